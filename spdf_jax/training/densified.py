"""Checkpoints made dense: what a launch of dense phases goes on from."""

import os
import pathlib
from typing import Any

import jax
import optax

from spdf_jax import sparsity
from spdf_jax.names import lookup
from spdf_jax.sparsity.restart import RestartState
from spdf_jax.training import checkpoints
from spdf_jax.training import workdir as workdirs
from spdf_jax.training.identity import read_config
from spdf_jax.training.recipe import create_recipe
from spdf_jax.training.recipe import Recipe
from spdf_jax.training.step import TrainState

PyTree = Any

MOMENTS = ('keep', 'restart')
"""What becomes of the optimizer's moments."""


def densify_checkpoint(
    source: str, workdir: str | os.PathLike, *, moments: str = 'keep'
) -> pathlib.Path:
  """Writes the checkpoint of a sparse phase so that a dense one goes on.

  Weights, step and schedules stay; masks become all `True`, and the moments
  are kept, or start anew as with `restart` of a phase. A launch whose config
  begins with the same phases and has a dense one after them goes on from it,
  by `config.resume` or in the new workdir: it ends as one launch of all phases.

  Args:
    source: `'WORKDIR'` or `'WORKDIR@PHASE'`; a phase must end there.
    workdir: Where the new checkpoint goes, made if missing.
    moments: `'keep'` or `'restart'`.

  Returns:
    The directory of the new checkpoint.

  Raises:
    ValueError: there is no such checkpoint, it is within a phase, has
      parameters only, or does not fit its config any more; or the workdir has
      checkpoints already.

  References:
    Thangarasa et al., `SPDF <https://arxiv.org/abs/2303.10464>`_, 2023
  """
  lookup('moments', moments, dict.fromkeys(MOMENTS))
  checkpoint = workdirs.find_checkpoint(source)
  workdirs.refuse_saved(workdir)
  ends = _ends_at(checkpoint)
  config = read_config(
      workdirs.read_meta(checkpoint)['config'], f'checkpoint {checkpoint}'
  )
  past = [
      phase.name for phase in config.phases
      if ends[phase.name] <= int(checkpoint.name)
  ]
  return _densify(
      create_recipe(config.as_dict()), checkpoint, past, workdir, moments
  )


def _ends_at(checkpoint: pathlib.Path) -> dict[str, int]:
  """Returns the ends of phases, one of which is at the checkpoint."""
  meta, step = workdirs.read_meta(checkpoint), int(checkpoint.name)
  ends = meta['phase_ends']
  if not ends:
    raise ValueError(
        f'checkpoint {checkpoint} holds parameters only, and no mask; a dense '
        'run starts from them with --config.init_from.'
    )
  if step not in ends.values():
    raise ValueError(
        f'checkpoint {checkpoint} is of step {step}, within a phase; name one '
        f'that has ended, WORKDIR@PHASE: phases end at {ends}.'
    )
  return ends


def _densify(
    recipe: Recipe,
    checkpoint: pathlib.Path,
    past: list[str],
    workdir: str | os.PathLike,
    moments: str,
) -> pathlib.Path:
  state = checkpoints.read_checkpoint(
      checkpoint,
      recipe.abstract_state,
      config=recipe.config,
      fingerprints=recipe.fingerprints,
  )
  saved = checkpoints.Checkpoints(
      workdir,
      phase_ends=recipe.plan.ends,
      keep=1,
      config=recipe.config,
      fingerprints=recipe.fingerprints,
      densified=past,
  )
  saved.save(densify_state(state, recipe.optimizer, moments=moments))
  saved.close()
  return workdirs.find_checkpoint(str(workdir))


def densify_state(
    state: TrainState, optimizer: optax.GradientTransformation, *, moments: str
) -> TrainState:
  """Makes masks all `True`, and moments new where asked.

  Args:
    state: At the end of a sparse phase.
    optimizer: What it was trained with: moments are inside a `restart`.
    moments: `'keep'` or `'restart'`.

  Returns:
    The state a dense phase starts from.
  """
  opt_state = sparsity.densify(state.opt_state)
  if moments == 'restart':
    is_restart = lambda x: isinstance(x, RestartState)
    opt_state = jax.tree.map(
        lambda old, new: old._replace(
            inner_state=new.inner_state
        ) if is_restart(old) else old,
        opt_state, optimizer.init(state.params), is_leaf=is_restart,
    )
  return state.replace(opt_state=opt_state)

# SPDX-License-Identifier: Apache-2.0
"""Densified checkpoints, from which a run of dense phases resumes."""

from collections.abc import Mapping
import contextlib
import dataclasses
import os
import pathlib

import jax
import optax

from spdf_jax import sparsity
from spdf_jax.names import lookup
from spdf_jax.names import received
from spdf_jax.sparsity.reset_state import ResetState
from spdf_jax.training.checkpoints import manager as checkpoints
from spdf_jax.training.checkpoints.identity import read_config
from spdf_jax.training.checkpoints.workdir import find_checkpoint
from spdf_jax.training.checkpoints.workdir import read_meta
from spdf_jax.training.checkpoints.workdir import refuse_saved
from spdf_jax.training.run import Run
from spdf_jax.training.step.state import TrainState

MOMENTS = ('keep', 'reset')
"""Ways to treat the optimizer's moments: keep them, or reset them."""


def densify_checkpoint(
    source: str,
    workdir: str | os.PathLike[str],
    *,
    moments: str = 'keep',
    trust_code: bool = False,
) -> pathlib.Path:
  """Writes a dense copy of the checkpoint at the end of a sparse phase.

  Weights, step and schedules stay; masks become all `True`, and the moments are
  kept, or reset as by `reset_moments` of a phase. A run whose config begins
  with the same phases and has a dense one after them resumes from the copy, by
  `config.resume` or in the new workdir, with the same result as one run of all
  phases.

  Args:
    source: `'WORKDIR'`, for its latest checkpoint, or `'WORKDIR@PHASE'`, for
      that at the end of a phase; a phase must end there in both cases.
    workdir: Working directory of the new checkpoint; created if missing.
    moments: Whether to `'keep'` or to `'reset'` the optimizer's moments.
    trust_code: Whether functions that the checkpoint's config names by
      `'package.module:function'`, as user-defined models, optimizers and
      algorithms are, may be imported and called.

  Returns:
    The directory of the new checkpoint.

  Raises:
    ValueError: there is no such checkpoint, it is within a phase, it has
      parameters only, it is damaged, or its config names functions and
      `trust_code` is `False`; the workdir has checkpoints already; or `moments`
      is unknown.
    MismatchError: this version cannot read the config, or the data has changed.

  References:
    Thangarasa et al., `SPDF <https://arxiv.org/abs/2303.10464>`_, 2023
  """
  lookup('moments', moments, dict.fromkeys(MOMENTS))
  checkpoint = find_checkpoint(source)
  refuse_saved(workdir)
  ends = _ends_at(checkpoint)
  config = read_config(
      read_meta(checkpoint)['config'], f'checkpoint {checkpoint}'
  )
  past = {
      name: end for name, end in ends.items() if end <= int(checkpoint.name)
  }
  reading = contextlib.nullcontext() if trust_code else received(
      f'the config of checkpoint {checkpoint}',
      'set trust_code (the flag --trust_code)',
  )
  with reading:
    return _densify(
        Run.create(config.as_dict()), checkpoint, past, workdir, moments
    )


def _ends_at(checkpoint: pathlib.Path) -> dict[str, int]:
  """Returns the ends of phases; raises unless one is at the checkpoint."""
  meta, step = read_meta(checkpoint), int(checkpoint.name)
  ends = meta['phase_ends']
  if not ends:
    raise ValueError(
        f'checkpoint {checkpoint} holds parameters only, and no mask; start a '
        'dense run from them by config.init_from.'
    )
  if step not in ends.values():
    raise ValueError(
        f'checkpoint {checkpoint} is of step {step}, within a phase; give '
        'WORKDIR@PHASE, with a phase that has ended: phases end at the steps '
        f'{ends}.'
    )
  return ends


def _densify(
    run: Run,
    checkpoint: pathlib.Path,
    past: Mapping[str, int],
    workdir: str | os.PathLike[str],
    moments: str,
) -> pathlib.Path:
  state = run.read_checkpoint(checkpoint)
  saved = checkpoints.Checkpoints(
      workdir,
      phase_ends=run.plan.with_ends(past).ends,
      keep=1,
      config=run.config,
      fingerprints=run.fingerprints,
      densified=list(past),
  )
  saved.save(densify_state(state, run.programs.optimizer, moments=moments))
  saved.close()
  return find_checkpoint(str(workdir))


def densify_state(
    state: TrainState, optimizer: optax.GradientTransformation, *, moments: str
) -> TrainState:
  """Sets the masks to all `True` and resets the moments on request.

  Args:
    state: The state at the end of a sparse phase.
    optimizer: The optimizer of the state. To be reset, its moments must be
      inside `reset_state`.
    moments: `'keep'` or `'reset'`.

  Returns:
    The initial state of a dense phase.
  """
  opt_state = sparsity.densify(state.opt_state)
  if moments == 'reset':
    is_restart = lambda x: isinstance(x, ResetState)
    opt_state = jax.tree.map(
        lambda old, new: old._replace(
            inner_state=new.inner_state
        ) if is_restart(old) else old,
        opt_state, optimizer.init(state.params), is_leaf=is_restart,
    )
  return dataclasses.replace(state, opt_state=opt_state)

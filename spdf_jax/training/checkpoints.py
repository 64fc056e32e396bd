# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, saved in the background and checked before a restore."""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import logging
import os
import pathlib
import re
import types
from typing import Any
import warnings

import jax
import numpy as np
import orbax.checkpoint as ocp

from spdf_jax.sealed_json import seal
from spdf_jax.sparsity.paths import by_name
from spdf_jax.training.best_checkpoints import Best
from spdf_jax.training.best_checkpoints import describe_best
from spdf_jax.training.best_checkpoints import read_bests
from spdf_jax.training.config import RunConfig
from spdf_jax.training.digests import digest_arrays
from spdf_jax.training.identity import describe_arrays
from spdf_jax.training.identity import MismatchError
from spdf_jax.training.identity import past_identity
from spdf_jax.training.identity import read_config
from spdf_jax.training.identity import refuse_difference
from spdf_jax.training.identity import run_identity
from spdf_jax.training.step import TrainState
from spdf_jax.training.workdir import free_name
from spdf_jax.training.workdir import past_ends
from spdf_jax.training.workdir import read_item
from spdf_jax.training.workdir import read_meta
from spdf_jax.training.workdir import refuse_saved

PyTree = Any

logger = logging.getLogger('spdf_jax')

_ITEMS = ('params', 'opt_state', 'data', 'meta')


class Checkpoints:
  """The checkpoints of one working directory.

  Each holds `params`, `opt_state` (masks included), `data` (the step and the
  fingerprints of the data, which determine the batches, and in float16 the
  loss scale) and `meta` (config, phase ends, best evaluations, shapes, dtypes
  and digests). The latest `keep` checkpoints, the one at the end of every phase
  and the best one of every phase are not deleted.

  Args:
    workdir: The working directory; checkpoints go to `checkpoints/` in it.
    phase_ends: Steps completed at the end of each phase, by name.
    keep: Number of the latest checkpoints to keep.
    config: The config of the run.
    fingerprints: Fingerprints of the data, by source.
    densified: Names of the phases before the step at which the state was
      densified; empty if it was not.
  """

  def __init__(
      self,
      workdir: str | os.PathLike[str],
      *,
      phase_ends: Mapping[str, int],
      keep: int,
      config: RunConfig,
      fingerprints: Mapping[str, str],
      densified: Sequence[str] = (),
  ):
    self._densified = list(densified)
    self._phase_ends = dict(phase_ends)
    self._config = config
    self._fingerprints = dict(fingerprints)
    self._directory = pathlib.Path(workdir).absolute() / 'checkpoints'
    self._best_steps = _Steps()
    policies = ocp.checkpoint_managers
    self._manager = ocp.CheckpointManager(
        self._directory,
        item_names=_ITEMS,
        options=ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([
                policies.LatestN(keep),
                policies.CustomSteps(list(self._phase_ends.values())),
                self._best_steps,
            ]),
        ),
    )

  def save(
      self,
      state: TrainState,
      best: Mapping[str, Best] = types.MappingProxyType({}),
  ) -> None:
    """Saves in the background; does nothing if the step is saved already.

    Args:
      state: The state, dense.
      best: Best evaluations of the phases so far, by name; their checkpoints
        are kept, and earlier best ones are not.
    """
    step = int(state.step)
    self._best_steps.steps = {each.step for each in best.values()}
    if step in self._manager.all_steps():
      return
    save, save_json = ocp.args.StandardSave, ocp.args.JsonSave
    self._manager.save(
        step,
        args=ocp.args.Composite(
            params=save(state.params),
            opt_state=save(state.opt_state),
            data=save_json(seal({
                'step': step,
                'fingerprints': self._fingerprints,
                'loss_scale': jax.tree.map(
                    lambda x: x.item(), jax.tree.leaves(state.loss_scale)
                ),
            })),
            meta=save_json(seal({
                'config': self._config.as_dict(),
                'phase_ends': self._phase_ends,
                'best': {name: list(each) for name, each in best.items()},
                'arrays': describe_arrays(state),
                'digests': digest_arrays(state),
                'densified': self._densified,
            })),
        ),
    )

  def restore_latest(self, abstract: TrainState) -> TrainState | None:
    """Restores the latest checkpoint that can be read.

    A damaged checkpoint is moved aside, with a warning, and the one before it
    is tried.

    Args:
      abstract: Shapes, dtypes and shardings of the state.

    Returns:
      The state; `None` if there are no checkpoints.

    Raises:
      MismatchError: the checkpoint was made with another config, data or model.
      ValueError: there are checkpoints and none can be read; or there are
        several processes and the latest checkpoint cannot be read.
    """
    steps = sorted(self._manager.all_steps(), reverse=True)
    for step in steps:
      try:
        return read_checkpoint(
            self._directory / str(step),
            abstract,
            config=self._config,
            fingerprints=self._fingerprints,
        )
      except MismatchError:
        raise
      except Exception as error:  # Damage may raise any exception.
        if jax.process_count() > 1:
          raise ValueError(
              f'checkpoint {step} in {self._directory} cannot be read '
              f'({type(error).__name__}), and a run of several processes does '
              'not move it; move it away to use the one before it.'
          ) from error
        aside = free_name(
            self._directory.parent / 'damaged_checkpoints' / str(step)
        )
        aside.parent.mkdir(exist_ok=True)
        os.rename(self._directory / str(step), aside)
        self._manager.reload()
        logger.warning(
            'checkpoint %d cannot be read (%s: %s); it was moved to %s and '
            'the one before it is used.',
            step, type(error).__name__, str(error).split('\n')[0][:200], aside,
        )
    if steps:
      raise ValueError(
          f'none of the checkpoints {steps} in {self._directory} can be read; '
          'they were moved to damaged_checkpoints beside it; start with '
          'another workdir or put back a copy.'
      )
    return None

  def ends_until(self, step: int) -> dict[str, int]:
    """Returns the ends of phases up to a saved step, by name."""
    return past_ends(self._directory / str(step))

  def best_until(self, step: int) -> dict[str, Best]:
    """Returns the best evaluations up to a saved step that are saved too."""
    saved = self._manager.all_steps()
    bests = read_bests(read_meta(self._directory / str(step)))
    return {name: best for name, best in bests.items() if best.step in saved}

  def restore_best(self, best: Best, abstract: TrainState) -> TrainState:
    """Restores the checkpoint of a best evaluation, once it is saved.

    Args:
      best: The best evaluation.
      abstract: Shapes, dtypes and shardings of the state.

    Returns:
      The state.

    Raises:
      ValueError: the checkpoint cannot be read.
    """
    self.wait()
    checkpoint = self._directory / str(best.step)
    try:
      return read_checkpoint(
          checkpoint,
          abstract,
          config=self._config,
          fingerprints=self._fingerprints,
      )
    except Exception as error:  # Damage may raise any exception.
      raise ValueError(
          f'checkpoint {checkpoint}, the best one of its phase, cannot be read '
          f'({type(error).__name__}); move it away and run the same command '
          'again, to go on without it.'
      ) from error

  def wait(self) -> None:
    """Waits for all saves to finish; raises the error of one that failed."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits for all saves and closes the checkpoint manager."""
    self.wait()
    self._manager.close()


class _Steps:
  """A preservation policy of steps that change."""

  def __init__(self) -> None:
    self.steps: set[int] = set()

  def should_preserve(
      self, checkpoints: Sequence[Any], *, context: Any
  ) -> list[bool]:
    del context
    return [checkpoint.step in self.steps for checkpoint in checkpoints]


def read_checkpoint(
    checkpoint: pathlib.Path,
    abstract: TrainState,
    *,
    config: RunConfig,
    fingerprints: Mapping[str, str],
) -> TrainState:
  """Restores the whole state and checks that it is what was saved.

  Args:
    checkpoint: Directory of the checkpoint.
    abstract: Shapes, dtypes and shardings of the state.
    config: Config of the run, equal to that of the checkpoint. If the state was
      densified, later phases may differ, and the next one must be dense.
    fingerprints: Fingerprints of the data, equal to those of the checkpoint.

  Returns:
    The state.

  Raises:
    MismatchError: config, data, shapes or dtypes differ.
    ValueError: the checkpoint is damaged: an array, the metadata or the step
      differs from what was saved.
  """
  meta = read_meta(checkpoint)
  stored = read_config(meta['config'], f'checkpoint {checkpoint}')
  data = _read_data(checkpoint)
  identity_of, sources = run_identity, dict(fingerprints)
  found = data['fingerprints']
  past = meta['densified'] if 'densified' in meta else ()
  if past:
    _check_next_phase_is_dense(checkpoint, len(past), config)
    identity_of = functools.partial(past_identity, phases=len(past))
    read = {phase.data for phase in stored.phases if phase.name in past}
    found, sources = (
        {k: v for k, v in x.items() if k in read} for x in (found, sources)
    )
  refuse_difference(
      checkpoint, 'config', identity_of(stored), identity_of(config)
  )
  refuse_difference(checkpoint, 'data', found, sources)
  refuse_difference(
      checkpoint, 'model', meta['arrays'], describe_arrays(abstract)
  )
  if stored.storage != config.storage:
    logger.info(
        'checkpoint %s is of a run with storage %r; it is converted to %r '
        '(checkpoints are dense)',
        checkpoint, stored.storage, config.storage,
    )
  items = _restore(
      checkpoint, params=abstract.params, opt_state=abstract.opt_state
  )
  numbers = jax.tree.map(
      lambda found, like: jax.device_put(
          np.asarray(found, like.dtype), like.sharding
      ),
      [data['step'], *data.get('loss_scale', ())],
      [abstract.step, *jax.tree.leaves(abstract.loss_scale)],
  )
  loss_scale = jax.tree.unflatten(
      jax.tree.structure(abstract.loss_scale), numbers[1:]
  )
  state = TrainState(numbers[0], items.params, items.opt_state, loss_scale)
  _check_digests(checkpoint, meta, state)
  return state


def _read_data(checkpoint: pathlib.Path) -> dict[str, Any]:
  data = read_item(checkpoint, 'data')
  if data['step'] != int(checkpoint.name):
    raise ValueError(
        f'checkpoint {checkpoint} is of step {data["step"]}; give its folder '
        'the name of its step, or use another checkpoint.'
    )
  return data


def _check_digests(
    checkpoint: pathlib.Path, meta: Mapping[str, Any], tree: PyTree
) -> None:
  """Raises ValueError if an array is not what was saved."""
  if 'digests' not in meta:  # Written by an earlier version.
    return
  for name, found in digest_arrays(tree).items():
    if found != meta['digests'][name]:
      raise ValueError(
          f'checkpoint {checkpoint} is damaged: array {name} is not what was '
          'saved; use another checkpoint.'
      )


def verify_checkpoint(checkpoint: pathlib.Path) -> int:
  """Reads a checkpoint of any config and checks that it is what was saved.

  Args:
    checkpoint: Directory of the checkpoint.

  Returns:
    The number of arrays.

  Raises:
    ValueError: an array, the metadata or the step differs from what was saved;
      or the checkpoint is of an earlier version, which saved no digests.
    Exception: as orbax raises it for files that cannot be read.
  """
  meta = read_meta(checkpoint)
  _read_data(checkpoint)
  if 'digests' not in meta:
    raise ValueError(
        f'checkpoint {checkpoint} has no digests, as an earlier version wrote '
        'it; it can be used, but not verified.'
    )
  saved = {
      name for name in meta['digests']
      if name.startswith(('params/', 'opt_state/'))
  }
  items = {name.split('/')[0] for name in saved}
  with (
      ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
      warnings.catch_warnings(),
  ):
    # The arrays are placed as they were saved; none of them is used.
    warnings.filterwarnings('ignore', 'Sharding info not provided')
    found = {item: checkpointer.restore(checkpoint / item) for item in items}
  _check_digests(checkpoint, meta, found)
  missing = saved - by_name(found).keys()
  if missing:
    raise ValueError(
        f'checkpoint {checkpoint} is damaged: array {min(missing)} is missing; '
        'use another checkpoint.'
    )
  return len(saved)


def _check_next_phase_is_dense(
    checkpoint: pathlib.Path, past: int, config: RunConfig
) -> None:
  for phase in config.phases[past:past + 1]:
    if phase.sparsity != 0:
      raise MismatchError(
          f'checkpoint {checkpoint} was made dense and phase {phase.name!r}, '
          f'which would resume from it, has sparsity {phase.sparsity}; set it '
          'to 0, or resume from the sparse checkpoint.'
      )


def read_params(checkpoint: pathlib.Path, abstract: PyTree) -> PyTree:
  """Restores the parameters only, to start a new run from them.

  Args:
    checkpoint: Directory of the checkpoint.
    abstract: Shapes and dtypes of the parameters.

  Returns:
    The parameters.

  Raises:
    MismatchError: shapes or dtypes differ.
    ValueError: the checkpoint is damaged.
  """
  meta = read_meta(checkpoint)
  found = {k: v for k, v in meta['arrays'].items() if k.startswith('params/')}
  asked = {f'params/{k}': v for k, v in describe_arrays(abstract).items()}
  refuse_difference(checkpoint, 'model', found, asked)
  params = _restore(checkpoint, params=abstract).params
  best = describe_best(meta, int(checkpoint.name))
  if best:
    logger.info('the parameters of %s are %s', checkpoint, best)
  _check_digests(checkpoint, meta, {'params': params})
  return params


def read_masks(checkpoint: pathlib.Path) -> dict[str, jax.Array]:
  """Restores only the masks from the optimizer state of a checkpoint.

  Args:
    checkpoint: Directory of the checkpoint.

  Returns:
    Masks by the path of their parameter; empty if the checkpoint holds
    parameters only.

  Raises:
    ValueError: the checkpoint is damaged.
  """
  meta = read_meta(checkpoint)
  arrays = meta['arrays']
  kept = re.compile(r'opt_state/(.*/)?mask/(?P<path>.+)')
  found = {}
  for name, array in arrays.items():
    match = kept.fullmatch(name)
    if match and array.startswith('bool['):
      found[name.removeprefix('opt_state/')] = match['path'], array
  if not found:
    return {}
  abstract: dict[str, Any] = {}
  for name, (_, array) in found.items():
    *parents, last = name.split('/')
    folder = abstract
    for parent in parents:
      folder = folder.setdefault(parent, {})
    sizes = [int(n) for n in array[len('bool['):-1].split(',')]
    folder[last] = jax.ShapeDtypeStruct(sizes, bool)
  abstract = _placed(abstract)
  args = ocp.args.PyTreeRestore(
      abstract,
      restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
      partial_restore=True,
  )
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
    opt_state = checkpointer.restore(checkpoint / 'opt_state', args)
  restored = {k: v for k, v in by_name(opt_state).items() if k in found}
  _check_digests(
      checkpoint, meta, {f'opt_state/{k}': v for k, v in restored.items()}
  )
  return {path: restored[name] for name, (path, _) in found.items()}


def write_params(
    workdir: str | os.PathLike[str], params: PyTree, config: Mapping[str, Any]
) -> pathlib.Path:
  """Writes parameters only, as step 0 of a workdir, for `config.init_from`.

  Args:
    workdir: The working directory; created if missing.
    params: The parameters.
    config: Description of the origin of the parameters, JSON-able.

  Returns:
    The directory of the checkpoint.

  Raises:
    ValueError: the workdir has checkpoints already.
  """
  refuse_saved(workdir)
  checkpoint = pathlib.Path(workdir).absolute() / 'checkpoints' / '0'
  save_json = ocp.args.JsonSave
  items = ocp.args.Composite(
      params=ocp.args.StandardSave(params),
      data=save_json(seal({'step': 0, 'fingerprints': {}})),
      meta=save_json(seal({
          'config': config,
          'phase_ends': {},
          'arrays': describe_arrays({'params': params}),
          'digests': digest_arrays({'params': params}),
      })),
  )
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
    checkpointer.save(checkpoint, items)
  return checkpoint


def _restore(checkpoint: pathlib.Path, **abstract: PyTree) -> Any:
  args = {
      k: ocp.args.StandardRestore(_placed(v))
      for k, v in abstract.items()
  }
  with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
    return checkpointer.restore(checkpoint, args=ocp.args.Composite(**args))


def _placed(abstract: PyTree) -> PyTree:
  """Gives leaves without a sharding that of the first local device."""
  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=getattr(x, 'sharding', None) or device
      ),
      abstract,
  )

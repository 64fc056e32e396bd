# SPDX-License-Identifier: Apache-2.0
"""The files of one checkpoint, read, checked and written.

Orbax is imported where it is used, since most commands need no checkpoint.
"""

from collections.abc import Callable, Mapping
import logging
import os
import pathlib
import re
from typing import Any

import jax
import numpy as np

from spdf_jax.files import reading
from spdf_jax.files import seal
from spdf_jax.files import writing
from spdf_jax.sparsity import trees
from spdf_jax.training.checkpoints import identity
from spdf_jax.training.checkpoints import workdir as workdirs
from spdf_jax.training.configs.config import RunConfig
from spdf_jax.training.configs.early_stop import describe_best
from spdf_jax.training.step.state import TrainState

PyTree = Any

logger = logging.getLogger('spdf_jax')


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
    config: Config of the run, equal to that of the checkpoint but for logging
      and evaluations, see `state_identity`. At the end of a phase, later ones
      may differ; if the state was densified, the next one must be dense.
    fingerprints: Fingerprints of the data, equal to those of the checkpoint.

  Returns:
    The state.

  Raises:
    MismatchError: config, data, shapes or dtypes differ.
    ValueError: the checkpoint is damaged: an array, the metadata or the step
      differs from what was saved.
  """
  damaged = 'use another checkpoint.'
  with reading(checkpoint, damaged):
    meta = workdirs.read_meta(checkpoint)
    data = _read_data(checkpoint)
    recorded, sources = data['fingerprints'], dict(fingerprints)
    if meta.get('densified'):
      _check_next_phase_is_dense(checkpoint, len(meta['densified']), config)
    stored, past = identity.refuse_other_past(checkpoint, meta, config)
    if past:
      read = {phase.data for phase in stored.phases if phase.name in past}
      read.add('teacher')  # Both configs have the same loss.
      recorded, sources = (
          {k: v for k, v in x.items() if k in read} for x in (recorded, sources)
      )
    identity.refuse_difference(checkpoint, 'data', recorded, sources)
    identity.refuse_difference(
        checkpoint, 'model', meta['arrays'], identity.describe_arrays(abstract)
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
  with reading(checkpoint, damaged):
    numbers = jax.tree.map(
        lambda value, like: jax.device_put(
            np.asarray(value, like.dtype), like.sharding
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
  data = workdirs.read_item(checkpoint, 'data')
  if data['step'] != int(checkpoint.name):
    raise ValueError(
        f'checkpoint {checkpoint} holds step {data["step"]}, which is not the '
        f'name of its folder; rename the folder to {data["step"]}, or use '
        'another checkpoint.'
    )
  return data


def _check_digests(
    checkpoint: pathlib.Path, meta: Mapping[str, Any], tree: PyTree
) -> None:
  """Raises ValueError if an array is not what was saved."""
  with reading(checkpoint, 'use another checkpoint.'):
    for name, digest in identity.digest_arrays(tree).items():
      if digest != meta['digests'][name]:
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
    ValueError: an array, the metadata or the step differs from what was saved.
    Exception: as orbax raises it for files that cannot be read.
  """
  import orbax.checkpoint as ocp

  meta = workdirs.read_meta(checkpoint)
  _read_data(checkpoint)
  saved = {
      name for name in meta['digests']
      if name.startswith(('params/', 'opt_state/'))
  }
  items = {name.split('/')[0] for name in saved}
  handler = ocp.PyTreeCheckpointHandler()
  sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  arrays = {}
  with ocp.Checkpointer(handler) as checkpointer:
    for item in items:
      # On one device, since those that saved them may not be here. As NumPy
      # arrays they would be restored without some of the files.
      types = jax.tree.map(
          lambda _: ocp.ArrayRestoreArgs(sharding=sharding),
          handler.metadata(checkpoint / item).tree,
      )
      arrays[item] = checkpointer.restore(
          checkpoint / item, ocp.args.PyTreeRestore(restore_args=types)
      )
  _check_digests(checkpoint, meta, arrays)
  missing = saved - trees.by_name(arrays).keys()
  if missing:
    raise ValueError(
        f'checkpoint {checkpoint} is damaged: array {min(missing)} is missing; '
        'use another checkpoint.'
    )
  return len(saved)


# Messages of faults of devices and file systems, which may pass.
_PASSING = re.compile(
    'RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|out of memory'
    '|Input/output error|Stale file handle|timed out|Cannot allocate memory'
    '|Too many open files|Permission denied|Transport endpoint', re.I,
)


def is_damaged(checkpoint: pathlib.Path, error: BaseException) -> bool:
  """Returns whether a checkpoint that cannot be restored is damaged.

  Args:
    checkpoint: Directory of the checkpoint.
    error: Error of its restore.

  Returns:
    `False` if the error is one that may pass, or if all files are what was
    saved when they are read once more.
  """
  if _may_pass(error):
    return False
  try:
    verify_checkpoint(checkpoint)
  except Exception as again:  # Damage may raise any exception.
    return not _may_pass(again)
  return False


def _may_pass(error: BaseException | None) -> bool:
  if error is None:
    return False
  lost = FileNotFoundError, NotADirectoryError, IsADirectoryError
  if isinstance(error, MemoryError) or (
      isinstance(error, OSError) and not isinstance(error, lost)
  ):
    return True
  return bool(_PASSING.search(str(error))) or _may_pass(
      error.__cause__ or error.__context__
  )


def _check_next_phase_is_dense(
    checkpoint: pathlib.Path, past: int, config: RunConfig
) -> None:
  for phase in config.phases[past:past + 1]:
    if not phase.is_dense:
      raise identity.MismatchError(
          f'checkpoint {checkpoint} was densified, and phase {phase.name!r}, '
          'which would resume from it, has the algorithm '
          f'{phase.algorithm["name"]!r}; set the algorithm of the phase to '
          "'dense', or resume from the checkpoint before it was densified."
      )


def read_params(checkpoint: pathlib.Path, abstract: PyTree) -> PyTree:
  """Restores the parameters only, to start a new run from them.

  Args:
    checkpoint: Directory of the checkpoint, as `find_checkpoint` returns it.
    abstract: Tree of `jax.ShapeDtypeStruct` of all parameters; leaves without a
      sharding are placed on the first device.

  Returns:
    The parameters; if the optimizer was schedule-free, its averaged ones.

  Raises:
    MismatchError: names, shapes or dtypes of parameters differ.
    ValueError: the checkpoint is damaged.
    OSError: the checkpoint is missing.
  """
  meta = workdirs.read_meta(checkpoint)
  arrays = {k: v for k, v in meta['arrays'].items() if k.startswith('params/')}
  expected = identity.describe_arrays({'params': abstract})
  identity.refuse_difference(checkpoint, 'model', arrays, expected)
  params = _restore(checkpoint, params=abstract).params
  best = describe_best(meta, int(checkpoint.name))
  if best:
    logger.info('the parameters of %s are %s', checkpoint, best)
  _check_digests(checkpoint, meta, {'params': params})
  path = tuple(meta.get('schedule_free') or ())
  return _average(checkpoint, meta, path, params) if path else params


def _average(
    checkpoint: pathlib.Path, meta: Mapping[str, Any], path: tuple[str, ...],
    params: PyTree,
) -> PyTree:
  """Returns the averages of a schedule-free optimizer, which are the model."""
  arrays = _read_arrays(
      checkpoint, meta,
      lambda parts: parts[:-1] == path and parts[-1] == 'b1'
      or parts[:len(path) + 1] == (*path, 'z'),
  )
  b1 = arrays.pop((*path, 'b1'))
  iterates = {'/'.join(parts[len(path) + 1:]): z for parts, z in arrays.items()}
  return jax.tree_util.tree_map_with_path(
      lambda p, y: ((y - (1 - b1) * iterates[trees.path_name(p)]) / b1).astype(
          y.dtype
      ),
      params,
  )


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
  meta = workdirs.read_meta(checkpoint)
  parameters = {tuple(path): name for name, path in meta['masks'].items()}
  if not parameters:
    return {}
  masks = _read_arrays(checkpoint, meta, lambda parts: parts in parameters)
  return {parameters[parts]: mask for parts, mask in masks.items()}


def _read_arrays(
    checkpoint: pathlib.Path,
    meta: Mapping[str, Any],
    is_wanted: Callable[[tuple[str, ...]], bool],
) -> dict[tuple[str, ...], jax.Array]:
  """Restores some arrays of the optimizer state, by the names of their path."""
  import orbax.checkpoint as ocp

  handler = ocp.PyTreeCheckpointHandler()
  abstract = jax.tree_util.tree_map_with_path(
      lambda path, x: _placed(jax.ShapeDtypeStruct(x.shape, x.dtype))
      if is_wanted(trees.path_parts(path)) else ocp.PLACEHOLDER,
      handler.metadata(checkpoint / 'opt_state').tree,
  )
  args = ocp.args.PyTreeRestore(
      abstract,
      restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
  )
  with ocp.Checkpointer(handler) as checkpointer:
    restored = checkpointer.restore(checkpoint / 'opt_state', args)
  arrays = jax.tree_util.tree_map_with_path(
      lambda path, x: x if is_wanted(trees.path_parts(path)) else None, restored
  )
  _check_digests(checkpoint, meta, {'opt_state': arrays})
  return {
      trees.path_parts(path): array
      for path, array in jax.tree_util.tree_leaves_with_path(arrays)
  }


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
  import orbax.checkpoint as ocp

  workdirs.refuse_saved(workdir)
  checkpoint = pathlib.Path(workdir).absolute() / 'checkpoints' / '0'
  save_json = ocp.args.JsonSave
  items = ocp.args.Composite(
      params=ocp.args.StandardSave(params),
      data=save_json(seal({'step': 0, 'fingerprints': {}})),
      meta=save_json(seal({
          'config': config,
          'phase_ends': {},
          'arrays': identity.describe_arrays({'params': params}),
          'digests': identity.digest_arrays({'params': params}),
          'masks': {},
      })),
  )
  with (
      writing(checkpoint),
      ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer,
  ):
    checkpointer.save(checkpoint, items)
  return checkpoint


def _restore(checkpoint: pathlib.Path, **abstract: PyTree) -> Any:
  import orbax.checkpoint as ocp

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

# SPDX-License-Identifier: Apache-2.0
"""The working directory of a run: its config, checkpoints and free space."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import pathlib
import re
import shutil
from typing import Any, TypeVar

import jax
import numpy as np

from spdf_jax import files
from spdf_jax.training.checkpoints import identity
from spdf_jax.training.configs.config import RunConfig
from spdf_jax.training.configs.early_stop import read_bests
from spdf_jax.training.loop.processes import is_main_process

PyTree = Any

logger = logging.getLogger('spdf_jax')
T = TypeVar('T')
_NOT_OF_ARRAYS = ('model.dtype', 'model.remat', 'model.dropout')
# Attempts, since a run may delete a checkpoint while it is read.
_READINGS = 5

CONFIG = 'config.json'
"""File of the config in a working directory."""


@contextlib.contextmanager
def created(workdir: pathlib.Path) -> Iterator[None]:
  """Creates a working directory, and removes it again after an error.

  Args:
    workdir: The directory, which `check_workdir` has accepted. It is not
      removed if it existed or holds files.

  Raises:
    OSError: the directory cannot be written.
  """
  is_new = not workdir.exists()
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    files.write_atomically(workdir / '.writable', '')
    (workdir / '.writable').unlink(missing_ok=True)
  except OSError as error:
    raise OSError(
        f'workdir {str(workdir)!r} cannot be written ({error.strerror}); give '
        'a writable directory.'
    ) from error
  try:
    yield
  except BaseException:
    if is_new and is_main_process():
      with contextlib.suppress(OSError):
        if (workdir / 'checkpoints').exists():
          (workdir / 'checkpoints').rmdir()
        (workdir / '.lock').unlink(missing_ok=True)
        workdir.rmdir()
    raise


def check_workdir(
    workdir: str | os.PathLike[str], config: RunConfig, params: PyTree = None
) -> None:
  """Checks, without writing, that a run can start in a working directory.

  Args:
    workdir: The directory; it need not exist.
    config: The config of the run.
    params: Shapes of the parameters, for a comparison with `init_from`; `None`:
      they are not compared.

  Raises:
    OSError: the directory is a file or in one.
    ValueError: the directory is a URL, has links to folders, was made with
      another config or is in use by another process, or `resume` or `init_from`
      names no checkpoint.
    MismatchError: the checkpoint of `resume` is of another config, or that of
      `init_from` of another model.
  """
  files.refuse_url(workdir, 'workdir')
  workdir = pathlib.Path(workdir)
  path = next(p for p in (workdir, *workdir.absolute().parents) if p.exists())
  if not path.is_dir():
    raise NotADirectoryError(
        f'workdir {str(workdir)!r} cannot be written, since {str(path)!r} is '
        'a file; give a writable directory.'
    )
  refuse_linked_folders(workdir)
  if is_main_process():
    files.refuse_locked(workdir, 'workdir')
  if (workdir / CONFIG).exists():
    different = identity.differences(
        identity.run_identity(read_workdir_config(workdir)),
        identity.run_identity(config),
    )
    if different:
      ends = [
          past_ends(workdir / 'checkpoints' / str(step))
          for step in saved_steps(workdir)[-1:]
      ]
      then = ''
      if ends and all(x.startswith('phases.') for x in different):
        given = (
            'whole state with other phases, give another workdir and '
            f'--config.resume={workdir}@{[*ends[0]][-1]}'
        ) if ends[0] else (
            'parameters alone with other phases, give another workdir and '
            f'--config.init_from={workdir}'
        )
        then = f' To go on from its {given}.'
      raise ValueError(
          f'workdir {str(workdir)!r} belongs to another config: '
          f'{"; ".join(different[:5])}; give another workdir or the config it '
          f'was made with.{then}'
      )
  if not saved_steps(workdir):
    _check_start(config, params)


def refuse_linked_folders(workdir: pathlib.Path) -> None:
  """Raises ValueError if a folder of a working directory is a link.

  A run deletes old checkpoints, and a link in a received workdir could name any
  folder of the user.
  """
  for path in (*workdir.glob('*'), *workdir.glob('checkpoints/*')):
    if path.is_symlink() and path.is_dir():
      raise ValueError(
          f'{path} is a link to the folder {path.resolve()}, in which a run '
          'would write and delete files; replace it by the folder, or give '
          'another workdir.'
      )


def _check_start(config: RunConfig, params: PyTree) -> None:
  """Checks the checkpoint that a new run starts from, if any."""
  field = 'resume' if config.resume else 'init_from'
  source = getattr(config, field)
  if not source:
    return
  try:
    checkpoint, meta = read_source(source, lambda path: (path, read_meta(path)))
  except ValueError as error:
    raise ValueError(f'{field}: {error}') from error
  if field == 'init_from' and params is not None:
    of_params = {
        k: v for k, v in meta['arrays'].items() if k.startswith('params/')
    }
    expected = identity.describe_arrays({'params': params})
    if of_params != expected:
      # Imported weights have a config of their model alone.
      model = identity.flatten({'model': meta['config']['model']})
      fields = {
          name: value for name, value in identity.run_identity(config).items()
          if name.startswith('model.') and name not in _NOT_OF_ARRAYS
      }
      identity.refuse_difference(
          checkpoint, 'model',
          {name: model[name] for name in fields if name in model},
          {name: fields[name] for name in fields if name in model},
      )
    identity.refuse_difference(checkpoint, 'model', of_params, expected)
  # Whether a dense phase follows a densified state is checked with the state.
  if field == 'resume' and not meta.get('densified'):
    identity.refuse_other_past(checkpoint, meta, config)


def write_workdir_config(workdir: pathlib.Path, config: RunConfig) -> None:
  """Writes the config of a run to its working directory."""
  text = json.dumps(config.as_dict(), indent=2)
  files.write_atomically(workdir / CONFIG, text + '\n')


def read_workdir_config(workdir: str | os.PathLike[str]) -> RunConfig:
  """Reads the config of a run from its working directory.

  Args:
    workdir: The directory.

  Returns:
    The config.

  Raises:
    FileNotFoundError: the directory has no config.
    ValueError: the config is not a JSON object.
    MismatchError: this version cannot read the config.
  """
  path = pathlib.Path(workdir, CONFIG)
  if not path.is_file():
    raise FileNotFoundError(
        f'{workdir} has no {CONFIG}; give the workdir of a training run.'
    )
  fix = 'delete it and repeat the command of the run, which writes it again.'
  stored = files.read_object(path, fix)
  return identity.read_config(stored, f'config of workdir {str(workdir)!r}')


def with_recorded_start(config: RunConfig, workdir: pathlib.Path) -> RunConfig:
  """Returns a config with the `init_from` and `resume` of a run that began.

  Args:
    config: The config.
    workdir: The directory; a config in it is used if it has checkpoints.

  Returns:
    The config.
  """
  if not saved_steps(workdir) or not (workdir / CONFIG).is_file():
    return config
  recorded = read_workdir_config(workdir)
  different = identity.differences(*(
      {'init_from': each.init_from, 'resume': each.resume}
      for each in (recorded, config)
  ))
  if not different:
    return config
  logger.warning(
      '%s, but workdir %r goes on from its own checkpoint; give another '
      'workdir for another start.',
      '; '.join(different), str(workdir),
  )
  return dataclasses.replace(
      config, init_from=recorded.init_from, resume=recorded.resume
  )


def find_checkpoint(source: str) -> pathlib.Path:
  """Returns the checkpoint that a source names.

  Args:
    source: `'WORKDIR'`, for its latest checkpoint; `'WORKDIR@PHASE'`, for the
      checkpoint at the end of that phase, which holds its best weights if the
      phase has an early stop; or `'WORKDIR@PHASE:best'`, for the best
      checkpoint of such a phase, finished or not.

  Returns:
    The directory of the checkpoint.

  Raises:
    ValueError: there is no such checkpoint; the message lists the phases that
      have ended, or those that have a best one.
  """
  workdir, phase, which = split_source(str(source))
  directory = pathlib.Path(workdir).absolute() / 'checkpoints'
  steps = saved_steps(workdir)
  if not steps:
    raise ValueError(
        f'{source!r} names no checkpoint: {directory} holds none; give the '
        'workdir of a run that has saved one.'
    )
  if not phase and not which:
    return directory / str(steps[-1])
  meta = read_meta(directory / str(steps[-1]))
  if which:
    bests = {
        name: best.step for name, best in read_bests(meta).items()
        if best.step in steps
    }
    if phase not in bests:
      raise ValueError(
          f'{source!r} names no checkpoint: the phases with a best one, which '
          f'have early_stop, are {list(bests)}; give one of them, or '
          'WORKDIR@PHASE for the end of another.'
      )
    return directory / str(bests[phase])
  ends = {name: s for name, s in meta['phase_ends'].items() if s in steps}
  if phase not in ends:
    raise ValueError(
        f'{source!r} names no checkpoint: the phases that have ended there are '
        f'{list(ends)}; give one of them, or WORKDIR for the latest checkpoint.'
    )
  return directory / str(ends[phase])


def read_source(source: str, read: Callable[[pathlib.Path], T]) -> T:
  """Reads the checkpoint that a source names, while its run may go on.

  A run deletes its earlier checkpoints as it saves new ones. If that happens
  during `read`, the checkpoint that the source then names is read.

  Args:
    source: As for `find_checkpoint`.
    read: Function of the directory of the checkpoint.

  Returns:
    What `read` returns.

  Raises:
    ValueError: there is no such checkpoint, or the run deletes them faster than
      they are read.
  """
  workdir, _, _ = split_source(str(source))
  for _ in range(_READINGS):
    steps = saved_steps(workdir)
    try:
      with files.reading(workdir, 'use another checkpoint.'):
        return read(find_checkpoint(source))
    except Exception as error:  # A file may be missing from any library's view.
      if saved_steps(workdir) == steps:
        raise
      last = error
  raise ValueError(
      f'{source!r} cannot be read, because its run deletes checkpoints faster; '
      'name the end of a phase, WORKDIR@PHASE, which is kept.'
  ) from last


def split_source(source: str) -> tuple[str, str, str]:
  """Splits the name of a checkpoint into workdir, phase and `'best'`.

  Args:
    source: `'WORKDIR'`, `'WORKDIR@PHASE'` or `'WORKDIR@PHASE:best'`.

  Returns:
    The three parts; `''` for those that are missing.

  Raises:
    ValueError: another word than `'best'` follows the phase.

  Example:
    >>> split_source('runs/a@finetune:best'), split_source('me@home/a')
    (('runs/a', 'finetune', 'best'), ('me@home/a', '', ''))
  """
  # The workdir, and folders of it, may have an @ in their names.
  folder, slash, name = source.rpartition('/')
  if '@' not in name or pathlib.Path(source).is_dir():
    return source, '', ''
  workdir, _, place = name.rpartition('@')
  workdir = folder + slash + workdir
  phase, colon, which = place.partition(':')
  if colon and which != 'best':
    raise ValueError(
        f'{source!r} names no checkpoint; give WORKDIR, WORKDIR@PHASE or '
        'WORKDIR@PHASE:best.'
    )
  return workdir, phase, which


def past_ends(checkpoint: pathlib.Path) -> dict[str, int]:
  """Returns the ends of the phases up to a checkpoint, by name."""
  ends = read_meta(checkpoint)['phase_ends']
  return {k: end for k, end in ends.items() if end <= int(checkpoint.name)}


def read_meta(checkpoint: pathlib.Path) -> dict[str, Any]:
  """Reads the metadata of a checkpoint: config, phase ends, arrays."""
  return read_item(checkpoint, 'meta')


def read_item(checkpoint: pathlib.Path, item: str) -> Any:
  """Reads a JSON item of a checkpoint, `'meta'` or `'data'`.

  Raises:
    OSError: it is missing.
    ValueError: it is not what was saved.
  """
  path = checkpoint / item / 'metadata'
  return files.unseal(files.read_object(path, 'use another checkpoint.'), path)


def saved_steps(workdir: str | os.PathLike[str]) -> list[int]:
  """Returns the steps of all checkpoints of a workdir, in ascending order."""
  directory = pathlib.Path(workdir) / 'checkpoints'
  names = os.listdir(directory) if directory.is_dir() else ()
  return sorted(int(x) for x in names if re.fullmatch('0|[1-9][0-9]*', x))


def refuse_saved(workdir: str | os.PathLike[str]) -> None:
  """Raises ValueError if a workdir has checkpoints already."""
  if saved_steps(workdir):
    raise ValueError(
        f'workdir {str(workdir)!r} holds checkpoints already; give another '
        'workdir.'
    )


def free_name(path: pathlib.Path) -> pathlib.Path:
  """Returns the path, with a number appended if it exists already."""
  names = (path.with_name(f'{path.name}.{i}') for i in itertools.count(1))
  return next(p for p in itertools.chain([path], names) if not p.exists())


def checkpoint_bytes(state: PyTree) -> int:
  """Returns the bytes of a state's arrays, an upper bound of a checkpoint."""
  return sum(
      int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state)
  )


def check_free_space(
    workdir: str | os.PathLike[str], state: PyTree, checkpoints: int
) -> None:
  """Raises OSError unless the disk has space for all checkpoints of a plan.

  Args:
    workdir: An existing directory; no space is counted for checkpoints that it
      already holds.
    state: The state or its shapes.
    checkpoints: Largest number of checkpoints at one time.

  Raises:
    OSError: there is too little free space.
  """
  checkpoints = max(1, checkpoints - len(saved_steps(workdir)))
  needed = checkpoints * checkpoint_bytes(state)
  free = shutil.disk_usage(workdir).free
  if needed > free:
    raise OSError(
        f'workdir {str(workdir)!r} has {free / 2**30:.2f} GiB free and the '
        f'plan writes up to {checkpoints} more checkpoints, '
        f'{needed / 2**30:.2f} GiB; free some space, lower checkpoints.keep, '
        'or use another disk.'
    )

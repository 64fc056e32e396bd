# SPDX-License-Identifier: Apache-2.0
"""Writers of metrics to dashboards, beside `metrics.jsonl`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import logging
import os
import pathlib
from typing import Any, Protocol
import uuid

from spdf_jax import files
from spdf_jax.extras import require
from spdf_jax.names import lookup

_logger = logging.getLogger('spdf_jax')


class Writer(Protocol):
  """A writer of scalars."""

  def write_scalars(
      self, step: int, scalars: Mapping[str, float | str]
  ) -> None:
    """Writes the values of a step; may ignore values that are not numbers."""

  def flush(self) -> None:
    """Writes buffered values."""

  def close(self) -> None:
    """Flushes and closes the writer."""


Open = Callable[[pathlib.Path, Mapping[str, Any], int], Writer]
"""A function `(workdir, config, step)` that opens a writer: working directory
of the run, its config, JSON-able, and the step that it resumes from.
"""


def open_all(
    writers: Iterable[Open], workdir: pathlib.Path, config: Mapping[str, Any],
    step: int,
) -> list[Writer]:
  """Opens writers to dashboards, without those that fail, which are warned of.

  Args:
    writers: Functions that open writers.
    workdir: Working directory of the run.
    config: Config of the run, JSON-able.
    step: Step that the run resumes from.

  Returns:
    The open writers.
  """
  opened = []
  for open_writer in writers:
    try:
      opened.append(open_writer(workdir, config, step))
    except Exception as error:  # A dashboard may raise any exception.
      _warn(getattr(open_writer, '__name__', repr(open_writer)), error)
  return opened


def _warn(name: str, error: Exception) -> None:
  _logger.warning(
      '%s failed (%s: %s), so it gets no more metrics; metrics.jsonl has all '
      'of them.', name, type(error).__name__, error,
  )


class AllWriters:
  """A writer that writes to several writers.

  Errors of the first writer are raised. Any other writer is dropped after its
  first error, with a warning, so that training continues without a dashboard.

  Args:
    writers: The writers, in the order of their calls; the first is that of
      `metrics.jsonl`.
  """

  def __init__(self, writers: Sequence[Writer]):
    self._writers = list(writers)

  def write_scalars(
      self, step: int, scalars: Mapping[str, float | str]
  ) -> None:
    """Writes to all writers."""
    self._call('write_scalars', step, scalars)

  def flush(self) -> None:
    """Flushes all writers."""
    self._call('flush')

  def close(self) -> None:
    """Closes all writers."""
    self._call('close')

  def _call(self, method: str, *args: Any) -> None:
    for writer in tuple(self._writers):
      try:
        getattr(writer, method)(*args)
      except Exception as error:  # A dashboard may raise any exception.
        if writer is self._writers[0]:
          raise
        self._writers.remove(writer)
        _warn(type(writer).__name__, error)


class TensorBoardWriter:
  """A writer of TensorBoard event files in `tensorboard/` of the workdir.

  Args:
    workdir: Working directory of the run.
    config: Unused.
    resume_step: Step to resume from; values of later steps are hidden.
  """

  library = 'tensorboardX'

  def __init__(
      self,
      workdir: str | os.PathLike[str],
      config: Mapping[str, Any],
      resume_step: int,
  ):
    del config
    self._writer = require(self.library, 'log').SummaryWriter(
        os.path.join(workdir, 'tensorboard'),
        purge_step=resume_step + 1,
        # Names contain the time in seconds, which may be equal after a restart.
        filename_suffix=f'.{resume_step}',
    )

  def write_scalars(
      self, step: int, scalars: Mapping[str, float | str]
  ) -> None:
    """Appends every number to the curve of its name."""
    for name, value in _numbers(scalars).items():
      self._writer.add_scalar(name, value, step)

  def flush(self) -> None:
    """Writes buffered events to disk."""
    self._writer.flush()

  def close(self) -> None:
    """Flushes and closes the event file."""
    self._writer.close()


class WandbWriter:
  """A writer to a Weights & Biases run with the name of the workdir.

  The id of the run is drawn once and kept in `wandb_id` of the workdir, so that
  a resumed run continues on the dashboard and another run of the same name does
  not. `WANDB_PROJECT` names the project, by default `spdf_jax`, and
  `WANDB_RUN_GROUP` the group, by default the name of the folder that contains
  the workdir.

  Args:
    workdir: Working directory of the run; local files go to `wandb/` in it.
    config: Config of the run, JSON-able, shown on the dashboard.
    resume_step: Unused, since the service keeps the first of two values of a
      step.
  """

  library = 'wandb'

  def __init__(
      self,
      workdir: str | os.PathLike[str],
      config: Mapping[str, Any],
      resume_step: int,
  ):
    del resume_step
    folder, name = os.path.split(os.path.abspath(workdir))
    self._run = require(self.library, 'log').init(
        project=os.environ.get('WANDB_PROJECT', 'spdf_jax'),
        group=os.environ.get('WANDB_RUN_GROUP', os.path.basename(folder)),
        name=name, id=_wandb_id(pathlib.Path(workdir) / 'wandb_id'),
        dir=str(workdir), config=dict(config), resume='allow',
    )

  def write_scalars(
      self, step: int, scalars: Mapping[str, float | str]
  ) -> None:
    """Logs every number."""
    self._run.log(_numbers(scalars), step=step)

  def flush(self) -> None:
    """Does nothing, since the library sends values in the background."""

  def close(self) -> None:
    """Finishes the run."""
    self._run.finish()


def _wandb_id(path: pathlib.Path) -> str:
  """Returns the id in a file, after drawing it if the file is missing."""
  if not path.exists():
    files.write_atomically(path, uuid.uuid4().hex + '\n')
  return path.read_text('utf-8').strip()


WRITERS: dict[str, Any] = {
    'tensorboard': TensorBoardWriter, 'wandb': WandbWriter
}
"""Writers to dashboards, by name."""


def choose_writers(names: Sequence[str]) -> list[Open]:
  """Chooses writers to dashboards by name, to open when training starts.

  Args:
    names: Keys of `WRITERS`.

  Returns:
    The writers, not open yet.

  Raises:
    ValueError: a name is unknown.
    ImportError: the library of a writer is not installed.

  Example:
    >>> choose_writers([])
    []
  """
  chosen = [lookup('writer', name, WRITERS) for name in names]
  for writer in chosen:
    require(writer.library, 'log')
  return chosen


def _numbers(scalars: Mapping[str, float | str]) -> dict[str, float]:
  return {k: v for k, v in scalars.items() if isinstance(v, (int, float))}

"""Where metrics go beside the metrics file: dashboards."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import os
from typing import Any
from typing import Protocol

from spdf_jax.extras import require
from spdf_jax.names import lookup


class Writer(Protocol):
  """Takes scalars as they come."""

  def write_scalars(
      self, step: int, scalars: Mapping[str, float | str]
  ) -> None:
    """Takes the values at a step; those that are no numbers may be dropped."""

  def flush(self) -> None:
    """Puts everything written where it goes."""

  def close(self) -> None:
    """Flushes; nothing is written afterwards."""


Open = Callable[[int], Writer]
"""Opens a writer of a run that resumes from a step."""


class AllWriters:
  """Writes to several writers.

  Args:
    writers: In the order in which they are written to.
  """

  def __init__(self, writers: Sequence[Writer]):
    self._writers = tuple(writers)

  def write_scalars(
      self, step: int, scalars: Mapping[str, float | str]
  ) -> None:
    """Writes to all."""
    for writer in self._writers:
      writer.write_scalars(step, scalars)

  def flush(self) -> None:
    """Flushes all."""
    for writer in self._writers:
      writer.flush()

  def close(self) -> None:
    """Closes all."""
    for writer in self._writers:
      writer.close()


class TensorBoardWriter:
  """Writes event files for TensorBoard to `tensorboard/` in the workdir.

  Args:
    workdir: Of the run.
    config: Not shown.
    resume_step: What was written of later steps is hidden.
  """

  library = 'tensorboardX'

  def __init__(
      self,
      workdir: str | os.PathLike,
      config: Mapping[str, Any],
      resume_step: int,
  ):
    del config
    self._writer = require(self.library, 'log').SummaryWriter(
        os.path.join(workdir, 'tensorboard'),
        purge_step=resume_step + 1,
        filename_suffix=f'.{resume_step}',  # Names have the time, in seconds.
    )

  def write_scalars(
      self, step: int, scalars: Mapping[str, float | str]
  ) -> None:
    """Adds a point to the curve of every number."""
    for name, value in _numbers(scalars).items():
      self._writer.add_scalar(name, value, step)

  def flush(self) -> None:
    """Puts everything written on disk."""
    self._writer.flush()

  def close(self) -> None:
    """Flushes and closes the file."""
    self._writer.close()


class WandbWriter:
  """Writes to the run of Weights & Biases that has the workdir's name.

  Args:
    workdir: Of the run; local files go to `wandb/` in it.
    config: What the run shows as its config.
    resume_step: Unused: of what comes twice the first is kept there.
  """

  library = 'wandb'

  def __init__(
      self,
      workdir: str | os.PathLike,
      config: Mapping[str, Any],
      resume_step: int,
  ):
    del resume_step
    name = os.path.basename(os.path.abspath(workdir))
    self._run = require(self.library, 'log').init(
        name=name, id=name, dir=str(workdir), config=dict(config),
        resume='allow',
    )

  def write_scalars(
      self, step: int, scalars: Mapping[str, float | str]
  ) -> None:
    """Logs every number."""
    self._run.log(_numbers(scalars), step=step)

  def flush(self) -> None:
    """Does nothing: the library sends what it has by itself."""

  def close(self) -> None:
    """Ends the run."""
    self._run.finish()


WRITERS = {'tensorboard': TensorBoardWriter, 'wandb': WandbWriter}
"""Writers to dashboards, by name."""


def choose_writers(
    names: Sequence[str], workdir: str | os.PathLike, config: Mapping[str, Any]
) -> list[Open]:
  """Chooses dashboards by name, to be opened when training starts.

  Args:
    names: Keys of `WRITERS`.
    workdir: Of the run.
    config: Of the run.

  Returns:
    What opens them.

  Raises:
    ValueError: a name is unknown.
    ImportError: a library is not installed.

  Example:
    >>> choose_writers([], 'runs/a', {})
    []
  """
  chosen = [lookup('writer', name, WRITERS) for name in names]
  for writer in chosen:
    require(writer.library, 'log')
  return [functools.partial(writer, workdir, config) for writer in chosen]


def _numbers(scalars: Mapping[str, float | str]) -> dict[str, float]:
  return {k: v for k, v in scalars.items() if isinstance(v, (int, float))}

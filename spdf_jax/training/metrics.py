"""Metrics: written to a file of JSON lines and to dashboards, and read."""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import json
import os
import pathlib
from typing import Any
from typing import Protocol

from spdf_jax.extras import require
from spdf_jax.names import lookup


class MetricWriter:
  """Appends scalars to `metrics.jsonl`.

  Opening cuts the file back to the step that training resumes from, so that a
  run that was killed logs every step once.

  Args:
    path: The file; made if missing.
    resume_step: Rows of later steps are dropped.
  """

  def __init__(self, path: str | os.PathLike, resume_step: int):
    self._path = pathlib.Path(path)
    _cut_back(self._path, resume_step)
    # By the line: who follows the file sees every row as it comes.
    self._file = self._path.open('a', encoding='utf-8', buffering=1)

  def write_scalars(
      self, step: int, scalars: Mapping[str, float | str]
  ) -> None:
    """Adds one row: the steps completed and the values."""
    self._file.write(json.dumps({'step': step, **scalars}) + '\n')

  def flush(self) -> None:
    """Puts everything written on disk."""
    self._file.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    """Flushes and closes the file."""
    self.flush()
    self._file.close()


class Writer(Protocol):
  """Writes scalars."""

  def write_scalars(
      self, step: int, scalars: Mapping[str, float | str]
  ) -> None:
    """Writes the values at a step; those that are no numbers may be dropped."""

  def flush(self) -> None:
    """Writes out what is buffered."""

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
    workdir: Working directory of the run.
    config: Unused.
    resume_step: Step to resume from; values of later steps are hidden.
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
    workdir: Working directory of the run; local files go to `wandb/` in it.
    config: Config of the run, JSON-able, shown there.
    resume_step: Unused: the service keeps the first of two values of a step.
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
    workdir: Working directory of the run.
    config: Config of the run, JSON-able.

  Returns:
    Functions that open them.

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


def read_rows(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads a metrics file, in the order of its lines.

  Args:
    path: The file.

  Returns:
    A row per line, its step under `'step'`; a last line that was not finished
    is left out.

  Raises:
    ValueError: a line is not what `MetricWriter` writes; it is named.
  """
  rows = []
  for number, row in _numbered_objects(path):
    if 'step' not in row or not isinstance(row['step'], int):
      raise ValueError(
          f'{path} line {number} has no whole "step": {json.dumps(row)[:80]}; '
          'remove that line, or restore the file.'
      )
    rows.append(row)
  return rows


def read_json_lines(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads a file of JSON objects, one a line.

  Args:
    path: The file.

  Returns:
    The objects; a last line that was not finished is left out.

  Raises:
    ValueError: a line is no JSON object; it is named.
  """
  return [row for _, row in _numbered_objects(path)]


def _numbered_objects(
    path: str | os.PathLike,
) -> Iterator[tuple[int, dict[str, Any]]]:
  lines = pathlib.Path(path).read_text(encoding='utf-8').split('\n')
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
    except json.JSONDecodeError as error:
      if number == len(lines):  # No newline after it: it was being written.
        return
      raise ValueError(
          f'{path} line {number} is not JSON ({error}); remove that line, or '
          'restore the file.'
      ) from error
    if not isinstance(row, dict):
      raise ValueError(
          f'{path} line {number} holds {line.strip()[:40]}, which is not a '
          'JSON object; remove that line, or restore the file.'
      )
    yield number, row


def _cut_back(path: pathlib.Path, step: int) -> None:
  rows = read_rows(path) if path.exists() else []
  kept = [row for row in rows if row['step'] <= step]
  write_atomically(path, ''.join(json.dumps(row) + '\n' for row in kept))


def write_atomically(path: str | os.PathLike, text: str) -> None:
  """Writes a text file so that no reader or crash sees half of it."""
  path = pathlib.Path(path)
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  with temporary.open('w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)

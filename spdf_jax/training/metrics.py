"""The metrics file: one JSON object a line."""

from collections.abc import Iterator
from collections.abc import Mapping
import json
import os
import pathlib
from typing import Any


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
    if not isinstance(row.get('step'), int):
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

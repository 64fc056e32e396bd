"""The metrics file: one JSON object a line."""

from collections.abc import Mapping
import json
import os
import pathlib


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


def read_rows(path: str | os.PathLike) -> list[dict[str, float | str]]:
  """Reads a metrics file; an unfinished last line is left out."""
  text = pathlib.Path(path).read_text(encoding='utf-8')
  complete = text[: text.rfind('\n') + 1]
  return [json.loads(line) for line in complete.splitlines()]


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

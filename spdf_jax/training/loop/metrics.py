# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run, a file of JSON lines."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import hashlib
import json
import logging
import math
import os
import pathlib
import shutil
import sys
from typing import Any, BinaryIO, TextIO

from spdf_jax import files

logger = logging.getLogger('spdf_jax')
_DIGEST = 'metrics.sha256'
"""File beside `metrics.jsonl` with its digest, once training has ended."""

_MEND = 'remove that line, or restore the file.'


class MetricWriter:
  """A writer that appends scalars to `metrics.jsonl`.

  Opening the file removes rows after the step that training resumes from, so
  that a run that was killed logs every step once; `metrics_cut.jsonl` beside it
  keeps them.

  Args:
    path: The file; created if missing.
    resume_step: Step to resume from; rows of later steps are removed.
  """

  def __init__(self, path: str | os.PathLike[str], resume_step: int):
    self._path = pathlib.Path(path)
    _cut_back(self._path, resume_step)
    self._path.with_name(_DIGEST).unlink(missing_ok=True)
    self._file = _open_to_append(self._path)

  def write_scalars(
      self, step: int, scalars: Mapping[str, float | str]
  ) -> None:
    """Appends one row with the number of completed steps and the values.

    Values that are not finite are written as null, since JSON has no NaN.
    """
    self._file.write(_to_line({'step': step, **scalars}))

  def flush(self) -> None:
    """Writes buffered rows to disk, with fsync."""
    self._file.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    """Flushes and closes the file, and writes its digest beside it."""
    self.flush()
    self._file.close()
    with self._path.open('rb') as file:
      digest = hashlib.file_digest(file, 'sha256').hexdigest()
    files.write_atomically(self._path.with_name(_DIGEST), f'{digest}\n')


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads a metrics file, in the order of its lines.

  Args:
    path: The file.

  Returns:
    The rows, one per line, each with the key `'step'`, without an incomplete
    last line.

  Raises:
    OSError: the file cannot be read.
    ValueError: a line is not a row of `MetricWriter`; the message has its
      number.
  """
  digest = hashlib.sha256()
  rows = list(_objects(path, _parse_row, digest.update))
  _warn_of_change(pathlib.Path(path), digest.hexdigest())
  return rows


def read_last_rows(
    path: str | os.PathLike[str], after: int, until: int
) -> list[dict[str, Any]]:
  """Reads the rows of an interval of steps, from the end of the file.

  Args:
    path: The file, whose steps do not decrease.
    after: Step after which rows are returned; no earlier ones are read.
    until: Step up to which rows are returned.

  Returns:
    The rows, in the order of their lines.

  Raises:
    ValueError: a line that is read is not a row of `MetricWriter`.
  """
  rows = []
  with pathlib.Path(path).open('rb') as file:
    for _, row in _rows_from_end(file):
      if row['step'] <= after:
        break
      if row['step'] <= until:
        rows.append(row)
  return rows[::-1]


def last_values(
    rows: Sequence[Mapping[str, Any]], names: Iterable[str]
) -> dict[str, float]:
  """Returns the last value of every name that rows have; NaN: not finite.

  Example:
    >>> last_values([{'step': 1, 'a': 2.0}, {'step': 2, 'a': None}], ['a', 'b'])
    {'a': nan}
  """
  return {
      name: math.nan if row[name] is None else row[name]
      for name in names for row in rows if name in row
  }


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads a file of JSON objects, one per line.

  Args:
    path: The file.

  Returns:
    The objects, without an incomplete last line.

  Raises:
    OSError: the file cannot be read.
    ValueError: a line is not a JSON object; the message has its number.
  """
  return list(_objects(path, _parse))


def _objects(
    path: str | os.PathLike[str],
    parse: Callable[[bytes], dict[str, Any]],
    seen: Callable[[bytes], None] = lambda line: None,
) -> Iterator[dict[str, Any]]:
  """Yields the objects of a file; calls `seen` with every line."""
  number, line = 0, b''
  with files.reading(path, _MEND), pathlib.Path(path).open('rb') as file:
    try:
      for line in file:
        number += 1
        seen(line)
        if line.strip():
          yield parse(line)
    except Exception as error:
      if line.strip() and not line.endswith(b'\n'):
        return  # The write was cut off.
      with files.reading(f'{path} line {number}', _MEND):
        raise error


def _parse(line: bytes) -> dict[str, Any]:
  # A million rows have the same names, which are held once.
  return {sys.intern(name): x for name, x in json.loads(line).items()}


def _parse_row(line: bytes) -> dict[str, Any]:
  row = _parse(line)
  step = row['step']
  is_int = isinstance(step, int) and not isinstance(step, bool)
  if not is_int or not 0 <= step < 1 << 63:
    raise ValueError(f'step is {step!r:.80}, which is no integer of 64 bits')
  for name, value in row.items():
    if '/' in name and not isinstance(value, (int, float, type(None))):
      raise ValueError(f'{name:.80} is {value!r:.80}, which is not a number')
  return row


def _rows_from_end(file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields rows and the offsets of their ends, the last row first."""
  size = file.seek(0, os.SEEK_END)
  for end, line in _lines_from_end(file):
    if not line.strip():
      continue
    try:
      row = _parse_row(line)
    except Exception as error:
      if end == size:  # The write was cut off.
        continue
      with files.reading(f'{file.name} before byte {end}', _MEND):
        raise error
    yield end, row


def _lines_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
  """Yields lines and the offsets of their ends, the last line first."""
  start, held = file.seek(0, os.SEEK_END), b''
  while start:
    size = min(start, max(len(held), 1 << 16))
    start -= size
    file.seek(start)
    held = file.read(size) + held
    end = start + len(held)
    held, *lines = held.split(b'\n')
    for line in reversed(lines):
      yield end, line
      end -= len(line) + 1
  yield len(held), held


def _cut_back(path: pathlib.Path, step: int) -> None:
  """Removes the rows after a step, which are the last ones of the file."""
  if not path.is_file():
    return
  with path.open('rb') as file:
    _warn_of_change(path, hashlib.file_digest(file, 'sha256').hexdigest())
    ends = (end for end, row in _rows_from_end(file) if row['step'] <= step)
    kept = next(ends, 0)
    file.seek(kept)
    cut = file.read()
    if cut == b'\n':  # No row is after the step.
      return
    if cut.strip():
      with _open_to_append(path.with_name('metrics_cut.jsonl')) as copy:
        copy.write(cut.decode('utf-8', 'replace').strip() + '\n')
    with files.replacing(path) as temporary, temporary.open('wb') as new:
      file.seek(0)
      shutil.copyfileobj(file, new)
      new.seek(kept)
      new.write(b'\n' if kept else b'')
      new.truncate()


def _warn_of_change(path: pathlib.Path, digest: str) -> None:
  """Warns if a file has another digest than that written beside it."""
  stored = path.with_name(_DIGEST)
  if stored.is_file() and stored.read_bytes().split() != [digest.encode()]:
    logger.warning(
        '%s is not as its run wrote it, by the digest in %s; restore it from '
        'a copy, or delete the digest if you changed the file.', path, stored
    )


def _open_to_append(path: pathlib.Path) -> TextIO:
  descriptor = files.open_regular(path, os.O_APPEND)
  # Line-buffered, so that `tail -f` shows every row at once.
  return os.fdopen(descriptor, 'a', encoding='utf-8', buffering=1)


def _to_line(row: Mapping[str, Any]) -> str:
  strict = {
      k: None if isinstance(v, float) and not math.isfinite(v) else v
      for k, v in row.items()
  }
  return json.dumps(strict, allow_nan=False) + '\n'

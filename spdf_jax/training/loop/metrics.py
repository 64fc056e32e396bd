# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run, a file of JSON lines."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import hashlib
import json
import logging
import math
import os
import pathlib
from typing import Any, TextIO

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
    digest = self._path.with_name(_DIGEST)
    files.write_atomically(digest, f'{_digest_of(self._path)}\n')


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads a metrics file, in the order of its lines.

  Args:
    path: The file.

  Returns:
    The rows, one per line, each with the key `'step'`, without an incomplete
    last line.

  Raises:
    ValueError: a line is not a row of `MetricWriter`; the message has its
      number.
  """
  rows = []
  for number, row in _numbered_objects(path):
    place = f'{path} line {number}'
    if not _is_step(row.get('step')):
      raise ValueError(
          f'{place} has no integer "step": {json.dumps(row)[:80]}; {_MEND}'
      )
    for name, value in row.items():
      if '/' in name and not isinstance(value, (int, float, type(None))):
        raise ValueError(
            f'{place} has the value {value!r:.80} of {name!r:.80}, which is '
            f'not a number; {_MEND}'
        )
    rows.append(row)
  digest = pathlib.Path(path).with_name(_DIGEST)
  if digest.is_file() and digest.read_bytes().split() != [
      _digest_of(path).encode()
  ]:
    logger.warning(
        '%s is not as its run wrote it, by the digest in %s; restore it from '
        'a copy, or delete the digest if you changed the file.', path, digest
    )
  return rows


def _is_step(value: Any) -> bool:
  """Returns whether a value is a step, which fits in 64 bits."""
  is_int = isinstance(value, int) and not isinstance(value, bool)
  return is_int and 0 <= value < 1 << 63


def _digest_of(path: str | os.PathLike[str]) -> str:
  return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


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
    ValueError: a line is not a JSON object; the message has its number.
  """
  return [row for _, row in _numbered_objects(path)]


def _numbered_objects(
    path: str | os.PathLike[str],
) -> Iterator[tuple[int, dict[str, Any]]]:
  path = pathlib.Path(path)
  if path.exists() and not path.is_file():
    raise ValueError(f'{path} is not a regular file; restore it.')
  lines = path.read_bytes().split(b'\n')
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
    except (ValueError, RecursionError) as error:
      if number == len(lines):  # Without a newline, the write was cut off.
        return
      raise ValueError(
          f'{path} line {number} is not JSON ({error}); {_MEND}'
      ) from error
    if not isinstance(row, dict):
      raise ValueError(
          f'{path} line {number} holds {row!r:.40}, which is not a JSON '
          f'object; {_MEND}'
      )
    yield number, row


def _cut_back(path: pathlib.Path, step: int) -> None:
  rows = read_rows(path) if path.exists() else []
  kept = [row for row in rows if row['step'] <= step]
  cut = [row for row in rows if row['step'] > step]
  if cut:
    copy = path.with_name('metrics_cut.jsonl')
    with _open_to_append(copy) as file:
      file.writelines(map(_to_line, cut))
  files.write_atomically(path, ''.join(map(_to_line, kept)))


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

"""JSON files of outcomes, with support for infinite and NaN numbers.

JSON has no such numbers. They are written as the strings 'NaN', 'Infinity' and
'-Infinity', and these strings are read back as numbers. So the loss of a
diverged run is preserved, and every JSON parser can read the files.
"""

from collections.abc import Mapping, Sequence
import json
import math
import os
import pathlib
from typing import Any

from spdf_jax import files

_NUMBERS = {'NaN': math.nan, 'Infinity': math.inf, '-Infinity': -math.inf}


def encode(value: Any, indent: int | None = None) -> str:
  """Encodes a value as JSON, with non-finite numbers as strings.

  Args:
    value: Mappings with string keys, sequences, strings, numbers and `None`.
    indent: Spaces for each level of nesting; `None`: a single line.

  Returns:
    Strict JSON.

  Example:
    >>> encode({'loss': float('nan'), 'curve': [[2, float('-inf')]]})
    '{"loss": "NaN", "curve": [[2, "-Infinity"]]}'
  """
  return json.dumps(_named(value), indent=indent, allow_nan=False)


def decode(text: str) -> Any:
  """Decodes the output of `encode`.

  Bare NaN and Infinity, which Python's `json` writes by default, are accepted.

  Example:
    >>> decode('{"loss": "Infinity", "method": "dense"}')
    {'loss': inf, 'method': 'dense'}
  """
  return _numbered(json.loads(text))


def write_json(path: str | os.PathLike, value: Any, indent: int) -> None:
  """Writes a value, encoded by `encode`, to a file atomically."""
  files.write_atomically(path, encode(value, indent) + '\n')


def read_json(path: str | os.PathLike) -> Any:
  """Reads a file that `write_json` wrote."""
  with files.reading(path, 'delete it, and it is written again.'):
    return decode(pathlib.Path(path).read_text('utf-8'))


def check_same(
    argument: str, folder: str | os.PathLike,
    rows: Sequence[Mapping[str, Any]], **same: Any,
) -> None:
  """Checks that the runs of a folder have the settings of this command.

  Args:
    argument: Name of the argument that gives the folder.
    folder: Folder of the recorded runs.
    rows: Records of the runs; the settings of older ones may be missing.
    **same: Settings that all of them share.

  Raises:
    ValueError: a run has other settings, or does not record them.

  Example:
    >>> check_same('output', 'a', [dict(steps=12)], steps=13)
    Traceback (most recent call last):
    ValueError: output 'a' has runs with steps 12, not 13; give another folder.
  """
  for name, value in same.items():
    for row in rows:
      if row.get(name) != value:
        raise ValueError(
            f'{argument} {str(folder)!r} has runs with {name} '
            f'{row.get(name, "unknown")}, not {value}; give another folder.'
        )


def _named(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _named(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_named(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    sign = '-' if value < 0 else ''
    return 'NaN' if math.isnan(value) else f'{sign}Infinity'
  return value


def _numbered(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _numbered(item) for key, item in value.items()}
  if isinstance(value, list):
    return [_numbered(item) for item in value]
  return _NUMBERS.get(value, value) if isinstance(value, str) else value

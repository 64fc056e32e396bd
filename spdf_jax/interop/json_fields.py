# SPDX-License-Identifier: Apache-2.0
"""JSON files of others, read field by field with checked types."""

from collections.abc import Mapping
import json
import pathlib
import reprlib
from typing import Any
from typing import TypeVar

T = TypeVar('T')
Fields = Mapping[str, Any]

_LARGEST_SIZE = 2**24
_LARGEST_NUMBER = 3.4e38  # Close to that of float32.


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object from a file.

  Raises:
    ValueError: the file is missing or damaged.
  """
  try:
    found = json.loads(path.read_text('utf-8'))
  except FileNotFoundError as error:
    raise ValueError(
        f'{path.parent} has no {path.name}; give the directory of a model that '
        'transformers or spdf_jax saved.'
    ) from error
  except OSError as error:
    raise ValueError(
        f'{path} cannot be read ({error.strerror}); fetch or export it again.'
    ) from error
  except (ValueError, RecursionError) as error:
    raise ValueError(
        f'{path} is not JSON ({error}); fetch or export it again.'
    ) from error
  if not isinstance(found, dict):
    raise ValueError(f'{path} holds no JSON object; fetch or export it again.')
  return found


def given(fields: Fields, name: str, default: Any = None) -> Any:
  """Returns a field, or the default if it is missing or null.

  Raises:
    ValueError: the field is missing and has no default.
  """
  value = fields.get(name)
  value = default if value is None else value
  if value is None:
    raise ValueError(f'{name} is missing; add it, or fetch the file again.')
  return value


def size(fields: Fields, name: str, default: int | None = None) -> int:
  """Returns a field with a positive integer.

  Raises:
    ValueError: the field is missing, of another type or too large.

  Example:
    >>> size({'n_layer': 12}, 'n_layer')
    12
  """
  value = given(fields, name, default)
  if type(value) is not int or not 1 <= value <= _LARGEST_SIZE:
    raise _error(name, value, f'must be an integer from 1 to {_LARGEST_SIZE}')
  return value


def number(fields: Fields, name: str, default: float | None = None) -> float:
  """Returns a field with a positive number.

  Raises:
    ValueError: the field is missing, of another type or not in float32.
  """
  value = given(fields, name, default)
  if type(value) not in (int, float) or not 0 < value <= _LARGEST_NUMBER:
    raise _error(name, value, 'must be a positive number of float32')
  return float(value)


def flag(fields: Fields, name: str) -> bool:
  """Returns a field with a boolean, `False` if it is missing.

  Raises:
    ValueError: the field is of another type.
  """
  value = given(fields, name, False)
  if type(value) is not bool:
    raise _error(name, value, 'must be true or false')
  return value


def choice(
    fields: Fields,
    name: str,
    known: Mapping[str, T],
    default: str | None = None,
) -> T:
  """Returns the value in a table of the name in a field.

  Raises:
    ValueError: the field is missing, or its name is not in the table.

  Example:
    >>> choice({'activation_function': 'gelu'}, 'activation_function',
    ...        {'gelu': 1})
    1
  """
  value = given(fields, name, default)
  if not isinstance(value, str) or value not in known:
    names = ' or '.join(map(repr, known))
    raise _error(name, value, f'must be {names}')
  return known[value]


def refuse_other_options(fields: Fields, computed: Fields) -> None:
  """Raises ValueError unless optional fields have the only supported values."""
  for name, value in computed.items():
    found = given(fields, name, value)
    if found != value:
      raise _error(name, found, f'must be {value!r} to be computed here')


def _error(name: str, value: Any, demand: str) -> ValueError:
  # reprlib shortens values, which may be long or deeply nested.
  return ValueError(f'{name} is {reprlib.repr(value)}; it {demand}.')

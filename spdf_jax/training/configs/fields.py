# SPDX-License-Identifier: Apache-2.0
"""Fields of dataclasses, read from a mapping and checked by their types."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import json
import math
import types
import typing
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

from spdf_jax.names import lookup


class _Dataclass(Protocol):
  __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


T = TypeVar('T', bound=_Dataclass)
Reader = Callable[[Any, str], Any]

_WORDS = {
    bool: 'True or False', int: 'a whole number', float: 'a number',
    str: 'text', list: 'a list', tuple: 'a list', types.NoneType: 'None',
}


def plain(config: Any) -> dict[str, Any]:
  """Returns a config as nested dicts, lists, numbers and strings.

  Raises:
    ValueError: a value is neither of these.

  Example:
    >>> plain({'seed': 0, 'order': ('a', 'b')})
    {'seed': 0, 'order': ['a', 'b']}
  """
  as_dict = config.to_dict() if hasattr(config, 'to_dict') else config
  if not isinstance(as_dict, Mapping):
    raise ValueError(
        f'config is {config!r:.60}; give a ConfigDict or a mapping, as '
        'configs/base.py returns.'
    )
  refuse = functools.partial(_refuse_value, as_dict)
  return json.loads(json.dumps(dict(as_dict), default=refuse))


def _refuse_value(config: Any, value: Any) -> NoReturn:
  raise ValueError(
      f'config field {_path_of(value, config)!r} is {value!r:.60}, a '
      f'{type(value).__name__}; give a number, text, a list or a mapping.'
  )


def _path_of(value: Any, config: Any) -> str:
  """Returns the dotted name of a value in nested mappings and lists."""
  items: Any = enumerate(config) if isinstance(config, list | tuple) else ()
  for key, item in config.items() if isinstance(config, Mapping) else items:
    if item is value:
      return str(key)
    path = _path_of(value, item)
    if path:
      return f'{key}.{path}'
  return ''


def read_fields(
    kind: type[T],
    given: Any,
    path: str = '',
    readers: Mapping[Any, Reader] = types.MappingProxyType({}),
) -> T:
  """Builds a dataclass from a mapping of its fields.

  Args:
    kind: The dataclass. Fields that are dataclasses are read the same way.
    given: The mapping. Only fields that may be `None` can be missing.
    path: Dotted name of the mapping in the config, for error messages.
    readers: Functions `(value, path) -> field`, by the type of the field.

  Returns:
    The dataclass.

  Raises:
    ValueError: a field is unknown, missing, of another type or out of its
      range.

  Example:
    >>> @dataclasses.dataclass
    ... class Size:
    ...   width: int
    ...   name: str | None
    >>> read_fields(Size, {'width': 3})
    Size(width=3, name=None)
  """
  fields: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(kind)}
  prefix = f'{path}.' if path else ''
  check_known(given, fields, path)
  values = {}
  for name, field_type in fields.items():
    if name not in given and types.NoneType not in typing.get_args(field_type):
      raise ValueError(
          f'config field {prefix + name!r} is missing; set it, as '
          'configs/base.py does.'
      )
    value = given[name] if name in given else None
    if field_type in readers:
      values[name] = readers[field_type](value, prefix + name)
    elif isinstance(field_type, type) and dataclasses.is_dataclass(field_type):
      values[name] = read_fields(field_type, value, prefix + name, readers)
    else:
      check_type(value, field_type, prefix + name)
      values[name] = value
  made = kind(**values)
  for name, value in values.items():
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(
          f'config field {prefix + name!r} is {value}; it must be finite.'
      )
  return made


def check_known(given: Any, fields: Mapping[str, Any], path: str) -> None:
  """Raises ValueError unless a value is a mapping of known fields only."""
  if not isinstance(given, Mapping):
    raise ValueError(
        f'config field {path!r} is {given!r}; give a mapping with its fields, '
        f'{", ".join(fields)}.'
    )
  prefix = f'{path}.' if path else ''
  known = {prefix + name: None for name in fields}
  for name in given:
    lookup('config field', f'{prefix}{name}', known)


def check_type(value: Any, field_type: Any, path: str) -> None:
  """Raises ValueError unless a value is of a type.

  Args:
    value: The value.
    field_type: A class, or a union such as `int | None`. An int is accepted as
      a float; a bool is accepted as neither.
    path: Dotted name of the value in the config, for the error message.
  """
  options = typing.get_args(field_type) if isinstance(
      field_type, types.UnionType
  ) else (field_type,)
  kinds = [typing.get_origin(option) or option for option in options]
  accepted = [*kinds, int] if float in kinds else kinds
  is_bool = isinstance(value, bool)
  if not isinstance(value, tuple(accepted)) or (is_bool and bool not in kinds):
    words = ' or '.join(_WORDS.get(kind, 'a mapping') for kind in kinds)
    raise ValueError(f'config field {path!r} is {value!r}; it must be {words}.')


_DEMANDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    '0 or more': (lambda number: not number < 0, 'give 0 or more'),
    'at least 1': (lambda number: number >= 1, 'it must be at least 1'),
    'positive': (lambda number: number > 0, 'it must be positive'),
}


def check_numbers(config: Any, path: str, demand: str, *names: str) -> None:
  """Raises ValueError unless fields of a dataclass are in a range.

  Args:
    config: The dataclass.
    path: Prefix of the fields in error messages, with a dot at its end.
    demand: `'0 or more'`, `'at least 1'` or `'positive'`.
    *names: Names of the fields.
  """
  is_met, fix = _DEMANDS[demand]
  for name in names:
    value = getattr(config, name)
    if not is_met(value):
      raise ValueError(f'{path}{name} is {value}; {fix}.')

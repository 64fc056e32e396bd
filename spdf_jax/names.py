"""Lookup of user-supplied names, with an error that suggests known ones."""

from collections.abc import Mapping
import difflib
from typing import TypeVar

T = TypeVar('T')


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
  """Returns `table[name]`, or raises an error with the closest known names.

  Args:
    kind: Kind of the table's entries for the error message, e.g. `'preset'`.
    name: Name to look up.
    table: Known names and their values.

  Returns:
    The value under `name`.

  Raises:
    ValueError: `name` is unknown.

  Example:
    >>> lookup('preset', 'gpt2-small', {'gpt2-small': 12})
    12
  """
  if isinstance(name, str) and name in table:
    return table[name]
  near = difflib.get_close_matches(str(name), table, n=3, cutoff=0.4)
  hint = f'did you mean {" or ".join(map(repr, near))}?' if near else (
      f'known are {", ".join(map(repr, sorted(table)))}.'
  )
  raise ValueError(f'{kind} {name!r} is unknown; {hint}')

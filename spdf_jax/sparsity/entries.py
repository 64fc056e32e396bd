# SPDX-License-Identifier: Apache-2.0
"""Arguments given by name: distributions, structures and initial masks."""

from collections.abc import Callable
from collections.abc import Mapping
import functools
import inspect
import re
from typing import Any

from spdf_jax.names import lookup
from spdf_jax.sparsity import distributions
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import structures
from spdf_jax.sparsity.initial_masks import nonzero_mask

_DISTRIBUTIONS = {
    'by_pattern': distributions.by_pattern,
    'erk': distributions.erk,
    'model_wide': distributions.model_wide,
    'uniform': distributions.uniform,
}
_STRUCTURES = {
    'balanced': structures.balanced,
    'block': structures.block,
    'channel': structures.channel,
    'n_of_m': structures.n_of_m,
    'unstructured': structures.unstructured,
}
_INITS = {
    'magnitude': masks.magnitude_mask,
    'nonzero': nonzero_mask,
    'random': masks.random_mask,
}


def distribution_of(value: Any) -> Callable[..., Any]:
  """Returns a distribution given by name, or itself.

  Args:
    value: `(params, sparsity) -> sparsities`, or `'uniform'`, `'erk'`,
      `'by_pattern'` or `'model_wide'`, or a mapping with the name under
      `'distribution'` and further arguments.

  Returns:
    The distribution.

  Raises:
    ValueError: `value` is something else, or the name or an argument is
      unknown.

  Example:
    >>> distribution_of('erk').__name__
    'erk'
  """
  # Called later with two positional arguments, an initial mask with three.
  found = by_entry('distribution', value, _DISTRIBUTIONS, missing=2)
  return _check(found, callable(found), 'distribution', 'erk, or its name')


def structure_of(value: Any) -> structures.Structure:
  """Returns a structure given by name, or itself.

  Args:
    value: A structure; `'unstructured'`; N:M as `'2:4'`; or a mapping with the
      name under `'structure'` and its arguments.

  Returns:
    The structure.

  Raises:
    ValueError: `value` is something else, or the name or an argument is
      unknown.

  Example:
    >>> structure_of('2:4').unit_shape((1, 8, 16))
    (32, 4, 1)
  """
  if isinstance(value, str) and re.fullmatch(r'\d+:\d+', value):
    n, m = map(int, value.split(':'))
    return structures.n_of_m(n, m)
  found = by_entry('structure', value, _STRUCTURES)
  if isinstance(value, (str, Mapping)):
    found = found()
  return _check(
      found, isinstance(found, structures.Structure), 'structure',
      "structures.block(4, 4), or a name such as '2:4'",
  )


def init_of(value: Any) -> Callable[..., Any]:
  """Returns a maker of initial masks given by name, or itself.

  Args:
    value: `(key, params, sparsities) -> mask`, or `'random'`, `'magnitude'` or
      `'nonzero'`.

  Returns:
    The maker.

  Raises:
    ValueError: `value` is something else, or the name is unknown.

  Example:
    >>> init_of('magnitude').__name__
    'magnitude_mask'
  """
  found = by_entry('init', value, _INITS, missing=3)
  return _check(found, callable(found), 'init', 'magnitude_mask, or its name')


def _check(found: Any, valid: bool, name: str, example: str) -> Any:
  if not valid:
    raise ValueError(f'{name} is {found!r:.80}; give e.g. {example}.')
  return found


def bind(
    what: str,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    missing: int = 0,
) -> Callable[..., Any]:
  """Binds keyword arguments to a function after checking its signature.

  Args:
    what: Name of the function for error messages.
    function: The function.
    arguments: Keyword arguments of the function.
    missing: Number of positional arguments of the later call.

  Returns:
    A function of the missing arguments.

  Raises:
    ValueError: an argument is missing or unexpected.
  """
  signature = inspect.signature(function)
  try:
    signature.bind(*[None] * missing, **arguments)
  except TypeError as error:
    names = list(signature.parameters)[missing:]
    raise ValueError(
        f'{what}: {error}; its arguments are {", ".join(names) or "none"}.'
    ) from error
  return functools.partial(function, **arguments) if arguments else function


def by_entry(
    kind: str, value: Any, table: Mapping[str, Any], missing: int = 0
) -> Any:
  """Looks up a name, or a mapping of a name and arguments, in a table.

  Args:
    kind: Kind of the table's entries, the key of the name in a mapping.
    value: `name` or `{kind: name, …arguments}`; others are returned unchanged.
    table: Functions by their names.
    missing: Number of positional arguments of the later call.

  Returns:
    The function, with the arguments bound.

  Raises:
    ValueError: the name is unknown, or an argument is.
  """
  if isinstance(value, str):
    value = {kind: value}
  if not isinstance(value, Mapping):
    return value
  name = value.get(kind, '')
  function = lookup(kind, name, table)
  arguments = {k: v for k, v in value.items() if k != kind}
  return bind(f'{kind} {name!r}', function, arguments, missing)

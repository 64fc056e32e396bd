# SPDX-License-Identifier: Apache-2.0
"""Construction of algorithms from the plain data of a config."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import optax

from spdf_jax import names
from spdf_jax.sparsity import combinators
from spdf_jax.sparsity import schedules
from spdf_jax.sparsity.algorithm import Algorithm
from spdf_jax.sparsity.algorithms import gmp
from spdf_jax.sparsity.algorithms import granet
from spdf_jax.sparsity.algorithms import iterative
from spdf_jax.sparsity.algorithms import rigl
from spdf_jax.sparsity.algorithms import sparse_evolution
from spdf_jax.sparsity.algorithms import static
from spdf_jax.sparsity.algorithms.iterative import Round

_SCHEDULES = {
    name: getattr(optax, name) for name in dir(optax)
    if name.endswith('_schedule')
} | {
    'cosine': schedules.cosine,
    'cubic': schedules.cubic,
    'periodic': schedules.periodic,
}


def create_algorithm(spec: float | Mapping[str, Any]) -> Algorithm:
  """Builds the algorithm that a config specifies.

  A number specifies `static`. A mapping has the name of an algorithm under
  `'algorithm'`, one of `ALGORITHMS` or `'package.module:function'` for a custom
  function that returns an `Algorithm`, and the algorithm's arguments as further
  entries. Arguments may be JSON:

  * `sparsity` and `drop_fraction`: a number; `{'schedule': 'cubic', 'initial':
    0.5, 'final': 0.8, 'steps': 700}` with the name of a schedule of spdf_jax or
    optax (`'linear_schedule'`) and its arguments; for `by_pattern` a list of
    `[pattern, sparsity]` pairs, or a mapping, each sparsity one of these;
  * `distribution`: `'uniform'`, `'erk'`, `'by_pattern'`, `'model_wide'`, or
    `{'distribution': 'erk', 'power': 0.5}`;
  * `structure`: `'unstructured'`, `'2:4'`, or `{'structure': 'n_of_m', 'n': 2,
    'm': 4}` and likewise `block`, `channel`, `balanced`;
  * `init`: `'random'`, `'magnitude'`, or `'nonzero'` to keep the non-zero
    parameters;
  * `rounds`: a list of `{'steps': 300, 'fraction': 0.25}`.

  The algorithm `'partition'` has one argument, `groups`: a list of `[pattern,
  spec]` pairs, e.g. `[['*/attn/*', 0.5], ['*', {'algorithm': 'dense'}]]`. Each
  spec is a number or mapping as here, but not a partition, and applies to the
  leaves whose path matches its pattern and no pattern before it.

  Args:
    spec: A number or a mapping.

  Returns:
    The algorithm.

  Raises:
    ValueError: a name is unknown, an argument is missing, unexpected or out of
      its range, or a custom function cannot be imported or does not return an
      `Algorithm`.

  Example:
    >>> import jax.numpy as jnp
    >>> rise = {'schedule': 'cubic', 'initial': 0.5, 'final': 0.8, 'steps': 700}
    >>> algorithm = create_algorithm({
    ...     'algorithm': 'rigl', 'sparsity': rise, 'update_every': 100,
    ...     'update_until': 700, 'distribution': 'erk'})
    >>> algorithm.sparsity_at(700, {'w': jnp.ones((1, 2, 5))})
    {'w': 0.8}
  """
  if not isinstance(spec, Mapping):
    return static.static(spec)
  arguments = {
      name: _DECODERS[name](value) if name in _DECODERS else value
      for name, value in spec.items() if name != 'algorithm'
  }
  name = spec.get('algorithm', '')
  if not isinstance(name, str) or ':' not in name:
    make = names.lookup('algorithm', name, ALGORITHMS)
  else:
    make = names.import_function('algorithm', name)
  made = names.bind(f'algorithm {name!r}', make, arguments)()
  if not isinstance(made, Algorithm):
    raise ValueError(
        f'algorithm {name!r} returned {made!r:.60}; let the function return a '
        'spdf_jax.Algorithm.'
    )
  return made


def member_specs(spec: float | Mapping[str, Any]) -> list[Mapping[str, Any]]:
  """Returns the mappings of all algorithms that a spec specifies.

  Args:
    spec: A number or a mapping, as `create_algorithm` reads it.

  Returns:
    The spec; for a partition, the specs of its groups. Numbers are left out.

  Raises:
    ValueError: the groups of a partition are not valid.

  Example:
    >>> rigl = {'algorithm': 'rigl', 'sparsity': 0.8, 'update_every': 9}
    >>> groups = [['*/mlp/*', rigl], ['*', 0.5]]
    >>> member_specs({'algorithm': 'partition', 'groups': groups}) == [rigl]
    True
  """
  if not isinstance(spec, Mapping):
    return []
  if not _is_partition(spec):
    return [spec]
  groups = _check_groups(spec.get('groups'))
  return [member for _, member in groups if isinstance(member, Mapping)]


def _is_partition(spec: Any) -> bool:
  return isinstance(spec, Mapping) and spec.get('algorithm') == 'partition'


def _partition(groups: Any) -> Algorithm:
  members = {}
  for pattern, spec in _check_groups(groups):
    try:
      members[pattern] = create_algorithm(spec)
    except ValueError as error:
      raise ValueError(f'group {pattern!r}: {error}') from error
  labels = [(pattern, pattern) for pattern in members]
  return combinators.partition(members, labels)


def _check_groups(groups: Any) -> Sequence[tuple[str, Any]]:
  """Returns the groups of a partition, or raises."""
  is_list = isinstance(groups, (list, tuple)) and bool(groups)
  if not is_list or not all(
      isinstance(group, (list, tuple))
      and len(group) == 2
      and isinstance(group[0], str)
      and isinstance(group[1], (int, float, Mapping))
      for group in groups
  ):
    raise ValueError(
        f'groups is {groups!r:.80}; give a list of [pattern, algorithm] pairs, '
        "e.g. [['*/attn/*', 0.5], ['*', {'algorithm': 'dense'}]]."
    )
  patterns = [pattern for pattern, _ in groups]
  for pattern, spec in groups:
    if patterns.count(pattern) > 1:
      raise ValueError(
          f'groups has the pattern {pattern!r} {patterns.count(pattern)} '
          'times; give each pattern once.'
      )
    if _is_partition(spec):
      raise ValueError(
          f'group {pattern!r} is a partition; give its groups in the outer '
          'list instead, before the patterns that also match their leaves.'
      )
  return groups


def _sparsity(value: Any) -> Any:
  """Decodes a number, a schedule, or sparsities by pattern."""
  if isinstance(value, Mapping) and 'schedule' in value:
    return names.by_entry('schedule', value, _SCHEDULES)()
  if isinstance(value, Mapping):
    return {key: _sparsity(sparsity) for key, sparsity in value.items()}
  if isinstance(value, (list, tuple)):
    try:
      pairs = [(str(pattern), sparsity) for pattern, sparsity in value]
    except (TypeError, ValueError) as error:
      raise ValueError(
          f'sparsity is {value!r}; a list is of [pattern, sparsity] pairs.'
      ) from error
    return [(pattern, _sparsity(sparsity)) for pattern, sparsity in pairs]
  return value


def _rounds(value: Any) -> Any:
  if not isinstance(value, (list, tuple)):
    return value
  return [
      names.bind('a round', Round, entry)() if isinstance(
          entry, Mapping
      ) else entry
      for entry in value
  ]


_DECODERS: dict[str, Callable[[Any], Any]] = {
    'drop_fraction': _sparsity,
    'rounds': _rounds,
    'sparsity': _sparsity,
}
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    'dense': static.dense,
    'gmp': gmp.gmp,
    'granet': granet.granet,
    'iterative': iterative.iterative,
    'partition': _partition,
    'rigl': rigl.rigl,
    'sparse_evolution': sparse_evolution.sparse_evolution,
    'static': static.static,
}

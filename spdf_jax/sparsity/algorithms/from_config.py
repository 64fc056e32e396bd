# SPDX-License-Identifier: Apache-2.0
"""Construction of algorithms from the plain data of a config."""

from collections.abc import Callable, Mapping, Sequence
import fractions
import functools
import inspect
import re
from typing import Any, TypeVar

import optax

from spdf_jax import names
from spdf_jax.sparsity import schedules
from spdf_jax.sparsity.algorithms import combinators
from spdf_jax.sparsity.algorithms import gmp
from spdf_jax.sparsity.algorithms import granet
from spdf_jax.sparsity.algorithms import iterative
from spdf_jax.sparsity.algorithms import largest
from spdf_jax.sparsity.algorithms import rigl
from spdf_jax.sparsity.algorithms import sparse_evolution
from spdf_jax.sparsity.algorithms import static
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.algorithms.iterative import Round

T = TypeVar('T')

_SCHEDULES = {
    name: getattr(optax, name) for name in dir(optax)
    if name.endswith('_schedule')
} | {
    'cosine': schedules.cosine,
    'cubic': schedules.cubic,
    'periodic': schedules.periodic,
}

_TIME = re.compile(
    r'\s*(?:([0-9]+)\s*(?:steps?)?|([0-9]+(?:\.[0-9]+)?)\s*%)\s*'
)

_ASSUMED_STEPS = 10**6  # Where the phase's length is not yet known.
TIMES = (
    'update_every', 'update_from', 'update_until', 'steps', 'start', 'period',
    'transition_steps', 'transition_begin', 'decay_steps', 'warmup_steps',
)
"""Arguments of algorithms and schedules that are numbers of steps."""


def create_algorithm(spec: Mapping[str, Any]) -> Algorithm:
  """Builds the algorithm that a config specifies.

  A spec is a mapping with the name of an algorithm under `'name'` and the
  algorithm's arguments as further entries. The name is `'dense'`, `'static'`,
  `'gmp'`, `'iterative'`, `'set'` (`sparse_evolution`), `'rigl'`, `'granet'`,
  `'partition'`, or `'package.module:function'` for a custom function that
  returns an `Algorithm`. Arguments may be written as in JSON:

  * `sparsity` and `drop_fraction`: a number, or `{'schedule': 'cubic',
    'initial': 0.5, 'final': 0.8, 'steps': 700}` with the name of a schedule of
    spdf_jax (`'cubic'`, `'periodic'`, `'cosine'`) or optax
    (`'linear_schedule'`) and its arguments. With `by_pattern`, `sparsity` is a
    list of `[pattern, sparsity]` pairs, or a mapping, of these values;
  * `distribution`: `'uniform'`, `'erk'`, `'igq'`, `'by_pattern'`,
    `'model_wide'`, or `{'distribution': 'erk', 'power': 0.5}`;
  * `structure`: `'unstructured'`, `'2:4'`, or `{'structure': 'n_of_m', 'n': 2,
    'm': 4}` and likewise `block`, `channel`, `balanced`;
  * `init`: `'random'`, `'magnitude'`, or `'nonzero'` to keep the non-zero
    parameters;
  * `rounds`: a list of `{'steps': 300, 'fraction': 0.25}`;
  * each of these names, `update_every` and `grow` may be
    `'package.module:function'`, a function of your own.

  The algorithm `'partition'` has one argument, `groups`: a list of `[pattern,
  spec]` pairs, e.g. `[['*/attn/*', {'name': 'static', 'sparsity': 0.5}], ['*',
  {'name': 'dense'}]]`. Each spec has the form described here, is not itself a
  partition, and applies to the leaves whose path matches its pattern and no
  pattern before it.

  Args:
    spec: The name of the algorithm and its arguments.

  Returns:
    The algorithm.

  Raises:
    ValueError: a name is unknown; an argument is missing, unexpected or out of
      its range; or a custom function cannot be imported or does not return an
      `Algorithm`.

  Example:
    >>> import jax.numpy as jnp
    >>> rise = {'schedule': 'cubic', 'initial': 0.5, 'final': 0.8, 'steps': 700}
    >>> algorithm = create_algorithm({
    ...     'name': 'rigl', 'sparsity': rise, 'update_every': 100,
    ...     'update_until': 700, 'distribution': 'erk'})
    >>> algorithm.sparsity_at(700, {'w': jnp.ones((1, 2, 5))})
    {'w': 0.8}
  """
  make = _function_of(spec)
  arguments = {
      name: _DECODERS[name](value) if name in _DECODERS else value
      for name, value in spec.items() if name != 'name'
  }
  named = f'algorithm {spec["name"]!r}'
  made = names.bind(named, make, arguments)()
  if not isinstance(made, Algorithm):
    raise ValueError(
        f'{named} returned {made!r:.60}; let the function return an '
        'spdf_jax.Algorithm.'
    )
  return made


def resolve(spec: Mapping[str, Any], steps: int | None) -> dict[str, Any]:
  """Prepares the spec of an algorithm in a config for `create_algorithm`.

  Removes arguments that are `None`, and those that only other algorithms of
  `ALGORITHMS` take, so that a user can change the name alone. Converts times to
  numbers of steps: `update_every`, `update_from`, `update_until`, and those of
  a schedule, such as its `steps`, may be `'100 steps'`, or `'75%'` of the
  training phase, which is rounded down to whole steps but not to 0.

  Args:
    spec: The name of the algorithm and its arguments.
    steps: Number of steps of the training phase. `None` if it is not known yet:
      percentages are then of a provisional length, and the result serves to
      check the spec, not to train.

  Returns:
    The spec as `create_algorithm` takes it, with times as numbers of steps.

  Raises:
    ValueError: a name is unknown, an argument is one that no algorithm takes,
      or a time has another form.

  Example:
    >>> times = {'update_every': '5%', 'update_until': '75%'}
    >>> resolve({'name': 'rigl', 'sparsity': 0.8} | times, steps=1000)
    {'name': 'rigl', 'sparsity': 0.8, 'update_every': 50, 'update_until': 750}
    >>> resolve({'name': 'static', 'sparsity': 0.8} | times, steps=1000)
    {'name': 'static', 'sparsity': 0.8}
  """
  parameters = inspect.signature(_function_of(spec)).parameters
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  known = {'name': None} | dict(parameters)
  for make in ALGORITHMS.values():
    known |= inspect.signature(make).parameters
  length = steps
  if length is None:
    until = spec.get('update_until') or _ASSUMED_STEPS
    length = _in_steps('update_until', until, _ASSUMED_STEPS)
  arguments = {'name': spec['name']}
  for name, value in spec.items():
    if not takes_any:
      names.lookup(f'algorithm {spec["name"]!r}: argument', name, known)
    if name == 'groups' and name in parameters:
      groups = _map_groups(lambda member: resolve(member, steps), value)
      value = [list(group) for group in groups.items()]
    else:
      value = _in_steps(name, value, length)
    if value is not None and (takes_any or name in parameters):
      arguments[name] = value
  return arguments


def member_specs(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
  """Returns the specs of the groups of a partition; any other spec alone.

  Args:
    spec: A spec, as `create_algorithm` reads it.

  Returns:
    A list of specs: those of the groups, in their order, or `[spec]`.

  Raises:
    ValueError: the spec has no name, or the groups of a partition are not
      valid.

  Example:
    >>> static = {'name': 'static', 'sparsity': 0.8}
    >>> groups = [['*/mlp/*', static], ['*', {'name': 'dense'}]]
    >>> member_specs({'name': 'partition', 'groups': groups})
    [{'name': 'static', 'sparsity': 0.8}, {'name': 'dense'}]
  """
  _check_name(spec)
  if spec['name'] != 'partition':
    return [spec]
  return [member for _, member in _check_groups(spec.get('groups'))]


def user_functions(spec: Any) -> list[str]:
  """Returns the names of functions in a spec that would be imported.

  Args:
    spec: A spec, as `create_algorithm` reads it, or a value in one.

  Returns:
    The names, in the order of the spec.

  Example:
    >>> user_functions({'name': 'static', 'structure': '2:4', 'init': 'my:f'})
    ['my:f']
  """
  if isinstance(spec, str):
    return [spec] if names.is_function(spec) else []
  if isinstance(spec, Mapping):
    spec = list(spec.values())
  if not isinstance(spec, (list, tuple)):
    return []
  return [name for value in spec for name in user_functions(value)]


def initial_masks_of(spec: Mapping[str, Any]) -> list[str]:
  """Returns the names of the functions that make the initial masks of a spec.

  Args:
    spec: A spec, as `create_algorithm` reads it.

  Returns:
    Names of functions of `spdf_jax.init`, or of the user's own, each one once,
    in the order of a partition's groups. The list is empty for algorithms
    without an argument `init`, such as `dense`.

  Raises:
    ValueError: the name of an algorithm is unknown, or the groups of a
      partition are not valid.

  Example:
    >>> initial_masks_of({'name': 'rigl', 'sparsity': 0.8})
    ['random']
    >>> initial_masks_of({'name': 'static', 'sparsity': 0.8, 'init': 'nonzero'})
    ['nonzero']
  """
  init_names = []
  for member in member_specs(spec):
    parameter = _init_parameter(member)
    if parameter is not None:
      init = member.get('init') or parameter.default
      init_names.append(init if isinstance(init, str) else init.__name__)
  return list(dict.fromkeys(init_names))


def with_default_init(spec: Mapping[str, Any], init: str) -> dict[str, Any]:
  """Returns a spec that makes masks by `init`, unless it states how.

  Args:
    spec: A spec, as `create_algorithm` reads it.
    init: Name of a function of `spdf_jax.init`.

  Returns:
    The spec; in a partition, the groups that do not state it have this `init`.
    Algorithms without an argument `init` are unchanged.

  Example:
    >>> with_default_init({'name': 'static', 'sparsity': 0.8}, 'magnitude')
    {'name': 'static', 'sparsity': 0.8, 'init': 'magnitude'}
  """
  if spec['name'] == 'partition':
    return {**spec, 'groups': [
        [pattern, with_default_init(member, init)]
        for pattern, member in _check_groups(spec.get('groups'))
    ]}
  if spec.get('init') or _init_parameter(spec) is None:
    return dict(spec)
  return {**spec, 'init': init}


def _init_parameter(spec: Mapping[str, Any]) -> inspect.Parameter | None:
  return inspect.signature(_function_of(spec)).parameters.get('init')


def _check_name(spec: Any) -> None:
  if not isinstance(spec, Mapping) or not isinstance(spec.get('name'), str):
    raise ValueError(
        f'algorithm is {spec!r:.80}; give its name and arguments, e.g. '
        "{'name': 'static', 'sparsity': 0.75}."
    )


def _function_of(spec: Any) -> Callable[..., Algorithm]:
  _check_name(spec)
  if names.is_function(spec['name']):
    return names.import_function('algorithm', spec['name'])
  return names.lookup('algorithm', spec['name'], ALGORITHMS)


def _in_steps(name: str, value: Any, steps: int) -> Any:
  """Converts the times in an argument of an algorithm to steps."""
  if isinstance(value, Mapping):
    return {k: _in_steps(k, v, steps) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_in_steps(name, v, steps) for v in value]
  if not isinstance(value, str) or name not in TIMES:
    return value
  if name == 'update_every' and names.is_function(value):
    return value
  match = _TIME.fullmatch(value)
  if match is None:
    raise ValueError(
        f"{name} is {value!r}; give a number of steps, e.g. '100 steps', or a "
        "percentage of the phase, e.g. '75%'."
    )
  number, share = match.groups()
  if number:
    return int(number)
  share = fractions.Fraction(share)
  return max(int(share * steps / 100), 1 if share else 0)


def _partition(groups: Any) -> Algorithm:
  members = _map_groups(create_algorithm, groups)
  labels = [(pattern, pattern) for pattern in members]
  return combinators.partition(members, labels)


def _map_groups(function: Callable[[Any], T], groups: Any) -> dict[str, T]:
  """Applies a function to the specs of a partition; errors name the group."""
  results = {}
  for pattern, spec in _check_groups(groups):
    try:
      results[pattern] = function(spec)
    except ValueError as error:
      raise ValueError(f'group {pattern!r}: {error}') from error
  return results


def _check_groups(groups: Any) -> Sequence[tuple[str, Any]]:
  """Returns the groups of a partition, or raises."""
  is_list = isinstance(groups, (list, tuple)) and bool(groups)
  if not is_list or not all(
      isinstance(group, (list, tuple))
      and len(group) == 2
      and isinstance(group[0], str)
      and isinstance(group[1], Mapping)
      for group in groups
  ):
    raise ValueError(
        f'groups is {groups!r:.80}; give a list of [pattern, algorithm] pairs, '
        "e.g. [['*/attn/*', {'name': 'static', 'sparsity': 0.5}], ['*', "
        "{'name': 'dense'}]]."
    )
  patterns = [pattern for pattern, _ in groups]
  for pattern, spec in groups:
    if patterns.count(pattern) > 1:
      raise ValueError(
          f'groups has the pattern {pattern!r} {patterns.count(pattern)} '
          'times; give each pattern once.'
      )
    if spec.get('name') == 'partition':
      raise ValueError(
          f'group {pattern!r} is a partition, and partitions cannot be nested; '
          'give its groups in the outer list instead, before the patterns that '
          'also match their leaves.'
      )
  return groups


def _number(name: str, value: Any) -> Any:
  """Decodes a number, a schedule, or sparsities by pattern."""
  if isinstance(value, Mapping) and 'schedule' in value:
    return names.by_entry('schedule', value, _SCHEDULES)()
  if isinstance(value, Mapping):
    return {key: _number(name, number) for key, number in value.items()}
  if isinstance(value, (list, tuple)):
    try:
      pairs = [(str(pattern), sparsity) for pattern, sparsity in value]
    except (TypeError, ValueError) as error:
      raise ValueError(
          f'{name} is {value!r}; give a number, a mapping with a schedule, or, '
          'for the sparsity with by_pattern, a list of [pattern, sparsity] '
          'pairs.'
      ) from error
    return [(pattern, _number(name, sparsity)) for pattern, sparsity in pairs]
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
    'drop_fraction': functools.partial(_number, 'drop_fraction'),
    'rounds': _rounds,
    'sparsity': functools.partial(_number, 'sparsity'),
    'update_every': lambda value: names.by_entry(
        'update_every', value, {}, missing=1
    ),
}
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    'dense': static.dense,
    'gmp': gmp.gmp,
    'granet': granet.granet,
    'hard_threshold': largest.largest,
    'iterative': iterative.iterative,
    'partition': _partition,
    'rigl': rigl.rigl,
    'set': sparse_evolution.sparse_evolution,
    'static': static.static,
}

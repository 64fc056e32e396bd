# SPDX-License-Identifier: Apache-2.0
"""Schedules of sparsity, evaluated step by step on the host.

A sparsity is a number, a schedule (a function of the step), or a tree of
those. On the host, schedules of this module compute in float64 and those of
optax in float32; under tracing, all compute in float32.
"""

import bisect
from collections.abc import Callable, Sequence
import math
import operator
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import distributions

PyTree = Any
Schedule = Callable[[Any], Any]

# A `jax.tree_util.Partial` is a pytree node, but here it is a schedule.
_is_leaf = lambda x: x is None or isinstance(x, jax.tree_util.Partial)


def cubic(
    initial: float, final: float, steps: int, start: int = 0
) -> Schedule:
  r"""Returns a cubic schedule between two sparsities, for gradual pruning.

  .. math::
    s_t = s_f + (s_i - s_f) \left(1 - \frac{t - t_0}{n}\right)^3

  Args:
    initial: :math:`s_i`, the sparsity until `start`.
    final: :math:`s_f`, the sparsity from `start + steps` on.
    steps: :math:`n`, the length of the ramp.
    start: :math:`t_0`, the first step of the ramp.

  Returns:
    The schedule, a function of the step.

  Raises:
    ValueError: a sparsity is outside [0, 1), `steps` is below 1, or `start` is
      negative.

  References:
    Zhu and Gupta, `To Prune, or Not to Prune
    <https://arxiv.org/abs/1710.01878>`_, 2017

  Example:
    >>> sparsity = cubic(0.0, 0.8, steps=100)
    >>> sparsity(0), sparsity(50), sparsity(1000)
    (0.0, 0.7000000000000001, 0.8)
  """
  initial = distributions.check_sparsity(initial, 'initial')
  final = distributions.check_sparsity(final, 'final')
  steps = check_steps('steps', steps, 1)
  start = check_steps('start', start, 0)

  def schedule(count):
    if is_host_int(count) and count <= start:
      return initial  # The formula may differ in the last bit.
    return final + (initial - final) * (1 - _ramp(count - start, steps)) ** 3

  schedule.__name__ = f'cubic({initial}, {final}, {steps}, start={start})'
  return schedule


def rising(sparsity: PyTree, steps: int) -> PyTree:
  """Replaces numbers in a sparsity by `cubic` schedules that rise from 0.

  Args:
    sparsity: A number, a schedule, or a tree of those.
    steps: Number of steps after which the numbers are reached.

  Returns:
    The sparsity, with schedules in place of numbers.

  Raises:
    ValueError: a number is outside [0, 1), or `steps` is below 1.

  Example:
    >>> rising(0.8, steps=100)(50)
    0.7000000000000001
  """
  steps = check_steps('update_until', steps, 1)
  if type(sparsity) is dict:  # `jax.tree.map` would sort its patterns.
    return {name: rising(s, steps) for name, s in sparsity.items()}

  def rise(s):
    if s is None or isinstance(s, str) or callable(s):
      return s
    return cubic(0.0, s, steps)

  return jax.tree.map(rise, sparsity, is_leaf=_is_leaf)


def periodic(sparsities: Sequence[float], period: int) -> Schedule:
  """Returns a schedule that cycles through sparsities, as in AC/DC.

  Args:
    sparsities: The sparsities of one cycle, in order.
    period: Number of steps for which each sparsity holds.

  Returns:
    The schedule, a function of the step.

  Raises:
    ValueError: there are no sparsities, one is outside [0, 1), or `period` is
      below 1.

  References:
    Peste et al., `AC/DC <https://arxiv.org/abs/2106.12379>`_, 2021

  Example:
    >>> sparsity = periodic([0.0, 0.9], period=10)
    >>> [sparsity(step) for step in (0, 9, 10, 20)]
    [0.0, 0.0, 0.9, 0.0]
  """
  sparsities = tuple(
      distributions.check_sparsity(s, 'a sparsity') for s in sparsities
  )
  if not sparsities:
    raise ValueError('sparsities is empty; give the sparsities of one cycle.')
  period = check_steps('period', period, 1)

  def schedule(count):
    turn = count // period % len(sparsities)
    if is_host_int(count):
      return sparsities[turn]
    return jnp.asarray(sparsities)[turn]

  schedule.__name__ = f'periodic({list(sparsities)}, {period})'
  return schedule


def cosine(initial: float, steps: int) -> Schedule:
  r"""Returns a cosine decay of a drop fraction to 0, as in RigL.

  .. math:: f_t = \frac{f_0}{2} \left(1 + \cos \frac{\pi t}{n}\right)

  Args:
    initial: :math:`f_0`, the fraction at step 0.
    steps: :math:`n`, the step from which it is 0.

  Returns:
    The schedule.

  Raises:
    ValueError: the fraction is outside (0, 1), or `steps` is below 1.

  References:
    Evci et al., `RigL <https://arxiv.org/abs/1911.11134>`_, 2020

  Example:
    >>> fraction = cosine(0.3, steps=100)
    >>> fraction(0), round(fraction(50), 6), fraction(1000)
    (0.3, 0.15, 0.0)
  """
  initial = float(initial)
  if not 0 < initial < 1:
    raise ValueError(f'initial is {initial}; give a fraction in (0, 1).')
  steps = check_steps('steps', steps, 1)

  def schedule(count):
    cos = math.cos if is_host_int(count) else jnp.cos
    return initial / 2 * (1 + cos(math.pi * _ramp(count, steps)))

  schedule.__name__ = f'cosine({initial}, {steps})'
  return schedule


def value_at(schedule: float | Schedule, count: int) -> float:
  """Evaluates a number or a schedule on the host, also under tracing.

  Args:
    schedule: A number, or a function of the step.
    count: The step.

  Returns:
    The value.

  Raises:
    ValueError: the schedule does not return a number.

  Example:
    >>> value_at(lambda step: jnp.float32(step) / 4, 3)
    0.75
  """
  count = operator.index(count)
  if not callable(schedule):
    return float(schedule)
  with jax.ensure_compile_time_eval():
    value = schedule(count)
    try:
      return float(value)
    except (TypeError, ValueError) as error:
      raise ValueError(
          f'the schedule {getattr(schedule, "__name__", schedule)!r} returns '
          f'{value!r:.80} at step {count}; return a number.'
      ) from error


def is_sequence(every: Any) -> TypeGuard[Sequence[int]]:
  """Returns whether steps are listed; an array of one number has no axis."""
  return (
      hasattr(every, '__iter__') and not isinstance(every, str)
      and bool(getattr(every, 'ndim', True))
  )


def is_constant(sparsity: PyTree) -> bool:
  """Returns whether a sparsity contains no schedule."""
  return not any(map(callable, jax.tree.leaves(sparsity, is_leaf=_is_leaf)))


def sparsity_at(sparsity: PyTree, count: int) -> PyTree:
  """Evaluates a sparsity at a step.

  Args:
    sparsity: A number, a schedule, or a tree of those; a dict keeps its order.
    count: The step, on the host.

  Returns:
    The tree with a float for every number and schedule; `None` and strings (the
    patterns of `by_pattern`) are unchanged.

  Raises:
    ValueError: a sparsity is outside [0, 1); the message names the step.

  Example:
    >>> sparsity_at({'w': cubic(0.0, 0.5, 100), 'v': 0.75, 'b': None}, 100)
    {'w': 0.5, 'v': 0.75, 'b': None}
  """
  # `jax.tree.map` would sort the keys, but the first matching pattern applies.
  if type(sparsity) is dict:
    return {key: sparsity_at(value, count) for key, value in sparsity.items()}

  def evaluate(leaf):
    if leaf is None or isinstance(leaf, str):
      return leaf
    if not callable(leaf):
      return distributions.check_sparsity(leaf)
    return distributions.check_sparsity(
        value_at(leaf, count), f'sparsity at step {count}'
    )

  return jax.tree.map(evaluate, sparsity, is_leaf=_is_leaf)


def _ramp(count: Any, steps: int) -> Any:
  """Returns a linear ramp from 0 at count 0 to 1 at `steps`."""
  if is_host_int(count):
    return min(max(int(count), 0), steps) / steps
  return jnp.clip(count, 0, steps) / steps

UpdateEvery = int | Sequence[int] | Callable[[int], Any]
"""Steps of mask updates: their distance, a list, or a function of the step."""

_LAST_STEP = 2**31 - 1


class UpdateTimes(NamedTuple):
  """Steps at which masks are updated, as `update_times` returns them.

  Counts may be traced; negative ones are before every update.
  """

  start: int
  """The step of the first update."""

  every: int
  """Number of steps from one update to the next."""

  number: int | None
  """Number of updates; `None`: there is no last one."""

  listed: tuple[int, ...] = ()
  """The steps of all updates, if they are not evenly spaced."""

  @property
  def endless(self) -> bool:
    """Whether there is no last update."""
    return self.number is None

  @property
  def steps(self) -> np.ndarray:
    """The steps of all updates, int32.

    Raises:
      ValueError: there is no last update.
    """
    if self.number is None:
      raise ValueError(
          f'update_every is {self.every} and update_until is None, so that '
          'mask updates have no last one, at which schedules end; give '
          'update_until, the last step that may be a mask update.'
      )
    regular = range(self.start, _LAST_STEP + 1, self.every)[:self.number]
    return np.asarray(self.listed or regular, np.int32)

  def contains(self, count: Any) -> Any:
    """Returns whether the step `count` is an update: bool, or traced bool[]."""
    if self.listed:
      if is_host_int(count):
        number = self.index(count)
        return number >= 0 and self.listed[number] == count
      return jnp.any(jnp.asarray(count)[..., None] == self.steps, axis=-1)
    since = int(count) - self.start if is_host_int(count) else (
        count - self.start
    )
    is_update = (since >= 0) & (since % self.every == 0)
    if self.number is None:
      return is_update
    return is_update & (since <= (self.number - 1) * self.every)

  def index(  # type: ignore[override]  # hides tuple.index
      self, count: Any
  ) -> Any:
    """Returns the number of the last update at or before a step.

    Args:
      count: The step, a Python int or traced int32.

    Returns:
      The number, 0 for the first update and -1 before it: int, or traced int32.
    """
    if self.listed:
      if is_host_int(count):
        return bisect.bisect_right(self.listed, count) - 1
      # The default method would be a loop inside the compiled step.
      after = jnp.searchsorted(
          self.steps, count, side='right', method='compare_all'
      )
      return after.astype(jnp.int32) - 1
    last = _LAST_STEP if self.number is None else self.number - 1
    if is_host_int(count):
      return min(max((int(count) - self.start) // self.every, -1), last)
    return jnp.clip((count - self.start) // self.every, -1, last)


def update_times(
    every: UpdateEvery,
    start: int | None = None,
    stop: int | None = None,
) -> UpdateTimes:
  """Returns the steps at which masks are updated.

  Error messages name the arguments as algorithms do: `update_every`,
  `update_from` and `update_until`.

  Args:
    every: Number of steps between updates, or an increasing list of the steps,
      or a function of the step that is true at updates (evaluated here for
      every step, so `stop` is required).
    start: First step that may be an update. The default is `every`, if that is
      a number of steps, and 0 otherwise.
    stop: Last step that may be an update; `None`: updates do not end.

  Returns:
    The steps of mask updates.

  Raises:
    ValueError: an argument is invalid, or no step is an update.

  Example:
    >>> times = update_times(100, stop=300)
    >>> times.steps.tolist(), times.contains(250), times.index(250)
    ([100, 200, 300], False, 1)
  """
  stop = stop if stop is None else check_steps('update_until', stop, 0)
  listed: Sequence[int]
  if callable(every):
    first = check_steps('update_from', 0 if start is None else start, 0)
    if stop is None:
      raise ValueError(
          'update_every is a function of the step and update_until is None; '
          'give update_until, the last step at which to evaluate the function.'
      )
    with jax.ensure_compile_time_eval():
      listed = [t for t in range(first, stop + 1) if bool(every(t))]
  elif is_sequence(every):
    first = check_steps('update_from', 0 if start is None else start, 0)
    listed = [check_steps('a step in update_every', t, 0) for t in every]
    for before, after in zip(listed, listed[1:]):
      if after <= before:
        raise ValueError(
            f'update_every lists step {after} after step {before}; list each '
            'step once, in increasing order.'
        )
    last = _LAST_STEP if stop is None else stop
    listed = [t for t in listed if first <= t <= last]
  else:
    every = check_steps('update_every', every, 1)
    first = check_steps('update_from', every if start is None else start, 0)
    if stop is None:
      return UpdateTimes(first, every, None)
    listed = range(first, stop + 1, every)
  if not listed:
    what = '' if callable(every) else f'={every!r:.80}'
    until = 'on' if stop is None else f'to step {stop}'
    raise ValueError(
        f'update_every{what} gives no mask update from step {first} {until}; '
        'update more often, lower update_from, or raise update_until.'
    )
  if isinstance(listed, range):
    return UpdateTimes(first, listed.step, len(listed))
  gaps = {after - before for before, after in zip(listed, listed[1:])} or {1}
  even = len(gaps) == 1
  return UpdateTimes(
      start=listed[0],
      every=min(gaps),
      number=len(listed),
      listed=() if even else tuple(listed),
  )


def is_host_int(count: Any) -> bool:
  """Returns whether a step is a Python or NumPy integer."""
  return isinstance(count, (int, np.integer))


def check_steps(name: str, value: Any, least: int) -> int:
  """Returns a step or number of steps as an int, or raises.

  Args:
    name: Name of the value for error messages.
    value: The value to check.
    least: The smallest valid number.

  Returns:
    The number.

  Raises:
    ValueError: the value is not a whole number, is below `least`, or exceeds
      int32.

  Example:
    >>> check_steps('every', 100, 1)
    100
  """
  try:
    number = operator.index(value)
  except TypeError:
    number = least - 1
  if isinstance(value, bool) or not least <= number <= _LAST_STEP:
    raise ValueError(
        f'{name} is {value!r}; give a whole number of steps from {least} to '
        f'{_LAST_STEP:,}.'
    )
  return number


def check_boundaries(boundaries: Sequence[int]) -> list[int]:
  """Returns boundaries as ints; raises unless they increase, the first >= 0."""
  steps = [check_steps('a step in boundaries', b, 0) for b in boundaries]
  if any(b <= a for a, b in zip(steps, steps[1:])):
    raise ValueError(
        f'boundaries are {steps}; give increasing steps, each one once.'
    )
  return steps

# SPDX-License-Identifier: Apache-2.0
"""Schedules of sparsity, evaluated step by step on the host.

A sparsity is a number, a schedule (a function of the step), or a tree of
those. On the host, schedules of this module compute in float64 and those of
optax in float32; under tracing, all compute in float32.
"""

from collections.abc import Callable
from collections.abc import Sequence
import math
import operator
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spdf_jax.sparsity.distributions import check_sparsity
from spdf_jax.sparsity.times import check_steps
from spdf_jax.sparsity.times import is_host_int
from spdf_jax.sparsity.times import UpdateTimes

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
    The schedule.

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
  initial = check_sparsity(initial, 'initial')
  final = check_sparsity(final, 'final')
  steps = check_steps('steps', steps, 1)
  start = check_steps('start', start, 0)

  def schedule(count):
    if is_host_int(count) and count <= start:
      return initial  # The formula may differ in the last bit.
    return final + (initial - final) * (1 - _ramp(count - start, steps)) ** 3

  return schedule


def periodic(sparsities: Sequence[float], period: int) -> Schedule:
  """Returns a schedule that cycles through sparsities, as in AC/DC.

  Args:
    sparsities: The sparsities of one cycle.
    period: Number of steps of each sparsity in a cycle.

  Returns:
    The schedule.

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
  sparsities = tuple(check_sparsity(s, 'a sparsity') for s in sparsities)
  if not sparsities:
    raise ValueError('sparsities is empty; give the sparsities of one cycle.')
  period = check_steps('period', period, 1)

  def schedule(count):
    turn = count // period % len(sparsities)
    if is_host_int(count):
      return sparsities[turn]
    return jnp.asarray(sparsities)[turn]

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
          f'the schedule returns {value!r} at step {count}; return a number.'
      ) from error


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
      return check_sparsity(leaf)
    return check_sparsity(value_at(leaf, count), f'sparsity at step {count}')

  return jax.tree.map(evaluate, sparsity, is_leaf=_is_leaf)


class ScheduleRange(NamedTuple):
  """Extremes and end of a sparsity over all updates, each a number or tree."""

  minimum: PyTree
  """The lowest sparsity."""

  maximum: PyTree
  """The highest sparsity."""

  final: PyTree
  """The sparsity at the last update."""


def schedule_range(
    sparsity: PyTree,
    times: UpdateTimes | None = None,
    total_steps: int | None = None,
) -> ScheduleRange:
  """Returns the extremes and the end of a sparsity over its mask updates.

  Args:
    sparsity: A number, a schedule, or a tree of those.
    times: The steps of mask updates; not needed for a constant sparsity.
    total_steps: Length of the run; updates after its end are ignored. Required
      if there is no last update.

  Returns:
    The lowest, the highest and the last sparsity: floats for one number or
    schedule.

  Raises:
    ValueError: a sparsity is outside [0, 1), there is neither a last update nor
      `total_steps`, or no update is in the run.

  Example:
    >>> from spdf_jax.sparsity.times import update_times
    >>> sparsity = periodic([0.0, 0.9], period=10)
    >>> schedule_range(sparsity, update_times(10), total_steps=50)
    ScheduleRange(minimum=0.0, maximum=0.9, final=0.0)
  """
  steps: Sequence[int] = [0]
  if not is_constant(sparsity):
    steps = _steps_in_run(times, total_steps)
  sparsities = [sparsity_at(sparsity, step) for step in steps]
  return ScheduleRange(
      jax.tree.map(lambda *values: min(values), *sparsities),
      jax.tree.map(lambda *values: max(values), *sparsities),
      sparsities[-1],
  )


def _steps_in_run(
    times: UpdateTimes | None, total_steps: int | None
) -> Sequence[int]:
  if times is None or (times.endless and total_steps is None):
    raise ValueError(
        'sparsity is a schedule and its updates have no last one; give them a '
        'stop, or total_steps.'
    )
  end = None if total_steps is None else check_steps(
      'total_steps', total_steps, 1
  )
  steps: Sequence[int]
  if times.endless and end is not None:
    steps = range(times.start, end, times.every)
  else:
    steps = [t for t in times.steps.tolist() if end is None or t < end]
  if not steps:
    raise ValueError(
        f'total_steps is {end}, but the first update is at step '
        f'{times.start}; give a larger total_steps.'
    )
  return steps


def _ramp(count: Any, steps: int) -> Any:
  """Returns a linear ramp from 0 at count 0 to 1 at `steps`."""
  if is_host_int(count):
    return min(max(int(count), 0), steps) / steps
  return jnp.clip(count, 0, steps) / steps

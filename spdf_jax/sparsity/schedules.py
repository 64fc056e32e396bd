"""Sparsity over time: schedules, evaluated step by step on the host.

A sparsity is a number, a schedule (a function of the step), or a tree of
those. On the host the schedules here compute in float64, those of optax in
float32; under tracing all are float32.
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

# A `jax.tree_util.Partial` is a tree; here it is a schedule.
_is_leaf = lambda x: x is None or isinstance(x, jax.tree_util.Partial)


def cubic(
    initial: float, final: float, steps: int, start: int = 0
) -> Schedule:
  r"""Moves from one sparsity to another, fast first, as in gradual pruning.

  .. math::
    s_t = s_f + (s_i - s_f) \left(1 - \frac{t - t_0}{n}\right)^3

  Args:
    initial: :math:`s_i`, kept until `start`.
    final: :math:`s_f`, reached `steps` later and kept.
    steps: :math:`n`, the length of the ramp.
    start: :math:`t_0`, the step at which it begins.

  Returns:
    The schedule.

  Raises:
    ValueError: a sparsity is outside [0, 1), or `steps` below 1.

  References:
    Zhu and Gupta, `To Prune, or Not to Prune
    <https://arxiv.org/abs/1710.01878>`_, 2017

  Example:
    >>> level = cubic(0.0, 0.8, steps=100)
    >>> level(0), level(50), level(1000)
    (0.0, 0.7000000000000001, 0.8)
  """
  initial = check_sparsity(initial, 'initial')
  final = check_sparsity(final, 'final')
  steps = check_steps('steps', steps, 1)
  start = check_steps('start', start, 0)

  def schedule(count):
    return final + (initial - final) * (1 - _ramp(count - start, steps)) ** 3

  return schedule


def periodic(levels: Sequence[float], period: int) -> Schedule:
  """Goes through levels in turn, again and again, as in AC/DC.

  Args:
    levels: The sparsities of one cycle.
    period: Steps for which each is kept.

  Returns:
    The schedule.

  Raises:
    ValueError: there are no levels, one is outside [0, 1), or `period` is
      below 1.

  References:
    Peste et al., `AC/DC <https://arxiv.org/abs/2106.12379>`_, 2021

  Example:
    >>> level = periodic([0.0, 0.9], period=10)
    >>> [level(step) for step in (0, 9, 10, 20)]
    [0.0, 0.0, 0.9, 0.0]
  """
  levels = tuple(check_sparsity(level, 'a level') for level in levels)
  if not levels:
    raise ValueError('levels is empty; give the sparsities of one cycle.')
  period = check_steps('period', period, 1)

  def schedule(count):
    turn = count // period % len(levels)
    return levels[turn] if is_host_int(count) else jnp.asarray(levels)[turn]

  return schedule


def cosine(initial: float, steps: int) -> Schedule:
  r"""Lowers a drop fraction to 0 by half a cosine, as in RigL.

  .. math:: f_t = \frac{f_0}{2} \left(1 + \cos \frac{\pi t}{n}\right)

  Args:
    initial: :math:`f_0`, the fraction at step 0.
    steps: :math:`n`, the step from which it is 0.

  Returns:
    The schedule.

  Raises:
    ValueError: the fraction is outside (0, 1), or `steps` below 1.

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
  """Evaluates a number or a schedule on the host, also while jax traces.

  Args:
    schedule: A number, or a function of the step.
    count: The step.

  Returns:
    The value.

  Raises:
    ValueError: the schedule returns no number.

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
  """Returns whether nothing in a sparsity is a schedule."""
  return not any(map(callable, jax.tree.leaves(sparsity, is_leaf=_is_leaf)))


def level_at(sparsity: PyTree, count: int) -> PyTree:
  """Evaluates a sparsity at a step.

  Args:
    sparsity: A number, a schedule, or a tree of those; a dict keeps its order.
    count: The step, on the host.

  Returns:
    The same with a float for every number and schedule; `None` and text, the
    patterns of `by_pattern`, stay.

  Raises:
    ValueError: a level is outside [0, 1); it names the step.

  Example:
    >>> level_at({'w': cubic(0.0, 0.5, 100), 'v': 0.75, 'b': None}, 100)
    {'w': 0.5, 'v': 0.75, 'b': None}
  """
  # jax would sort it, and of patterns the first counts.
  if type(sparsity) is dict:
    return {key: level_at(value, count) for key, value in sparsity.items()}

  def level(leaf):
    if leaf is None or isinstance(leaf, str):
      return leaf
    if not callable(leaf):
      return check_sparsity(leaf)
    return check_sparsity(value_at(leaf, count), f'sparsity at step {count}')

  return jax.tree.map(level, sparsity, is_leaf=_is_leaf)


class ScheduleRange(NamedTuple):
  """Levels over all updates, each a tree like the sparsity's."""

  minimum: PyTree
  """The lowest level."""

  maximum: PyTree
  """The highest level."""

  final: PyTree
  """The level of the last update."""


def schedule_range(
    sparsity: PyTree,
    times: UpdateTimes | None = None,
    total_steps: int | None = None,
) -> ScheduleRange:
  """Finds the extremes and the end of a sparsity over its updates.

  Args:
    sparsity: A number, a schedule, or a tree of those.
    times: The updates; not needed where the sparsity is constant.
    total_steps: Length of the run, needed if there is no last update; later
      updates do not count.

  Returns:
    The lowest, the highest and the last level: floats for one number or
    schedule.

  Raises:
    ValueError: a level is outside [0, 1), or the updates have no last one, or
      none lies in the run.

  Example:
    >>> from spdf_jax.sparsity.times import update_times
    >>> level = periodic([0.0, 0.9], period=10)
    >>> schedule_range(level, update_times(10), total_steps=50)
    ScheduleRange(minimum=0.0, maximum=0.9, final=0.0)
  """
  steps = [0]
  if not is_constant(sparsity):
    steps = _steps_in_run(times, total_steps)
  levels = [level_at(sparsity, step) for step in steps]
  return ScheduleRange(
      jax.tree.map(lambda *values: min(values), *levels),
      jax.tree.map(lambda *values: max(values), *levels),
      levels[-1],
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
  if times.endless:
    steps = range(times.start, end, times.every)
  else:
    steps = [t for t in times.steps.tolist() if end is None or t < end]
  if not steps:
    raise ValueError(
        f'total_steps is {end}, but the first update is at step '
        f'{times.start}; let the run last beyond it.'
    )
  return steps


def _ramp(count: Any, steps: int) -> Any:
  """Rises from 0 at count 0 to 1 at `steps`."""
  if is_host_int(count):
    return min(max(int(count), 0), steps) / steps
  return jnp.clip(count, 0, steps) / steps

# SPDX-License-Identifier: Apache-2.0
"""The steps at which masks are updated."""

import bisect
from collections.abc import Callable
from collections.abc import Sequence
import operator
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
          f'updates every {self.every} steps have no last one; give the step '
          'of the last, stop=….'
      )
    regular = range(self.start, _LAST_STEP + 1, self.every)[:self.number]
    return np.asarray(self.listed or regular, np.int32)

  def contains(self, count: Any) -> Any:
    """Returns whether the step `count` is an update: bool, or traced bool[]."""
    if self.listed:
      if is_host_int(count):
        return int(count) in self.listed
      return jnp.any(jnp.asarray(count)[..., None] == self.steps, axis=-1)
    since = int(count) - self.start if is_host_int(count) else (
        count - self.start
    )
    found = (since >= 0) & (since % self.every == 0)
    if self.number is None:
      return found
    return found & (since <= (self.number - 1) * self.every)

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
  stop = stop if stop is None else check_steps('stop', stop, 0)
  listed: Sequence[int]
  if callable(every):
    first = check_steps('start', 0 if start is None else start, 0)
    if stop is None:
      raise ValueError(
          'every is a function of the step and stop is None; give the last '
          'step at which to evaluate it, stop=….'
      )
    with jax.ensure_compile_time_eval():
      listed = [t for t in range(first, stop + 1) if bool(every(t))]
  elif hasattr(every, '__iter__') and not isinstance(every, str):
    first = check_steps('start', 0 if start is None else start, 0)
    listed = [check_steps('a step in every', t, 0) for t in every]
    for before, after in zip(listed, listed[1:]):
      if after <= before:
        raise ValueError(
            f'every lists step {after} after step {before}; list each step '
            'once, in increasing order.'
        )
    last = _LAST_STEP if stop is None else stop
    listed = [t for t in listed if first <= t <= last]
  else:
    every = check_steps('every', every, 1)
    first = check_steps('start', every if start is None else start, 0)
    if stop is None:
      return UpdateTimes(first, every, None)
    listed = range(first, stop + 1, every)
  if not listed:
    what = 'every' if callable(every) else f'every={every!r}'
    raise ValueError(
        f'{what} gives no update from start={first} to stop={stop}; widen the '
        'range or update more often.'
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

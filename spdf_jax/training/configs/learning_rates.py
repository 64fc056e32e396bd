# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules by name, each a warm-up and a decay."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math

import optax

from spdf_jax.names import lookup


def _warmed(
    peak: float, warmup: int, horizon: int, decay: optax.Schedule
) -> optax.Schedule:
  if warmup >= horizon:
    raise ValueError(
        f'warm-up takes {warmup} of {horizon} steps; set the '
        "learning_rate.warmup of this phase to fewer steps, or to '5%'."
    )
  if not warmup:
    return decay
  # Starts above zero, so that the first step already updates the weights.
  rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
  return optax.join_schedules([rise, decay], [warmup])


def _constant(peak, warmup, horizon, final_fraction):
  del final_fraction
  return _warmed(peak, warmup, horizon, optax.constant_schedule(peak))


def _linear(peak, warmup, horizon, final_fraction):
  fall = optax.linear_schedule(peak, peak * final_fraction, horizon - warmup)
  return _warmed(peak, warmup, horizon, fall)


def _cosine(peak, warmup, horizon, final_fraction):
  fall = optax.cosine_decay_schedule(
      peak, max(horizon - warmup, 1), alpha=final_fraction
  )
  return _warmed(peak, warmup, horizon, fall)


SCHEDULES = {'constant': _constant, 'linear': _linear, 'cosine': _cosine}
"""Schedules by name, functions of (peak, warmup, horizon, final_fraction)."""

_PEAKED = ('peak', 'warmup', 'final_fraction')
TAKES = dict.fromkeys(SCHEDULES, _PEAKED) | {'continue': (), 'rewind': ('to',)}
"""The fields of `LearningRate` that a schedule uses, by its name."""


@dataclasses.dataclass(frozen=True)
class LearningRate:
  """The learning rate of a phase.

  Three schedules are functions of the step within the phase: `'constant'`,
  `'linear'` and `'cosine'`. Two reuse the schedule of the latest earlier phase
  that has one of these three: `'continue'` continues it, and phases directly
  after it that continue extend its horizon; `'rewind'` repeats it from step
  `to`, and stays at its final value beyond its end.

  Attributes:
    schedule: A key of `TAKES`.
    peak: Learning rate after the warm-up.
    warmup: Length of the warm-up, a duration, e.g. `'5%'` of the phase; `''`:
      no warm-up.
    final_fraction: Learning rate at the end, as a fraction of the peak.
    to: Step to rewind to, a duration; `''`: the first.

  Raises:
    ValueError: the schedule is unknown, or a field that it uses is missing or
      out of its range.

  References:
    Renda et al., `Comparing Rewinding and Fine-tuning in Neural Network
    Pruning <https://arxiv.org/abs/2003.02389>`_, 2020

  Example:
    >>> LearningRate('continue').to is None
    True
  """

  schedule: str
  peak: float | None = None
  warmup: str | None = None
  final_fraction: float | None = None
  to: str | None = None

  def __post_init__(self):
    takes = lookup('schedule', self.schedule, TAKES)
    for name in takes:
      if getattr(self, name) is None:
        raise ValueError(
            f'schedule {self.schedule!r} needs {name!r}, which is not given; '
            'set it.'
        )
    peak = self.peak if 'peak' in takes else None
    if peak is not None and not (peak > 0 and math.isfinite(peak)):
      raise ValueError(f'peak is {peak}; give a positive, finite number.')
    final = self.final_fraction if 'final_fraction' in takes else None
    if final is not None and not 0 <= final <= 1:
      raise ValueError(
          f'final_fraction is {final}; give a fraction of the peak in [0, 1].'
      )


def phase_schedules(
    order: Sequence[str],
    rates: Sequence[LearningRate],
    steps: Sequence[int],
    resolvers: Sequence[Callable[..., int]],
) -> list[optax.Schedule]:
  """Builds the learning rate of every phase of a plan.

  Args:
    order: Names of the phases, for error messages.
    rates: Learning rates of the phases.
    steps: Numbers of steps of the phases.
    resolvers: Functions from a duration to a number of steps, one per phase.

  Returns:
    Schedules, one per phase, of the step within the phase.

  Raises:
    ValueError: a warm-up or a rewind is not shorter than its schedule.
  """
  schedules = []
  head, horizon, offset = 0, 0, 0
  for i, (name, rate) in enumerate(zip(order, rates)):
    try:
      if rate.schedule == 'continue':
        offset += steps[i - 1]
      elif rate.schedule == 'rewind':
        offset = _rewound(rate, resolvers[head], horizon)
      else:
        head, offset = i, 0
        horizon = steps[i] + _continued(rates[i + 1:], steps[i + 1:])
        within = functools.partial(resolvers[i], phase_steps=steps[i])
        warmup = _resolve(within, rate.warmup)
        make = SCHEDULES[rate.schedule]
        whole = make(rate.peak, warmup, horizon, rate.final_fraction)
    except ValueError as error:
      raise ValueError(f'learning rate of phase {name!r}: {error}') from error
    schedules.append(lambda step, f=whole, offset=offset: f(step + offset))
  return schedules


def _rewound(
    rate: LearningRate, resolver: Callable[[str], int], horizon: int
) -> int:
  to = _resolve(resolver, rate.to)
  if to >= horizon:
    raise ValueError(
        f'it rewinds to step {to} of a schedule of {horizon} steps; give an '
        "earlier step in 'to'."
    )
  return to


def _resolve(resolver: Callable[[str], int], duration: str | None) -> int:
  steps = resolver(duration) if duration else 0
  # An unknown number of steps, before the data is read, fits every schedule.
  return steps if math.isfinite(steps) else 0


def _continued(rates: Sequence[LearningRate], steps: Sequence[int]) -> int:
  """Returns the number of steps of the leading phases that continue."""
  total = 0
  for rate, n in zip(rates, steps):
    if rate.schedule != 'continue':
      break
    total += n
  return total

"""Learning-rate schedules by name: a warm-up, then a decay."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import Any

import optax

from spdf_jax.names import lookup


def _warmed(peak: float, warmup: int, horizon: int, decay: optax.Schedule):
  if not peak > 0 or not math.isfinite(peak):
    raise ValueError(f'peak is {peak}; a learning rate must be positive.')
  if warmup >= horizon:
    raise ValueError(
        f'warm-up takes {warmup} of {horizon} steps; make it shorter.'
    )
  if not warmup:
    return decay
  # The first step already learns.
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
"""Learning-rate schedules by name: (peak, warmup, horizon, final_fraction)."""

_KNOWN = SCHEDULES | {'continue': None, 'rewind': None}


def phase_schedules(
    order: Sequence[str],
    specs: Sequence[Mapping[str, Any]],
    steps: Sequence[int],
    resolvers: Sequence[Callable[[str], int]],
) -> list[optax.Schedule]:
  """Builds the learning rate of every phase of a plan.

  A phase's `learning_rate` has the name of a schedule, with its `peak`,
  `warmup` (a duration, or `''`) and `final_fraction` of the peak. Two names
  stand for the schedule of the last phase before that has one of its own:
  `'continue'` goes on in it, and where it follows directly that schedule is
  made to span both phases; `'rewind'` goes through it again from step `to` (a
  duration, or `''` for its first step), and stays at its last value beyond its
  end.

  Args:
    order: The phases' names, for messages.
    specs: Their descriptions.
    steps: Their lengths.
    resolvers: For each phase, what turns a duration into steps.

  Returns:
    For each phase a schedule of the step within it.

  Raises:
    ValueError: a name is unknown, or a value is out of its range.

  References:
    Renda et al., `Comparing Rewinding and Fine-tuning in Neural Network
    Pruning <https://arxiv.org/abs/2003.02389>`_, 2020
  """
  schedules = []
  kinds = [spec['learning_rate']['schedule'] for spec in specs]
  head, horizon, offset = 0, 0, 0
  for i, (name, kind) in enumerate(zip(order, kinds)):
    rate = specs[i]['learning_rate']
    make = lookup(f'schedule of phase {name!r}:', kind, _KNOWN)
    if i == 0 and make is None:
      raise ValueError(
          f'phase {name!r} is the first and has the schedule {kind!r}; give it '
          'one of its own.'
      )
    try:
      if kind == 'continue':
        offset += steps[i - 1]
      elif kind == 'rewind':
        offset = _rewound(rate, resolvers[head], horizon)
      else:
        head, offset = i, 0
        horizon = steps[i] + _continued(kinds[i + 1:], steps[i + 1:])
        warmup = _resolve(resolvers[i], rate['warmup'])
        whole = make(rate['peak'], warmup, horizon, rate['final_fraction'])
    except ValueError as error:
      raise ValueError(f'learning rate of phase {name!r}: {error}') from error
    schedules.append(lambda step, f=whole, offset=offset: f(step + offset))
  return schedules


def _rewound(
    rate: Mapping[str, Any], resolver: Callable[[str], int], horizon: int
) -> int:
  if 'to' not in rate:
    raise ValueError("it rewinds to no step; give 'to', e.g. '100 steps'.")
  to = _resolve(resolver, rate['to'])
  if to >= horizon:
    raise ValueError(
        f'it rewinds to step {to} of a schedule of {horizon} steps; give an '
        'earlier step.'
    )
  return to


def _resolve(resolver: Callable[[str], int], duration: str) -> int:
  return resolver(duration) if duration else 0


def _continued(kinds: Sequence[str], steps: Sequence[int]) -> int:
  """Adds up the steps of the first phases as long as they continue."""
  total = 0
  for kind, n in zip(kinds, steps):
    if kind != 'continue':
      break
    total += n
  return total

"""Learning-rate schedules by name: a warm-up, then a decay."""

import math

import optax


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

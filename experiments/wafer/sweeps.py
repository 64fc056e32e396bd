"""Times of a program over sparsities, systems and numbers of the device."""

from collections.abc import Mapping, Sequence
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.accelerator import wafer
from spdf_jax.accelerator.wafer import device as devices
from spdf_jax.accelerator.wafer import program as programs
from spdf_jax.accelerator.wafer.program import Program

# Integers, so a step changes them by at least 1.
_WHOLE = 'fan_out', 'largest_cluster'


def sweep_sparsities(
    program: Program, device: wafer.WaferDevice, sparsities: jax.Array,
    *, systems: int = 1,
) -> np.ndarray:
  """Returns the time of a program at many sparsities, in one jitted call.

  Args:
    program: A program traced with a sparsity above 0, which marks the masked
      products.
    device: One system of the device.
    sparsities: Fractions of zeros in [0, 1), [N].
    systems: Number of systems over which the tokens are split.

  Returns:
    Seconds [N], float32.

  Raises:
    ValueError: a sparsity is outside [0, 1).

  Example:
    >>> from experiments.wafer.training_step import training_step
    >>> from spdf_jax import models
    >>> config = models.GPTConfig(1000, 2, 4, 4096, 16384, 2048)
    >>> step = training_step(config, 64, 2048, 0.5)
    >>> seconds = sweep_sparsities(
    ...     step, wafer.create_device('cs2'), np.linspace(0, 0.9, 1000))
    >>> seconds.shape, bool((np.diff(seconds) <= 0).all())
    ((1000,), True)
  """
  sparsities = jnp.asarray(sparsities)
  if not bool(((sparsities >= 0) & (sparsities < 1)).all()):
    raise ValueError(
        f'sparsities are between {sparsities.min()} and {sparsities.max()}; '
        'give fractions of zeros, at least 0 and below 1.'
    )

  @jax.jit
  @jax.vmap
  def at(sparsity):
    changed = programs.with_sparsity(program, lambda layer: sparsity)
    return wafer.report_on(changed, device, systems).seconds

  return np.asarray(at(sparsities))


def sensitivities(
    program: Program, device: wafer.WaferDevice, *, systems: int = 1,
    step: float = 0.01,
) -> dict[str, float]:
  """Returns the relative effect of each number of a device on the time.

  Args:
    program: Program to cost.
    device: One system of the device.
    systems: Number of systems over which the tokens are split.
    step: Relative change of each number, up and down.

  Returns:
    The percentage by which the time changes when a number grows by one percent,
    by name, from finite differences; numbers that are zero are omitted.

  Example:
    >>> from experiments.wafer.training_step import training_step
    >>> from spdf_jax import models
    >>> config = models.GPTConfig(1000, 2, 4, 4096, 16384, 2048)
    >>> step = training_step(config, 64, 2048)
    >>> effects = sensitivities(step, wafer.create_device('cs2', 'ideal'))
    >>> f"{effects['clock']:.2f}, {effects['sram']:.2f}"
    '-1.00, 0.00'
  """
  seconds = lambda d: float(wafer.report_on(program, d, systems).seconds)
  base = seconds(device)
  effects = {}
  for name in devices.NUMBERS:
    value = getattr(device, name)
    if name in _WHOLE or not value:
      continue
    exceeds = name in devices.SHARES and value * (1 + step) > 1
    room = 0.0 if exceeds else 1.0
    up, down = (
        seconds(dataclasses.replace(device, **{name: value * (1 + s)}))
        for s in (room * step, -step)
    )
    effects[name] = (up - down) / base / (step * (1 + room))
  return effects


def sensitivity_table(effects: Mapping[str, float]) -> str:
  """Formats sensitivities, the largest first, omitting those near zero.

  Args:
    effects: Result of `sensitivities`.

  Returns:
    A text of several lines.

  Example:
    >>> print(sensitivity_table({'clock': -0.9, 'power': 0.0}))
    one percent more of        changes the time by
    clock                      -0.900 %
  """
  rows = sorted(effects.items(), key=lambda item: -abs(item[1]))
  return '\n'.join([
      f'{"one percent more of":<27}changes the time by',
      *(f'{name:<27}{x:+.3f} %' for name, x in rows if abs(x) > 5e-4),
  ])


def strong_scaling(
    program: Program, device: wafer.WaferDevice, systems: Sequence[int]
) -> list[float]:
  """Returns the speed on one batch that is split over several systems.

  Args:
    program: Program on the whole batch.
    device: One system of the device.
    systems: Numbers of systems.

  Returns:
    Work per second relative to one system, for each number of systems.

  Example:
    >>> from experiments.wafer.training_step import training_step
    >>> from spdf_jax import models
    >>> xl = models.PRESETS['gpt3-xl']
    >>> step = training_step(xl, 528, 2048)
    >>> speedups = strong_scaling(step, wafer.create_device('cs2'), [1, 4, 16])
    >>> [f'{speedup:.1f}' for speedup in speedups]
    ['1.0', '3.6', '11.0']
  """
  one = wafer.report_on(program, device).seconds
  return [one / wafer.report_on(program, device, n).seconds for n in systems]


def weak_scaling(
    program: Program, device: wafer.WaferDevice, systems: Sequence[int]
) -> list[float]:
  """Returns the speed on a batch that grows with the number of systems.

  Args:
    program: Program on the batch of one system.
    device: One system of the device.
    systems: Numbers of systems.

  Returns:
    Work per second relative to one system, for each number of systems.

  Example:
    >>> from experiments.wafer.training_step import training_step
    >>> from spdf_jax import models
    >>> xl = models.PRESETS['gpt3-xl']
    >>> step = training_step(xl, 132, 2048)
    >>> speedups = weak_scaling(step, wafer.create_device('cs2'), [1, 16])
    >>> [f'{speedup:.1f}' for speedup in speedups]
    ['1.0', '15.3']
  """
  one = wafer.report_on(program, device).seconds
  speedups = []
  for n in systems:
    grow = lambda o, n=n: o._replace(work=programs.split_tokens(o.work, 1 / n))
    batch = programs.map_operations(program, grow)
    seconds = wafer.report_on(batch, device, n).seconds
    speedups.append(n * one / seconds)
  return speedups

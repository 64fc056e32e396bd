"""What if: sweeps over numbers of a device, and what each number is worth."""

from collections.abc import Mapping
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.accelerator.wafer.device import NUMBERS
from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.report import report_on
from spdf_jax.accelerator.wafer.variants import with_density
from spdf_jax.names import lookup

# A cluster is a whole number of systems behind a tree of them.
_NOT_SWEPT = ('fan_out', 'largest_cluster')


def sweep_devices(
    program: Program,
    device: WaferDevice,
    changes: Mapping[str, jax.Array],
    *,
    systems: int = 1,
) -> np.ndarray:
  """Times a program on many devices in one jitted call.

  Args:
    program: What is done.
    device: The device to start from.
    changes: By name of a number, its values [N].
    systems: Over which the tokens are split.

  Returns:
    Seconds [N], float32.

  Raises:
    ValueError: a name is unknown, or values are not as many.

  Example:
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> from spdf_jax.accelerator.wafer.decoders import Decoder
    >>> from spdf_jax.accelerator.wafer.decoders import training_step
    >>> step = training_step(Decoder(2, 256, 1024, 4, 1000), 64, 1024)
    >>> clocks = np.linspace(0.5e9, 1.0e9, 1000)
    >>> seconds = sweep_devices(step, create_device('cs2'), {'clock': clocks})
    >>> bool(seconds[0] > seconds[-1])
    True
  """
  for name in changes:
    lookup('device number', name, dict.fromkeys(_swept()))
  if len({len(values) for values in changes.values()}) != 1:
    sizes = {name: len(values) for name, values in changes.items()}
    raise ValueError(f'changes have {sizes} values; give as many for each.')

  @jax.jit
  @jax.vmap
  def at(values):
    changed = dataclasses.replace(device, **values)
    return report_on(program, changed, systems).seconds

  return np.asarray(at({k: jnp.asarray(v) for k, v in changes.items()}))


def sweep_densities(
    program: Program, device: WaferDevice, densities: jax.Array,
    *, systems: int = 1,
) -> np.ndarray:
  """Times a program at many densities of its masked products in one call.

  Args:
    program: What is done; products of density below 1 are the masked ones.
    device: The device.
    densities: Values in (0, 1], [N].
    systems: Over which the tokens are split.

  Returns:
    Seconds [N], float32.

  Raises:
    ValueError: a density is outside (0, 1].

  Example:
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> from spdf_jax.accelerator.wafer.decoders import Decoder
    >>> from spdf_jax.accelerator.wafer.decoders import training_step
    >>> step = training_step(Decoder(2, 4096, 16384, 4, 1000), 64, 2048, 0.5)
    >>> seconds = sweep_densities(
    ...     step, create_device('cs2'), np.linspace(0.1, 1, 1000))
    >>> seconds.shape, bool((np.diff(seconds) >= 0).all())
    ((1000,), True)
  """
  densities = jnp.asarray(densities)
  if not bool(((densities > 0) & (densities <= 1)).all()):
    raise ValueError(
        f'densities reach from {densities.min()} to {densities.max()}; they '
        'are shares of kept weights, above 0 and at most 1.'
    )

  @jax.jit
  @jax.vmap
  def at(density):
    changed = with_density(program, lambda layer: density)
    return report_on(changed, device, systems).seconds

  return np.asarray(at(densities))


def sensitivities(
    program: Program, device: WaferDevice, *, systems: int = 1,
    step: float = 0.01,
) -> dict[str, float]:
  """Tells what each number of a device is worth, by finite differences.

  Args:
    program: What is done.
    device: The device.
    systems: Over which the tokens are split.
    step: Relative change of each number, up and down.

  Returns:
    By name, the percent that the time changes by when the number grows by one
    percent; numbers that are zero are left out.

  Example:
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> from spdf_jax.accelerator.wafer.decoders import Decoder
    >>> from spdf_jax.accelerator.wafer.decoders import training_step
    >>> step = training_step(Decoder(2, 4096, 16384, 4, 1000), 64, 2048)
    >>> found = sensitivities(step, create_device('cs2', 'ideal'))
    >>> f"{found['clock']:.2f}, {found['sram']:.2f}"
    '-1.00, 0.00'
  """
  seconds = lambda d: float(report_on(program, d, systems).seconds)
  base = seconds(device)
  found = {}
  for name in _swept():
    value = getattr(device, name)
    # A share of 1 cannot grow.
    room = 1.0 if value != 1 else 0.0
    if not value:
      continue
    up, down = (
        seconds(dataclasses.replace(device, **{name: value * (1 + s)}))
        for s in (room * step, -step)
    )
    found[name] = (up - down) / base / (step * (1 + room))
  return found


def sensitivity_table(found: Mapping[str, float]) -> str:
  """Writes sensitivities, the largest first; those near zero are left out.

  Example:
    >>> print(sensitivity_table({'clock': -0.9, 'power': 0.0}))
    one percent more of        changes the time by
    clock                      -0.900 %
  """
  rows = sorted(found.items(), key=lambda item: -abs(item[1]))
  return '\n'.join([
      f'{"one percent more of":<27}changes the time by',
      *(f'{name:<27}{x:+.3f} %' for name, x in rows if abs(x) > 5e-4),
  ])


def _swept() -> list[str]:
  return [name for name in NUMBERS if name not in _NOT_SWEPT]

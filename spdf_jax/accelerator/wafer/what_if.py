# SPDX-License-Identifier: Apache-2.0
"""Variants of programs and devices: sweeps, sensitivities and scaling."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.accelerator.wafer.device import NUMBERS
from spdf_jax.accelerator.wafer.device import SHARES
from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.program import Host
from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.program import split_tokens
from spdf_jax.accelerator.wafer.simulate import report_on
from spdf_jax.names import lookup

# The depth of the SwarmX tree and the check of the number of systems need
# Python numbers, so these two fields cannot be traced.
_SWEPT = [n for n in NUMBERS if n not in ('fan_out', 'largest_cluster')]


def with_sparsity(
    program: Program,
    sparsity: Callable[[str], float],
    *,
    dense_grads: bool = False,
) -> Program:
  """Returns a program with another sparsity of the masked products.

  Args:
    program: A program traced with a sparsity above 0, which marks the masked
      products.
    sparsity: Function from the layer's name to the fraction of zeros.
    dense_grads: Whether gradients of pruned weights are computed too.

  Returns:
    The program, without the profiles of known masks.

  Example:
    >>> operation = Operation('h', 'p', 'forward', Product(8, 4, 4, 0.5))
    >>> sparser = with_sparsity(Program((operation,)), lambda layer: 0.9)
    >>> sparser.operations[0].work.sparsity
    0.9
  """

  def change(operation: Operation) -> Operation:
    work = operation.work
    if not (isinstance(work, Product) and work.sparsity > 0):
      return operation
    zeros = sparsity(operation.layer)
    if dense_grads and work.sampled:
      zeros = 0.0
    return operation._replace(work=work._replace(sparsity=zeros, mask=None))

  return _changed(program, change)


def in_micro_batches(program: Program, number: int) -> Program:
  """Returns a program that computes its batch in sequential parts.

  The weights are streamed again for each part; the optimizer steps once.

  Args:
    program: Program on the whole batch.
    number: Number of micro-batches.

  Returns:
    A program with the work of all micro-batches.

  Raises:
    ValueError: `number` is below 1.

  Example:
    >>> operation = Operation('h', 'p', 'forward', Product(8, 4, 4))
    >>> parts = in_micro_batches(Program((operation,)), 4)
    >>> parts.operations[0].work.tokens, parts.operations[0].count
    (2.0, 4.0)
  """

  if number < 1:
    raise ValueError(f'number is {number}; give 1 micro-batch or more.')

  def change(operation: Operation) -> Operation:
    if isinstance(operation.work, Host):
      return operation
    return operation._replace(
        work=split_tokens(operation.work, number),
        count=operation.count * number,
    )

  return _changed(program, change)


def sweep_devices(
    program: Program,
    device: WaferDevice,
    changes: Mapping[str, jax.Array],
    *,
    systems: int = 1,
) -> np.ndarray:
  """Returns the time of a program on many devices, in one jitted call.

  Args:
    program: Program to cost.
    device: Device whose numbers are replaced.
    changes: Values [N] of numbers of the device, by name.
    systems: Number of systems over which the tokens are split.

  Returns:
    Seconds [N], float32.

  Raises:
    ValueError: A name is unknown, or the lengths of values differ.

  Example:
    >>> from spdf_jax.accelerator.wafer.closed_form import Decoder
    >>> from spdf_jax.accelerator.wafer.closed_form import training_step
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> step = training_step(Decoder(2, 256, 1024, 4, 1000), 64, 1024)
    >>> clocks = np.linspace(0.5e9, 1.0e9, 1000)
    >>> seconds = sweep_devices(step, create_device('cs2'), {'clock': clocks})
    >>> bool(seconds[0] > seconds[-1])
    True
  """
  for name in changes:
    lookup('device number', name, dict.fromkeys(_SWEPT))
  if len({len(values) for values in changes.values()}) != 1:
    sizes = {name: len(values) for name, values in changes.items()}
    raise ValueError(f'changes have {sizes} values; give equally many of each.')

  @jax.jit
  @jax.vmap
  def at(values):
    changed = dataclasses.replace(device, **values)
    return report_on(program, changed, systems).seconds

  return np.asarray(at({k: jnp.asarray(v) for k, v in changes.items()}))


def sweep_sparsities(
    program: Program, device: WaferDevice, sparsities: jax.Array,
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
    ValueError: A sparsity is outside [0, 1).

  Example:
    >>> from spdf_jax.accelerator.wafer.closed_form import Decoder
    >>> from spdf_jax.accelerator.wafer.closed_form import training_step
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> step = training_step(Decoder(2, 4096, 16384, 4, 1000), 64, 2048, 0.5)
    >>> seconds = sweep_sparsities(
    ...     step, create_device('cs2'), np.linspace(0, 0.9, 1000))
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
    changed = with_sparsity(program, lambda layer: sparsity)
    return report_on(changed, device, systems).seconds

  return np.asarray(at(sparsities))


def sensitivities(
    program: Program, device: WaferDevice, *, systems: int = 1,
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
    >>> from spdf_jax.accelerator.wafer.closed_form import Decoder
    >>> from spdf_jax.accelerator.wafer.closed_form import training_step
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> step = training_step(Decoder(2, 4096, 16384, 4, 1000), 64, 2048)
    >>> found = sensitivities(step, create_device('cs2', 'ideal'))
    >>> f"{found['clock']:.2f}, {found['sram']:.2f}"
    '-1.00, 0.00'
  """
  seconds = lambda d: float(report_on(program, d, systems).seconds)
  base = seconds(device)
  found = {}
  for name in _SWEPT:
    value = getattr(device, name)
    if not value:
      continue
    exceeds = name in SHARES and value * (1 + step) > 1
    room = 0.0 if exceeds else 1.0
    up, down = (
        seconds(dataclasses.replace(device, **{name: value * (1 + s)}))
        for s in (room * step, -step)
    )
    found[name] = (up - down) / base / (step * (1 + room))
  return found


class Scaling(NamedTuple):
  """The speed of a program on several systems.

  Attributes:
    systems: Number of systems.
    seconds: Time of the program, s.
    speedup: Work per second, relative to one system.
  """

  systems: int
  seconds: float
  speedup: float


def strong_scaling(
    program: Program, device: WaferDevice, systems: Sequence[int]
) -> list[Scaling]:
  """Returns the speed on one batch that is split over several systems.

  Args:
    program: Program on the whole batch.
    device: One system of the device.
    systems: Numbers of systems.

  Returns:
    The scaling for each number of systems.

  Example:
    >>> from spdf_jax.accelerator.wafer.closed_form import GPT3_XL
    >>> from spdf_jax.accelerator.wafer.closed_form import training_step
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> step = training_step(GPT3_XL, 528, 2048)
    >>> points = strong_scaling(step, create_device('cs2'), [1, 4, 16])
    >>> [f'{point.speedup:.1f}' for point in points]
    ['1.0', '3.6', '11.0']
  """
  one = report_on(program, device).seconds
  seconds = [report_on(program, device, n).seconds for n in systems]
  return [Scaling(n, t, one / t) for n, t in zip(systems, seconds)]


def weak_scaling(
    program: Program, device: WaferDevice, systems: Sequence[int]
) -> list[Scaling]:
  """Returns the speed on a batch that grows with the number of systems.

  Args:
    program: Program on the batch of one system.
    device: One system of the device.
    systems: Numbers of systems.

  Returns:
    The scaling for each number of systems.

  Example:
    >>> from spdf_jax.accelerator.wafer.closed_form import GPT3_XL
    >>> from spdf_jax.accelerator.wafer.closed_form import training_step
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> step = training_step(GPT3_XL, 132, 2048)
    >>> points = weak_scaling(step, create_device('cs2'), [1, 16])
    >>> [f'{point.speedup:.1f}' for point in points]
    ['1.0', '15.3']
  """
  one = report_on(program, device).seconds
  found = []
  for n in systems:
    batch = _changed(program, functools.partial(_split, systems=n))
    seconds = report_on(batch, device, n).seconds
    found.append(Scaling(n, seconds, n * one / seconds))
  return found


def _split(operation: Operation, systems: int) -> Operation:
  return operation._replace(work=split_tokens(operation.work, 1 / systems))


def _changed(
    program: Program, change: Callable[[Operation], Operation]
) -> Program:
  return dataclasses.replace(
      program,
      operations=tuple(map(change, program.operations)),
      branches=tuple(
          b._replace(programs=tuple(_changed(p, change) for p in b.programs))
          for b in program.branches
      ),
  )

"""Weak and strong scaling of a program over a cluster."""

from collections.abc import Sequence
from typing import NamedTuple

from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.report import report_on
from spdf_jax.accelerator.wafer.variants import times_tokens


class Scaling(NamedTuple):
  """How a program goes on several systems.

  Attributes:
    systems: Their number.
    seconds: Of the program.
    speedup: In work per second, over one system.
  """

  systems: int
  seconds: float
  speedup: float


def strong_scaling(
    program: Program, device: WaferDevice, systems: Sequence[int]
) -> list[Scaling]:
  """Splits one batch over more and more systems.

  Args:
    program: Of the whole batch.
    device: One system.
    systems: Numbers of them.

  Returns:
    A point for each number.

  Example:
    >>> from spdf_jax.accelerator.wafer.decoders import Decoder
    >>> from spdf_jax.accelerator.wafer.decoders import training_step
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> step = training_step(Decoder(24, 2048, 8192, 16, 50257), 528, 2048)
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
  """Gives every one of more and more systems a batch of its own.

  Args:
    program: Of one system's batch.
    device: One system.
    systems: Numbers of them.

  Returns:
    A point for each number.

  Example:
    >>> from spdf_jax.accelerator.wafer.decoders import Decoder
    >>> from spdf_jax.accelerator.wafer.decoders import training_step
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> step = training_step(Decoder(24, 2048, 8192, 16, 50257), 132, 2048)
    >>> points = weak_scaling(step, create_device('cs2'), [1, 16])
    >>> [f'{point.speedup:.1f}' for point in points]
    ['1.0', '15.3']
  """
  one = report_on(program, device).seconds
  seconds = [
      report_on(times_tokens(program, n), device, n).seconds for n in systems
  ]
  return [Scaling(n, t, n * one / t) for n, t in zip(systems, seconds)]


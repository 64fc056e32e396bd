"""Clusters: several systems behind SwarmX, which broadcasts and reduces.

Training is data parallel: every system has its share of the tokens and sees
all weights. The tree broadcasts weights as they stream in and adds gradients
up as they stream out, so it costs its hops, and a loss per doubling.
"""

import dataclasses
import math
from typing import Any

from spdf_jax.accelerator.wafer.cost import Cost
from spdf_jax.accelerator.wafer.cost import cost_of
from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.work import Host
from spdf_jax.accelerator.wafer.work import Product
from spdf_jax.accelerator.wafer.work import split_tokens
from spdf_jax.accelerator.wafer.work import Work


def tree_levels(systems: int, fan_out: float) -> int:
  """Returns the levels of the SwarmX tree above some systems.

  Example:
    >>> [tree_levels(n, 4) for n in (1, 2, 4, 5, 16, 17)]
    [0, 1, 1, 2, 2, 3]
  """
  levels = 0
  while fan_out**levels < systems:
    levels += 1
  return levels


def cost_on(work: Work, device: WaferDevice, systems: int = 1) -> Cost:
  """Costs work whose tokens are split over some systems.

  Args:
    work: Of the whole batch.
    device: One system.
    systems: Their number.

  Returns:
    Cycles of the slowest system, and FLOPs and fabric bytes of all of them;
    streamed bytes and working set are those of each.

  Raises:
    ValueError: there is less than one system, or more than a cluster holds.

  Example:
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> work = Product(2**20, 4096, 4096)
    >>> one, four = (cost_on(work, create_device('cs2'), n) for n in (1, 4))
    >>> round(float(one.cycles / four.cycles), 2)
    3.78
  """
  check_systems(systems, device)
  cost = cost_of(split_tokens(work, systems), device)
  if systems == 1 or isinstance(work, Host):
    return cost
  slower = 1 + device.scaling_loss * math.log2(systems)
  hops = 0.0
  if isinstance(work, Product):
    levels = tree_levels(systems, device.fan_out)
    hops = 2 * levels * device.io_latency * device.clock
  return dataclasses.replace(
      cost,
      cycles=(cost.cycles + hops) * slower,
      latency=cost.latency + hops,
      flops=cost.flops * systems,
      skipped_flops=cost.skipped_flops * systems,
      fabric_bytes=cost.fabric_bytes * systems,
  )


def check_systems(systems: Any, device: WaferDevice) -> None:
  """Raises ValueError unless a cluster has that many systems."""
  if systems < 1 or systems != int(systems):
    raise ValueError(f'systems is {systems}; give a whole number from 1.')
  largest = device.largest_cluster
  if isinstance(largest, (int, float)) and systems > largest:
    raise ValueError(
        f'systems is {systems}; a cluster of {device.name} has at most '
        f'{largest:,.0f}.'
    )

# SPDX-License-Identifier: Apache-2.0
"""The cost of work on one wafer or on a cluster of them, in cycles.

Weights are streamed over a mesh of R x C cores; every core stores m tokens and
k features. For a product of M tokens, K inputs and N outputs with a fraction
d = 1 - sparsity of non-zeros:

.. code-block:: text

  axpy   = N k d ceil(m/S) b           each non-zero triggers an AXPY of tokens
  disp   = N k d o_nz b + N o_row      dispatch per non-zero and output row
  psum   = N m / 2                     partial sums, or dY, along the row
  core   = axpy + disp + (1 - phi) psum
  fabric = max(N k d b + N, psum [+ 2 N k d])   brackets: sampled products only
  io     = streamed bits / io_bandwidth
  cycles = max(min over m of max(core, fabric) / efficiency, io) + latency

b is the load imbalance, S the number of lanes, o_nz and o_row the dispatch
overheads and phi the overlap of the device.

The functions compute in float64 on NumPy numbers, and with `jax.numpy` on JAX
arrays, also under `jit`, `vmap` and `grad`.

Clusters are data parallel: every system processes its share of the tokens with
all weights. The SwarmX tree broadcasts streamed weights and reduces gradients,
which costs the latency of its hops and a loss per doubling of systems.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.accelerator.wafer import program
from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.program import Elementwise
from spdf_jax.accelerator.wafer.program import Host
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import ScoreProduct
from spdf_jax.accelerator.wafer.program import Work

TOKENS_PER_CORE = 2.0 ** np.arange(1, 11.01, 0.25)
"""Candidates for the tokens per core; the fastest one is used."""

_EULER = 0.5772156649015329


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cost:
  """The cost of work on a device; supports `+`, and `*` by a count.

  Attributes:
    cycles: Cycles from start to end.
    core: Cycles of the busiest core without stalls.
    fabric: Cycles of the busiest link.
    io: Cycles of streaming weights in, or gradients out.
    latency: Cycles before the first weight arrives.
    host: Cycles in which the wafer waits for the optimizer on the hosts.
    flops: Number of FLOPs; a multiply-add counts as two.
    skipped_flops: Number of FLOPs that sparsity saves.
    streamed_bytes: Bytes through the wafer's I/O.
    fabric_bytes: Bytes over links between cores, counted at each hop.
    sram_bytes: Bytes of simultaneously resident activations; a sum of costs
      takes the maximum.
    host_operations: Number of operations on weights, executed on the hosts.
  """

  cycles: Any = 0.0
  core: Any = 0.0
  fabric: Any = 0.0
  io: Any = 0.0
  latency: Any = 0.0
  host: Any = 0.0
  flops: Any = 0.0
  skipped_flops: Any = 0.0
  streamed_bytes: Any = 0.0
  fabric_bytes: Any = 0.0
  sram_bytes: Any = 0.0
  host_operations: Any = 0.0

  def __add__(self, other: 'Cost') -> 'Cost':
    largest = _module(self.sram_bytes, other.sram_bytes).maximum
    added = {
        name: getattr(self, name) + getattr(other, name) for name in _SUMMED
    }
    return Cost(
        **added, sram_bytes=largest(self.sram_bytes, other.sram_bytes)
    )

  def __mul__(self, count: Any) -> 'Cost':
    scaled = {name: getattr(self, name) * count for name in _SUMMED}
    return Cost(**scaled, sram_bytes=self.sram_bytes)


_SUMMED = tuple(
    f.name for f in dataclasses.fields(Cost) if f.name != 'sram_bytes'
)


def cost_of(work: Work, device: WaferDevice) -> Cost:
  """Returns the cost of work on one device.

  Args:
    work: A `Product`, `ScoreProduct`, `Elementwise` or `Host`.
    device: Device that executes the work.

  Returns:
    The cost.

  Example:
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> ideal = create_device('cs2', 'ideal')
    >>> layer = Product(65 * 2048, 12288, 12288)
    >>> dense = cost_of(layer, ideal).cycles
    >>> float(dense / cost_of(layer._replace(sparsity=0.75), ideal).cycles)
    4.0
  """
  return _COSTS[type(work)](work, device)


def cost_on(work: Work, device: WaferDevice, systems: int = 1) -> Cost:
  """Returns the cost of work, with the tokens split over several systems.

  Args:
    work: Work on the whole batch.
    device: One system of the cluster.
    systems: Number of systems.

  Returns:
    A cost with the cycles of the slowest system, FLOPs and fabric bytes of all
    systems, and streamed bytes and working set of each.

  Raises:
    ValueError: `systems` is below 1 or above the device's `largest_cluster`.

  Example:
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> work = Product(2**20, 4096, 4096)
    >>> one, four = (cost_on(work, create_device('cs2'), n) for n in (1, 4))
    >>> round(float(one.cycles / four.cycles), 2)
    3.78
  """
  _check_systems(systems, device)
  cost = cost_of(program.split_tokens(work, systems), device)
  if systems == 1 or isinstance(work, Host):
    return cost
  slower = 1 + device.scaling_loss * math.log2(systems)
  hops = 0.0
  if isinstance(work, Product):
    depth = tree_depth(systems, device.fan_out)
    hops = 2 * depth * device.io_latency * device.clock
  return dataclasses.replace(
      cost,
      cycles=(cost.cycles + hops) * slower,
      latency=cost.latency + hops,
      flops=cost.flops * systems,
      skipped_flops=cost.skipped_flops * systems,
      fabric_bytes=cost.fabric_bytes * systems,
  )


def tree_depth(systems: int, fan_out: float) -> int:
  """Returns the depth of the SwarmX tree over a number of systems.

  Example:
    >>> [tree_depth(n, 4) for n in (1, 2, 4, 5, 16, 17)]
    [0, 1, 1, 2, 2, 3]
  """
  depth = 0
  while fan_out**depth < systems:
    depth += 1
  return depth


def expected_imbalance(weights: Any, sparsity: Any, columns: Any) -> Any:
  """Returns the expected ratio of the largest to the mean load of columns.

  The expected maximum of `columns` binomial counts, divided by their mean, by
  the normal approximation with a correction for skewness.

  Args:
    weights: Number of weights of a column in a window, zeros included.
    sparsity: Fraction of zeros, at random positions.
    columns: Number of columns of cores.

  Returns:
    The ratio, from 1 to 1 / (1 - sparsity).

  Example:
    >>> round(float(expected_imbalance(16 * 64, 0.9, 768)), 3)
    1.312
  """
  xp = _module(weights, sparsity, columns)
  # Without kept weights there is no work, and any ratio is correct.
  kept = xp.maximum(1 - sparsity, 1e-30)
  root = xp.sqrt(2 * xp.log(xp.maximum(columns, 2)))
  largest = root + (
      _EULER - (xp.log(root**2 / 2) + np.log(4 * np.pi)) / 2
  ) / root
  spread = xp.sqrt(xp.maximum(weights * kept * sparsity, 1e-30))
  # No correction below a sparsity of 0.5: nearly full columns cannot be much
  # fuller, and the cost would rise with sparsity there.
  skew = xp.maximum(1 - 2 * kept, 0) * (largest**2 - 1) / 6
  factor = 1 + (spread * largest + skew) / (weights * kept)
  factor = xp.where(columns < 2, 1.0, factor)
  return xp.clip(factor, 1.0, 1 / kept)


def product_on_grid(
    work: Product, device: WaferDevice, tokens_per_core: Any, columns: Any
) -> Cost:
  """Returns the cost of a product with a given layout on the mesh.

  Args:
    work: Product to compute.
    device: Device that computes the product.
    tokens_per_core: Number of tokens per core, m; the tokens occupy tokens / m
      rows of cores.
    columns: Number of columns of cores over which the inputs are split, C.

  Returns:
    The cost, with arrays of the shape of `tokens_per_core` and `columns`.
  """
  xp = _module(*work[:4], *jax.tree.leaves(device), tokens_per_core)
  n, m = work.outputs, tokens_per_core
  rows = work.tokens / m
  kept = work.kept / columns  # N k d, the mean number in a column.
  b = 1 + device.imbalance * (_imbalance(work, device, columns) - 1)
  axpy = kept * xp.ceil(m / device.lanes) * b
  dispatch = kept * device.dispatch * b + n * device.row_dispatch
  psum = n * m / 2
  core = axpy + dispatch + (1 - device.overlap) * psum
  fabric = xp.maximum(kept * b + n, psum + 2 * kept * work.sampled)
  hops = work.kept * rows * (2 if work.sampled else 1)
  hops = hops + rows * (columns - 1) * n * xp.ceil(m / 2)
  bits = work.inputs * work.outputs * _bits_per_weight(work.sparsity, device)
  io = bits / device.io_bandwidth * device.clock
  core, fabric = core / device.efficiency, fabric / device.efficiency
  latency = device.latency * device.clock
  dense_flops = 2.0 * work.tokens * work.inputs * work.outputs
  flops = 2.0 * work.tokens * work.kept
  return Cost(
      cycles=xp.maximum(xp.maximum(core, fabric), io) + latency,
      core=core,
      fabric=fabric,
      io=io,
      latency=latency,
      flops=flops,
      skipped_flops=dense_flops - flops,
      streamed_bytes=bits / 8,
      fabric_bytes=hops * device.wavelet_bits / 8,
      sram_bytes=(
          work.tokens * (work.inputs + work.outputs) * device.value_bits / 8
      ),
  )


def fastest_layout(
    work: Product, device: WaferDevice
) -> tuple[Any, Any, Cost]:
  """Returns the fastest layout of a product on the mesh.

  Args:
    work: Product to compute.
    device: Device that computes the product.

  Returns:
    The number of tokens per core, the number of columns of cores, and the cost
    of the product in that layout. Both numbers may have fractions.

  Example:
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> m, columns, _ = fastest_layout(
    ...     Product(4096, 64, 64, 0.75), create_device('cs2', cores=1024))
    >>> float(m), float(columns)
    (32.0, 8.0)
  """
  xp = _module(*work[:4], *jax.tree.leaves(device))
  # Every core in use has at least one feature and one token.
  m = xp.minimum(TOKENS_PER_CORE, xp.maximum(work.tokens, 1))
  m = xp.maximum(m, work.tokens / device.cores)
  columns = xp.minimum(m * device.cores / work.tokens, work.inputs)
  tried = product_on_grid(work, device, m, columns)
  best = xp.argmin(tried.cycles)
  cost = jax.tree.map(lambda x: x[best] if np.ndim(x) else x, tried)
  return m[best], columns[best], cost


def _product(work: Product, device: WaferDevice) -> Cost:
  return fastest_layout(work, device)[2]


def _scores(work: ScoreProduct, device: WaferDevice) -> Cost:
  rate = device.cores * device.lanes * device.attention_efficiency
  core = work.multiply_adds / rate / device.efficiency
  return Cost(cycles=core, core=core, flops=2.0 * work.multiply_adds)


def _elementwise(work: Elementwise, device: WaferDevice) -> Cost:
  # A core computes one vector per cycle, as long as its number of lanes.
  core = work.operations / (device.cores * device.lanes) / device.efficiency
  return Cost(cycles=core, core=core, flops=1.0 * work.operations)


def _host(work: Host, device: WaferDevice) -> Cost:
  cycles = work.steps * device.step_seconds * device.clock
  return Cost(cycles=cycles, host=cycles, host_operations=work.operations)


_COSTS: dict[type, Callable[..., Cost]] = {
    Product: _product, ScoreProduct: _scores, Elementwise: _elementwise,
    Host: _host,
}


def _bits_per_weight(sparsity: Any, device: WaferDevice) -> Any:
  kept = 1 - sparsity
  sparse = {
      'wavelet': device.wavelet_bits * kept,
      'bitmap': 1 + device.value_bits * kept,
  }[device.encoding]
  # Weights of low sparsity are streamed in the dense format.
  xp = _module(sparse, device.value_bits)
  return xp.minimum(sparse, device.value_bits)


def _imbalance(work: Product, device: WaferDevice, columns: Any) -> Any:
  xp = _module(work.sparsity, device.window, columns)
  window = xp.minimum(device.window, work.outputs)
  if work.mask is not None and xp is np:
    return work.mask.imbalance(columns, float(window))
  weights = window * work.inputs / columns
  return expected_imbalance(weights, work.sparsity, columns)


def _module(*values: Any) -> Any:
  """Returns `jax.numpy` if any value is a JAX array, else NumPy."""
  return jnp if any(isinstance(x, jax.Array) for x in values) else np


def _check_systems(systems: Any, device: WaferDevice) -> None:
  if systems < 1 or systems != int(systems):
    raise ValueError(f'systems is {systems}; give a whole number, 1 or more.')
  largest = device.largest_cluster
  if isinstance(largest, (int, float)) and systems > largest:
    raise ValueError(
        f'systems is {systems}; give at most {largest:,.0f}, the '
        f'largest_cluster of device {device.name}.'
    )

r"""The cost of work on a wafer, in cycles.

Weights are streamed over a mesh of R x C cores; every core keeps m tokens and
k features. For a product of M tokens, K inputs and N outputs at density d:

.. code-block:: text

  axpy   = N k d ceil(m/S) b           each non-zero triggers an AXPY of tokens
  disp   = N k d o_nz b + N o_row      dispatch per non-zero and output row
  psum   = N m / 2                     partial sums, or dY, along the row
  core   = axpy + disp + (1 - phi) psum
  fabric = max(N k d b + N, psum [+ 2 N k d])   in brackets: sampled products
  io     = streamed bits / io_bandwidth
  cycles = max(min over m of max(core, fabric) / efficiency, io) + latency

Works on NumPy numbers in float64 and on JAX arrays under `jit`, `vmap` and
`grad` alike.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.work import Elementwise
from spdf_jax.accelerator.wafer.work import Host
from spdf_jax.accelerator.wafer.work import Product
from spdf_jax.accelerator.wafer.work import Scores
from spdf_jax.accelerator.wafer.work import Work

TOKENS_PER_CORE = 2.0 ** np.arange(1, 11.01, 0.25)
"""Tokens of a core that are tried; the fastest is taken."""

_EULER = 0.5772156649015329


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cost:
  """What work takes on a device; costs add up, and multiply by counts.

  Attributes:
    cycles: Until it is done.
    core: Cycles of the busiest core, if it waited for nothing.
    fabric: Cycles of the busiest link.
    io: Cycles of streaming weights in, or gradients out.
    latency: Cycles before the first weight arrives.
    host: Cycles in which the wafer waits for the optimizer's hosts.
    flops: FLOPs done; a multiplication and an addition are two.
    skipped_flops: FLOPs that zeros save.
    streamed_bytes: Through the wafer's I/O.
    fabric_bytes: Over links between cores, each hop counted.
    sram_bytes: Of activations that are on the wafer at once; sums take the
      largest.
    host_operations: On weights, where they are stored.
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

  __rmul__ = __mul__


_SUMMED = tuple(
    f.name for f in dataclasses.fields(Cost) if f.name != 'sram_bytes'
)


def cost_of(work: Work, device: WaferDevice) -> Cost:
  """Costs work on one device.

  Args:
    work: A `Product`, `Scores`, `Elementwise` or `Host`.
    device: The device.

  Returns:
    The cost.

  Example:
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> ideal = create_device('cs2', 'ideal')
    >>> layer = Product(65 * 2048, 12288, 12288)
    >>> dense = cost_of(layer, ideal).cycles
    >>> float(dense / cost_of(layer._replace(density=0.25), ideal).cycles)
    4.0
  """
  return _COSTS[type(work)](work, device)


def fits(cost: Cost, device: WaferDevice) -> Any:
  """Tells whether the activations of work fit the wafer, also under `vmap`.

  Example:
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> device = create_device('cs2')
    >>> bool(fits(cost_of(Product(2**20, 12288, 12288), device), device))
    False
  """
  return cost.sram_bytes <= device.sram


def expected_imbalance(weights: Any, density: Any, columns: Any) -> Any:
  """Returns how much busier the busiest of some columns of cores is.

  The mean of the largest of `columns` binomial counts over their own mean, by
  the normal approximation with its correction for skewness.

  Args:
    weights: That each column holds in a window, kept or not.
    density: Share that is kept, at random.
    columns: Their number.

  Returns:
    The factor, from 1 to 1 / density.

  Example:
    >>> round(float(expected_imbalance(16 * 64, 0.1, 768)), 3)
    1.312
  """
  xp = _module(weights, density, columns)
  root = xp.sqrt(2 * xp.log(xp.maximum(columns, 2)))
  largest = root + (
      _EULER - (xp.log(root**2 / 2) + np.log(4 * np.pi)) / 2
  ) / root
  spread = xp.sqrt(xp.maximum(weights * density * (1 - density), 1e-30))
  # Left out above a half: columns that are nearly full cannot be much fuller,
  # and fewer zeros would seem to cost less.
  skew = xp.maximum(1 - 2 * density, 0) * (largest**2 - 1) / 6
  factor = 1 + (spread * largest + skew) / (weights * density)
  factor = xp.where(columns < 2, 1.0, factor)
  return xp.clip(factor, 1.0, 1 / density)


def product_on_grid(
    work: Product, device: WaferDevice, tokens_per_core: Any, columns: Any
) -> Cost:
  """Costs a product that is laid out on the mesh in a given way.

  Args:
    work: The product.
    device: The device.
    tokens_per_core: m; the tokens need tokens / m rows of cores.
    columns: C, over which the inputs are split.

  Returns:
    The cost, of the shape of `tokens_per_core` and `columns`.
  """
  xp = _module(*work[:4], *jax.tree.leaves(device), tokens_per_core)
  n, m = work.outputs, tokens_per_core
  rows = work.tokens / m
  kept = work.kept / columns  # N k d, of a column on average
  b = 1 + device.imbalance * (_imbalance(work, device, columns) - 1)
  axpy = kept * xp.ceil(m / device.lanes) * b
  dispatch = kept * device.dispatch * b + n * device.row_dispatch
  psum = n * m / 2
  core = axpy + dispatch + (1 - device.overlap) * psum
  fabric = xp.maximum(kept * b + n, psum + 2 * kept * work.sampled)
  hops = work.kept * rows * (2 if work.sampled else 1)
  hops = hops + rows * (columns - 1) * n * xp.ceil(m / 2)
  bits = work.inputs * work.outputs * _bits_per_weight(work.density, device)
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


def _product(work: Product, device: WaferDevice) -> Cost:
  xp = _module(*work[:4], *jax.tree.leaves(device))
  # At least one feature and one token for every core that works.
  m = xp.minimum(TOKENS_PER_CORE, xp.maximum(work.tokens, 1))
  m = xp.maximum(m, work.tokens / device.cores)
  columns = xp.minimum(m * device.cores / work.tokens, work.inputs)
  tried = product_on_grid(work, device, m, columns)
  best = xp.argmin(tried.cycles)
  return jax.tree.map(lambda x: x[best] if _is_array(x) else x, tried)


def _is_array(x: Any) -> bool:
  return getattr(x, 'ndim', 0) > 0


def _scores(work: Scores, device: WaferDevice) -> Cost:
  rate = device.cores * device.lanes * device.attention_efficiency
  core = work.multiply_adds / rate / device.efficiency
  return Cost(cycles=core, core=core, flops=2.0 * work.multiply_adds)


def _elementwise(work: Elementwise, device: WaferDevice) -> Cost:
  # A vector of as many numbers as a core has lanes, every cycle.
  core = work.operations / (device.cores * device.lanes) / device.efficiency
  return Cost(cycles=core, core=core, flops=1.0 * work.operations)


def _host(work: Host, device: WaferDevice) -> Cost:
  cycles = work.steps * device.step_seconds * device.clock
  return Cost(cycles=cycles, host=cycles, host_operations=work.operations)


_COSTS = {
    Product: _product, Scores: _scores, Elementwise: _elementwise, Host: _host,
}


def _bits_per_weight(density: Any, device: WaferDevice) -> Any:
  sparse = {
      'wavelet': device.wavelet_bits * density,
      'bitmap': 1 + device.value_bits * density,
  }[device.encoding]
  # What is nearly dense is streamed as if it were.
  xp = _module(sparse, device.value_bits)
  return xp.minimum(sparse, device.value_bits)


def _imbalance(work: Product, device: WaferDevice, columns: Any) -> Any:
  xp = _module(work.density, device.window, columns)
  window = xp.minimum(device.window, work.outputs)
  if work.mask is not None and xp is np:
    return work.mask.imbalance(columns, float(window))
  weights = window * work.inputs / columns
  return expected_imbalance(weights, work.density, columns)


def _module(*values: Any) -> Any:
  """Returns `jax.numpy` where JAX holds one of the numbers, else NumPy."""
  return jnp if any(isinstance(x, jax.Array) for x in values) else np

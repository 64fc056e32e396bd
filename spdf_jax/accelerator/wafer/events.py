# SPDX-License-Identifier: Apache-2.0
"""Events of executions on the emulated wafer, and their recording.

An execution counts the weights that pass through each column of cores and the
hops that it takes; `count` derives wavelets, bytes and cycles from these counts
and from the parameters of the device, independently of the equations in `cost`.
Columns run independently within a window of outputs and synchronize at its end.
Streamed weights are buffered one window ahead, so that cores and links do not
stall each other, and the slower of them determines the time.
"""

from collections.abc import Iterator
import contextlib
from typing import Any
from typing import NamedTuple

import numpy as np

from spdf_jax.accelerator.wafer.device import WaferDevice


class Grid(NamedTuple):
  """The distribution of a product over the cores.

  Attributes:
    tokens: Number of tokens.
    inputs: Number of contracted features.
    outputs: Number of features of the result.
    rows: Number of rows of cores, over which the tokens are split.
    columns: Number of columns of cores, over which the inputs are split.
    tokens_per_core: Number of tokens of a core; the last row may have fewer.
    window: Number of outputs after which columns synchronize.
  """

  tokens: int
  inputs: int
  outputs: int
  rows: int
  columns: int
  tokens_per_core: int
  window: int


class Event(NamedTuple):
  """The counted events of one execution of a product.

  Attributes:
    layer: Name of the calling layer; `''` if it has none.
    name: Name of the primitive.
    kind: `'forward'`, `'transposed'` or `'sampled'`.
    grid: Distribution over the cores.
    nonzeros: Number of multiplied weights, once for all rows of cores.
    multiply_adds: Number of multiply-adds of all cores.
    hops: Number of wavelets times the links that each of them crosses.
    streamed_bytes: Bytes through the edge of the grid.
    core: Cycles of the busiest cores.
    fabric: Cycles of the busiest links.
    io: Cycles of streaming weights in, or gradients out.
    cycles: Cycles from start to end.
    loads: Number of weights per column of cores and window of outputs.
  """

  layer: str
  name: str
  kind: str
  grid: Grid
  nonzeros: int
  multiply_adds: int
  hops: int
  streamed_bytes: float
  core: float
  fabric: float
  io: float
  cycles: float
  loads: np.ndarray


_records: list[list[Event]] = []


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
  """Records the events of executions with a lowering made by `lowering`.

  The events are counted in compiled programs, also in those that were compiled
  before. Their order is that of the executions, or arbitrary where two products
  do not depend on each other. Wait for the results of a program inside of the
  context, by `jax.block_until_ready`, so that all its events are recorded.

  Yields:
    A list that grows by one `Event` for each executed product.

  Example:
    >>> import jax.numpy as jnp
    >>> from spdf_jax.accelerator import sparse_matmul
    >>> from spdf_jax.accelerator import wafer
    >>> mask = jnp.arange(32).reshape(8, 4) % 4 == 0
    >>> with wafer.record() as events:
    ...   y = sparse_matmul(
    ...       jnp.ones((16, 8)), jnp.ones((8, 4)), mask, lowering='wafer')
    ...   y = y.block_until_ready()
    >>> events[0].nonzeros, events[0].multiply_adds
    (8, 128)
  """
  events: list[Event] = []
  _records.append(events)
  try:
    yield events
  finally:
    _records[:] = [r for r in _records if r is not events]


def note(
    loads: Any, hops: Any, *, layer: str, name: str, kind: str, grid: Grid,
    device: WaferDevice,
) -> None:
  """Counts the events of one execution in all open records.

  Args:
    loads: Number of weights per column of cores and window of outputs.
    hops: Number of hops of partial sums, or of rows of gradients.
    layer: Name of the calling layer.
    name: Name of the primitive.
    kind: `'forward'`, `'transposed'` or `'sampled'`.
    grid: Distribution over the cores.
    device: Device that is emulated.
  """
  if not _records:
    return
  event = count(
      np.asarray(loads), int(hops), layer=layer, name=name, kind=kind,
      grid=grid, device=device,
  )
  for events in _records:
    events.append(event)


def count(
    loads: np.ndarray, hops: int, *, layer: str, name: str, kind: str,
    grid: Grid, device: WaferDevice,
) -> Event:
  """Returns the events of an execution; see `note`."""
  nonzeros = int(loads.sum())
  sampled = kind == 'sampled'
  m = grid.tokens_per_core
  last = grid.tokens - (grid.rows - 1) * m
  # Two values travel in one wavelet, for each output.
  pairs = grid.outputs * ((grid.rows - 1) * -(-m // 2) + -(-last // 2))
  if sampled:
    # Each weight arrives from above and its gradient returns the same way;
    # dY travels along the rows.
    wavelets = nonzeros * (grid.rows + hops) + (grid.columns - 1) * pairs
  else:
    wavelets = nonzeros * grid.rows + hops * pairs
  windows = loads.shape[1]
  outputs = np.full(windows, grid.window)
  outputs[-1] = grid.outputs - (windows - 1) * grid.window
  vectors = -(-m // int(device.lanes))
  exposed = (1 - device.overlap) * m / 2
  busy = loads * (vectors + device.dispatch)
  busy = busy + outputs * (device.row_dispatch + exposed)
  # One wavelet marks the end of each output.
  links = (loads + outputs).max(0).sum()
  along = grid.outputs * m / 2
  if sampled:
    along += 2 * nonzeros / grid.columns
  core = busy.max(0).sum() / device.efficiency
  fabric = max(links, along) / device.efficiency
  streamed = _streamed(nonzeros, grid, device)
  io = 8 * streamed / device.io_bandwidth * device.clock
  # The last wavelet crosses the grid.
  start = device.latency * device.clock
  cycles = max(core, fabric, io) + start + grid.rows + grid.columns
  return Event(
      layer, name, kind, grid, nonzeros, nonzeros * grid.tokens, wavelets,
      streamed, float(core), float(fabric), float(io), float(cycles), loads,
  )


def _streamed(nonzeros: int, grid: Grid, device: WaferDevice) -> float:
  """Returns the bytes of the encoded weights."""
  size = grid.inputs * grid.outputs
  bits = {
      'wavelet': nonzeros * device.wavelet_bits,
      'bitmap': size + nonzeros * device.value_bits,
  }[device.encoding]
  return min(bits, size * device.value_bits) / 8

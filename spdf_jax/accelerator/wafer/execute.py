# SPDX-License-Identifier: Apache-2.0
"""The modeled wafer as a lowering: products run on an emulated grid of cores.

Row r of R stores a share of the tokens, column c of C a share of the inputs.
Weights are streamed output by output, each non-zero down the column that stores
its input, and every core of the column adds its product with the core's tokens:
fp16 times fp16, summed in float32. Partial sums then travel along the row, and
each hop rounds them to fp16. For gradients, dY travels along the row instead,
and the sum over tokens of each kept weight up its column, rounded to fp16 at
each hop. The functions are traceable, and vectorized over the axis of the grid
along which no values travel, so that a scan over the other axis is left.

An execution counts the weights that pass through each column of cores and the
hops that it takes. Wavelets, bytes and cycles follow from these counts and from
the parameters of the device, independently of the equations in `cost`. Columns
run independently within a window of outputs and synchronize at its end.
Streamed weights are buffered one window ahead, so that cores and links do not
stall each other, and the slower of them determines the time.
"""

from collections.abc import Iterator
import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import lowerings
from spdf_jax.accelerator import primitives
from spdf_jax.accelerator.wafer import cost
from spdf_jax.accelerator.wafer import program
from spdf_jax.accelerator.wafer.device import create_device
from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.program import Product

WAFER = 'wafer'
"""Name of the lowering to `CORNER`."""

CORNER = create_device('cs2', cores=1024)
"""Device of the lowering `'wafer'`: 1,024 cores of a CS-2, so that small models
take seconds."""

_PLATFORMS = ('cpu', 'cuda', 'tpu')
_DTYPES = {16: jnp.float16, 32: jnp.float32}
_names: dict[tuple[WaferDevice, float], str] = {}
_records: list[list['Event']] = []


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


def lowering(device: WaferDevice, sparsity: float = 0.75) -> str:
  """Registers a lowering of `sparse_matmul` to an emulated device.

  Sparse matmuls, their gradients and tangents are computed with the numerics of
  the device, on a grid of at most `device.cores` cores, and recorded by
  `record`. Operands and partial sums are rounded to fp16 if `device.value_bits`
  is 16, and results have the dtype of the operands given. In fp16, values above
  65,504 overflow to infinity, and values below 6e-8 underflow to zero, so that
  gradients need a loss scale. As in the reference, an infinite input times the
  zero of a pruned weight is NaN. Products with a `PackedMask` or a
  `ListedMatrix` fall back to the reference. Masks change without recompilation,
  so the layout on the grid depends on `sparsity` and shapes only.

  Args:
    device: Device to emulate; its numbers must not be tracers. `value_bits` is
      16, or 32 for float32.
    sparsity: Fraction of zeros for which the layout is the fastest.

  Returns:
    Name of the lowering, for the argument `lowering` of `sparse_matmul`; equal
    arguments return the same name.

  Raises:
    ValueError: `value_bits` is neither 16 nor 32, `cores` or `window` is below
      1, or `sparsity` is not in [0, 1).

  Example:
    >>> from spdf_jax.accelerator import sparse_matmul
    >>> grid = create_device('cs2', cores=2)  # One row, two columns.
    >>> x, w = jnp.array([[2048., 1.]]), jnp.ones((2, 1))
    >>> y = sparse_matmul(x, w, w > 0, lowering=lowering(grid))
    >>> y.item()  # 2,049 rounded to fp16.
    2048.0
  """
  if device.value_bits not in _DTYPES:
    raise ValueError(
        f'value_bits of the device is {device.value_bits}; create an emulated '
        'device with 16 or 32.'
    )
  for size in ('cores', 'window'):
    value = getattr(device, size)
    if not value >= 1:
      raise ValueError(
          f'{size} of the device is {value}; create an emulated device with at '
          'least 1.'
      )
  program.check_sparsity(sparsity)
  key = device, sparsity
  if key not in _names:
    name = f'{WAFER} {len(_names)}' if _names else WAFER
    layout = functools.partial(grid_of, device=device, sparsity=sparsity)
    for primitive, function in (
        (primitives.sparse_matmul_p, _sparse_matmul),
        (primitives.sampled_matmul_p, _sampled_matmul),
        (primitives.sparse_matmul_tangent_p, _tangent),
        (primitives.sparse_matmul_backward_p, _backward),
    ):
      for platform in _PLATFORMS:
        lowerings.register_lowering(
            name, primitive,
            functools.partial(function, device=device, layout=layout),
            platform=platform, takes_layer=True,
        )
    _names[key] = name
  return _names[key]


def grid_of(
    tokens: int, inputs: int, outputs: int, sampled: bool = False,
    *, device: WaferDevice, sparsity: float,
) -> Grid:
  """Returns the grid of cores on which a product is fastest by the cost model.

  Args:
    tokens: Number of tokens.
    inputs: Number of contracted features.
    outputs: Number of features of the result.
    sampled: Whether the product is that of the gradients of kept weights.
    device: Device with the cores.
    sparsity: Fraction of zeros for which the grid is the fastest.

  Returns:
    The grid, of at most the device's number of cores.

  Example:
    >>> grid = grid_of(1024, 128, 512, device=CORNER, sparsity=0.75)
    >>> grid.rows, grid.columns, grid.tokens_per_core
    (64, 16, 16)
  """
  cores = int(device.cores)
  work = Product(tokens, inputs, outputs, sparsity, sampled)
  m, columns = (round(float(x)) for x in cost.fastest_layout(work, device)[:2])
  columns = min(max(columns, 1), inputs, cores)
  m = min(max(m, -(-tokens // (cores // columns))), tokens)
  rows = -(-tokens // m)
  window = min(int(device.window), outputs)
  return Grid(tokens, inputs, outputs, rows, columns, m, window)


def _sparse_matmul(
    x: jax.Array, w: jax.Array, mask: jax.Array, grad_mask: jax.Array,
    *, transpose: bool, accumulation_dtype: Any, out_sharding: Any,
    name: str = 'sparse_matmul', **options: Any,
) -> jax.Array:
  """Multiplies by the kept weights; see `reference.sparse_matmul`."""
  del grad_mask, accumulation_dtype, out_sharding
  if transpose:
    w, mask = w.swapaxes(-1, -2), mask.swapaxes(-1, -2)
  kind = 'transposed' if transpose else 'forward'
  multiply = functools.partial(_multiply, name=name, kind=kind, **options)
  tokens = x.reshape(*w.shape[:-2], -1, x.shape[-1])
  y = _over_stack(multiply, tokens, w, mask)
  return y.reshape(*x.shape[:-1], y.shape[-1]).astype(x.dtype)


def _sampled_matmul(
    x: jax.Array, dy: jax.Array, mask: jax.Array,
    *, accumulation_dtype: Any, out_sharding: Any,
    name: str = 'sampled_matmul', **options: Any,
) -> jax.Array:
  """Multiplies over the tokens at masked entries; see `reference`."""
  del accumulation_dtype, out_sharding
  sample = functools.partial(_sample, name=name, kind='sampled', **options)
  stack = mask.shape[:-2]
  tokens = [a.reshape(*stack, -1, a.shape[-1]) for a in (x, dy)]
  return _over_stack(sample, *tokens, mask).astype(x.dtype)


def _tangent(dx, x, dw, w, mask, grad_mask, **params):
  """Computes a product's tangent from two products."""
  params |= dict(transpose=False, name='sparse_matmul_tangent')
  return _sparse_matmul(dx, w, mask, grad_mask, **params) + _sparse_matmul(
      x, dw, grad_mask, grad_mask, **params
  )


def _backward(dy, x, w, mask, grad_mask, **params):
  """Computes dx and dw separately."""
  params |= dict(name='sparse_matmul_backward')
  return [
      _sparse_matmul(dy, w, mask, grad_mask, transpose=True, **params),
      _sampled_matmul(x, dy, grad_mask, **params),
  ]


def _over_stack(f, *arrays):
  """Applies a function of matrices to the last two axes of arrays."""
  stack = arrays[0].shape[:-2]
  if not stack:
    return f(*arrays)
  flat = tuple(a.reshape(-1, *a.shape[-2:]) for a in arrays)
  results = jax.lax.map(lambda matrices: f(*matrices), flat)
  return results.reshape(*stack, *results.shape[1:])


def _multiply(x, w, mask, *, device, layout, **event):
  """Multiplies matrices; partial sums travel over the columns of the grid."""
  grid = layout(*x.shape, w.shape[-1])
  half = _DTYPES[device.value_bits]
  inputs, is_input = _blocks(grid.inputs, grid.columns)

  def column(carry, block):
    arriving, hops = carry
    x, w, mask, is_first = block
    own = _dot(x, jnp.where(mask, w, 0))
    leaving = (arriving.astype(jnp.float32) + own).astype(half)
    return (leaving, hops + ~is_first), _loads(mask, grid)

  blocks = (
      # Padding is zero, since padded copies of infinite inputs would be NaN.
      jnp.where(is_input[..., None], _rounded(x, half).T[inputs], 0).swapaxes(
          1, 2
      ),
      _rounded(w, half)[inputs],
      mask[inputs] & is_input[..., None],
      np.arange(grid.columns) == 0,
  )
  first = jnp.zeros((grid.tokens, grid.outputs), half), jnp.int32(0)
  (y, hops), loads = jax.lax.scan(column, first, blocks)
  _note(loads, hops, grid, device, event)
  return y


def _sample(x, dy, mask, *, device, layout, **event):
  """Multiplies over tokens; gradients travel over the rows of the grid."""
  grid = layout(*x.shape, dy.shape[-1], sampled=True)
  half = _DTYPES[device.value_bits]
  tokens, is_token = _blocks(
      grid.tokens, grid.rows, largest=grid.tokens_per_core
  )

  def row(carry, block):
    arriving, hops = carry
    x, dy = block
    leaving = (arriving.astype(jnp.float32) + _dot(x.T, dy)).astype(half)
    return (leaving, hops + 1), None

  blocks = tuple(
      jnp.where(is_token[..., None], _rounded(a, half)[tokens], 0)
      for a in (x, dy)
  )
  first = jnp.zeros(mask.shape, half), jnp.int32(0)
  (dw, hops), _ = jax.lax.scan(row, first, blocks)
  inputs, is_input = _blocks(grid.inputs, grid.columns)
  weights = mask[inputs] & is_input[..., None]
  _note(jax.vmap(lambda m: _loads(m, grid))(weights), hops, grid, device, event)
  return jnp.where(mask, dw, 0)


def _note(loads, hops, grid, device, event):
  jax.debug.callback(
      functools.partial(_record, grid=grid, device=device, **event),
      loads, hops,
  )


def _dot(x, y):
  """Multiplies fp16 numbers in float32, where their products are exact."""
  return jnp.dot(
      x.astype(jnp.float32), y.astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST,
  )


def _rounded(x, dtype):
  # XLA may cancel a pair of conversions, which would omit the rounding.
  return jax.lax.optimization_barrier(x.astype(dtype))


def _loads(mask, grid):
  """Counts the weights of a column of cores in each window of outputs."""
  per_output = mask.sum(0, dtype=jnp.int32)
  windows = -(-grid.outputs // grid.window)
  padded = jnp.pad(per_output, (0, windows * grid.window - grid.outputs))
  return padded.reshape(windows, grid.window).sum(1)


def _blocks(
    size: int, parts: int, *, largest: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Splits indices evenly, or into blocks of a size and a rest.

  Args:
    size: Number of indices.
    parts: Number of blocks.
    largest: Size of all blocks but the last; `None`: as even as possible.

  Returns:
    Indices [parts, block], padded with 0, and whether each is one of the block.
  """
  ends = np.arange(parts + 1) * size // parts
  if largest is not None:
    ends = np.minimum(np.arange(parts + 1) * largest, size)
  block = int(np.diff(ends).max())
  indices = ends[:-1, None] + np.arange(block)
  is_part = indices < ends[1:, None]
  return np.where(is_part, indices, 0), is_part


@contextlib.contextmanager
def record() -> Iterator[list[Event]]:
  """Records the products that run on an emulated device; a context manager.

  These are the products with a lowering that `lowering` returned, or with
  `'wafer'`, the emulation of 1,024 cores of a CS-2. Every execution is
  recorded, also of programs that were compiled before. Events are in the order
  of the executions, which is arbitrary where two products do not depend on each
  other. Wait for the results of a program inside of the context, by
  `jax.block_until_ready`, so that all its events are recorded.

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


def _record(
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
  event = _count(
      np.asarray(loads), int(hops), layer=layer, name=name, kind=kind,
      grid=grid, device=device,
  )
  for events in _records:
    events.append(event)


def _count(
    loads: np.ndarray, hops: int, *, layer: str, name: str, kind: str,
    grid: Grid, device: WaferDevice,
) -> Event:
  """Returns the events of an execution; see `_record`."""
  nonzeros = int(loads.sum())
  sampled = kind == 'sampled'
  m = grid.tokens_per_core
  last = grid.tokens - (grid.rows - 1) * m
  # A wavelet carries two values of each output.
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


lowering(CORNER)

"""The device executed: a small grid of cores, its arithmetic and its events.

Row r of R holds a share of the tokens, column c of C a share of the inputs.
Weights are streamed output by output, each non-zero down the column that holds
its input, and every core of the column adds it times its tokens (fp16 times
fp16, summed in float32). Partial sums then travel along the row as fp16. For
gradients dY travels along the row instead, and each kept weight's sum over
tokens up its column. Columns wait for one another at the end of each window of
outputs. What is counted here is counted event by event, apart from `cost`.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from spdf_jax.accelerator.wafer.cost import Cost
from spdf_jax.accelerator.wafer.cost import product_on_grid
from spdf_jax.accelerator.wafer.device import WaferDevice
from spdf_jax.accelerator.wafer.masks import MaskProfile
from spdf_jax.accelerator.wafer.work import Product


@dataclasses.dataclass
class Events:
  """What happened.

  Attributes:
    nonzeros: Weights that were multiplied, once however many rows see them.
    multiply_adds: Of all cores.
    hops: Wavelets times the links that each of them took.
    streamed_bytes: Through the edge of the grid.
    cycles: Until the last core was done.
  """

  nonzeros: int = 0
  multiply_adds: int = 0
  hops: int = 0
  streamed_bytes: float = 0.0
  cycles: float = 0.0


class Emulation(NamedTuple):
  """The result of a product, and its events."""

  output: np.ndarray
  """[tokens, outputs], or the gradient [inputs, outputs], float32."""

  events: Events
  """What was counted on the way."""


class _Grid(NamedTuple):
  """Who holds what."""

  tokens: list[np.ndarray]
  """The tokens of each row of cores."""

  inputs: list[np.ndarray]
  """The inputs of each column of cores."""

  device: WaferDevice
  """Its lanes, dispatch and so on."""


def emulate(
    x: np.ndarray, w: np.ndarray, mask: np.ndarray, device: WaferDevice,
    *, rows: int, columns: int,
) -> Emulation:
  """Multiplies by kept weights on a grid of cores: x @ (mask ⊙ w).

  Args:
    x: [tokens, inputs].
    w: [inputs, outputs].
    mask: Kept weights, bool [inputs, outputs].
    device: Its lanes, dispatch, window and overlap; not its number of cores.
    rows: Of cores, over which the tokens are split evenly.
    columns: Of cores, over which the inputs are split evenly.

  Returns:
    The product, and the events.

  Raises:
    ValueError: the shapes do not fit, or tokens or inputs do not divide.

  Example:
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> x, w = np.ones((4, 6)), np.ones((6, 2))
    >>> mask = np.array([[True, False]] * 6)
    >>> y, events = emulate(
    ...     x, w, mask, create_device('cs2'), rows=2, columns=3)
    >>> y.tolist(), events.nonzeros
    ([[6.0, 0.0], [6.0, 0.0], [6.0, 0.0], [6.0, 0.0]], 6)
  """
  _check(x.shape[1] == w.shape[0] and w.shape == mask.shape, x, w, mask)
  grid = _layout(x, device, rows, columns)
  x, w = x.astype(np.float16), w.astype(np.float16)
  events = Events()
  output = np.zeros((len(x), w.shape[1]), np.float32)
  clock = _Clock(events, grid, sampled=False)
  for j in range(w.shape[1]):
    weights = [i[mask[i, j]] for i in grid.inputs]  # Of each column of cores.
    for row in grid.tokens:
      partial = np.zeros(len(row), np.float32)
      for c, kept in enumerate(weights):
        if c:  # What came from the left is added here.
          events.hops += _wavelets(len(row))
          partial = partial.astype(np.float16).astype(np.float32)
        own = np.zeros(len(row), np.float32)
        for i in kept:
          own += x[row, i] * w[i, j]
          events.multiply_adds += len(row)
          events.hops += 1  # From the row of cores above, or the edge.
        partial += own
      output[row, j] = partial
    clock.output([len(kept) for kept in weights])
  clock.finish()
  events.streamed_bytes = _streamed(mask, device)
  return Emulation(output, events)


def emulate_sampled(
    x: np.ndarray, dy: np.ndarray, mask: np.ndarray, device: WaferDevice,
    *, rows: int, columns: int,
) -> Emulation:
  """Computes gradients of kept weights on a grid of cores: mask ⊙ (xᵀ @ dy).

  Args:
    x: [tokens, inputs].
    dy: [tokens, outputs].
    mask: Kept weights, bool [inputs, outputs].
    device: As for `emulate`.
    rows: As for `emulate`.
    columns: As for `emulate`.

  Returns:
    The gradient, zero off the mask, and the events.

  Raises:
    ValueError: as `emulate`.

  Example:
    >>> from spdf_jax.accelerator.wafer.device import create_device
    >>> mask = np.array([[True], [False]])
    >>> dw, events = emulate_sampled(
    ...     np.ones((4, 2)), np.ones((4, 1)), mask, create_device('cs2'),
    ...     rows=2, columns=2)
    >>> dw.tolist(), events.nonzeros
    ([[4.0], [0.0]], 1)
  """
  fits = len(x) == len(dy) and mask.shape == (x.shape[1], dy.shape[1])
  _check(fits, x, dy, mask)
  grid = _layout(x, device, rows, columns)
  x, dy = x.astype(np.float16), dy.astype(np.float16)
  events = Events()
  output = np.zeros(mask.shape, np.float32)
  clock = _Clock(events, grid, sampled=True)
  for j in range(mask.shape[1]):
    weights = [i[mask[i, j]] for i in grid.inputs]
    for row in grid.tokens:
      for c, kept in enumerate(weights):
        if c:  # dY passes on to the next column.
          events.hops += _wavelets(len(row))
        for i in kept:
          products = (x[row, i] * dy[row, j]).astype(np.float32)
          total = output[i, j].astype(np.float16) + products.sum()
          output[i, j] = np.float16(total)
          events.multiply_adds += len(row)
          events.hops += 2  # Which weight, down; the sum so far, up.
    clock.output([len(kept) for kept in weights])
  clock.finish()
  events.streamed_bytes = _streamed(mask, device)
  return Emulation(output, events)


def rule_on_grid(
    tokens: int, mask: np.ndarray, device: WaferDevice,
    *, rows: int, columns: int, sampled: bool = False,
) -> Cost:
  """Costs what was emulated by the rule, on the same grid.

  Args:
    tokens: Of all rows.
    mask: Kept weights [inputs, outputs].
    device: As for `emulate`.
    rows: As for `emulate`.
    columns: As for `emulate`.
    sampled: Whether gradients of weights are computed.

  Returns:
    The cost.
  """
  profile = MaskProfile(mask)
  work = Product(
      tokens, *mask.shape, profile.density, sampled=sampled, mask=profile
  )
  return product_on_grid(
      work, device, np.array([tokens / rows]), np.array([columns])
  )


class _Clock:
  """Keeps time: columns of cores work on their own within a window.

  What is streamed is buffered a window ahead, so cores and links wait for
  themselves only, and the slower of them is done last.
  """

  def __init__(self, events: Events, grid: _Grid, sampled: bool):
    self._events = events
    self._device = grid.device
    self._sampled = sampled
    self._tokens = max(map(len, grid.tokens))
    self._depth = len(grid.tokens) + len(grid.inputs)
    self._busy = np.zeros(len(grid.inputs))
    self._links = np.zeros(len(grid.inputs))
    self._row_links = 0.0
    self._waited = np.zeros(2)  # For the busiest cores, and for the links.
    self._rows = 0

  def output(self, nonzeros: list[int]) -> None:
    """Takes the time of one output: non-zeros of each column of cores."""
    counts = np.array(nonzeros)
    device = self._device
    self._events.nonzeros += int(counts.sum())
    vectors = -(-self._tokens // device.lanes)
    exposed = (1 - device.overlap) * self._tokens / 2
    self._busy += counts * (vectors + device.dispatch)
    self._busy += device.row_dispatch + exposed
    self._links += counts + 1  # And the end of the output.
    self._row_links += self._tokens / 2
    if self._sampled:
      self._row_links += 2 * counts.mean()
    self._rows += 1
    if self._rows == device.window:
      self._wait()

  def _wait(self) -> None:
    self._waited += self._busy.max(), self._links.max()
    self._busy[:], self._links[:] = 0, 0
    self._rows = 0

  def finish(self) -> None:
    """Waits for the last window, and for the last wavelet to cross."""
    self._wait()
    slowest = max(*self._waited, self._row_links)
    self._events.cycles = float(slowest) + self._depth


def _layout(
    x: np.ndarray, device: WaferDevice, rows: int, columns: int
) -> _Grid:
  for name, size, parts in (
      ('rows', len(x), rows), ('columns', x.shape[1], columns)
  ):
    if parts < 1 or size % parts:
      raise ValueError(
          f'{name} is {parts}, which does not divide {size}; choose a divisor.'
      )
  return _Grid(
      np.split(np.arange(len(x)), rows),
      np.split(np.arange(x.shape[1]), columns),
      device,
  )


def _check(fits: bool, *arrays: np.ndarray) -> None:
  if not fits:
    shapes = ', '.join(str(a.shape) for a in arrays)
    raise ValueError(
        f'the arrays have shapes {shapes}; give [tokens, inputs], [inputs, '
        'outputs] or dy [tokens, outputs], and a mask [inputs, outputs].'
    )


def _wavelets(tokens: int) -> int:
  return -(-tokens // 2)  # Two fp16 values each.


def _streamed(mask: np.ndarray, device: WaferDevice) -> float:
  """Counts the bytes of the weights as they are encoded."""
  kept = int(mask.sum())
  bits = {
      'wavelet': kept * device.wavelet_bits,
      'bitmap': mask.size + kept * device.value_bits,
  }[device.encoding]
  return min(bits, mask.size * device.value_bits) / 8

# SPDX-License-Identifier: Apache-2.0
"""Emulation of the arithmetic and the events of a small grid of cores.

Row r of R stores a share of the tokens, column c of C a share of the inputs.
Weights are streamed output by output, each non-zero down the column that stores
its input, and every core of the column adds its product with the core's tokens
(fp16 times fp16, summed in float32). Partial sums then travel along the row as
fp16. For gradients, dY travels along the row instead, and the sum over tokens
of each kept weight up its column. Columns synchronize at the end of each window
of outputs. The events are counted independently of the equations in `cost`.
"""

from collections.abc import Iterator
import dataclasses
from typing import NamedTuple

import numpy as np

from spdf_jax.accelerator.wafer.device import WaferDevice


@dataclasses.dataclass
class Events:
  """Counts of the events of an emulation.

  Attributes:
    nonzeros: Number of multiplied weights, once for all rows of cores.
    multiply_adds: Number of multiply-adds of all cores.
    hops: Number of wavelets times the links that each of them crosses.
    streamed_bytes: Bytes through the edge of the grid.
    cycles: Cycles until the last core is done.
  """

  nonzeros: int = 0
  multiply_adds: int = 0
  hops: int = 0
  streamed_bytes: float = 0.0
  cycles: float = 0.0


class Emulation(NamedTuple):
  """The result of an emulation.

  Attributes:
    output: Product [tokens, outputs] or gradient [inputs, outputs], float32.
    events: Counted events.
  """

  output: np.ndarray
  events: Events


class _Grid(NamedTuple):
  """The distribution of tokens and inputs over the cores.

  Attributes:
    tokens: Tokens of each row of cores.
    inputs: Inputs of each column of cores.
    device: Parameters of the cores.
  """

  tokens: list[np.ndarray]
  inputs: list[np.ndarray]
  device: WaferDevice


def emulate(
    x: np.ndarray, w: np.ndarray, mask: np.ndarray, device: WaferDevice,
    *, rows: int, columns: int,
) -> Emulation:
  """Multiplies by kept weights on a grid of cores: x @ (mask ⊙ w).

  Args:
    x: Activations [tokens, inputs].
    w: Weights [inputs, outputs].
    mask: Kept weights, bool [inputs, outputs].
    device: Device with the parameters of a core; its number of cores is not
      used.
    rows: Number of rows of cores, over which the tokens are split evenly.
    columns: Number of columns of cores, over which the inputs are split evenly.

  Returns:
    The product and the events.

  Raises:
    ValueError: The shapes do not match, or tokens or inputs do not divide.

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
  for j, row, kept in _stream(grid, mask, events, sampled=False):
    # The partial sum of the columns to the left arrives as fp16.
    partial = output[row, j].astype(np.float16).astype(np.float32)
    own = np.zeros(len(row), np.float32)
    for i in kept:
      own += x[row, i] * w[i, j]
    output[row, j] = partial + own
  return Emulation(output, events)


def emulate_sampled(
    x: np.ndarray, dy: np.ndarray, mask: np.ndarray, device: WaferDevice,
    *, rows: int, columns: int,
) -> Emulation:
  """Computes gradients of kept weights on a grid of cores: mask ⊙ (xᵀ @ dy).

  Args:
    x: Activations [tokens, inputs].
    dy: Gradients of the outputs [tokens, outputs].
    mask: Kept weights, bool [inputs, outputs].
    device: Device with the parameters of a core; its number of cores is not
      used.
    rows: Number of rows of cores, over which the tokens are split evenly.
    columns: Number of columns of cores, over which the inputs are split evenly.

  Returns:
    The gradient, zero off the mask, and the events.

  Raises:
    ValueError: The shapes do not match, or tokens or inputs do not divide.

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
  for j, row, kept in _stream(grid, mask, events, sampled=True):
    for i in kept:
      products = (x[row, i] * dy[row, j]).astype(np.float32)
      total = output[i, j].astype(np.float16) + products.sum()
      output[i, j] = np.float16(total)
  return Emulation(output, events)


def _stream(
    grid: _Grid, mask: np.ndarray, events: Events, *, sampled: bool
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
  """Streams a mask over a grid and counts the events.

  Args:
    grid: Distribution of tokens and inputs over the cores.
    mask: Kept weights, bool [inputs, outputs].
    events: Counts, updated in place.
    sampled: Whether gradients of weights are computed.

  Yields:
    The output, the tokens of the core and its inputs with a kept weight, for
    each core and output.
  """
  clock = _Clock(events, grid, sampled)
  for j in range(mask.shape[1]):
    weights = [i[mask[i, j]] for i in grid.inputs]
    for row in grid.tokens:
      for c, kept in enumerate(weights):
        if c:  # Partial sums or dY: from the left, two values per wavelet.
          events.hops += -(-len(row) // 2)
        # Each weight arrives from above; its gradient returns the same way.
        events.hops += len(kept) * (2 if sampled else 1)
        events.multiply_adds += len(kept) * len(row)
        yield j, row, kept
    clock.output([len(kept) for kept in weights])
  clock.finish()
  events.streamed_bytes = _streamed(mask, grid.device)


class _Clock:
  """A counter of cycles; columns run independently within a window.

  Streamed weights are buffered one window ahead, so that cores and links do not
  stall each other, and the slower of them determines the time.
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
    self._waited = np.zeros(2)  # Cycles of the busiest cores and links.
    self._rows = 0

  def output(self, nonzeros: list[int]) -> None:
    """Adds the time of one output, given the non-zeros of each column."""
    counts = np.array(nonzeros)
    device = self._device
    self._events.nonzeros += int(counts.sum())
    vectors = -(-self._tokens // device.lanes)
    exposed = (1 - device.overlap) * self._tokens / 2
    self._busy += counts * (vectors + device.dispatch)
    self._busy += device.row_dispatch + exposed
    self._links += counts + 1  # One wavelet marks the end of the output.
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
    """Adds the last window and the last wavelet's path across the grid."""
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


def _streamed(mask: np.ndarray, device: WaferDevice) -> float:
  """Returns the bytes of the encoded weights."""
  kept = int(mask.sum())
  bits = {
      'wavelet': kept * device.wavelet_bits,
      'bitmap': mask.size + kept * device.value_bits,
  }[device.encoding]
  return min(bits, mask.size * device.value_bits) / 8

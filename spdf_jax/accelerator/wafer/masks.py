"""What a real mask says about load: its non-zeros, counted."""

from typing import Any

import numpy as np


class MaskProfile:
  """A mask as the cost model sees it.

  Attributes:
    nonzeros: Kept weights.
    density: Their share.

  Example:
    >>> profile = MaskProfile(np.array([[True, True], [False, False]]))
    >>> profile.nonzeros, profile.density
    (2, 0.5)
  """

  def __init__(self, mask: Any):
    """Counts a mask, bool [inputs, outputs]."""
    self._mask = np.asarray(mask, bool)
    self.nonzeros = int(self._mask.sum())
    self.density = self.nonzeros / self._mask.size
    self._found = {}

  def transposed(self) -> 'MaskProfile':
    """Returns the profile of the transposed mask."""
    return MaskProfile(self._mask.T)

  def imbalance(self, columns: Any, window: float) -> np.ndarray:
    """Counts how much busier the busiest column of cores is.

    Args:
      columns: Numbers of columns of cores, over which the inputs are split.
      window: Outputs within which columns wait for one another.

    Returns:
      For each number of columns, the sum over windows of the busiest column's
      non-zeros over the sum of the means.

    Example:
      >>> profile = MaskProfile(np.array([[True, True], [False, False]]))
      >>> profile.imbalance(np.array([1, 2]), 2).tolist()
      [1.0, 2.0]
    """
    inputs, outputs = self._mask.shape
    if not self.nonzeros:
      return np.ones(np.shape(columns))
    starts = np.arange(0, outputs, max(int(window), 1))
    if window not in self._found:
      self._found[window] = np.add.reduceat(
          self._mask, starts, axis=1, dtype=np.int64
      )
    per_window = self._found[window]

    def count(number):
      number = int(np.clip(round(float(number)), 1, inputs))
      firsts = np.arange(number) * inputs // number
      loads = np.add.reduceat(per_window, firsts, axis=0)
      return loads.max(axis=0).sum() * number / self.nonzeros

    return np.vectorize(count, otypes=[float])(columns)

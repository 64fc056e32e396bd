"""Equations as rules see them: shapes, parameters, what is known of masks."""

from collections.abc import Callable
from collections.abc import Mapping
import math
from typing import Any
from typing import NamedTuple

import numpy as np

from spdf_jax.accelerator.wafer.masks import MaskProfile

WEIGHT, GRADIENT, TOKEN = 'weight', 'gradient', 'token'
"""Where arrays live: weights and their gradients are streamed, and what is
done to them is done by hosts; what has a row for each token is resident."""


class Operand(NamedTuple):
  """An array that an equation reads.

  Attributes:
    shape: Its shape.
    dtype: Its type.
    space: `WEIGHT`, `GRADIENT`, `TOKEN`, or `None`: a scalar or constant.
    known: Its value where that follows from the program's inputs.
    source: Number of the program's input that it is made of, elementwise.
  """

  shape: tuple[int, ...]
  dtype: Any
  space: str | None = None
  known: np.ndarray | None = None
  source: int | None = None

  @property
  def size(self) -> int:
    """Number of its elements."""
    return math.prod(self.shape)


class Weights(NamedTuple):
  """What is known of a mask.

  Attributes:
    density: Share of the kept weights.
    mask: The mask itself, counted, where it is known.
  """

  density: float
  mask: MaskProfile | None = None

  def transposed(self) -> 'Weights':
    """Returns what is known of the transposed mask."""
    return self._replace(mask=self.mask and self.mask.transposed())


class Equation(NamedTuple):
  """An equation of a program.

  Attributes:
    operands: What it reads.
    results: What it gives; values and spaces are not filled in.
    params: Of its primitive.
    weights_of: `(mask) -> list`, what is known of each matrix of a mask, one
      for each of a stack.
  """

  operands: tuple[Operand, ...]
  results: tuple[Operand, ...]
  params: Mapping[str, Any]
  weights_of: Callable[[Operand], list[Weights]]

  @property
  def size(self) -> int:
    """Elements of the largest result."""
    return max((r.size for r in self.results), default=0)

  @property
  def read(self) -> int:
    """Elements of the largest operand."""
    return max((o.size for o in self.operands), default=0)

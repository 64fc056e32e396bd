# SPDX-License-Identifier: Apache-2.0
"""Which sparsified weights reach kernels, and what stops the others."""

import dataclasses
import logging
from typing import NamedTuple

logger = logging.getLogger('spdf_jax')


class Use(NamedTuple):
  """A use of a sparsified weight: a product that skips zeros, or a dense one.

  Attributes:
    weight: Path of the weight.
    product: Sizes of the matrix or stack; `''` if it is no product.
    tokens: Number of rows that the weights multiply; 0 if it is no product.
    kernels: Kernels that multiply; `''` if the use is dense.
    reason: Why it is dense: the primitive, or what it lacks; or `''`.
    layer: Name stack of the equation.
  """

  weight: str
  product: str
  tokens: int
  kernels: str
  reason: str
  layer: str


_HEADER = 'weight', 'product', 'tokens', 'kernels', 'dense because'


@dataclasses.dataclass(frozen=True)
class Explanation:
  """The uses of a function's sparsified weights; prints as a table.

  Attributes:
    weights: Paths of all sparsified weights.
    uses: Their uses, in the order of the program.
  """

  weights: tuple[str, ...]
  uses: tuple[Use, ...]

  @property
  def reached(self) -> tuple[str, ...]:
    """Paths of the weights of which some product skips zeros."""
    with_kernels = {use.weight for use in self.uses if use.kernels}
    return tuple(name for name in self.weights if name in with_kernels)

  @property
  def dense(self) -> dict[str, str]:
    """Reasons why weights stay dense in all of their uses, by their paths."""
    reached = set(self.reached)
    reasons: dict[str, list[str]] = {
        name: [] for name in self.weights if name not in reached
    }
    for use in self.uses:
      if use.weight in reasons and use.reason not in reasons[use.weight]:
        reasons[use.weight].append(use.reason)
    return {
        name: ', '.join(texts) or 'not used' for name, texts in reasons.items()
    }

  def __str__(self) -> str:
    unused = set(self.weights) - {use.weight for use in self.uses}
    rows = [*self.uses] + [
        Use(name, '', 0, '', 'not used', '') for name in sorted(unused)
    ]
    cells = [_HEADER] + [
        (use.weight, use.product, str(use.tokens or ''), use.kernels or '–',
         use.reason) for use in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return '\n'.join(
        '  '.join(cell.ljust(n) for cell, n in zip(row, widths)).rstrip()
        for row in cells
    )

  def log(self) -> None:
    """Logs how many weights reach kernels, and warns of those that do not."""
    kernels = sorted({use.kernels for use in self.uses if use.kernels})
    also = sorted({
        f'{use.weight!r} ({use.reason})' for use in self.uses
        if use.reason and use.weight not in self.dense
    })
    logger.info(
        'skip_zeros: %d of %d sparsified weights reach kernels%s%s.',
        len(self.reached), len(self.weights),
        f' ({", ".join(kernels)})' if kernels else '',
        f'; dense elsewhere: {", ".join(also)}' if also else '',
    )
    if self.dense:
      logger.warning(
          'skip_zeros: %d of %d sparsified weights stay dense, by what stops '
          'them: %s; spdf_jax.accelerator.explain prints all their uses.',
          len(self.dense), len(self.weights),
          ', '.join(f'{n!r} ({why})' for n, why in self.dense.items()),
      )

"""FLOPs of a train step counted in its traced program, beside the formula."""

from typing import NamedTuple

from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.program import Scores
from spdf_jax.accelerator.wafer.what_if import with_sparsity
from spdf_jax.costs.flops import shape_of
from spdf_jax.costs.flops import softmax_flops
from spdf_jax.costs.flops import training_flops
from spdf_jax.costs.simulation import trace_step
from spdf_jax.training.recipe import Recipe


class TracedFlops(NamedTuple):
  """FLOPs of one train step on a batch, by two ways.

  Attributes:
    products: Of all products in the program, but for those computed anew.
    recomputed: Of products that the backward pass computes anew, to save
      memory (`remat`, or a loss in chunks); the formula has none.
    formula: `training_flops` of the batch.
    softmax: Its share for the softmax of attention, in which there is no
      product.
  """

  products: float
  recomputed: float
  formula: float
  softmax: float

  @property
  def difference(self) -> float:
    """What the formula has more than the program, of the formula; 0: exact."""
    return (self.formula - self.softmax - self.products) / self.formula


def trace_flops(
    recipe: Recipe,
    batch_size: int,
    length: int,
    sparsity: float = 0.0,
    *,
    dense_grads: bool = False,
) -> TracedFlops:
  """Counts the FLOPs of a recipe's train step, by its program and the formula.

  Args:
    recipe: What would be run; it is traced from shapes.
    batch_size: Sequences.
    length: Tokens of each.
    sparsity: Fraction of zeros in the hidden matrices.
    dense_grads: Whether pruned weights need their gradients.

  Returns:
    Both counts.

  Raises:
    ValueError: `sparsity` is 1 or out of its range.
  """
  shape = shape_of(recipe.model.config)
  formula = batch_size * training_flops(
      shape, length, sparsity, dense_grads=dense_grads
  )
  program = with_sparsity(
      trace_step(recipe, batch_size, length), lambda layer: sparsity,
      dense_grads=dense_grads,
  )
  anew = product_flops(program, ('recompute',))
  return TracedFlops(
      products=product_flops(program, ('forward', 'backward')),
      recomputed=anew,
      formula=formula,
      softmax=3 * batch_size * softmax_flops(shape, length),
  )


def product_flops(
    program: Program,
    phases: tuple[str, ...] = ('forward', 'backward', 'recompute'),
) -> float:
  """Sums the FLOPs of a program's products, sparse ones by their kept weights.

  Args:
    program: Traced; of a cond that is open the costliest branch counts.
    phases: Which of its operations.

  Returns:
    FLOPs: a multiplication and an addition are two.

  Example:
    >>> from spdf_jax.accelerator.wafer.program import Operation
    >>> product = Product(8, 4, 4, sparsity=0.75)
    >>> product_flops(Program((Operation('h', 'p', 'forward', product),)))
    64.0
  """
  total = 0.0
  for operation in program.operations:
    if operation.phase not in phases:
      continue
    work = operation.work
    if isinstance(work, Product):
      total += 2 * operation.count * work.tokens * work.kept
    elif isinstance(work, Scores):
      total += 2 * operation.count * work.multiply_adds
  for branches in program.branches:
    total += branches.count * max(
        product_flops(branch, phases) for branch in branches.programs
    )
  return total

"""FLOPs of a train step, counted in the traced program and by the formula."""

from typing import NamedTuple

from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.program import ScoreProduct
from spdf_jax.accelerator.wafer.program import with_sparsity
from spdf_jax.costs import flops
from spdf_jax.costs import wafer_costs
from spdf_jax.training.run import Run


class TracedFlops(NamedTuple):
  """FLOPs of one train step on a batch, counted in two ways.

  Attributes:
    products: FLOPs of all products in the program, except recomputed ones.
    recomputed: FLOPs of products that the backward pass recomputes to save
      memory (`remat`, or a loss in chunks); not part of the formula.
    formula: Result of `training_flops` for the batch.
    softmax: Part of `formula` for the softmax of attention, which has no
      products.
  """

  products: float
  recomputed: float
  formula: float
  softmax: float

  @property
  def difference(self) -> float:
    """Excess of the formula over the program, relative to the formula."""
    return (self.formula - self.softmax - self.products) / self.formula


def trace_flops(
    run: Run,
    batch_size: int,
    length: int,
    sparsity: float = 0.0,
    *,
    dense_grads: bool = False,
) -> TracedFlops:
  """Counts the FLOPs of a run's train step, by the program and the formula.

  Args:
    run: The run; the step is traced from shapes.
    batch_size: Number of sequences.
    length: Number of tokens of each sequence.
    sparsity: Fraction of zeros in the hidden matrices.
    dense_grads: Whether gradients of pruned weights are computed.

  Returns:
    Both counts.

  Raises:
    ValueError: `sparsity` is outside [0, 1].
  """
  shape = run.model.config
  formula = batch_size * flops.training_flops(
      shape, length, sparsity, dense_grads=dense_grads
  )
  program = with_sparsity(
      wafer_costs.trace_step(run, batch_size, length),
      lambda layer: sparsity,
      dense_grads=dense_grads,
  )
  return TracedFlops(
      products=product_flops(program, ('forward', 'backward')),
      recomputed=product_flops(program, ('recompute',)),
      formula=formula,
      softmax=3 * batch_size * flops.softmax_flops(shape, length),
  )


def product_flops(
    program: Program,
    phases: tuple[str, ...] = ('forward', 'backward', 'recompute'),
) -> float:
  """Returns the FLOPs of a program's products; only kept weights count.

  Args:
    program: A traced program; the costliest branch of each cond with an unknown
      predicate counts.
    phases: Passes whose operations are counted.

  Returns:
    FLOPs; a multiply-add counts as two.

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
    elif isinstance(work, ScoreProduct):
      total += 2 * operation.count * work.multiply_adds
  for branches in program.branches:
    total += branches.count * max(
        product_flops(branch, phases) for branch in branches.programs
    )
  return total

"""Variants of a program: at another density, in micro-batches."""

from collections.abc import Callable
import dataclasses

from spdf_jax.accelerator.wafer.program import Operation
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.work import Host
from spdf_jax.accelerator.wafer.work import Product
from spdf_jax.accelerator.wafer.work import split_tokens


def with_density(
    program: Program,
    density: Callable[[str], float],
    *,
    dense_grads: bool = False,
) -> Program:
  """Returns a program whose masked products have another density.

  Args:
    program: Traced at a density below 1: that tells the masked products.
    density: From the layer's name to the share of its kept weights.
    dense_grads: Whether pruned weights get gradients too.

  Returns:
    The program; masks that were known are forgotten.

  Example:
    >>> operation = Operation('h', 'p', 'forward', Product(8, 4, 4, 0.5))
    >>> sparser = with_density(Program((operation,)), lambda layer: 0.1)
    >>> sparser.operations[0].work.density
    0.1
  """

  def change(operation: Operation) -> Operation:
    work = operation.work
    if not (isinstance(work, Product) and work.density < 1):
      return operation
    share = density(operation.layer)
    if dense_grads and work.sampled:
      share = 1.0
    return operation._replace(work=work._replace(density=share, mask=None))

  return _changed(program, change)


def in_micro_batches(program: Program, number: int) -> Program:
  """Returns a program that takes its tokens in parts, one after another.

  Weights are streamed again for each part; the optimizer steps once.

  Args:
    program: Of the whole batch.
    number: Of parts.

  Returns:
    The program.

  Example:
    >>> operation = Operation('h', 'p', 'forward', Product(8, 4, 4))
    >>> parts = in_micro_batches(Program((operation,)), 4)
    >>> parts.operations[0].work.tokens, parts.operations[0].count
    (2.0, 4.0)
  """

  def change(operation: Operation) -> Operation:
    if isinstance(operation.work, Host):
      return operation
    return operation._replace(
        work=split_tokens(operation.work, number),
        count=operation.count * number,
    )

  return _changed(program, change)


def times_tokens(program: Program, factor: float) -> Program:
  """Returns a program on so many times the tokens.

  Example:
    >>> operation = Operation('h', 'p', 'forward', Product(8, 4, 4))
    >>> times_tokens(Program((operation,)), 4).operations[0].work.tokens
    32.0
  """
  return _changed(
      program,
      lambda o: o._replace(work=split_tokens(o.work, 1 / factor)),
  )


def _changed(
    program: Program, change: Callable[[Operation], Operation]
) -> Program:
  return dataclasses.replace(
      program,
      operations=tuple(map(change, program.operations)),
      branches=tuple(
          b._replace(programs=tuple(_changed(p, change) for p in b.programs))
          for b in program.branches
      ),
  )

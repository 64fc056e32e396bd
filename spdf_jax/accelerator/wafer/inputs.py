"""Operands: a program's inputs and literals, and what is known of them."""

from typing import Any

import jax
from jax.extend.core import Literal
import jax.numpy as jnp
import numpy as np

from spdf_jax.accelerator.wafer.equations import Operand
from spdf_jax.accelerator.wafer.equations import TOKEN
from spdf_jax.accelerator.wafer.equations import WEIGHT

_SMALL = 4096  # Elements.


def operands_of(args: Any) -> list[Operand]:
  """Makes the operands of a program's arguments.

  Signed integers are tokens, and so is what has their shape, such as the
  weights of a loss; other arrays are weights until they meet a product.

  Args:
    args: A tree of arrays or their shapes.

  Returns:
    An operand for each leaf.

  Example:
    >>> args = jnp.zeros((2, 3), int), jnp.ones((2, 3)), jnp.ones((4, 4))
    >>> [operand.space for operand in operands_of(args)]
    ['token', 'token', 'weight']
  """
  operands = [operand_of(x) for x in jax.tree.leaves(args)]
  tokens = {o.shape for o in operands if o.space == TOKEN}
  return [
      o._replace(space=TOKEN, source=i) if o.shape in tokens
      else o._replace(source=i)
      for i, o in enumerate(operands)
  ]


def operand_of(x: Any) -> Operand:
  """Makes an operand; values of masks, integers and scalars are kept."""
  aval = jax.typeof(x) if not hasattr(x, 'shape') else x
  dtype = aval.dtype
  operand = Operand(tuple(aval.shape), dtype)
  if operand.size > 1:
    is_token = jnp.issubdtype(dtype, jnp.signedinteger)
    operand = operand._replace(space=TOKEN if is_token else WEIGHT)
  if isinstance(x, jax.ShapeDtypeStruct) or not _is_kept(operand):
    return operand
  return operand._replace(known=np.asarray(x))


def _is_kept(operand: Operand) -> bool:
  is_mask_or_count = _is_number(operand) and operand.dtype.kind in 'biu'
  return is_mask_or_count or (_is_number(operand) and operand.size == 1)


def _is_number(operand: Operand) -> bool:
  return isinstance(operand.dtype, np.dtype)  # Not a key of random numbers.


def literal_of(literal: Literal) -> Operand:
  """Makes the operand of a literal."""
  return operand_of(literal.val)._replace(space=None)


def result_of(var: Any) -> Operand:
  """Makes the operand of what an equation gives, from its type."""
  aval = var.aval
  shape = tuple(getattr(aval, 'shape', ()))
  return Operand(shape, getattr(aval, 'dtype', None))


def evaluate(eqn, operands, results) -> list[np.ndarray | None]:
  """Computes the results of an equation where its operands are known."""
  known = [o.known for o in operands]
  # Nothing large is made from little, as masks of causality are.
  most = max([_SMALL, *(o.size for o in operands)])
  kept = all(r.size <= most and _is_number(r) for r in results)
  if not kept or any(k is None for k in known):
    return [None] * len(results)
  values = eqn.primitive.bind(*map(jnp.asarray, known), **eqn.params)
  values = values if eqn.primitive.multiple_results else [values]
  return [np.asarray(v) for v in values]

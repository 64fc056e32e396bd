# SPDX-License-Identifier: Apache-2.0
"""Equations of a traced program: operands, known values and layer names."""

from collections.abc import Callable, Iterable, Mapping
import math
import re
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
import jax.numpy as jnp
import numpy as np

from spdf_jax.accelerator import jaxprs
from spdf_jax.accelerator.wafer.program import MaskProfile

WEIGHT, GRADIENT, TOKEN = 'weight', 'gradient', 'token'
"""Memory spaces. Weights and gradients are stored on hosts, which execute the
operations on them, and are streamed; arrays with a row for each token are
resident on the wafer."""

# Maximum number of elements of a result that is computed, unless an operand is
# larger.
_LARGEST_EVALUATED = 4096
_WRAPPED = re.compile(r'\w+\((.*)\)')
_REMAT = 'rematted_computation'
_NO_LAYER = (_REMAT, 'checkpoint', 'remat', 'remat2', '')


class Operand(NamedTuple):
  """An array that an equation reads or writes.

  Attributes:
    shape: Shape of the array.
    dtype: Type of its elements.
    space: `WEIGHT`, `GRADIENT`, `TOKEN`, or `None` for scalars and constants.
    known: Value, if it can be computed from known inputs; else `None`.
    source: Index of the program input from which the array is computed
      elementwise; `None` if there is none.
  """

  shape: tuple[int, ...]
  dtype: Any
  space: str | None = None
  known: np.ndarray | None = None
  source: int | None = None

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.shape)


class Weights(NamedTuple):
  """The sparsity of one matrix of weights.

  Attributes:
    sparsity: Fraction of zeros.
    mask: Profile of the mask; `None` if its value is unknown.
  """

  sparsity: float
  mask: MaskProfile | None = None

  def transposed(self) -> 'Weights':
    """Returns the sparsity of the transposed matrix."""
    return self._replace(mask=self.mask and self.mask.transposed())


class Equation(NamedTuple):
  """An equation of a program, the argument of cost rules.

  Attributes:
    operands: Operands of the equation.
    results: Results of the equation, without values and spaces.
    params: Parameters of the primitive.
    weights_of: Function from the operand of a stack of masks to a list with the
      `Weights` of each matrix.
  """

  operands: tuple[Operand, ...]
  results: tuple[Operand, ...]
  params: Mapping[str, Any]
  weights_of: Callable[[Operand], list[Weights]]

  @property
  def size(self) -> int:
    """Number of elements of the largest array that the equation computes."""
    return max((r.size for r in self.results), default=0)

  @property
  def read(self) -> int:
    """Number of elements of the largest operand."""
    return max((o.size for o in self.operands), default=0)


def strongest(spaces: Iterable[str | None]) -> str | None:
  """Returns the space of a result: `TOKEN` before `GRADIENT` before `WEIGHT`.

  Example:
    >>> strongest([None, WEIGHT, GRADIENT])
    'gradient'
  """
  present = set(spaces)
  return next((s for s in (TOKEN, GRADIENT, WEIGHT) if s in present), None)


def operands_of(args: Any) -> list[Operand]:
  """Converts a program's arguments to operands.

  Signed integers are tokens, and so are arrays of the same shape, such as the
  weights of a loss. Other arrays count as weights until a product with weights
  shows that they are activations.

  Args:
    args: Tree of arrays or their shapes.

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
      o._replace(space=TOKEN if o.shape in tokens else o.space, source=i)
      for i, o in enumerate(operands)
  ]


def operand_of(x: Any) -> Operand:
  """Returns an operand; masks, integers and scalars keep their values."""
  aval = jax.typeof(x) if not hasattr(x, 'shape') else x
  operand = Operand(tuple(aval.shape), aval.dtype)
  if operand.size > 1:
    is_token = jnp.issubdtype(operand.dtype, jnp.signedinteger)
    operand = operand._replace(space=TOKEN if is_token else WEIGHT)
  is_kept = _is_number(operand) and (
      operand.size == 1 or operand.dtype.kind in 'biu'
  )
  if isinstance(x, jax.ShapeDtypeStruct) or not is_kept:
    return operand
  return operand._replace(known=np.asarray(x))


def literal_of(literal: Literal) -> Operand:
  """Returns the operand of a literal."""
  return operand_of(literal.val)._replace(space=None)


def result_of(var: Any) -> Operand:
  """Returns the operand of an equation's result, from the type alone."""
  shape = tuple(getattr(var.aval, 'shape', ()))
  return Operand(shape, getattr(var.aval, 'dtype', None))


def evaluate(
    eqn: Any, operands: tuple[Operand, ...], results: tuple[Operand, ...]
) -> list[np.ndarray | None]:
  """Computes the results of an equation whose operands are all known.

  Args:
    eqn: Equation of the jaxpr.
    operands: Operands of the equation.
    results: Results of the equation.

  Returns:
    The value of each result; `None` if an operand is unknown, the equation has
    effects, as callbacks have, or a result is much larger than all operands,
    e.g. a causal mask made from a scalar.
  """
  known = [o.known for o in operands]
  most = max([_LARGEST_EVALUATED, *(o.size for o in operands)])
  kept = all(r.size <= most and _is_number(r) for r in results)
  if not kept or eqn.effects or any(k is None for k in known):
    return [None] * len(results)
  values = jaxprs.evaluate(eqn, *map(jnp.asarray, known))
  return [np.asarray(v) for v in values]


def layer_of(path: str) -> tuple[str, str]:
  """Returns the module and the pass of training that a name stack denotes.

  Args:
    path: Names joined by `'/'`, including the transformations around them.

  Returns:
    The layer, and the pass: `'forward'`, `'backward'` or `'recompute'`.

  Example:
    >>> layer_of('transpose(jvp(GPT))/h/attn/vmap(ij->ji)')
    ('GPT/h/attn', 'backward')
  """
  phase = 'backward' if 'transpose(' in path else 'forward'
  phase = 'recompute' if _REMAT in path else phase
  names = []
  for part in path.split('/'):
    while match := _WRAPPED.fullmatch(part):
      part = match[1]
    if part not in _NO_LAYER and '->' not in part:
      names.append(part)
  return '/'.join(names), phase


def _is_number(operand: Operand) -> bool:
  return isinstance(operand.dtype, np.dtype)  # Random keys have other types.

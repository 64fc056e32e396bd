"""Where the results of an equation live: with the tokens, or with weights."""

from collections.abc import Set

import jax.numpy as jnp

from spdf_jax.accelerator.wafer.equations import Equation
from spdf_jax.accelerator.wafer.equations import GRADIENT
from spdf_jax.accelerator.wafer.equations import Operand
from spdf_jax.accelerator.wafer.equations import TOKEN
from spdf_jax.accelerator.wafer.equations import WEIGHT
from spdf_jax.accelerator.wafer.rules import is_product_of_weights
from spdf_jax.accelerator.wafer.rules import is_sampled
from spdf_jax.accelerator.wafer.rules import REDUCTIONS

_PRODUCTS = {
    'sampled_matmul': (GRADIENT,),
    'sparse_matmul': (TOKEN,),
    'sparse_matmul_backward': (TOKEN, GRADIENT),
    'sparse_matmul_tangent': (TOKEN,),
    'conv_general_dilated': (TOKEN,),
}
_RESIDENT = {
    'sampled_matmul': 2,
    'sparse_matmul': 1,
    'sparse_matmul_backward': 2,
    'sparse_matmul_tangent': 2,
    'conv_general_dilated': 1,
}
_STRONGEST = (TOKEN, GRADIENT, WEIGHT, None)


def spaces_of(
    name: str, equation: Equation, weight_shapes: Set[tuple[int, ...]]
) -> tuple[str | None, ...]:
  """Returns where the results of an equation live.

  Products say it. Otherwise results live where the operands of their size do;
  what tokens add up to in the shape of a weight is a gradient.

  Args:
    name: Of the primitive.
    equation: The equation.
    weight_shapes: Shapes of the program's weights, and of their slices.

  Returns:
    A space for each result.
  """
  if is_hosted(name, equation):
    return (GRADIENT,) * len(equation.results)
  if name in _PRODUCTS:
    return _PRODUCTS[name]
  if name == 'dot_general':
    sampled = is_product_of_weights(equation) and is_sampled(equation)
    return (GRADIENT if sampled else TOKEN,)
  if name == 'gather':
    table, indices = equation.operands[:2]
    return (TOKEN if indices.space == TOKEN else table.space,)
  return tuple(
      _space(name, equation.operands, result, weight_shapes)
      for result in equation.results
  )


def resident_operands(name: str, equation: Equation) -> tuple[Operand, ...]:
  """Returns the operands that a product takes for activations."""
  x_y = equation.operands[:2]
  if name != 'dot_general':
    return x_y[:_RESIDENT.get(name, 0)]
  if not is_product_of_weights(equation) or is_sampled(equation):
    return x_y
  x, y = x_y
  return (y if len(y.shape) > len(x.shape) else x,)


def is_product(name: str) -> bool:
  """Tells whether a primitive multiplies matrices."""
  return name == 'dot_general' or name in _PRODUCTS


def source_of(result: Operand, operands: tuple[Operand, ...]) -> int | None:
  """Returns the input that a result is made of elementwise, if there is one."""
  if not _is_float(result):
    return None  # Comparisons and bits are not what products multiply.
  same = [
      o.source for o in operands if o.size == result.size and _is_float(o)
  ]
  return next((s for s in same if s is not None), None)


def _is_float(operand: Operand) -> bool:
  return jnp.issubdtype(operand.dtype, jnp.floating)


def is_hosted(name: str, equation: Equation) -> bool:
  """Tells whether a product is one of weights alone, as in choosing masks."""
  if not is_product(name) or any(o.space == TOKEN for o in equation.operands):
    return False
  return all(o.space for o in resident_operands(name, equation))


def _space(
    name: str,
    operands: tuple[Operand, ...],
    result: Operand,
    weight_shapes: Set[tuple[int, ...]],
) -> str | None:
  if result.size <= 1:
    return None
  own = [o.space for o in operands if o.size == result.size]
  found = [s for s in own if s] or [o.space for o in operands]
  space = next((s for s in _STRONGEST if s in found), None)
  adds_up = name in REDUCTIONS or name.startswith('scatter')
  if adds_up and space == TOKEN and result.shape in weight_shapes:
    return GRADIENT
  return space

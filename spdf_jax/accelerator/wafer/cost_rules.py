# SPDX-License-Identifier: Apache-2.0
"""Cost rules: the work of each primitive, and the space of its results."""

from collections.abc import Callable, Sequence, Set
import math

from jax.extend.core import Primitive
import jax.numpy as jnp

from spdf_jax.accelerator.wafer import equations
from spdf_jax.accelerator.wafer.equations import Equation
from spdf_jax.accelerator.wafer.equations import Operand
from spdf_jax.accelerator.wafer.program import Elementwise
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import ScoreProduct
from spdf_jax.accelerator.wafer.program import Work

Rule = Callable[[Equation], Sequence[Work]]

FREE = frozenset(
    'bitcast_convert_type broadcast_in_dim convert_element_type copy copy_p '
    'create_token device_put empty empty2 expand_dims iota layout_constraint '
    'mesh_cast name optimization_barrier pcast platform_index pvary '
    'random_unwrap random_wrap '
    'reduce_precision reshape reshard sharding_constraint slice split squeeze '
    'stop_gradient unreduced_cast'.split()
)
"""Primitives that only cast, view or annotate data; they cost no time."""

ELEMENTWISE = frozenset(
    'abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil '
    'clamp clz complex conj cos cosh digamma div eq erf erf_inv erfc exp exp2 '
    'expm1 floor ge gt igamma imag integer_pow is_finite kept_weights le '
    'lgamma log log1p logistic lt max min mul ne neg nextafter not '
    'one_minus_square or polygamma population_count pow random_bits '
    'random_fold_in random_seed random_split real rem round rsqrt select_n '
    'shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt '
    'square sub tan tanh threefry2x32 xor'.split()
)
"""Primitives with one operation for each element of the result."""

REDUCTIONS = frozenset(
    'all_gather all_gather_invariant all_reduce all_to_all argmax argmin '
    'cumlogsumexp cummax cummin cumprod cumsum pmax pmin ppermute psum psum2 '
    'psum_invariant reduce_and reduce_max reduce_min reduce_or reduce_prod '
    'reduce_scatter reduce_sum reduce_xor'.split()
)
"""Primitives with one operation for each element of the operand, including
collectives."""

MOVES = frozenset(
    'concatenate dynamic_slice dynamic_update_slice gather pad rev scatter '
    'scatter-add scatter-max scatter-min scatter-mul scatter_add scatter_max '
    'scatter_min scatter_mul select_and_gather_add select_and_scatter_add sort '
    'stack top_k transpose'.split()
)
"""Primitives with one operation for each element that they move."""

# Number of operands that are activations, and spaces of the results, by name.
_PRODUCTS = {
    'sampled_matmul': (2, (equations.GRADIENT,)),
    'sparse_matmul': (1, (equations.TOKEN,)),
    'sparse_matmul_backward': (2, (equations.TOKEN, equations.GRADIENT)),
    'sparse_matmul_tangent': (2, (equations.TOKEN,)),
    'conv_general_dilated': (1, (equations.TOKEN,)),
}


def register_cost(primitive: Primitive | str, rule: Rule) -> None:
  """Registers the cost rule of a primitive, for `simulate` and `trace_program`.

  Args:
    primitive: JAX primitive, or its name in jaxprs.
    rule: `(equation) -> work`: a function of a `wafer.equations.Equation`,
      which has the operands and results of the primitive. The work of one
      execution is a sequence of `Product`, `ScoreProduct`, `Elementwise` or
      `Host` of `wafer.program`.

  Raises:
    ValueError: the primitive already has a rule.

  Example:
    >>> register_cost('my_fft', lambda eqn: [Elementwise(10 * eqn.size)])
  """
  name = str(primitive)
  if name in RULES:
    raise ValueError(
        f'primitive {name!r} already has a cost rule, which cannot be '
        'replaced; register rules of other primitives only.'
    )
  RULES[name] = rule


def is_elementwise(name: str) -> bool:
  """Returns whether a primitive's cost depends on numbers of elements only."""
  return name in ELEMENTWISE or name in REDUCTIONS or name in MOVES


def _dot_kind(equation: Equation) -> str:
  """Returns the kind of a `dot_general`.

  With batch axes both operands are activations: `'scores'`. JAX's transpose
  rule for the gradient of weights contracts all axes but the last of both
  operands: `'sampled'`. Other products stream weights: `'forward'`.
  """
  (left, right), (batch, _) = equation.params['dimension_numbers']
  if batch:
    return 'scores'
  sampled = all(
      len(operand.shape) > 1
      and sorted(axes) == list(range(len(operand.shape) - 1))
      for operand, axes in zip(equation.operands, (left, right))
  )
  return 'sampled' if sampled else 'forward'


def is_product(name: str) -> bool:
  """Returns whether a primitive multiplies matrices."""
  return name == 'dot_general' or name in _PRODUCTS


def resident_operands(name: str, equation: Equation) -> tuple[Operand, ...]:
  """Returns the operands of a product that are activations."""
  x_y = equation.operands[:2]
  if name != 'dot_general':
    activations, _ = _PRODUCTS.get(name, (0, ()))
    return x_y[:activations]
  if _dot_kind(equation) != 'forward':
    return x_y
  return (x_y[1] if _is_flipped(equation) else x_y[0],)


def _is_flipped(equation: Equation) -> bool:
  """Returns whether the weights of a product are its first operand."""
  x, y = equation.operands
  if {x.space, y.space} == {equations.WEIGHT, equations.TOKEN}:
    return y.space == equations.TOKEN
  return len(y.shape) > len(x.shape)  # Activations have more axes.


def is_hosted(name: str, equation: Equation) -> bool:
  """Returns whether all operands are weights, as in the selection of masks."""
  if not is_product(name) or any(
      o.space == equations.TOKEN for o in equation.operands
  ):
    return False
  return all(o.space for o in resident_operands(name, equation))


def spaces_of(
    name: str, equation: Equation, weight_shapes: Set[tuple[int, ...]]
) -> tuple[str | None, ...]:
  """Returns the memory spaces of the results of an equation.

  The spaces of products are fixed. A result of another primitive has the space
  of the operands of its size, except that a reduction of token arrays to the
  shape of a weight is a gradient.

  Args:
    name: Name of the primitive.
    equation: Equation of the primitive.
    weight_shapes: Shapes of the program's weights and of their slices.

  Returns:
    A space for each result.
  """
  if is_hosted(name, equation):
    return (equations.GRADIENT,) * len(equation.results)
  if name in _PRODUCTS:
    return _PRODUCTS[name][1]
  if name == 'dot_general':
    return (equations.GRADIENT if _dot_kind(
        equation
    ) == 'sampled' else equations.TOKEN,)
  if name == 'gather':
    table, indices = equation.operands[:2]
    if indices.space == equations.TOKEN:
      return (equations.TOKEN,)
    return (table.space,)
  return tuple(
      _space(name, equation.operands, result, weight_shapes)
      for result in equation.results
  )


def source_of(
    name: str, result: Operand, operands: tuple[Operand, ...]
) -> int | None:
  """Returns the program input from which a result is computed elementwise.

  Args:
    name: Name of the primitive.
    result: Result of the equation, with its space.
    operands: Operands of the equation.

  Returns:
    The index of the input; `None` for results of products, for arrays outside
    the space of weights, and for integers and booleans, which are no operands
    of products.
  """
  if result.space != equations.WEIGHT or is_product(name) or not _is_float(
      result
  ):
    return None
  same = [
      o.source for o in operands if o.size == result.size and _is_float(o)
  ]
  return next((s for s in same if s is not None), None)


def _is_float(operand: Operand) -> bool:
  return jnp.issubdtype(operand.dtype, jnp.floating)


def _space(
    name: str,
    operands: tuple[Operand, ...],
    result: Operand,
    weight_shapes: Set[tuple[int, ...]],
) -> str | None:
  if result.size <= 1:
    return None
  own = [o.space for o in operands if o.size == result.size and o.space]
  space = equations.strongest(own or [o.space for o in operands])
  adds_up = name in REDUCTIONS or name.startswith('scatter')
  if adds_up and space == equations.TOKEN and result.shape in weight_shapes:
    return equations.GRADIENT
  return space


def _dot_general(equation: Equation) -> list[Work]:
  (left, right), (batch, _) = equation.params['dimension_numbers']
  x, y = (operand.shape for operand in equation.operands)
  summed = math.prod(x[i] for i in left)
  batches = math.prod(x[i] for i in batch)
  rows = math.prod(x) // (summed * batches)
  columns = math.prod(y) // (summed * batches)
  kind = _dot_kind(equation)
  if kind == 'scores':
    return [ScoreProduct(batches * rows * summed * columns)]
  if kind == 'sampled':
    return [Product(summed, rows, columns, sampled=True)]
  if _is_flipped(equation):
    rows, columns = columns, rows
  return [Product(rows, summed, columns)]


def _convolution(equation: Equation) -> list[Work]:
  kernel = equation.operands[1].shape
  features = equation.params['dimension_numbers'].rhs_spec[0]
  # The gradient of a strided convolution inserts zeros into its inputs.
  zeros = math.prod(equation.params['lhs_dilation'])
  size = equation.size * math.prod(kernel) // kernel[features]
  return [ScoreProduct(size // zeros)]


def _masked(equation: Equation, mask: int, kind: str) -> list[Work]:
  """Returns the products of a stack of masked matrices.

  Args:
    equation: Equation with activations as first operand.
    mask: Index of the operand that is the mask.
    kind: `'forward'`, `'transposed'` or `'sampled'`.

  Returns:
    A product for each matrix.
  """
  x, masks = equation.operands[0], equation.operands[mask]
  *stack, inputs, outputs = masks.shape
  tokens = x.size // x.shape[-1] // math.prod(stack)
  weights = equation.weights_of(masks)
  if kind == 'transposed':
    weights = [w.transposed() for w in weights]
    inputs, outputs = outputs, inputs
  return [
      Product(tokens, inputs, outputs, w.sparsity, kind == 'sampled', w.mask)
      for w in weights
  ]


def _sparse_matmul(equation: Equation) -> list[Work]:
  kind = 'transposed' if equation.params['transpose'] else 'forward'
  return _masked(equation, 2, kind)


def _moved(equation: Equation) -> list[Work]:
  # A scatter moves only its updates.
  sizes = [o.size for o in equation.operands[2:]] or [equation.size]
  return [Elementwise(min(max(sizes), equation.size))]


RULES: dict[str, Rule] = {
    'conv_general_dilated': _convolution,
    'dot_general': _dot_general,
    'sampled_matmul': lambda e: _masked(e, 2, 'sampled'),
    'sparse_matmul': _sparse_matmul,
    'sparse_matmul_backward': lambda e: (
        _masked(e, 3, 'transposed') + _masked(e, 4, 'sampled')
    ),
    'sparse_matmul_tangent': lambda e: (
        _masked(e, 4, 'forward') + _masked(e, 5, 'forward')
    ),
}
"""Cost rules by the name of the primitive."""
RULES |= dict.fromkeys(FREE, lambda e: [])
RULES |= dict.fromkeys(ELEMENTWISE, lambda e: [Elementwise(e.size)])
RULES |= dict.fromkeys(REDUCTIONS, lambda e: [Elementwise(e.read)])
RULES |= dict.fromkeys(MOVES, lambda e: [Elementwise(e.size)])
RULES |= {name: _moved for name in MOVES if name.startswith('scatter')}
RULES['dynamic_update_slice'] = lambda e: [Elementwise(e.operands[1].size)]

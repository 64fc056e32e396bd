"""Rules: from the equation of a primitive to the work it asks for."""

from collections.abc import Callable
from collections.abc import Sequence
import math

from jax.extend.core import Primitive

from spdf_jax.accelerator.wafer.equations import Equation
from spdf_jax.accelerator.wafer.equations import Weights
from spdf_jax.accelerator.wafer.work import Elementwise
from spdf_jax.accelerator.wafer.work import Product
from spdf_jax.accelerator.wafer.work import Scores
from spdf_jax.accelerator.wafer.work import Work

Rule = Callable[[Equation], Sequence[Work]]

FREE = frozenset(
    'bitcast_convert_type broadcast_in_dim convert_element_type copy copy_p '
    'create_token device_put empty expand_dims iota layout_constraint '
    'mesh_cast name optimization_barrier pcast platform_index pvary '
    'random_unwrap random_wrap '
    'reduce_precision reshape reshard sharding_constraint slice split squeeze '
    'stop_gradient unreduced_cast'.split()
)
"""Primitives that only name, type or lay out data: no time is charged."""

ELEMENTWISE = frozenset(
    'abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil '
    'clamp clz complex conj cos cosh digamma div eq erf erf_inv erfc exp exp2 '
    'expm1 floor ge gt igamma imag integer_pow is_finite le lgamma log log1p '
    'logistic lt max min mul ne neg nextafter not one_minus_square or '
    'polygamma population_count pow random_bits random_fold_in random_seed '
    'random_split real rem round rsqrt select_n shift_left '
    'shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub '
    'tan tanh threefry2x32 xor'.split()
)
"""One operation for every number that comes out."""

REDUCTIONS = frozenset(
    'all_gather all_gather_invariant all_reduce all_to_all argmax argmin '
    'cumlogsumexp cummax cummin cumprod cumsum pmax pmin ppermute psum psum2 '
    'psum_invariant reduce_and reduce_max reduce_min reduce_or reduce_prod '
    'reduce_scatter reduce_sum reduce_xor'.split()
)
"""One operation for every number that goes in, also between systems."""

MOVES = frozenset(
    'concatenate dynamic_slice dynamic_update_slice gather pad rev scatter '
    'scatter-add scatter-max scatter-min scatter-mul scatter_add scatter_max '
    'scatter_min scatter_mul select_and_gather_add select_and_scatter_add sort '
    'stack top_k transpose'.split()
)
"""One operation for every number that is moved."""


def register_cost(primitive: Primitive | str, rule: Rule) -> None:
  """Tells what a primitive asks of a device.

  Args:
    primitive: The primitive, or its name.
    rule: From an `Equation` to a sequence of `Work`, e.g. one `Elementwise`;
      counts are added by the interpreter.

  Raises:
    ValueError: the primitive has a rule.

  Example:
    >>> register_cost('my_fft', lambda eqn: [Elementwise(10 * eqn.size)])
  """
  name = str(primitive)
  if name in _RULES or name in FREE:
    raise ValueError(
        f'primitive {name!r} has a rule; give yours another name.'
    )
  _RULES[name] = rule


def rule_of(name: str) -> Rule | None:
  """Returns the rule of a primitive by its name, `None` if there is none."""
  return _RULES.get(name)


def is_elementwise(name: str) -> bool:
  """Tells whether a primitive is one of ours that no product is part of."""
  return name in ELEMENTWISE or name in REDUCTIONS or name in MOVES


def is_product_of_weights(equation: Equation) -> bool:
  """Tells whether a `dot_general` streams one operand: it has no batch axes."""
  (_, _), (batch, _) = equation.params['dimension_numbers']
  return not batch


def is_sampled(equation: Equation) -> bool:
  """Tells whether a `dot_general` sums over tokens: a gradient of weights.

  JAX's transposition contracts the leading axes of both operands for it, and
  all of them but the last; a forward product contracts a last axis.
  """
  (left, right), _ = equation.params['dimension_numbers']
  x, y = equation.operands
  leads = sorted(left) == list(range(len(left)))
  leads &= sorted(right) == list(range(len(right)))
  is_all = len(left) == len(x.shape) - 1 and len(right) == len(y.shape) - 1
  return leads and is_all and len(x.shape) > 1 and len(y.shape) > 1


def _dot_general(equation: Equation) -> list[Work]:
  (left, right), (batch, _) = equation.params['dimension_numbers']
  x, y = (operand.shape for operand in equation.operands)
  summed = math.prod(x[i] for i in left)
  batches = math.prod(x[i] for i in batch)
  rows = math.prod(x) // (summed * batches)
  columns = math.prod(y) // (summed * batches)
  if not is_product_of_weights(equation):
    return [Scores(batches * rows * summed * columns)]
  if is_sampled(equation):
    return [Product(summed, rows, columns, sampled=True)]
  if len(y) > len(x):  # The weight has fewer axes than the activations.
    rows, columns = columns, rows
  return [Product(rows, summed, columns)]


def _convolution(equation: Equation) -> list[Work]:
  kernel = equation.operands[1].shape
  features = equation.params['dimension_numbers'].rhs_spec[0]
  return [Scores(equation.size * math.prod(kernel) // kernel[features])]


def _products(
    tokens: int, weights: Sequence[Weights], inputs: int, outputs: int,
    **fields: bool,
) -> list[Work]:
  return [
      Product(tokens, inputs, outputs, w.density, mask=w.mask, **fields)
      for w in weights
  ]


def _sizes(equation: Equation, x: int, mask: int) -> tuple[int, int, int]:
  """Returns tokens of each matrix of a stack, inputs and outputs."""
  *stack, inputs, outputs = equation.operands[mask].shape
  features = equation.operands[x].shape[-1]
  rows = equation.operands[x].size // features // math.prod(stack)
  return rows, inputs, outputs


def _sparse_matmul(equation: Equation) -> list[Work]:
  tokens, inputs, outputs = _sizes(equation, 0, 2)
  weights = equation.weights_of(equation.operands[2])
  if equation.params['transpose']:
    return _transposed(tokens, weights, inputs, outputs)
  return _products(tokens, weights, inputs, outputs)


def _transposed(tokens, weights, inputs, outputs) -> list[Work]:
  weights = [w.transposed() for w in weights]
  return _products(tokens, weights, outputs, inputs)


def _sampled_matmul(equation: Equation) -> list[Work]:
  tokens, inputs, outputs = _sizes(equation, 0, 2)
  weights = equation.weights_of(equation.operands[2])
  return _products(tokens, weights, inputs, outputs, sampled=True)


def _sparse_matmul_tangent(equation: Equation) -> list[Work]:
  tokens, inputs, outputs = _sizes(equation, 0, 4)
  mask, grad_mask = (equation.weights_of(o) for o in equation.operands[4:])
  return _products(tokens, mask, inputs, outputs) + _products(
      tokens, grad_mask, inputs, outputs
  )


def _sparse_matmul_backward(equation: Equation) -> list[Work]:
  tokens, inputs, outputs = _sizes(equation, 0, 3)
  mask, grad_mask = (equation.weights_of(o) for o in equation.operands[3:])
  return _transposed(tokens, mask, inputs, outputs) + _products(
      tokens, grad_mask, inputs, outputs, sampled=True
  )


def _moved(equation: Equation) -> list[Work]:
  # What a scatter leaves alone is not moved.
  sizes = [o.size for o in equation.operands[2:]] or [equation.size]
  return [Elementwise(min(max(sizes), equation.size))]


_RULES: dict[str, Rule] = {
    'conv_general_dilated': _convolution,
    'dot_general': _dot_general,
    'sampled_matmul': _sampled_matmul,
    'sparse_matmul': _sparse_matmul,
    'sparse_matmul_backward': _sparse_matmul_backward,
    'sparse_matmul_tangent': _sparse_matmul_tangent,
}
_RULES |= dict.fromkeys(ELEMENTWISE, lambda e: [Elementwise(e.size)])
_RULES |= dict.fromkeys(REDUCTIONS, lambda e: [Elementwise(e.read)])
_RULES |= dict.fromkeys(MOVES, lambda e: [Elementwise(e.size)])
_RULES |= {name: _moved for name in MOVES if name.startswith('scatter')}

# SPDX-License-Identifier: Apache-2.0
"""Rules of products: they multiply by `sparse_matmul` or by a listed matrix."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax import lowerings
from spdf_jax.accelerator import auto
from spdf_jax.accelerator import bf16_matmul
from spdf_jax.accelerator import listed_matrix
from spdf_jax.accelerator import primitives
from spdf_jax.accelerator.interpreter.values import Value

_PRECISIONS: dict[Any, str | None] = {
    None: None,
    **{(p, p): p.name.lower() for p in jax.lax.Precision},
    **{p: p.name for p in jax.lax.DotAlgorithmPreset if p.name != 'DEFAULT'},
}
"""Names of the precisions of `jax.default_matmul_precision`."""


def masked(
    evaluation: Any, eqn: Any, values: list[Value]
) -> list[Value] | str:
  """Evaluates a `dot_general` of masked weights with `sparse_matmul`."""
  if eqn.params['out_sharding'] is not None:
    return 'a product with an out_sharding'
  precision = eqn.params['precision']
  if precision not in _PRECISIONS:
    return f'a product with the precision {precision}'
  # A result in a wider dtype is the product computed in that dtype.
  dtype = functools.reduce(
      jnp.promote_types, [var.aval.dtype for var in (*eqn.invars, *eqn.outvars)]
  )
  numbers = eqn.params['dimension_numbers']
  with jax.default_matmul_precision(_PRECISIONS[precision]):
    return _multiply(evaluation, eqn, values, numbers, dtype)


def dense(
    evaluation: Any, eqn: Any, values: list[Value]
) -> list[Value] | str:
  """Evaluates a product with `bf16_matmul.einsum` where XLA is slower."""
  del evaluation
  types = {var.aval.dtype.name for var in (*eqn.invars, *eqn.outvars)}
  if types != {'bfloat16'} or not bf16_matmul.is_faster(jnp.bfloat16):
    return eqn.primitive.name
  subscripts = bf16_matmul.subscripts(
      eqn.params['dimension_numbers'], [var.aval.ndim for var in eqn.invars]
  )
  return [Value(bf16_matmul.einsum(subscripts, *(v.array for v in values)))]


def einsum(
    evaluation: Any, eqn: Any, values: list[Value]
) -> list[Value] | str:
  """Evaluates a `bf16_matmul.einsum` of masked weights with `sparse_matmul`."""
  numbers = bf16_matmul.dimension_numbers(eqn.params['subscripts'])
  if numbers is None:
    return eqn.primitive.name
  # Kernels sum in float32, too; callers round the result to 16 bits.
  dtype = eqn.invars[0].aval.dtype
  return _multiply(evaluation, eqn, values, numbers, dtype)


def _multiply(evaluation, eqn, values, dimension_numbers, dtype):
  """Multiplies with `sparse_matmul` in a dtype, or says why it cannot."""
  contracted, batches = dimension_numbers
  side = int(values[1].masks is not None)  # The operand with masks.
  x, w = values[1 - side], values[side]
  array, out = jnp.asarray(x.masked()), eqn.outvars[0].aval
  reason = _unsupported(array, w.array, out)
  if reason:
    return reason
  evaluation.note(eqn, [x], reason='the other operand of a product is sparse')

  stacked, summed, free = _axes(w.array, contracted[side], batches[side])
  stacked_x, summed_x, tokens = _axes(
      array, contracted[1 - side], batches[1 - side]
  )
  sizes = lambda a, axes: [a.shape[axis] for axis in axes]
  stack, inputs, outputs = (
      math.prod(sizes(w.array, axes)) for axes in (stacked, summed, free)
  )
  shape = (stack, inputs, outputs) if stacked else (inputs, outputs)
  array = jnp.transpose(array, stacked_x + tokens + summed_x)
  array = array.reshape(
      *shape[:-2], *array.shape[len(stacked):][:len(tokens)], inputs
  )
  matrix = lambda a: (
      jnp.transpose(a, stacked + summed + free).reshape(shape)
  )
  array = array.astype(dtype)
  multiply = lambda x, w, mask, grad_mask: primitives.sparse_matmul(
      x, w, mask, grad_mask=grad_mask, lowering=evaluation.lowering,
      layer=evaluation.layer(),
  )
  y = (jax.vmap(multiply) if stacked else multiply)(
      array, matrix(w.array).astype(dtype),
      matrix(w.masks.product), matrix(w.masks.gradient),
  )
  y = y.astype(out.dtype).reshape(
      *sizes(w.array, stacked), *array.shape[len(shape) - 2:-1],
      *sizes(w.array, free),
  )
  if not side:
    first = len(stacked)
    y = jnp.moveaxis(
        y, range(first, first + len(tokens)), range(-len(tokens), 0)
    )
  kernels, reason = auto.describe(evaluation.lowering, array, shape)
  evaluation.note(
      eqn, [w], product=' × '.join(map(str, shape)),
      tokens=array.size // inputs // stack, kernels=kernels, reason=reason,
  )
  return [Value(y)]


def listed(
    evaluation: Any, eqn: Any, values: list[Value]
) -> list[Value] | str:
  """Multiplies with `listed_matmul`, if the product sums over all inputs."""
  contracted, batches = eqn.params['dimension_numbers']
  side = int(values[1].is_listed)
  x, w = values[1 - side].masked(), values[side].array
  inputs, outputs, outputs_first = w.axes
  first = len(outputs) if outputs_first else 0
  pairs = sorted(zip(contracted[side], contracted[1 - side]))
  summed = [axis for _, axis in pairs]
  if len(w.shape) != 2 or any(batches) or (
      [axis for axis, _ in pairs] != [*range(first, first + len(inputs))]
  ):
    return 'a product with other axes of a listed matrix'
  out = eqn.outvars[0].aval
  if out.dtype == jnp.float32:
    x = x.astype(out.dtype)  # Sums are rounded to the dtype of the inputs.
  x = jnp.moveaxis(x, summed, range(-len(summed), 0))
  tokens = x.shape[:-len(summed)]
  lowering = evaluation.lowering
  lowering = lowerings.NATIVE if lowering == auto.AUTO else lowering
  y = listed_matrix.listed_matmul(
      x.reshape(*tokens, w.inputs), w, lowering=lowering
  ).reshape(*tokens, *outputs)
  if not side:
    y = jnp.moveaxis(y, range(len(tokens)), range(-len(tokens), 0))
  evaluation.note(
      eqn, [values[side]], product=' × '.join(map(str, w.shape)),
      tokens=math.prod(tokens), kernels=f'lists, {lowering}',
  )
  return [Value(y.astype(out.dtype))]


def listed_cast(
    evaluation: Any, eqn: Any, values: list[Value]
) -> list[Value]:
  """Leaves the values as they are: products sum in float32 in any case."""
  return values


def _axes(a, summed, stacked):
  """Returns the batch, contracted and other axes of an operand of a product."""
  free = [i for i in range(a.ndim) if i not in (*summed, *stacked)]
  return list(stacked), list(summed), free


def _unsupported(x, w, out):
  """Returns why a product cannot be one of `sparse_matmul`, or `None`."""
  for dtype in (x.dtype, w.dtype, out.dtype):
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
      return f'a product of {dtype}'
  if 0 in x.shape + w.shape:
    return 'a product with an empty axis'
  explicit = jax.sharding.AxisType.Explicit
  if any(explicit in jax.typeof(a).sharding.mesh.axis_types for a in (x, w)):
    return 'explicit sharding'
  return None


def sparse(
    evaluation: Any, eqn: Any, values: list[Value]
) -> list[Value] | str:
  """Intersects the masks of a product by `sparse_matmul` itself."""
  x, w, mask, grad_mask = values
  if w.masks is None:
    return eqn.primitive.name
  if 0 in w.array.shape:
    return 'a product with an empty axis'
  evaluation.note(eqn, [x], reason='inputs of sparse_matmul')
  y = eqn.primitive.bind(
      x.masked(), w.array, mask.array & w.masks.product,
      grad_mask.array & w.masks.gradient, **eqn.params,
  )
  *stack, _, _ = w.array.shape
  lowering = eqn.params['lowering']
  kernels, reason = auto.describe(lowering, x.array, w.array.shape)
  evaluation.note(
      eqn, [w], product=' × '.join(map(str, w.array.shape)),
      tokens=x.array.size // x.array.shape[-1] // math.prod(stack),
      kernels=kernels, reason=reason,
  )
  return [Value(y)]

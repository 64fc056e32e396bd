# SPDX-License-Identifier: Apache-2.0
"""The sparse matmul of packed weights and its derivatives, as primitives.

The counterpart of `primitives`, with the values of the kept weights and the
bits of their mask in place of a matrix and masks: a product, its gradient of
the values, and the joint tangent and backward primitives. Only the reference
lowerings unpack the weights.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.interpreters import ad
from jax.interpreters import batching
import jax.numpy as jnp

from spdf_jax.accelerator import joined
from spdf_jax.lowerings import define_primitive
from spdf_jax.packing import gather_kept
from spdf_jax.packing import PackedMask
from spdf_jax.packing import scatter_kept


def packed_matmul(
    x: jax.Array,
    values: jax.Array,
    bits: jax.Array,
    *,
    transpose: bool,
    columns: int,
    accumulation_dtype: Any,
) -> jax.Array:
  """Multiplies by packed weights, or by their transpose: the reference.

  Args:
    x: Inputs [*batch, *tokens, inputs], or [..., outputs] with `transpose`.
    values: Values of the kept weights, [*batch, size].
    bits: Bits of the mask, uint8 [*batch, inputs, ceil(outputs / 8)].
    transpose: Whether to multiply by the transpose.
    columns: Number of outputs.
    accumulation_dtype: Dtype of the accumulators.

  Returns:
    Product [*batch, *tokens, outputs], or [..., inputs], in the dtype of `x`.
  """
  w = scatter_kept(values, PackedMask(bits, columns))
  batch = tuple(range(w.ndim - 2))
  contracted = (x.ndim - 1,), (w.ndim - 1 if transpose else w.ndim - 2,)
  return jax.lax.dot_general(
      x,
      w,
      (contracted, (batch, batch)),
      preferred_element_type=accumulation_dtype,
  ).astype(x.dtype)


def packed_gradient(
    x: jax.Array,
    dy: jax.Array,
    bits: jax.Array,
    *,
    size: int,
    columns: int,
    accumulation_dtype: Any,
) -> jax.Array:
  """Computes the gradient of the values: xᵀ @ dy at the kept weights.

  Args:
    x: Inputs [*batch, *tokens, inputs].
    dy: Cotangents [*batch, *tokens, outputs].
    bits: Bits of the mask, as for `packed_matmul`.
    size: Length of the vector of values of a matrix.
    columns: Number of outputs.
    accumulation_dtype: Dtype of the accumulators.

  Returns:
    Gradient [*batch, size], padded with zeros, in the dtype of `x`.
  """
  batch = tuple(range(bits.ndim - 2))
  tokens = tuple(range(len(batch), x.ndim - 1))
  product = jax.lax.dot_general(
      x,
      dy,
      ((tokens, tokens), (batch, batch)),
      preferred_element_type=accumulation_dtype,
  )
  return gather_kept(product.astype(x.dtype), PackedMask(bits, columns), size)


def packed_tangent(
    dx: jax.Array,
    x: jax.Array,
    dvalues: jax.Array,
    values: jax.Array,
    bits: jax.Array,
    **params: Any,
) -> jax.Array:
  """Computes the tangent of `packed_matmul` in x and values."""
  multiply: Callable[..., jax.Array] = functools.partial(
      packed_matmul, transpose=False, **params
  )
  return multiply(dx, values, bits) + multiply(x, dvalues, bits)


def packed_backward(
    dy: jax.Array,
    x: jax.Array,
    values: jax.Array,
    bits: jax.Array,
    **params: Any,
) -> list[jax.Array]:
  """Computes the gradients of `packed_matmul` in x and values."""
  return [
      packed_matmul(dy, values, bits, transpose=True, **params),
      packed_gradient(x, dy, bits, size=values.shape[-1], **params),
  ]


packed_matmul_p = define_primitive('packed_matmul', packed_matmul)
"""Primitive of y = x @ W or x @ Wᵀ; operands x, values, bits."""

packed_gradient_p = define_primitive('packed_gradient', packed_gradient)
"""Primitive of the gradient of the values; operands x, dy, bits."""

packed_tangent_p = define_primitive('packed_tangent', packed_tangent)
"""Primitive of dx @ W + x @ dW; operands dx, x, dvalues, values, bits."""

packed_backward_p = define_primitive(
    'packed_backward', packed_backward, multiple_results=True
)
"""Primitive of dx and dvalues; operands dy, x, values, bits."""


# Differentiation.


def _differentiate_matmul(primals, tangents, **params):
  x, values, bits = primals
  dx, dvalues, _ = tangents
  y = packed_matmul_p.bind(*primals, **params)
  nonzero = [not isinstance(tangent, ad.Zero) for tangent in (dx, dvalues)]
  if all(nonzero) and not params['transpose']:
    del params['transpose']
    return y, packed_tangent_p.bind(dx, x, dvalues, values, bits, **params)
  parts = []
  if nonzero[0]:
    parts.append(packed_matmul_p.bind(dx, values, bits, **params))
  if nonzero[1]:
    parts.append(packed_matmul_p.bind(x, dvalues, bits, **params))
  if not parts:
    # jax sets the method after the class, where type checkers do not see it.
    zero = ad.Zero.from_primal_value(y)  # type: ignore[attr-defined]
    return y, zero
  return y, functools.reduce(ad.add_jaxvals, parts)


ad.primitive_jvps[packed_matmul_p] = _differentiate_matmul
ad.defjvp(
    packed_gradient_p,
    lambda dx, x, dy, bits, **params: packed_gradient_p.bind(
        dx, dy, bits, **params
    ),
    lambda ddy, x, dy, bits, **params: packed_gradient_p.bind(
        x, ddy, bits, **params
    ),
    None,
)


def _transpose_matmul(dy, x, values, bits, *, transpose, **params):
  if ad.is_undefined_primal(x):
    dx = packed_matmul_p.bind(
        dy, values, bits, transpose=not transpose, **params
    )
    return [dx, None, None]
  inputs, outputs = (dy, x) if transpose else (x, dy)
  size = values.aval.shape[-1]
  dvalues = packed_gradient_p.bind(inputs, outputs, bits, size=size, **params)
  return [None, dvalues, None]


def _transpose_gradient(dvalues, x, dy, bits, *, size, **params):
  del size
  is_x = ad.is_undefined_primal(x)
  result = packed_matmul_p.bind(
      dy if is_x else x, dvalues, bits, transpose=is_x, **params
  )
  return [result, None, None] if is_x else [None, result, None]


ad.primitive_transposes[packed_matmul_p] = _transpose_matmul
ad.primitive_transposes[packed_gradient_p] = _transpose_gradient


def _tangent_parts(dx, x, dvalues, values, bits, **params):
  multiply = functools.partial(
      packed_matmul_p.bind, transpose=False, **params
  )
  return multiply(dx, values, bits) + multiply(x, dvalues, bits)


def _backward_parts(dy, x, values, bits, **params):
  size = values.shape[-1]
  return [
      packed_matmul_p.bind(dy, values, bits, transpose=True, **params),
      packed_gradient_p.bind(x, dy, bits, size=size, **params),
  ]


joined.register_parts(packed_tangent_p, _tangent_parts)
joined.register_parts(packed_backward_p, _backward_parts)


def _transpose_tangent(dy, *args, **params):
  unknown = [ad.is_undefined_primal(arg) for arg in args]
  if unknown != [True, False, True, False, False]:
    return joined.transpose_parts(_tangent_parts, dy, args, params)
  _, x, _, values, bits = args
  dx, dvalues = packed_backward_p.bind(dy, x, values, bits, **params)
  return [dx, None, dvalues, None, None]


def _transpose_backward(cotangents, *args, **params):
  dx, dvalues = map(ad.instantiate_zeros, cotangents)
  dy, x, values, bits = args
  unknown = [ad.is_undefined_primal(arg) for arg in args]
  if unknown != [True, False, False, False]:
    return joined.transpose_parts(
        _backward_parts, [dx, dvalues], args, params
    )
  result = packed_tangent_p.bind(dx, x, dvalues, values, bits, **params)
  return [result, None, None, None]


ad.primitive_transposes[packed_tangent_p] = _transpose_tangent
ad.primitive_transposes[packed_backward_p] = _transpose_backward


# Batching. A batch of x only is a further token axis. Any other batch makes a
# stack of matrices, with the batch as the leading axis of all operands.


def _batch_matmul(args, axes, **params):
  x, values, bits = args
  if axes[1] is None and axes[2] is None:
    stacked = values.ndim - 1
    x = jnp.moveaxis(x, axes[0], stacked)
    return packed_matmul_p.bind(x, values, bits, **params), stacked
  return packed_matmul_p.bind(*_stack(args, axes), **params), 0


def _batch_gradient(args, axes, **params):
  return packed_gradient_p.bind(*_stack(args, axes), **params), 0


def _stack(args, axes):
  """Moves or broadcasts the batch to the leading axis of every operand."""
  size = next(
      arg.shape[axis] for arg, axis in zip(args, axes) if axis is not None
  )
  return [
      jnp.broadcast_to(arg, (size, *arg.shape)) if axis is None
      else jnp.moveaxis(arg, axis, 0)
      for arg, axis in zip(args, axes)
  ]


batching.primitive_batchers[packed_matmul_p] = _batch_matmul
batching.primitive_batchers[packed_gradient_p] = _batch_gradient

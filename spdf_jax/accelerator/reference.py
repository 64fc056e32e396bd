# SPDX-License-Identifier: Apache-2.0
"""Reference implementation of the sparse primitives: masked dense matmuls.

It works on every platform and under every transformation, but multiplies zeros:
an infinite input times the zero of a pruned weight is NaN. All functions accept
stacks: the axes of a mask, or of its bits, before its last two are batch axes,
which all operands share as their leading axes.
"""

from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax import packing


def sparse_matmul(
    x: jax.Array,
    w: jax.Array,
    mask: jax.Array | None,
    grad_mask: jax.Array,
    *,
    transpose: bool,
    accumulation_dtype: Any,
    out_sharding: Any,
) -> jax.Array:
  """Multiplies by the kept weights: x @ (mask ⊙ w), or by their transpose.

  Args:
    x: Inputs [*batch, *tokens, inputs], or [..., outputs] with `transpose`.
    w: Weights [*batch, inputs, outputs].
    mask: Mask of the kept weights, of the shape of `w`; `None`: all are kept.
    grad_mask: Mask of the gradient of `w`; does not affect the product.
    transpose: Whether to multiply by the transpose.
    accumulation_dtype: Dtype of the accumulators.
    out_sharding: Sharding of the product, under explicit sharding.

  Returns:
    Product [*batch, *tokens, outputs], or [..., inputs], in the dtype of `x`.
  """
  del grad_mask
  if mask is not None:
    w = _keep(mask, w)
  return _multiply(x, w, transpose, accumulation_dtype, out_sharding)


def sampled_matmul(
    x: jax.Array,
    dy: jax.Array,
    mask: jax.Array,
    *,
    accumulation_dtype: Any,
    out_sharding: Any,
) -> jax.Array:
  """Multiplies over the tokens, at masked entries only: mask ⊙ (xᵀ @ dy).

  Args:
    x: Inputs [*batch, *tokens, inputs].
    dy: Cotangents [*batch, *tokens, outputs].
    mask: Mask of the entries to compute, [*batch, inputs, outputs].
    accumulation_dtype: Dtype of the accumulators.
    out_sharding: Sharding of the product, under explicit sharding.

  Returns:
    Product [*batch, inputs, outputs], zero off the mask, in the dtype of `x`.
  """
  return _keep(mask, _multiply_over_tokens(
      x, dy, mask.ndim - 2, accumulation_dtype, out_sharding
  ))


def packed_matmul(
    x: jax.Array,
    values: jax.Array,
    bits: jax.Array,
    *,
    transpose: bool,
    columns: int,
    accumulation_dtype: Any,
    out_sharding: Any,
) -> jax.Array:
  """Multiplies by packed weights, or by their transpose.

  Args:
    x: Inputs [*batch, *tokens, inputs], or [..., outputs] with `transpose`.
    values: Values of the kept weights, [*batch, size].
    bits: Bits of the mask, uint8 [*batch, inputs, ceil(outputs / 8)].
    transpose: Whether to multiply by the transpose.
    columns: Number of outputs.
    accumulation_dtype: Dtype of the accumulators.
    out_sharding: `None`; packed weights are on one device.

  Returns:
    Product [*batch, *tokens, outputs], or [..., inputs], in the dtype of `x`.
  """
  del out_sharding
  w = packing.scatter_kept(values, packing.PackedMask(bits, columns))
  return _multiply(x, w, transpose, accumulation_dtype, None)


def packed_gradient(
    x: jax.Array,
    dy: jax.Array,
    bits: jax.Array,
    *,
    size: int,
    columns: int,
    accumulation_dtype: Any,
    out_sharding: Any,
) -> jax.Array:
  """Computes the gradient of the values: xᵀ @ dy at the kept weights.

  Args:
    x: Inputs [*batch, *tokens, inputs].
    dy: Cotangents [*batch, *tokens, outputs].
    bits: Bits of the mask, as for `packed_matmul`.
    size: Length of the vector of values of a matrix.
    columns: Number of outputs.
    accumulation_dtype: Dtype of the accumulators.
    out_sharding: `None`; packed weights are on one device.

  Returns:
    Gradient [*batch, size], padded with zeros, in the dtype of `x`.
  """
  del out_sharding
  dw = _multiply_over_tokens(x, dy, bits.ndim - 2, accumulation_dtype, None)
  return packing.gather_kept(dw, packing.PackedMask(bits, columns), size)


def kept_weights(
    w: jax.Array, mask: jax.Array, grad_mask: jax.Array
) -> jax.Array:
  """Returns the weights, with zeros off the mask; see `primitives`."""
  del grad_mask
  return _keep(mask, w)


def _multiply(x, w, transpose, accumulation_dtype, out_sharding):
  batch = tuple(range(w.ndim - 2))
  contracted = (x.ndim - 1,), (w.ndim - 1 if transpose else w.ndim - 2,)
  return jax.lax.dot_general(
      x,
      w,
      (contracted, (batch, batch)),
      preferred_element_type=accumulation_dtype,
      out_sharding=out_sharding,
  ).astype(x.dtype)


def _multiply_over_tokens(x, dy, stacked, accumulation_dtype, out_sharding):
  batch = tuple(range(stacked))
  tokens = tuple(range(stacked, x.ndim - 1))
  return jax.lax.dot_general(
      x,
      dy,
      ((tokens, tokens), (batch, batch)),
      preferred_element_type=accumulation_dtype,
      out_sharding=out_sharding,
  ).astype(x.dtype)


def _keep(mask: jax.Array, w: jax.Array) -> jax.Array:
  # A select, because multiplying by the mask would propagate NaN off the mask.
  return jnp.where(mask, w, jnp.zeros((), w.dtype))

# SPDX-License-Identifier: Apache-2.0
"""Reference implementation of the sparse primitives: masked dense matmuls.

It works on every platform and under every transformation, but multiplies zeros:
an infinite input times the zero of a pruned weight is NaN. All functions accept
stacks: the axes of `mask` before its last two are batch axes, which all
operands share as their leading axes.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp


def sparse_matmul(
    x: jax.Array,
    w: jax.Array,
    mask: jax.Array,
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
    mask: Mask of the kept weights, of the shape of `w`.
    grad_mask: Mask of the gradient of `w`; does not affect the product.
    transpose: Whether to multiply by the transpose.
    accumulation_dtype: Dtype of the accumulators.
    out_sharding: Sharding of the product, under explicit sharding.

  Returns:
    Product [*batch, *tokens, outputs], or [..., inputs], in the dtype of `x`.
  """
  del grad_mask
  batch = tuple(range(w.ndim - 2))
  contracted = (x.ndim - 1,), (w.ndim - 1 if transpose else w.ndim - 2,)
  return jax.lax.dot_general(
      x,
      _keep(mask, w),
      (contracted, (batch, batch)),
      preferred_element_type=accumulation_dtype,
      out_sharding=out_sharding,
  ).astype(x.dtype)


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
  batch = tuple(range(mask.ndim - 2))
  tokens = tuple(range(len(batch), x.ndim - 1))
  product = jax.lax.dot_general(
      x,
      dy,
      ((tokens, tokens), (batch, batch)),
      preferred_element_type=accumulation_dtype,
      out_sharding=out_sharding,
  )
  return _keep(mask, product.astype(x.dtype))


def sparse_matmul_tangent(
    dx: jax.Array,
    x: jax.Array,
    dw: jax.Array,
    w: jax.Array,
    mask: jax.Array,
    grad_mask: jax.Array,
    **params: Any,
) -> jax.Array:
  """Computes a product's tangent: dx @ (mask ⊙ w) + x @ (grad_mask ⊙ dw).

  Args:
    dx: Tangent of x, [*batch, *tokens, inputs].
    x: Inputs of `sparse_matmul`.
    dw: Tangent of w, [*batch, inputs, outputs].
    w: Weights of `sparse_matmul`.
    mask: Mask of the kept weights.
    grad_mask: Mask of the gradient of w.
    **params: Parameters of `sparse_matmul`, without `transpose`.

  Returns:
    Tangent [*batch, *tokens, outputs], in the dtype of `x`.
  """
  multiply: Callable[..., jax.Array] = functools.partial(
      sparse_matmul, transpose=False, **params
  )
  return multiply(dx, w, mask, grad_mask) + multiply(
      x, dw, grad_mask, grad_mask
  )


def sparse_matmul_backward(
    dy: jax.Array,
    x: jax.Array,
    w: jax.Array,
    mask: jax.Array,
    grad_mask: jax.Array,
    *,
    accumulation_dtype: Any,
    out_sharding: tuple[Any, Any],
) -> list[jax.Array]:
  """Computes the gradients of a product in x and w.

  Args:
    dy: Cotangent of the product, [*batch, *tokens, outputs].
    x: Inputs of `sparse_matmul`.
    w: Weights of `sparse_matmul`.
    mask: Mask of the kept weights.
    grad_mask: Mask of the gradient of w.
    accumulation_dtype: Dtype of the accumulators.
    out_sharding: Shardings of dx and dw, under explicit sharding.

  Returns:
    dx = dy @ (mask ⊙ w)ᵀ and dw = grad_mask ⊙ (xᵀ @ dy).
  """
  of_x, of_w = out_sharding
  sums = dict(accumulation_dtype=accumulation_dtype)
  return [
      sparse_matmul(
          dy, w, mask, grad_mask, transpose=True, out_sharding=of_x, **sums
      ),
      sampled_matmul(x, dy, grad_mask, out_sharding=of_w, **sums),
  ]


def _keep(mask: jax.Array, w: jax.Array) -> jax.Array:
  # A select, because multiplying by the mask would propagate NaN off the mask.
  return jnp.where(mask, w, jnp.zeros((), w.dtype))

# SPDX-License-Identifier: Apache-2.0
"""Initial values of revived weights other than zero."""

from collections.abc import Callable
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spdf_jax.sparsity.masks import leaf_keys

PyTree = Any


def scaled_normal(
    scale: float | optax.Schedule,
) -> Callable[[jax.Array, jax.Array, PyTree, PyTree], PyTree]:
  r"""Draws revived weights from a scaled normal distribution.

  In a layer whose kept weights have the standard deviation :math:`\sigma`,
  values are drawn from :math:`N(0, (\mathrm{scale}\ \sigma)^2)`. The SPDF paper
  reports that a "scaled normal" initialization, which it does not specify, is
  no better than zeros.

  Args:
    scale: The standard deviation as a multiple of :math:`\sigma`, or a schedule
      of it; where the schedule is 0, values are zero.

  Returns:
    `(key, count, params, mask) -> values` over trees of leaves `[layers,
    inputs, outputs]`, where `count` is the number of steps taken and `mask` the
    mask before the update; values have the dtype of the parameters and are
    `None` where the mask is.

  Raises:
    ValueError: the scale is a number that is not positive.

  References:
    Thangarasa et al., `SPDF <https://arxiv.org/abs/2303.10464>`_, 2023,
    section 2.2

  Example:
    >>> params = {'w': jnp.ones((1, 2, 2)), 'b': None}
    >>> mask = {'w': jnp.ones((1, 2, 2), bool), 'b': None}
    >>> scaled_normal(0.5)(jax.random.key(0), 0, params, mask)['w'].tolist()
    [[[0.0, 0.0], [0.0, 0.0]]]
  """
  if not callable(scale) and not 0 < scale < math.inf:
    raise ValueError(
        f'scale is {scale}; give a positive multiple of the standard deviation '
        'of the kept weights.'
    )

  def values(key, count, params, mask):
    multiple = scale(count) if callable(scale) else scale

    def draw(p, m, leaf_key):
      dtype = p.dtype if p.dtype.itemsize > 4 else jnp.float32
      weights = jnp.where(m, p, 0).astype(dtype)
      kept = jnp.sum(m, axis=(-2, -1), keepdims=True, dtype=jnp.int32)
      count = jnp.maximum(kept, 1).astype(weights.real.dtype)
      mean = jnp.sum(weights, axis=(-2, -1), keepdims=True) / count
      from_mean = jnp.where(m, weights - mean, 0)
      variance = jnp.sum(
          jnp.square(jnp.abs(from_mean)), axis=(-2, -1), keepdims=True
      ) / count
      normal = jax.random.normal(leaf_key, p.shape, dtype)
      deviation = multiple * jnp.sqrt(variance)
      return (deviation.astype(dtype) * normal).astype(p.dtype)

    kept = jax.tree.map(lambda m, p: p, mask, params)
    return jax.tree.map(draw, kept, mask, leaf_keys(key, kept))

  return values

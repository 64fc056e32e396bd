# SPDX-License-Identifier: Apache-2.0
"""Kept weights of masks, counted fast enough for every training step.

XLA adds up booleans on CPUs one by one. Sums over rows in bytes, which count up
to 255 of them, are vectorized.
"""

import math

import jax
import jax.numpy as jnp

from spdf_jax.accelerator import crossovers


def kept_in_bands(mask: jax.Array) -> jax.Array:
  """Counts the kept weights of each output in bands of rows.

  Args:
    mask: Mask, [*stack, inputs, outputs].

  Returns:
    Counts, uint8 [*stack, bands, outputs]. A band has `crossovers.BLOCK` rows,
    or the largest common divisor of that and the number of inputs.

  Example:
    >>> mask = jnp.arange(64)[:, None] < jnp.array([1, 40])
    >>> kept_in_bands(mask).tolist()
    [[1, 32], [0, 8]]
  """
  *stack, inputs, outputs = mask.shape
  rows = math.gcd(inputs, crossovers.BLOCK)
  bands = mask.reshape(*stack, inputs // rows, rows, outputs)
  return jnp.sum(bands, axis=-2, dtype=jnp.uint8)


def count_kept(bands: jax.Array) -> jax.Array:
  """Counts the kept weights of each matrix.

  Args:
    bands: Result of `kept_in_bands`.

  Returns:
    Counts, int32 [*stack], of matrices of less than 2³¹ weights.

  Example:
    >>> int(count_kept(kept_in_bands(jnp.eye(6, dtype=bool))))
    6
  """
  return jnp.sum(bands, axis=(-2, -1), dtype=jnp.int32)


def are_in_blocks(bands: jax.Array, inputs: int) -> jax.Array | bool:
  """Returns whether masks consist of whole blocks of `crossovers.BLOCK`.

  Args:
    bands: Result of `kept_in_bands`.
    inputs: Number of inputs of the mask.

  Example:
    >>> mask = jnp.eye(2, dtype=bool).repeat(32, 0).repeat(32, 1)
    >>> bool(are_in_blocks(kept_in_bands(mask), 64))
    True
    >>> are_in_blocks(kept_in_bands(mask[:40]), 40)
    False
  """
  side = crossovers.BLOCK
  outputs = bands.shape[-1]
  if inputs % side or outputs % side:
    return False
  blocks = bands.reshape(*bands.shape[:-1], outputs // side, side)
  whole = (blocks == 0) | (blocks == side)
  return jnp.all(whole & (blocks == blocks[..., :1]))

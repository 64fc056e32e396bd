# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of products with block masks, through Triton.

A program computes one tile of the result and reads its list of kept blocks.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
import jax.numpy as jnp


def tokens_per_tile(tokens: int) -> int:
  """Returns the number of tokens of a tile, 0 if they cannot be tiled."""
  return next((t for t in (128, 64, 32, 16) if not tokens % t), 0)


def multiply(
    x: jax.Array, w: jax.Array, kept: jax.Array, *, interpret: bool = False
) -> jax.Array:
  """Multiplies by the kept blocks of a matrix; see `tpu.multiply`."""
  (tokens, inputs), outputs = x.shape, w.shape[1]
  tile, size = tokens_per_tile(tokens), outputs // kept.shape[1]
  counts = jnp.sum(kept, axis=0, dtype=jnp.int32)
  rows = jnp.argsort(~kept, axis=0, stable=True).astype(jnp.int32)

  def kernel(counts, rows, x, w, y):
    def add(k, total):
      at = pl.ds(rows[k, 0] * size, size)
      return total + triton.dot(x[:, at], w[at, :])

    total = jnp.zeros(y.shape, jnp.float32)
    y[...] = jax.lax.fori_loop(0, counts[0], add, total).astype(y.dtype)

  return pl.pallas_call(
      kernel,
      grid=(tokens // tile, kept.shape[1]),
      in_specs=[
          pl.BlockSpec((1,), lambda i, j: (j,)),
          pl.BlockSpec((kept.shape[0], 1), lambda i, j: (0, j)),
          pl.BlockSpec((tile, inputs), lambda i, j: (i, 0)),
          pl.BlockSpec((inputs, size), lambda i, j: (0, j)),
      ],
      out_specs=pl.BlockSpec((tile, size), lambda i, j: (i, j)),
      out_shape=jax.ShapeDtypeStruct((tokens, outputs), x.dtype),
      compiler_params=triton.CompilerParams(),
      interpret=interpret,
  )(counts, rows, x, w)


def sample(
    x: jax.Array, dy: jax.Array, kept: jax.Array, *, interpret: bool = False
) -> jax.Array:
  """Multiplies over the tokens in kept blocks; see `tpu.sample`."""
  (tokens, inputs), outputs = x.shape, dy.shape[1]
  tile, size = tokens_per_tile(tokens), outputs // kept.shape[1]

  def kernel(kept, x, dy, dw):
    def add(i, total):
      at = pl.ds(i * tile, tile)
      return total + triton.dot(x[at, :], dy[at, :], trans_a=True)

    @pl.when(kept[0, 0])
    def _():
      total = jnp.zeros(dw.shape, jnp.float32)
      total = jax.lax.fori_loop(0, tokens // tile, add, total)
      dw[...] = total.astype(dw.dtype)

  return pl.pallas_call(
      kernel,
      grid=kept.shape,
      in_specs=[
          pl.BlockSpec((1, 1), lambda i, j: (i, j)),
          pl.BlockSpec((tokens, size), lambda i, j: (0, i)),
          pl.BlockSpec((tokens, size), lambda i, j: (0, j)),
      ],
      out_specs=pl.BlockSpec((size, size), lambda i, j: (i, j)),
      out_shape=jax.ShapeDtypeStruct((inputs, outputs), x.dtype),
      compiler_params=triton.CompilerParams(),
      interpret=interpret,
  )(kept, x, dy)

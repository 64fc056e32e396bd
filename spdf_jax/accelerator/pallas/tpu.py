# SPDX-License-Identifier: Apache-2.0
"""TPU kernels of products with block masks.

The indices of kept blocks are prefetched scalars, from which the pipeline takes
the blocks to copy; the grid is as long as the longest list.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

_MOST_TOKENS = 512


def tokens_per_tile(tokens: int) -> int:
  """Returns the number of tokens of a tile, 0 if they cannot be tiled."""
  return next((t for t in (_MOST_TOKENS, 256, 128) if not tokens % t), 0)


def multiply(
    x: jax.Array, w: jax.Array, kept: jax.Array, *, interpret: bool = False
) -> jax.Array:
  """Multiplies by the kept blocks of a matrix.

  Args:
    x: Inputs [tokens, inputs].
    w: Weights [inputs, outputs], zero where pruned.
    kept: Whether a block has a kept weight, bool [inputs / size, outputs /
      size].
    interpret: Whether to interpret the kernel, on any device.

  Returns:
    The product [tokens, outputs], summed in float32, in the dtype of `x`.
  """
  tokens, outputs = x.shape[0], w.shape[1]
  tile, size = tokens_per_tile(tokens), outputs // kept.shape[1]
  counts = jnp.sum(kept, axis=0, dtype=jnp.int32)
  # Lists begin with the kept blocks of a column, in ascending order.
  rows = jnp.argsort(~kept, axis=0, stable=True).astype(jnp.int32)
  longest = jnp.maximum(jnp.max(counts), 1)

  def row(j, k, counts, rows):
    # Lists are padded with their last block, which is then not copied again.
    return rows[jnp.minimum(k, jnp.maximum(counts[j] - 1, 0)), j]

  def kernel(counts, rows, x, w, y, total):
    del rows
    k = pl.program_id(2)

    @pl.when(k == 0)
    def _():
      total[...] = jnp.zeros_like(total)

    @pl.when(k < counts[pl.program_id(1)])
    def _():
      total[...] += jnp.dot(
          x[...], w[...], preferred_element_type=jnp.float32
      )

    @pl.when(k == pl.num_programs(2) - 1)
    def _():
      y[...] = total[...].astype(y.dtype)

  return pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=2,
          grid=(tokens // tile, kept.shape[1], longest),
          in_specs=[
              pl.BlockSpec((tile, size), lambda i, j, *at: (i, row(j, *at))),
              pl.BlockSpec((size, size), lambda i, j, *at: (row(j, *at), j)),
          ],
          out_specs=pl.BlockSpec((tile, size), lambda i, j, k, *_: (i, j)),
          scratch_shapes=[pltpu.VMEM((tile, size), jnp.float32)],
      ),
      out_shape=jax.ShapeDtypeStruct((tokens, outputs), x.dtype),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('parallel', 'parallel', 'arbitrary')
      ),
      interpret=interpret,
  )(counts, rows, x, w)


def sample(
    x: jax.Array, dy: jax.Array, kept: jax.Array, *, interpret: bool = False
) -> jax.Array:
  """Multiplies over the tokens, xᵀ @ dy, in kept blocks.

  Args:
    x: Inputs [tokens, inputs].
    dy: Cotangents [tokens, outputs].
    kept: The blocks to compute, bool [inputs / size, outputs / size].
    interpret: Whether to interpret the kernel, on any device.

  Returns:
    The product [inputs, outputs], undefined in other blocks, summed in float32,
    in the dtype of `x`.
  """
  (tokens, inputs), outputs = x.shape, dy.shape[1]
  tile, size = tokens_per_tile(tokens), outputs // kept.shape[1]
  rows, columns = (
      indices.astype(jnp.int32)
      for indices in jnp.nonzero(kept, size=kept.size, fill_value=0)
  )
  blocks = jnp.maximum(jnp.sum(kept, dtype=jnp.int32), 1)

  def kernel(rows, columns, x, dy, dw, total):
    del rows, columns
    i = pl.program_id(1)

    @pl.when(i == 0)
    def _():
      total[...] = jnp.zeros_like(total)

    total[...] += jnp.dot(x[...], dy[...], preferred_element_type=jnp.float32)

    @pl.when(i == pl.num_programs(1) - 1)
    def _():
      dw[...] = total[...].astype(dw.dtype)

  return pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=2,
          grid=(blocks, tokens // tile),
          in_specs=[
              pl.BlockSpec((size, tile), lambda b, i, rows, _: (rows[b], i)),
              pl.BlockSpec((tile, size), lambda b, i, _, cols: (i, cols[b])),
          ],
          out_specs=pl.BlockSpec(
              (size, size), lambda b, i, rows, cols: (rows[b], cols[b])
          ),
          scratch_shapes=[pltpu.VMEM((size, size), jnp.float32)],
      ),
      out_shape=jax.ShapeDtypeStruct((inputs, outputs), x.dtype),
      compiler_params=pltpu.CompilerParams(
          dimension_semantics=('arbitrary', 'arbitrary')
      ),
      interpret=interpret,
  )(rows, columns, x.T, dy)

# SPDX-License-Identifier: Apache-2.0
"""The native kernels as a lowering of the sparse primitives on CPU.

They support float32, and bfloat16 on processors that multiply it, with float32
accumulation. Masks of whole, aligned 32 x 32 blocks are found and multiplied
block by block, in bfloat16 on Intel's processors by the tiles of AMX. They run
with several devices only inside `jax.shard_map`, where each shard calls them.
Everything else falls back to the reference. Masks and weights are arrays or
packed, and every call lists the kept weights again, so a new mask needs no
recompilation. Results differ from the reference in three ways: the order of
summation (about 1e-6 relative), which is fixed for a given number of threads;
pruned weights are not multiplied, so an infinite input gives no NaN there; and
bfloat16 values below 1e-38 are flushed to zero.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import lowerings
from spdf_jax.accelerator import listed_matrix
from spdf_jax.accelerator import primitives
from spdf_jax.accelerator.native import library


def _where_supported(kernel: Callable[..., Any]) -> lowerings.Lowering:
  """Returns a lowering that calls a kernel, and declines what it lacks."""
  def lowering(x, *operands, accumulation_dtype, out_sharding, **params):
    del out_sharding
    if x.dtype.name not in library.DTYPES or accumulation_dtype != jnp.float32:
      return NotImplemented
    if not (lowerings.is_local(x) and library.is_available(x.dtype)):
      return NotImplemented
    return kernel(x, *operands, **params)

  return lowering


@_where_supported
def sparse_matmul(
    x: jax.Array,
    w: jax.Array,
    mask: jax.Array,
    grad_mask: jax.Array,
    *,
    transpose: bool,
) -> jax.Array:
  """Multiplies by the kept weights; see `reference.sparse_matmul`."""
  del grad_mask
  features = w.shape[-2] if transpose else w.shape[-1]
  y = jax.ShapeDtypeStruct((*x.shape[:-1], features), x.dtype)
  return jax.ffi.ffi_call('spdf_sparse_matmul', y)(
      x, w, mask, transpose=transpose
  )


@_where_supported
def sampled_matmul(x: jax.Array, dy: jax.Array, mask: jax.Array) -> jax.Array:
  """Multiplies over the tokens at masked entries; see `reference`."""
  dw = jax.ShapeDtypeStruct(mask.shape, x.dtype)
  return jax.ffi.ffi_call('spdf_sampled_matmul', dw)(x, dy, mask)


@_where_supported
def sparse_matmul_backward(
    dy: jax.Array,
    x: jax.Array,
    w: jax.Array,
    mask: jax.Array,
    grad_mask: jax.Array,
) -> list[jax.Array]:
  """Computes dx and dw; see `primitives.sparse_matmul_backward_p`."""
  results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)]
  return list(
      jax.ffi.ffi_call('spdf_sparse_matmul_backward', results)(
          x, dy, w, mask, grad_mask
      )
  )


@_where_supported
def packed_matmul(
    x: jax.Array,
    values: jax.Array,
    bits: jax.Array,
    *,
    transpose: bool,
    columns: int,
) -> jax.Array:
  """Multiplies by packed weights; see `reference.packed_matmul`."""
  features = bits.shape[-2] if transpose else columns
  y = jax.ShapeDtypeStruct((*x.shape[:-1], features), x.dtype)
  return jax.ffi.ffi_call('spdf_packed_matmul', y)(
      x, values, bits, transpose=transpose, columns=np.int64(columns)
  )


@_where_supported
def packed_gradient(
    x: jax.Array,
    dy: jax.Array,
    bits: jax.Array,
    *,
    size: int,
    columns: int,
) -> jax.Array:
  """Computes the gradient of the values; see `reference.packed_gradient`."""
  dvalues = jax.ShapeDtypeStruct((*bits.shape[:-2], size), x.dtype)
  return jax.ffi.ffi_call('spdf_packed_gradient', dvalues)(
      x, dy, bits, columns=np.int64(columns)
  )


@_where_supported
def packed_backward(
    dy: jax.Array,
    x: jax.Array,
    values: jax.Array,
    bits: jax.Array,
    *,
    columns: int,
) -> list[jax.Array]:
  """Computes dx and dvalues; see `primitives.packed_backward_p`."""
  results = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, values)]
  return list(
      jax.ffi.ffi_call('spdf_packed_backward', results)(
          x, dy, values, bits, columns=np.int64(columns)
      )
  )


def listed_matmul(
    x: jax.Array, values: jax.Array, indices: jax.Array, starts: jax.Array
) -> jax.Array:
  """Multiplies by a listed matrix; see `listed_matrix.listed_matmul`."""
  # The kernels convert values of either dtype, so they need no bfloat16
  # instructions.
  if not (lowerings.is_local(x) and library.is_available()):
    return NotImplemented
  shape = (*x.shape[:-1], starts.shape[0] - 1)
  y = jax.ShapeDtypeStruct(shape, jnp.float32)
  return jax.ffi.ffi_call('spdf_listed_matmul', y)(
      x.astype(jnp.float32), values, indices, starts
  ).astype(x.dtype)


for _primitive, _function in (
    (primitives.sparse_matmul_p, sparse_matmul),
    (primitives.sampled_matmul_p, sampled_matmul),
    (primitives.sparse_matmul_backward_p, sparse_matmul_backward),
    (primitives.packed_matmul_p, packed_matmul),
    (primitives.packed_gradient_p, packed_gradient),
    (primitives.packed_backward_p, packed_backward),
    (listed_matrix.listed_matmul_p, listed_matmul),
):
  lowerings.register_lowering(
      lowerings.NATIVE, _primitive, _function, platform='cpu'
  )

# SPDX-License-Identifier: Apache-2.0
"""Digests of arrays, which show whether they are what was saved."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity.trees import path_name

PyTree = Any


def digest_arrays(tree: PyTree) -> dict[str, str]:
  """Computes a digest of every array in a tree, by path.

  A digest is a sum, modulo 2^32, of hashes of each element's bits and index.
  It is therefore the same for every sharding of the array, and computed where
  the shards are. A change of one element always changes it; other changes go
  unnoticed with a probability of 2^-32.

  Args:
    tree: Arrays; with several processes each may have a part of them.

  Returns:
    Digests in hexadecimal.

  Example:
    >>> digest_arrays({'w': jnp.zeros(2), 'b': jnp.ones(2)})
    {'b': 'f3a9199a', 'w': '11fd02eb'}
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  # Waits for each sum before the next starts: XLA:CPU runs few programs at
  # once, and sums over devices that wait for one another would never end.
  return {
      path_name(path): f'{int(_digest(jnp.asarray(x))):08x}'
      for path, x in leaves
  }


@jax.jit
def _digest(x: jax.Array) -> jax.Array:
  bits = _words(x)
  index = jnp.zeros(bits.shape, jnp.uint32)
  for axis, size in enumerate(bits.shape):
    index = index * np.uint32(size % 2**32) + jax.lax.broadcasted_iota(
        jnp.uint32, bits.shape, axis
    )
  # The final mix of MurmurHash3, which maps different words to different ones.
  word = bits ^ (index * np.uint32(0x9E3779B1))
  word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
  word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
  return (word ^ (word >> 16)).sum(dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
  """Returns the bits of an array as uint32, two words per 64-bit element."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  bits = min(8 * x.dtype.itemsize, 32)
  return jax.lax.bitcast_convert_type(x, f'uint{bits}').astype(jnp.uint32)

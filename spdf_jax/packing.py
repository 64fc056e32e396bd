# SPDX-License-Identifier: Apache-2.0
"""Packed matrices: the values of kept weights in order, and a bit per weight.

A float32 matrix then takes 4 bytes per kept weight and one bit per weight.
Values are in row-major order. Stacked matrices have one vector of values each,
all as long as the largest number of kept weights in the stack and padded with
zeros. Packing copies values and does no arithmetic, so unpacking restores a
matrix that is zero off the mask bit for bit.

This is the format of compact storage in training, of the native kernels and of
compact exports. Masks in NumPy arrays are packed and unpacked by NumPy, on the
host.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMask:
  """A mask with one bit per weight; a pytree node.

  Attributes:
    bits: uint8 [..., rows, ceil(columns / 8)]; the lowest bit belongs to the
      first column, bits beyond the last column are 0.
    columns: Number of columns of the matrix.

  Example:
    >>> packed = pack_mask(jnp.eye(3, 9, dtype=bool))
    >>> packed.bits.tolist(), packed.shape
    ([[1, 0], [2, 0], [4, 0]], (3, 9))
  """

  bits: Array
  columns: int = dataclasses.field(metadata={'static': True})

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the unpacked mask."""
    return (*self.bits.shape[:-1], self.columns)


def pack_mask(mask: Array) -> PackedMask:
  """Packs a mask.

  Args:
    mask: bool [..., rows, columns].

  Returns:
    The packed mask, an eighth of the size.

  Example:
    >>> pack_mask(jnp.array([[True, False, True]])).bits.tolist()
    [[5]]
  """
  numpy = np if isinstance(mask, np.ndarray) else jnp
  bits = numpy.packbits(mask, axis=-1, bitorder='little')
  return PackedMask(bits, mask.shape[-1])


def unpack_mask(packed: PackedMask) -> Array:
  """Unpacks a mask; the inverse of `pack_mask`.

  Args:
    packed: The packed mask.

  Returns:
    bool [..., rows, columns].

  Example:
    >>> unpack_mask(pack_mask(jnp.eye(2, dtype=bool))).tolist()
    [[True, False], [False, True]]
  """
  numpy = np if isinstance(packed.bits, np.ndarray) else jnp
  return numpy.unpackbits(
      packed.bits, axis=-1, count=packed.columns, bitorder='little'
  ).astype(bool)


def gather_kept(w: jax.Array, packed: PackedMask, size: int) -> jax.Array:
  """Gathers the kept values of matrices.

  Args:
    w: Matrices [..., rows, columns].
    packed: Packed mask of the shape of `w`.
    size: Length of each vector of values; further kept values are discarded.

  Returns:
    Values [..., size] in row-major order, padded with zeros.

  Example:
    >>> mask = pack_mask(jnp.array([[True, False], [True, True]]))
    >>> gather_kept(jnp.array([[1, 2], [3, 4]]), mask, 5).tolist()
    [1, 3, 4, 0, 0]
  """
  return _over_stack(functools.partial(_gather, size=size), w, packed)


def scatter_kept(values: jax.Array, packed: PackedMask) -> jax.Array:
  """Scatters kept values into matrices that are zero elsewhere.

  Args:
    values: Values [..., size], as `gather_kept` returns them.
    packed: The packed mask.

  Returns:
    Matrices [..., rows, columns].

  Example:
    >>> mask = pack_mask(jnp.array([[True, False], [True, True]]))
    >>> scatter_kept(jnp.array([1, 3, 4, 0, 0]), mask).tolist()
    [[1, 0], [3, 4]]
  """
  return _over_stack(_scatter, values, packed)


def _over_stack(f, x, packed):
  for _ in packed.shape[:-2]:
    f = jax.vmap(f)
  return f(jnp.asarray(x), packed)


def _gather(w, packed, size):
  indices = _kept_indices(packed, size)
  return w.reshape(-1).at[indices].get(mode='fill', fill_value=0)


def _scatter(values, packed):
  indices = _kept_indices(packed, values.shape[0])
  rows, columns = packed.shape
  flat = jnp.zeros(rows * columns, values.dtype)
  return flat.at[indices].set(values, mode='drop').reshape(packed.shape)


def _kept_indices(packed, size):
  """Returns the flat indices of kept weights, padded with an invalid index."""
  rows, columns = packed.shape
  mask = unpack_mask(packed).reshape(-1)
  return jnp.nonzero(mask, size=size, fill_value=rows * columns)[0]

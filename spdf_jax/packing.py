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

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
PyTree = Any


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


def is_packed(mask: PyTree) -> bool:
  """Returns whether a mask has packed leaves.

  Example:
    >>> is_packed({'w': pack_mask(jnp.eye(2, dtype=bool)), 'b': None})
    True
  """
  leaves = jax.tree.leaves(mask, is_leaf=_is_packed)
  return any(map(_is_packed, leaves))


def map_packed(f: Callable[[PackedMask], Any], mask: PyTree) -> PyTree:
  """Replaces the packed leaves of a mask; other leaves are unchanged.

  Args:
    f: Function of a packed mask.
    mask: A mask with leaves of booleans, packed leaves and `None`.

  Returns:
    The mask, with the results of `f` in place of packed leaves.

  Example:
    >>> mask = {'w': pack_mask(jnp.eye(2, dtype=bool)), 'b': None}
    >>> map_packed(unpack_mask, mask)['w'].tolist()
    [[True, False], [False, True]]
  """
  return jax.tree.map(
      lambda m: f(m) if _is_packed(m) else m, mask, is_leaf=_is_packed
  )


_is_packed = lambda x: isinstance(x, PackedMask)


def kept_entries(mask: Array | PackedMask) -> Array | bool:
  """Returns which entries of an array are kept weights.

  Args:
    mask: The mask of the array; packed if the array is a vector of values, of
      which all are kept.

  Returns:
    bool, to be broadcast to the array.

  Example:
    >>> kept_entries(pack_mask(jnp.eye(2, dtype=bool)))
    True
  """
  return True if isinstance(mask, PackedMask) else mask


def count_kept(mask: Array | PackedMask, axes: tuple[int, ...]) -> jax.Array:
  """Counts the kept weights of layers.

  Args:
    mask: bool, or packed.
    axes: Axes of a layer, not negative; all others index layers.

  Returns:
    uint32, to be broadcast to the array of the mask, or to the values.

  Raises:
    ValueError: the last two axes of a packed mask are not both of a layer.

  Example:
    >>> mask = jnp.eye(3, dtype=bool)
    >>> count_kept(mask, (0, 1)).tolist(), count_kept(pack_mask(mask), (0, 1))
    ([[3]], Array([3], dtype=uint32))
  """
  if not isinstance(mask, PackedMask):
    return jnp.sum(mask, axes, jnp.uint32, keepdims=True)
  ndim = len(mask.shape)
  if not {ndim - 2, ndim - 1} <= set(axes):
    raise ValueError(
        f'a packed mask of shape {mask.shape} has layers along the axes '
        f'{sorted(axes)}, and kept values are those of the last two; leave the '
        'state dense.'
    )
  of_matrices = jnp.sum(
      jax.lax.population_count(mask.bits), (-2, -1), jnp.uint32
  )
  outer = tuple(axis for axis in axes if axis < ndim - 2)
  return jnp.sum(of_matrices, outer, jnp.uint32, keepdims=True)[..., None]


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


def unpack_values(
    values: jax.Array, mask: Array | PackedMask | None
) -> jax.Array:
  """Scatters values, or returns an array unchanged if its mask is not packed.

  Example:
    >>> mask = pack_mask(jnp.eye(2, dtype=bool))
    >>> unpack_values(jnp.array([3, 5]), mask).tolist()
    [[3, 0], [0, 5]]
  """
  if not isinstance(mask, PackedMask):
    return values
  return scatter_kept(values, mask)


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

"""Packed matrices: the values of kept weights in order, and a bit per weight.

A matrix of which few weights are kept takes 4 bytes per kept weight and one
bit per weight. Values come row by row; those of stacked matrices, in a row each
of one length, which is the most that one of them keeps: what is left over is
zero. Everything here moves bits and computes nothing, so a matrix that is zero
elsewhere comes back bit for bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedMask:
  """A mask of a bit per weight; a pytree node.

  Attributes:
    bits: uint8 [..., rows, ceil(columns / 8)]; the lowest bit is the first
      column's, bits beyond the last column are 0.
    columns: Columns of the matrix.

  Example:
    >>> packed = pack_mask(jnp.eye(3, 9, dtype=bool))
    >>> packed.bits.tolist(), packed.shape
    ([[1, 0], [2, 0], [4, 0]], (3, 9))
  """

  bits: jax.Array
  columns: int = dataclasses.field(metadata={'static': True})

  @property
  def shape(self) -> tuple[int, ...]:
    """Of the mask that is packed."""
    return (*self.bits.shape[:-1], self.columns)


def pack_mask(mask: jax.Array) -> PackedMask:
  """Packs a mask.

  Args:
    mask: bool [..., rows, columns].

  Returns:
    The same, an eighth as large.

  Example:
    >>> pack_mask(jnp.array([[True, False, True]])).bits.tolist()
    [[5]]
  """
  bits = jnp.packbits(mask, axis=-1, bitorder='little')
  return PackedMask(bits, mask.shape[-1])


def unpack_mask(packed: PackedMask) -> jax.Array:
  """Undoes `pack_mask`.

  Args:
    packed: The mask.

  Returns:
    bool [..., rows, columns].

  Example:
    >>> unpack_mask(pack_mask(jnp.eye(2, dtype=bool))).tolist()
    [[True, False], [False, True]]
  """
  return jnp.unpackbits(
      packed.bits, axis=-1, count=packed.columns, bitorder='little'
  ).astype(bool)


def gather_kept(w: jax.Array, packed: PackedMask, size: int) -> jax.Array:
  """Takes the kept values out of matrices.

  Args:
    w: [..., rows, columns].
    packed: The mask, of that shape.
    size: Room for the values of a matrix; those it has no room for are lost.

  Returns:
    [..., size], in the order of rows; zero after the last value.

  Example:
    >>> mask = pack_mask(jnp.array([[True, False], [True, True]]))
    >>> gather_kept(jnp.array([[1, 2], [3, 4]]), mask, 5).tolist()
    [1, 3, 4, 0, 0]
  """
  return _over_stack(functools.partial(_gather, size=size), w, packed)


def scatter_kept(values: jax.Array, packed: PackedMask) -> jax.Array:
  """Puts kept values back into matrices that are zero elsewhere.

  Args:
    values: [..., size], as `gather_kept` returns them.
    packed: The mask.

  Returns:
    [..., rows, columns].

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
  places = _places(packed, size)
  return w.reshape(-1).at[places].get(mode='fill', fill_value=0)


def _scatter(values, packed):
  places = _places(packed, values.shape[0])
  rows, columns = packed.shape
  flat = jnp.zeros(rows * columns, values.dtype)
  return flat.at[places].set(values, mode='drop').reshape(packed.shape)


def _places(packed, size):
  """Returns where kept weights lie; past the matrix where there are none."""
  rows, columns = packed.shape
  mask = unpack_mask(packed).reshape(-1)
  return jnp.nonzero(mask, size=size, fill_value=rows * columns)[0]

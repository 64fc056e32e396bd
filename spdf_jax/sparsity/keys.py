"""Sort keys of the entries of a layer: uint32, smaller keys rank first."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from spdf_jax.sparsity import random_bits

Shape = tuple[int, ...]


class Layers(NamedTuple):
  """Entries of one leaf, `[..., a, b]`, or of one of its layers, `[a, b]`."""

  scores: jax.Array | None
  """Scores, the first key of an entry; `None`: all are equal."""

  among: jax.Array | None
  """Mask of the entries that may be kept; `None`: all."""

  words: jax.Array | None
  """Key words of the random bits that break ties; `None`: no random bits."""

  number: jax.Array | None = None
  """The index of each layer in the leaf, uint32 `[...]`."""


def check_rankable(scores: jax.Array) -> None:
  """Raises TypeError unless scores are real and of at most 32 bits."""
  dtype = jnp.dtype(scores.dtype)
  small = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize <= 2
  real = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4
  if not (small or real or dtype == jnp.uint32):
    raise TypeError(
        f'scores have dtype {dtype}; cast them to a real type of at most 32 '
        'bits, e.g. scores.astype(jnp.float32).'
    )


def number_of_keys(layer: Layers) -> int:
  """Returns the number of keys that rank the entries of a layer, 1 or 2."""
  return (layer.scores is not None) + (layer.words is not None)


def read_key(layer: Layers, i: int, shape: Shape) -> jax.Array:
  """Returns the i-th key of every entry of a layer: score, then random bits.

  Args:
    layer: The entries.
    i: Index of the key.
    shape: `(inputs, outputs)` of the layer.

  Returns:
    uint32 of the shape.
  """
  if i or layer.scores is None:
    return ~random_bits.bits_of_layer(layer.words, layer.number, shape)
  return ~_sortable_bits(layer.scores)


def compare(
    layer: Layers, shape: Shape, lasts: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
  """Compares the entries of a layer with an entry of given keys.

  Args:
    layer: The entries.
    shape: `(inputs, outputs)` of the layer.
    lasts: The keys of the other entry, or a prefix of them.

  Returns:
    Two masks of the entries that may be kept: those that rank before the other
    entry, and those with the same keys.
  """
  before = jnp.zeros(shape, bool)
  equal = jnp.ones(shape, bool) if layer.among is None else layer.among
  for i, last in enumerate(lasts):
    key = read_key(layer, i, shape)
    before |= equal & (key < last)
    equal &= key == last
  return before, equal


def _sortable_bits(x: jax.Array) -> jax.Array:
  """Maps scores to uint32 such that larger scores have larger integers."""
  if x.dtype == jnp.uint32:
    return x
  x = x.astype(jnp.float32)
  # Maps -0.0 to 0.0, and NaN below all numbers.
  bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
  ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(2**31))
  return jnp.where(jnp.isnan(x), jnp.uint32(0), ordered)

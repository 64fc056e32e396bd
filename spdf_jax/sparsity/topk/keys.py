# SPDX-License-Identifier: Apache-2.0
"""Sort keys of the entries of a layer: uint32, smaller keys rank first.

The last key is made of random bits, computed where they are used:
`jax.random.bits` gives the same bits, but on CPU it needs about 16 bytes of
scratch memory per value of the whole array, and it does not follow the sharding
of the array.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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

  first: tuple[jax.Array, jax.Array] | None = None
  """Row and column of the entry that ranks first, int32 `[...]`; `None`: none
  is preferred."""


def number_of_keys(layer: Layers) -> int:
  """Returns the number of keys that rank the entries of a layer, 1 to 3."""
  return _score_keys(layer.scores) + (layer.words is not None)


def _score_keys(scores: jax.Array | None) -> int:
  """Returns the number of 32-bit keys of a score."""
  if scores is None:
    return 0
  bits = 8 * scores.dtype.itemsize
  if jnp.issubdtype(scores.dtype, jnp.complexfloating):
    bits //= 2
  return max(1, bits // 32)


def comparable(scores: list[jax.Array]) -> list[jax.Array]:
  """Casts scores of different dtypes to one, so that their keys compare.

  Args:
    scores: Arrays of scores.

  Returns:
    The scores, as float32 or float64 where their dtypes differ.
  """
  if len({x.dtype for x in scores}) == 1:
    return scores
  reals = [
      jnp.abs(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
      for x in scores
  ]
  wide = any(x.dtype.itemsize == 8 for x in reals)
  return [x.astype(jnp.float64 if wide else jnp.float32) for x in reals]


def read_key(layer: Layers, i: int, shape: Shape) -> jax.Array:
  """Returns the i-th key of every entry of a layer.

  The first keys are those of the score, one of 32 bits or two of 64; the last
  is made of random bits.

  Args:
    layer: The entries.
    i: Index of the key.
    shape: `(inputs, outputs)` of the layer.

  Returns:
    uint32 of the shape.
  """
  scores: Any = layer.scores
  if i == _score_keys(scores):
    key = ~draw(layer, shape)
  else:
    key = ~sortable_bits(scores)
    if key.dtype == jnp.uint64:
      key = (key if i else key >> jnp.uint64(32)).astype(jnp.uint32)
  if layer.first is None:
    return key
  row, column = (
      jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1)
  )
  is_first = (row == layer.first[0]) & (column == layer.first[1])
  return jnp.where(is_first, jnp.uint32(0), key)


def draw(layer: Layers, shape: Shape) -> jax.Array:
  """Draws the random bits of a layer's entries, uint32 of the shape."""
  words: Any = layer.words
  number: Any = layer.number
  return bits_of_layer(words, number, shape)


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


def sortable_bits(x: jax.Array) -> jax.Array:
  """Maps scores to uint32 (uint64 if wide) so that larger are larger integers.

  Args:
    x: Scores; complex ones are ranked by magnitude, NaN below all numbers.

  Returns:
    Unsigned integers of the shape of `x`.

  Example:
    >>> bits = sortable_bits(jnp.array([-1., jnp.nan, 2., 0.]))
    >>> jnp.argsort(bits).tolist()
    [1, 0, 3, 2]
  """
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.abs(x)
  wide = x.dtype.itemsize == 8
  uint = jnp.uint64 if wide else jnp.uint32
  sign = jnp.asarray(1, uint) << (63 if wide else 31)
  if jnp.issubdtype(x.dtype, jnp.unsignedinteger) or x.dtype == bool:
    return x.astype(uint)
  if jnp.issubdtype(x.dtype, jnp.integer):
    signed = x.astype(jnp.int64 if wide else jnp.int32)
    return jax.lax.bitcast_convert_type(signed, uint) ^ sign
  x = x.astype(jnp.float64 if wide else jnp.float32)
  bits = jax.lax.bitcast_convert_type(x, uint)
  # Maps -0.0 to 0.0. CPUs that flush denormals compare them as equal to zero,
  # so the comparison is of bits.
  bits = jnp.where(bits == sign, jnp.zeros_like(bits), bits)
  ordered = jnp.where(bits & sign != 0, ~bits, bits | sign)
  return jnp.where(jnp.isnan(x), jnp.zeros_like(bits), ordered)

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def key_words(key: jax.Array) -> jax.Array:
  """Returns the two words of a typed key that `bits_of_layer` draws from.

  Args:
    key: A typed PRNG key. For implementations other than threefry2x32, the
      words are the key's first random bits.

  Returns:
    uint32 `[2]`.

  Raises:
    ValueError: `key` is not one typed key.

  Example:
    >>> key_words(jax.random.key(7)).tolist()
    [0, 7]
  """
  dtype = getattr(key, 'dtype', None)
  typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
  if not typed or key.shape:
    given = f'{dtype}{list(key.shape)}' if dtype is not None else repr(key)
    raise ValueError(f'key is {given}; give one typed key, jax.random.key(0).')
  if str(jax.random.key_impl(key)) == 'threefry2x32':
    return jax.random.key_data(key)
  return jax.random.bits(key, (2,), jnp.uint32)


def bits_of_layer(
    words: jax.Array, number: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
  """Computes the random bits of one layer of a stack.

  Args:
    words: uint32 `[2]`, from `key_words`.
    number: Index of the layer, uint32.
    shape: `(inputs, outputs)` of a layer, fewer than 2^31 entries.

  Returns:
    `jax.random.bits(key, (layers, *shape), 'uint32')[number]`.

  Example:
    >>> key = jax.random.key(0)
    >>> layer = bits_of_layer(key_words(key), jnp.uint32(2), (4, 8))
    >>> bool((layer == jax.random.bits(key, (3, 4, 8), 'uint32')[2]).all())
    True
  """
  row, column = (
      jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (0, 1)
  )
  high, first = _product(number, shape[0] * shape[1])
  low = first + row * jnp.uint32(shape[1]) + column
  return _threefry(words, high + (low < first).astype(jnp.uint32), low)


def _threefry(words: jax.Array, high: jax.Array, low: jax.Array) -> jax.Array:
  """Computes 32 random bits per position `high * 2^32 + low`.

  The bits are the exclusive or of the two output words of the Threefry-2x32
  cipher with 20 rounds (Salmon et al., `Parallel Random Numbers: As Easy as
  1, 2, 3 <https://doi.org/10.1145/2063384.2063405>`_, 2011).
  """
  keys = (words[0], words[1], words[0] ^ words[1] ^ jnp.uint32(_PARITY))
  x, y = high + keys[0], low + keys[1]
  for i in range(5):
    for shift in _ROTATIONS[i % 2]:
      x = x + y
      y = x ^ (y << shift | y >> (32 - shift))
    x = x + keys[(i + 1) % 3]
    y = y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
  return x ^ y


def _product(x: jax.Array, y: int) -> tuple[jax.Array, jax.Array]:
  """Returns the high and low words of the product of two uint32 numbers."""
  half = jnp.uint32(2**16 - 1)
  x_high, x_low = x >> 16, x & half
  y_high, y_low = jnp.uint32(y >> 16), jnp.uint32(y & 0xffff)
  middle = x_high * y_low + (x_low * y_low >> 16)
  carry = x_low * y_high + (middle & half)
  high = x_high * y_high + (middle >> 16) + (carry >> 16)
  return high, x * jnp.uint32(y)

# SPDX-License-Identifier: Apache-2.0
"""Random bits of single layers of an array, computed where they are used.

`jax.random.bits` gives the same bits, but on CPU it needs about 16 bytes of
scratch memory per value of the whole array, and it does not follow the sharding
of the array.
"""

import jax
import jax.numpy as jnp

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
  return jax.random.bits(key, (2,))


def bits_of_layer(
    words: jax.Array, number: jax.Array, shape: tuple[int, ...]
) -> jax.Array:
  """Computes the random bits of one layer of a stack.

  Args:
    words: uint32 `[2]`, from `key_words`.
    number: Index of the layer, uint32.
    shape: `(inputs, outputs)` of a layer, fewer than 2^31 entries.

  Returns:
    `jax.random.bits(key, (layers, *shape))[number]`, uint32.

  Example:
    >>> key = jax.random.key(0)
    >>> layer = bits_of_layer(key_words(key), jnp.uint32(2), (4, 8))
    >>> bool((layer == jax.random.bits(key, (3, 4, 8))[2]).all())
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

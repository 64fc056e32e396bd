"""Random bits of single positions of an array, computed where they are used.

`jax.random.bits` gives the same bits, but keeps whole arrays in memory while it
computes them on CPU (some 16 bytes per value), and knows no sharding of its own
to compute them in.
"""

import jax
import jax.numpy as jnp

from spdf_jax.sparsity.topk.limbs import Limbs

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def key_words(key: jax.Array) -> jax.Array:
  """Returns the two words of a typed key that `bits_at` draws from.

  Args:
    key: A typed PRNG key. One of another implementation than threefry2x32
      gives its first random bits.

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


def bits_at(words: jax.Array, position: Limbs) -> jax.Array:
  r"""Computes 32 random bits for every position.

  The bits are the two output words of the Threefry-2x32 cipher (20 rounds) of
  the position's limbs, combined by exclusive or; those of position :math:`i`
  are the :math:`i`-th of `jax.random.bits(key, shape)` in row-major order.

  Args:
    words: uint32 `[2]`, from `key_words`.
    position: Where; any shape.

  Returns:
    uint32 of the positions' shape.

  References:
    Salmon et al., `Parallel Random Numbers: As Easy as 1, 2, 3
    <https://doi.org/10.1145/2063384.2063405>`_, 2011

  Example:
    >>> key = jax.random.key(0)
    >>> third = bits_at(key_words(key), Limbs(jnp.uint32(0), jnp.uint32(2)))
    >>> bool(third == jax.random.bits(key, (4,))[2])
    True
  """
  words = (words[0], words[1], words[0] ^ words[1] ^ jnp.uint32(_PARITY))
  x, y = position.high + words[0], position.low + words[1]
  for i in range(5):
    for shift in _ROTATIONS[i % 2]:
      x = x + y
      y = x ^ (y << shift | y >> (32 - shift))
    x = x + words[(i + 1) % 3]
    y = y + words[(i + 2) % 3] + jnp.uint32(i + 1)
  return x ^ y

# SPDX-License-Identifier: Apache-2.0
"""Exact counts over many layers, beyond the range of int32."""

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_MOST = 2**48 - 1


class Wide(NamedTuple):
  """A non-negative integer below 2^48, `high * 2^16 + low`.

  `<` compares the integers; in `a - b`, `b` must not be larger than `a`.
  """

  high: jax.Array
  """The upper 32 bits, uint32."""

  low: jax.Array
  """The lower 16 bits, uint32."""

  def __lt__(  # type: ignore[override]  # hides tuple.__lt__
      self, other: 'Wide'
  ) -> jax.Array:
    lower = (self.high == other.high) & (self.low < other.low)
    return (self.high < other.high) | lower

  def __sub__(self, other: 'Wide') -> 'Wide':
    borrow = (self.low < other.low).astype(jnp.uint32)
    low = (self.low - other.low) & 0xffff
    return Wide(self.high - other.high - borrow, low)


def to_wide(number: int | jax.Array) -> Wide:
  """Converts a non-negative integer; 2^48 - 1 replaces larger ones.

  Args:
    number: A Python int, or a pair of uint32, the high word first, as a tuple
      or an array `[2]`; a pair may be traced.

  Returns:
    The integer.

  Example:
    >>> [int(part) for part in to_wide(3 * 2**16 + 7)]
    [3, 7]
  """
  words: Any = number
  if isinstance(number, (int, np.integer)):
    words = np.array(divmod(min(int(number), _MOST), 2**32), np.uint32)
  high, low = (jnp.asarray(word, jnp.uint32) for word in words)
  fits = high < 2**16
  return Wide(
      jnp.where(fits, high << 16 | low >> 16, np.uint32(_MOST >> 16)),
      jnp.where(fits, low & 0xffff, _MOST & 0xffff),
  )


def to_int32(number: Wide) -> jax.Array:
  """Converts to int32; 2^31 - 1 replaces larger numbers.

  Example:
    >>> int(to_int32(to_wide(2**40)))
    2147483647
  """
  bits = (number.high << 16 | number.low).astype(jnp.int32)
  return jnp.where(number.high < 2**15, bits, 2**31 - 1)


def total(counts: jax.Array) -> Wide:
  """Adds up counts of at most 2^16 layers.

  Args:
    counts: int32 `[layers, ...]`; the sum over one layer must fit into int32.

  Returns:
    The exact sum.

  Example:
    >>> int(total(jnp.full(6, 2**30)).high) == 6 * 2**14
    True
  """
  rows = counts.reshape(len(counts), -1)
  rows = jnp.sum(rows, axis=1, dtype=jnp.int32).astype(jnp.uint32)
  low = jnp.sum(rows & 0xffff, dtype=jnp.uint32)
  high = jnp.sum(rows >> 16, dtype=jnp.uint32)
  return Wide(high + (low >> 16), low & 0xffff)

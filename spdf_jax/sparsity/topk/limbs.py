"""Exact integers up to 2^64 as pairs of uint32: counts over whole models."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Limbs(NamedTuple):
  """Non-negative integers `high * 2^32 + low`, elementwise.

  They add, subtract (what is no larger) and compare as integers do.
  """

  high: jax.Array
  """The upper 32 bits, uint32."""

  low: jax.Array
  """The lower 32 bits, uint32."""

  def __add__(self, other: 'Limbs') -> 'Limbs':
    low = self.low + other.low
    carry = (low < other.low).astype(jnp.uint32)
    return Limbs(self.high + other.high + carry, low)

  def __sub__(self, other: 'Limbs') -> 'Limbs':
    borrow = (self.low < other.low).astype(jnp.uint32)
    return Limbs(self.high - other.high - borrow, self.low - other.low)

  def __ge__(self, other: 'Limbs') -> jax.Array:
    lower = (self.high == other.high) & (self.low >= other.low)
    return (self.high > other.high) | lower


def to_limbs(value: int | np.ndarray) -> Limbs:
  """Splits non-negative integers of the host.

  Args:
    value: A Python int, or an array of ints, below 2^64.

  Returns:
    The limbs.

  Raises:
    OverflowError: a value is negative or 2^64 and more.

  Example:
    >>> [int(limb) for limb in to_limbs(3 * 2**32 + 7)]
    [3, 7]
  """
  wide = np.asarray(value, np.uint64)
  halves = wide >> 32, wide & 0xffffffff
  return Limbs(*(jnp.asarray(half.astype(np.uint32)) for half in halves))


def minimum(a: Limbs, b: Limbs) -> Limbs:
  """Returns the smaller of a and b."""
  b_is_smaller = a >= b
  return Limbs(*(jnp.where(b_is_smaller, y, x) for x, y in zip(a, b)))


def multiply(a: jax.Array, b: int | jax.Array) -> Limbs:
  """Returns the product of two uint32, by halves of 16 bits."""
  a, b = jnp.uint32(a), jnp.uint32(b)
  half = lambda x: (x >> 16, x & 0xffff)
  (a_high, a_low), (b_high, b_low) = half(a), half(b)
  total = Limbs(a_high * b_high, a_low * b_low)
  for cross in (a_high * b_low, a_low * b_high):
    total += Limbs(cross >> 16, cross << 16)
  return total


def total(counts: jax.Array) -> Limbs:
  """Adds up non-negative int32 `[layers, ...]` over the layers, exactly."""
  low = counts.astype(jnp.uint32)
  x = Limbs(jnp.zeros_like(low), low)
  while (layers := x.low.shape[0]) > 1:
    half = layers // 2
    parts = zip(*(jnp.split(limb, (half, 2 * half)) for limb in x))
    first, second, rest = (Limbs(*part) for part in parts)
    x = Limbs(*map(jnp.concatenate, zip(first + second, rest)))
  return Limbs(*(limb[0] for limb in x))

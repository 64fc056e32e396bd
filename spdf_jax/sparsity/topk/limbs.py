"""Exact integers up to 2^64 as pairs of uint32: counts over whole models."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Limbs(NamedTuple):
  """Non-negative integers `high * 2^32 + low`, elementwise."""

  high: jax.Array
  """The upper 32 bits, uint32."""

  low: jax.Array
  """The lower 32 bits, uint32."""


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


def add(a: Limbs, b: Limbs) -> Limbs:
  """Returns a + b."""
  low = a.low + b.low
  return Limbs(a.high + b.high + (low < b.low).astype(jnp.uint32), low)


def subtract(a: Limbs, b: Limbs) -> Limbs:
  """Returns a - b, where b is at most a."""
  borrow = (a.low < b.low).astype(jnp.uint32)
  return Limbs(a.high - b.high - borrow, a.low - b.low)


def at_least(a: Limbs, b: Limbs) -> jax.Array:
  """Returns whether a >= b."""
  return (a.high > b.high) | ((a.high == b.high) & (a.low >= b.low))


def minimum(a: Limbs, b: Limbs) -> Limbs:
  """Returns the smaller of a and b."""
  b_is_smaller = at_least(a, b)
  return Limbs(*(jnp.where(b_is_smaller, y, x) for x, y in zip(a, b)))


def multiply(a: jax.Array, b: int | jax.Array) -> Limbs:
  """Returns the product of two uint32, by halves of 16 bits."""
  a, b = jnp.uint32(a), jnp.uint32(b)
  half = lambda x: (x >> 16, x & 0xffff)
  (a_high, a_low), (b_high, b_low) = half(a), half(b)
  low = Limbs(jnp.zeros_like(a * b), a_low * b_low)
  high = Limbs(a_high * b_high, jnp.zeros_like(a * b))
  total = add(low, high)
  for cross in (a_high * b_low, a_low * b_high):
    total = add(total, Limbs(cross >> 16, cross << 16))
  return total


def sums_from_the_end(x: Limbs) -> Limbs:
  """Returns what `x[i:]` adds up to, for every i of the last axis."""
  return jax.lax.associative_scan(add, x, reverse=True, axis=x.low.ndim - 1)

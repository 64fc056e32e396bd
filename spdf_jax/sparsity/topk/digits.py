"""Integers digit by digit: how keys are cut up and their digits counted."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

_WIDEST_DIGIT = 11
_SPARE_BINS = 16


class Counting(NamedTuple):
  """A way to count digits: `SCATTER`, or `COMPARE`."""

  digit: int
  """Bits looked at in one pass over the units, at most."""

  count: Callable[[jax.Array, jax.Array, int], jax.Array]
  """`(digits, left, bins) -> int32 [..., bins]`, where `left` digits lie in
  the bins and all others are larger."""


def split(width: int, counting: Counting) -> tuple[int, jax.Array]:
  """Splits a key of `width` bits: bits per digit, and where digits begin.

  All digits are alike, so the last may see bits of the one before again. The
  first entry of the shifts is `width`, where nothing is known yet.
  """
  passes = -(-width // counting.digit)
  digit = -(-width // passes)
  starts = [max(0, width - digit * (i + 1)) for i in range(passes)]
  return digit, jnp.array([width, *starts], jnp.uint32)


def after(
    bits: jax.Array,
    chosen: jax.Array | None,
    prefix: jax.Array,
    known: jax.Array,
    shift: jax.Array,
    digit: int,
) -> jax.Array:
  """Returns the next digit of keys that begin with a prefix.

  Args:
    bits: The keys, uint32.
    chosen: Which of them count; `None`: all.
    prefix: What the bits from `known` on are to be.
    known: Where the digits known so far end, from the lowest bit; 32 and
      nothing known at first.
    shift: Where the next digit ends.
    digit: Its number of bits.

  Returns:
    The digits, and `2**digit` or more where a key does not count.
  """
  # A shift by 32 is undefined in some back ends.
  begins = lambda x: jnp.where(known < 32, x >> jnp.minimum(known, 31), 0)
  counts = begins(bits) == begins(prefix)
  counts = counts if chosen is None else counts & chosen
  # What does not count goes to bins in turn: adding to one and the same again
  # and again would wait for memory. The barrier keeps XLA from storing them.
  _, spare = jax.lax.optimization_barrier((shift, jnp.uint32(_SPARE_BINS - 1)))
  spare &= jax.lax.broadcasted_iota(jnp.uint32, bits.shape, bits.ndim - 1)
  digits = bits >> shift & (2**digit - 1)
  return jnp.where(counts, digits, 2**digit + spare)


def _by_scatter(digits: jax.Array, left: jax.Array, bins: int) -> jax.Array:
  """Counts digits of one matrix, without flattening it."""
  del left
  return jax.lax.scatter_add(
      jnp.zeros(bins + _SPARE_BINS, jnp.int32),
      digits.astype(jnp.uint16)[..., None],
      jnp.ones(digits.shape, jnp.int32),
      jax.lax.ScatterDimensionNumbers((), (0,), (0,)),
      mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )[:bins]


def _by_comparing(digits: jax.Array, left: jax.Array, bins: int) -> jax.Array:
  """Counts binary digits of any number of competitions at once."""
  del bins
  ones = jnp.sum(digits == 1, axis=(-2, -1), dtype=jnp.int32)
  return jnp.stack([left - ones, ones], axis=-1)


SCATTER = Counting(_WIDEST_DIGIT, _by_scatter)
COMPARE = Counting(1, _by_comparing)


def sortable_bits(x: jax.Array) -> jax.Array:
  """Maps scores to uint32 such that larger scores have larger integers."""
  if x.dtype == jnp.uint32:
    return x
  x = x.astype(jnp.float32)
  # One zero, and NaN below everything.
  bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
  ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(2**31))
  return jnp.where(jnp.isnan(x), jnp.uint32(0), ordered)

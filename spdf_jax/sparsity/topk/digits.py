"""Integers digit by digit: how keys are cut up and their digits counted."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_MANY_UNITS = 2**16
_ROW = 32  # Bins.
_NOTHING = 32  # Of the bits of a key are known.

Found = tuple[jax.Array, jax.Array, jax.Array]


class Counting(NamedTuple):
  """A way to count digits: from `scattering`, or `COMPARING`."""

  digit: int
  """Bits looked at in one pass over the units, at most."""

  one_by_one: bool
  """Whether competitions are counted one after another, as matrices."""

  count: Callable[[jax.Array, jax.Array, int], jax.Array]
  """`(digits, chosen, bins) -> int32 [..., bins]`: how many of the chosen have
  each digit."""

  find: Callable[[jax.Array, jax.Array], Found]
  """`(counts, need) -> (digit, need, left)`: what digit the `need`-th largest
  has, or the last where there are fewer; how many of that digit are needed, and
  how many there are."""

  sampled: bool = False
  """Whether a sample is to say where to look first."""


class Passes(NamedTuple):
  """The passes over the units that read keys digit by digit, in order."""

  digit: int
  """Bits read in a pass."""

  key: np.ndarray
  """Which key is read, `[passes]`."""

  known: np.ndarray
  """Where the known digits of every key end, from the lowest bit, and 32 where
  nothing is known; uint32 `[passes, keys]`."""

  shift: np.ndarray
  """Where the digit ends that is read, uint32 `[passes]`."""


def passes(widths: Sequence[int], counting: Counting) -> Passes:
  """Cuts keys up, the first key first.

  All digits are alike, so the last of a key may see bits of the one before
  again.

  Args:
    widths: Bits of each key.
    counting: How digits are counted.

  Returns:
    The passes.
  """
  numbers = [-(-width // counting.digit) for width in widths]
  digit = max(-(-width // n) for width, n in zip(widths, numbers))
  key, known, shift = [], [], []
  for i, (width, number) in enumerate(zip(widths, numbers)):
    starts = [max(0, width - digit * (j + 1)) for j in range(number)]
    for before, start in zip([_NOTHING, *starts], starts):
      key.append(i)
      known.append([0] * i + [before] + [_NOTHING] * (len(widths) - i - 1))
      shift.append(start)
  as_uint32 = lambda x: np.array(x, np.uint32)
  return Passes(digit, np.array(key), as_uint32(known), as_uint32(shift))


def at_pass(
    i: jax.Array,
    passes: Passes,
    bits: Sequence[jax.Array],
    prefixes: jax.Array,
    chosen: jax.Array | None,
    narrowed: int | jax.Array = _NOTHING,
) -> tuple[jax.Array, jax.Array]:
  """Returns the digits that a pass reads, and which of them count.

  Args:
    i: Which pass.
    passes: All of them.
    bits: Every key of all units, uint32 `[..., a, b]` each.
    prefixes: The least that has the known bits of every key, uint32
      `[..., keys]`.
    chosen: Which units count, bool; `None`: all.
    narrowed: The first key is known to be one of the 2^narrowed from its
      prefix on, whatever the passes say.

  Returns:
    The digits, uint32 `[..., a, b]`, and which of them count, bool.
  """
  known = list(jnp.asarray(passes.known)[i])
  known[0] = jnp.minimum(known[0], narrowed)
  counts = chosen
  offsets = [
      key - prefixes[..., j, None, None] for j, key in enumerate(bits)
  ]
  for offset, end in zip(offsets, known):
    matches = _first_bits(offset, end) == 0
    counts = matches if counts is None else counts & matches
  read = offsets[0]
  for j in range(1, len(bits)):
    read = jnp.where(jnp.asarray(passes.key)[i] == j, offsets[j], read)
  digits = read >> jnp.asarray(passes.shift)[i] & (2**passes.digit - 1)
  return digits, counts


def _first_bits(bits: jax.Array, known: jax.Array) -> jax.Array:
  # A shift by 32 is undefined in some back ends.
  return jnp.where(known < _NOTHING, bits >> jnp.minimum(known, 31), 0)


def _by_scattering(
    digits: jax.Array, chosen: jax.Array, bins: int
) -> jax.Array:
  """Counts digits of one matrix, without flattening it."""
  return jax.lax.scatter_add(
      jnp.zeros(bins, jnp.int32),
      digits.astype(jnp.uint16)[..., None],
      chosen.astype(jnp.int32),
      jax.lax.ScatterDimensionNumbers((), (0,), (0,)),
      mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )


def _find_in_rows(counts: jax.Array, need: jax.Array) -> Found:
  """Finds a digit of one matrix: which row of bins, then which bin."""
  sums = [counts]
  while sums[-1].size > 2 * _ROW:
    sums.append(jnp.sum(sums[-1].reshape(-1, _ROW), axis=-1))
  digit = 0
  for parts in reversed(sums):
    if parts is not sums[-1]:
      parts = parts.reshape(-1, _ROW)[digit]
    from_each = jax.lax.cumsum(parts, reverse=True)
    need = jnp.minimum(need, from_each[0])
    place = jnp.sum(from_each >= need, dtype=jnp.int32) - 1
    left = parts[place]
    need = need - (from_each[place] - left)
    digit = digit * _ROW + place
  return digit, need, left


def _by_comparing(
    digits: jax.Array, chosen: jax.Array, bins: int
) -> jax.Array:
  """Counts binary digits of any number of competitions at once."""
  del bins
  number = lambda x: jnp.sum(x, axis=(-2, -1), dtype=jnp.int32)
  return jnp.stack(
      [number(chosen & (digits == 0)), number(chosen & (digits == 1))], axis=-1
  )


def _find_binary(counts: jax.Array, need: jax.Array) -> Found:
  """Finds a binary digit in any number of competitions at once."""
  zeros, ones = counts[..., 0], counts[..., 1]
  need = jnp.minimum(need, zeros + ones)
  enough = ones >= need
  pick = lambda one, zero: jnp.where(enough, one, zero)
  return enough, pick(need, need - ones), pick(ones, zeros)


def scattering(units: int) -> Counting:
  """Counts by scatter: fast on CPU, elsewhere it serialises.

  Args:
    units: How many compete; many are worth the longer digits.

  Returns:
    The way to count.
  """
  # Several devices would exchange the counts of so many digits.
  many = units >= _MANY_UNITS and jax.device_count() == 1
  digit = 16 if many else 11
  return Counting(digit, True, _by_scattering, _find_in_rows, sampled=many)


COMPARING = Counting(1, False, _by_comparing, _find_binary)


def sortable_bits(x: jax.Array) -> jax.Array:
  """Maps scores to uint32 such that larger scores have larger integers."""
  if x.dtype == jnp.uint32:
    return x
  x = x.astype(jnp.float32)
  # One zero, and NaN below everything.
  bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
  ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(2**31))
  return jnp.where(jnp.isnan(x), jnp.uint32(0), ordered)

"""Integers digit by digit: how keys are cut up and their digits counted."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity.topk.parts import whole_parts

_WIDEST_DIGIT = 11
_SPARE_BINS = 16
_BINS_IN_ROW = 32
_NOTHING = 32  # Of the bits of a key are known.

Found = tuple[jax.Array, jax.Array, jax.Array]


class Counting(NamedTuple):
  """A way to count digits: `SCATTER`, or `COMPARE`."""

  digit: int
  """Bits looked at in one pass over the units, at most."""

  count: Callable[[jax.Array, jax.Array, int], jax.Array]
  """`(digits, left, bins) -> int32 [..., bins]`, where `left` digits lie in
  the bins and all others are larger."""

  find: Callable[[jax.Array, jax.Array], Found]
  """`(counts, need) -> (digit, need, left)`: what digit the `need`-th largest
  has, how many of that digit are needed, and how many there are."""


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
) -> jax.Array:
  """Returns the digits that a pass reads.

  Args:
    i: Which pass.
    passes: All of them.
    bits: Every key of all units, uint32 `[..., a, b]` each.
    prefixes: What the known bits of every key are to be, uint32 `[..., keys]`.
    chosen: Which units count, bool; `None`: all.

  Returns:
    The digits, and `2**digit` or more where a unit does not count.
  """
  known = jnp.asarray(passes.known)[i]
  counts = chosen
  for j, key in enumerate(bits):
    prefix = prefixes[..., j, None, None]
    matches = _first_bits(key, known[j]) == _first_bits(prefix, known[j])
    counts = matches if counts is None else counts & matches
  read = bits[0]
  for j in range(1, len(bits)):
    read = jnp.where(jnp.asarray(passes.key)[i] == j, bits[j], read)
  shift = jnp.asarray(passes.shift)[i]
  # What does not count goes to bins in turn: adding to one and the same again
  # and again would wait for memory. The barrier keeps XLA from storing them.
  _, spare = jax.lax.optimization_barrier((shift, jnp.uint32(_SPARE_BINS - 1)))
  spare &= jax.lax.broadcasted_iota(jnp.uint32, read.shape, read.ndim - 1)
  digits = read >> shift & (2**passes.digit - 1)
  return jnp.where(counts, digits, 2**passes.digit + spare)


def _first_bits(bits: jax.Array, known: jax.Array) -> jax.Array:
  # A shift by 32 is undefined in some back ends.
  return jnp.where(known < _NOTHING, bits >> jnp.minimum(known, 31), 0)


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


def _find_in_rows(counts: jax.Array, need: jax.Array) -> Found:
  """Finds a digit of one matrix: the row of bins it lies in, then the bin."""
  rows = counts[::-1].reshape(-1, min(_BINS_IN_ROW, counts.size))
  row, above, _ = whole_parts(jnp.sum(rows, axis=1), need - 1)
  need = need - above
  bin_, above, up_to = whole_parts(rows[row], need - 1)
  digit = counts.size - 1 - (row * rows.shape[1] + bin_)
  return digit, need - above, up_to - above


def _find_binary(counts: jax.Array, need: jax.Array) -> Found:
  """Finds a binary digit in any number of competitions at once."""
  zeros, ones = counts[..., 0], counts[..., 1]
  enough = ones >= need
  pick = lambda one, zero: jnp.where(enough, one, zero)
  return enough, pick(need, need - ones), pick(ones, zeros)


SCATTER = Counting(_WIDEST_DIGIT, _by_scatter, _find_in_rows)
COMPARE = Counting(1, _by_comparing, _find_binary)


def sortable_bits(x: jax.Array) -> jax.Array:
  """Maps scores to uint32 such that larger scores have larger integers."""
  if x.dtype == jnp.uint32:
    return x
  x = x.astype(jnp.float32)
  # One zero, and NaN below everything.
  bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
  ordered = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(2**31))
  return jnp.where(jnp.isnan(x), jnp.uint32(0), ordered)

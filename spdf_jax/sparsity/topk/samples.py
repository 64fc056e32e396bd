"""Where among many keys the k-th largest is likely to be: what a sample says.

A pass over the units that reads digits within such a window leaves few of them
undecided, where one over all 32 bits leaves thousands.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from spdf_jax.sparsity.topk import digits

_STRIDE = 16  # One row of so many is sampled.
_COARSE = 14  # Bits of a key by which the sample is counted.
_DEVIATIONS = 4  # Of a rank in the sample, to both sides.
_BINS = 2**16
_BEYOND = 2**10  # Bins for what lies on one side: in one alone counts collide.
_WITHIN = _BINS - 2 * _BEYOND


class Window(NamedTuple):
  """A range of keys, cut into bins."""

  start: jax.Array
  """The least key in it, uint32."""

  shift: jax.Array
  """A bin holds 2^shift keys; uint32, at most 16."""


def sample_rows(x: jax.Array | None) -> jax.Array | None:
  """Returns one row of 16, the first included; `None` stays `None`."""
  return None if x is None else x[::_STRIDE]


def likely_window(
    counting: digits.Counting,
    bits: jax.Array,
    among: jax.Array | None,
    rank: jax.Array,
) -> Window:
  """Returns where a sample puts a key of a rank.

  Args:
    counting: How digits are counted.
    bits: Keys of 32 bits, sampled: uint32 `[a, b]`.
    among: Which of them compete, bool; `None`: all.
    rank: The rank that is expected in the sample, float32.

  Returns:
    The window.
  """
  chosen = jnp.ones(bits.shape, bool) if among is None else among
  counts = counting.count(bits >> (32 - _COARSE), chosen, 2**_COARSE)
  margin = _DEVIATIONS * (jnp.sqrt(rank) + 1)
  above, below = ((rank + s * margin).astype(jnp.int32) for s in (-1, 1))
  highest, _, _ = counting.find(counts, above)
  lowest, _, _ = counting.find(counts, below)
  end = jnp.where(above < 1, 2**_COARSE, highest + 1)
  start = jnp.where(below > jnp.sum(counts), 0, lowest)
  bins = 31 - jax.lax.clz(_WITHIN // (end - start))
  shift = jnp.clip(32 - _COARSE - bins, 0, 16)
  return Window(
      start.astype(jnp.uint32) << (32 - _COARSE), shift.astype(jnp.uint32)
  )


def find_within(
    counting: digits.Counting,
    window: Window,
    bits: jax.Array,
    among: jax.Array | None,
    kept: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Finds the bin of a window that has the `kept`-th largest key.

  Args:
    counting: How digits are counted.
    window: Where to look.
    bits: Keys of 32 bits of one competition, uint32 `[a, b]`.
    among: Which of them compete, bool; `None`: all.
    kept: The rank that is sought, int32.

  Returns:
    Whether it is in the window; if so the least key of its bin, how many of the
    bin's are needed, and how many it has.
  """
  inside = (bits - window.start) >> window.shift
  is_below = bits < window.start
  beyond = jnp.where(is_below, 0, _BINS - _BEYOND) + (bits & (_BEYOND - 1))
  within = ~is_below & (inside < _WITHIN)
  chosen = jnp.ones(bits.shape, bool) if among is None else among
  counts = counting.count(
      jnp.where(within, inside + _BEYOND, beyond), chosen, _BINS
  )
  place, need, left = counting.find(counts, kept)
  place -= _BEYOND
  least = window.start + (place.astype(jnp.uint32) << window.shift)
  return (place >= 0) & (place < _WITHIN), least, need, left

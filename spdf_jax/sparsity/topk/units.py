"""Units that compete for places in a mask, and the keys that rank them."""

from collections.abc import Callable
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spdf_jax.sparsity.topk import digits
from spdf_jax.sparsity.topk import limbs
from spdf_jax.sparsity.topk import random_bits

Shape = tuple[int, ...]


class Units(NamedTuple):
  """What competes; units are `[..., a, b]`, competitions `[...]`."""

  scores: jax.Array | None
  """Real numbers of at most 32 bits, the first key; `None`: none."""

  among: jax.Array | None
  """Which units take part, bool; `None`: all."""

  words: jax.Array | None
  """Key of the random bits that rank equals, uint32 `[2]`; `None`: none."""

  competition: jax.Array
  """The number of each competition within the leaf, uint32 `[...]`."""

  row: jax.Array
  """Length of the last axis, uint32: in an array, lest XLA computes indices
  once and keeps another 4 bytes per unit."""


class Key(NamedTuple):
  """One of the keys that rank units, the larger first."""

  width: int
  """Bits."""

  read: Callable[[Units], jax.Array]
  """The key of every unit, uint32."""

  stored: bool = False
  """Whether to keep it in memory between passes, or to compute it anew."""


def all_units(
    scores: jax.Array | None,
    among: jax.Array | None,
    words: jax.Array | None,
    shape: Shape,
) -> Units:
  """Returns the units of a leaf `[..., a, b]`, competitions numbered."""
  lead = shape[:-2]
  number = jnp.arange(math.prod(lead), dtype=jnp.uint32).reshape(lead)
  return Units(scores, among, words, number, jnp.uint32(shape[-1]))


def keys_of(units: Units, shape: Shape) -> tuple[Key, ...]:
  """Returns the keys that rank units of a shape; the last has no equals.

  The bits of the scores come first, then (if asked) random bits, then the
  index, the lower the better.
  """
  size = shape[-2] * shape[-1]

  def row_major(units):
    count = lambda axis: jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return count(len(shape) - 2) * units.row + count(len(shape) - 1)

  def random(units):
    first = limbs.multiply(units.competition, size)
    within = limbs.Limbs(jnp.zeros(shape, jnp.uint32), row_major(units))
    position = limbs.Limbs(*map(across, first)) + within
    return random_bits.bits_at(units.words, position)

  keys = []
  if units.scores is not None:
    keys.append(Key(32, lambda units: digits.sortable_bits(units.scores)))
  if units.words is not None:
    keys.append(Key(32, random, stored=True))
  index = lambda units: jnp.uint32(size - 1) - row_major(units)
  return (*keys, Key(max(1, (size - 1).bit_length()), index))


def across(x: jax.Array) -> jax.Array:
  """Lays one value per competition along its units."""
  return x[..., None, None]


def candidates(
    units: Units, keys: tuple[Key, ...], cuts: tuple[jax.Array, ...]
) -> jax.Array | None:
  """Returns which units take part and have the first keys equal to `cuts`."""
  chosen = units.among
  for key, cut in zip(keys, cuts):
    chosen = narrowed(chosen, key.read(units) == across(cut))
  return chosen


def narrowed(chosen: jax.Array | None, condition: jax.Array) -> jax.Array:
  """Returns which of the chosen (`None`: all) meet a condition."""
  return condition if chosen is None else chosen & condition


def ranked(scores: jax.Array, by_magnitude: bool) -> jax.Array:
  """Returns the numbers that rank units: the scores, or their magnitudes."""
  if not by_magnitude:
    return scores
  if jnp.issubdtype(scores.dtype, jnp.integer):
    scores = scores.astype(jnp.float32)  # Holds the least of them negated.
  return jnp.abs(scores)


def check_rankable(scores: jax.Array) -> None:
  """Raises TypeError unless scores are real and of at most 32 bits."""
  dtype = jnp.dtype(scores.dtype)
  small = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize <= 2
  real = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 4
  if not (small or real or dtype == jnp.uint32):
    raise TypeError(
        f'scores have dtype {dtype}; cast them to a real type of at most 32 '
        'bits, e.g. scores.astype(jnp.float32).'
    )


def check_shapes(shape: Shape, among: jax.Array | None) -> None:
  """Raises ValueError where a mask does not fit, or a layer is too large."""
  if len(shape) < 3:
    raise ValueError(
        f'scores have shape {list(shape)}; give [layers, inputs, outputs].'
    )
  if shape[-2] * shape[-1] >= 2**31:
    raise ValueError(
        f'a layer of shape {list(shape[-2:])} has 2^31 weights or more; split '
        'it along an axis.'
    )
  if among is not None and (among.shape != shape or among.dtype != bool):
    raise ValueError(
        f'among is {among.dtype}{list(among.shape)} for scores of shape '
        f'{list(shape)}; give a bool mask of that shape.'
    )

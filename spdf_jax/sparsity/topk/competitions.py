"""Competitions for places in a mask: the threshold that exactly k units pass.

Units of the last two axes compete, all earlier axes number competitions. The
k-th largest of a key is found digit by digit from the highest, by counting how
often each digit occurs: there is no sort, and of sharded arrays only the counts
are exchanged.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax.sparsity.topk import digits
from spdf_jax.sparsity.topk import samples
from spdf_jax.sparsity.topk.units import across
from spdf_jax.sparsity.topk.units import Key
from spdf_jax.sparsity.topk.units import narrowed
from spdf_jax.sparsity.topk.units import Shape
from spdf_jax.sparsity.topk.units import Units


def on_this_platform(
    run: Callable[..., Any], units: int, *operands: Any
) -> Any:
  """Calls `run(counting, *operands)` with the counting that is fast here."""
  return jax.lax.platform_dependent(
      *operands,
      cpu=lambda *xs: run(digits.scattering(units), *xs),
      default=lambda *xs: run(digits.COMPARING, *xs),
  )


def each(
    f: Callable[..., Any],
    counting: digits.Counting,
    units: Units,
    shape: Shape,
    *per_competition: jax.Array,
) -> Any:
  """Calls `f(counting, units, shape, *per_competition)`, for all."""
  if not counting.one_by_one:
    return f(counting, units, shape, *per_competition)

  def one(row):
    layer, numbers = row
    layer = layer._replace(words=units.words, row=units.row)
    return f(counting, layer, shape[-2:], *numbers)

  rows = units._replace(words=None, row=None), per_competition
  return jax.lax.map(one, rows)


def choose(
    counting: digits.Counting,
    units: Units,
    shape: Shape,
    keys: tuple[Key, ...],
    kept: jax.Array,
) -> jax.Array:
  """Keeps the `kept` highest-ranked units, or all if there are fewer.

  Args:
    counting: How digits are counted.
    units: What competes.
    shape: Their shape.
    keys: From `keys_of`, or the last of them.
    kept: How many to keep per competition, int32 `[...]`.

  Returns:
    The mask.
  """
  # Scores and indices are read in one loop, which ends when no equals are left;
  # random bits are made where there are equals only.
  first, rest = (keys[:1], keys[1:]) if len(keys) > 2 else (keys, ())
  stored = [key.read(units) if key.stored else None for key in first]

  def read(units, stored):
    return [
        key.read(units) if bits is None else bits
        for key, bits in zip(first, stored)
    ]

  values, tied, need = _kth_largest(
      counting, read, (units, stored), shape, first, kept
  )

  def compared(last):
    """Compares the keys in turn with the k-th largest, `last` the last one."""
    *firsts, bits = read(units, stored)
    passing = last(bits, across(values[..., len(first) - 1]))
    for j, bits in reversed(list(enumerate(firsts))):
      value = across(values[..., j])
      passing = (bits > value) | ((bits == value) & passing)
    return narrowed(units.among, passing & across(kept > 0))

  if not rest:
    return compared(jnp.greater_equal)

  def among_equals():
    (bits,) = read(units, stored)
    equals = narrowed(units.among, bits == across(values[..., 0]))
    chosen = choose(counting, units._replace(among=equals), shape, rest, need)
    return compared(jnp.greater) | chosen

  return jax.lax.cond(
      tied, among_equals, lambda: compared(jnp.greater_equal)
  )

def choose_by_rank(
    units: Units, shape: Shape, keys: tuple[Key, ...], kept: jax.Array
) -> jax.Array:
  """Keeps the `kept` highest-ranked candidates, comparing each two units."""
  lead, size = shape[:-2], shape[-2] * shape[-1]
  in_line = lambda x: x.reshape(*lead, size)
  index = jnp.arange(size)
  better, equal = False, True
  for key in keys[:-1]:
    bits = in_line(key.read(units))
    mine, other = bits[..., :, None], bits[..., None, :]
    better |= equal & (other > mine)
    equal &= other == mine
  better |= equal & (index < index[:, None])
  if units.among is not None:
    better &= in_line(units.among)[..., None, :]
  rank = jnp.sum(better, axis=-1, dtype=jnp.int32)
  return narrowed(units.among, (rank < kept[..., None]).reshape(shape))


def _kth_largest(
    counting: digits.Counting,
    read: Callable[..., list[jax.Array]],
    operands: tuple[Any, ...],
    shape: Shape,
    keys: tuple[Key, ...],
    kept: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Finds the keys of the last unit to be kept.

  Returns:
    The keys, uint32 `[..., keys]`, with zeros for all bits that need not be
    known; whether anywhere more units have them than are to be kept; and how
    many of those that have them are.
  """
  passes = digits.passes([key.width for key in keys], counting)

  def is_tied(need, left):
    return jnp.any((need > 0) & (need < left))

  def undecided(carry):
    i, _, need, left = carry
    return (i < len(passes.key)) & is_tied(need, left)

  def narrow(carry):
    # The barrier has each pass compute its digits anew: without it XLA keeps
    # another 4 bytes per score alive between the passes.
    arrays, (i, values, need, _) = jax.lax.optimization_barrier(
        (operands, carry)
    )
    among = arrays[0].among
    found = digits.at_pass(i, passes, read(*arrays), values, among, narrowed)
    digit, need, left = counting.find(
        counting.count(*found, 2**passes.digit), need
    )
    digit = digit.astype(jnp.uint32) << jnp.asarray(passes.shift)[i]
    key = jnp.asarray(passes.key)[i] == jnp.arange(len(keys))
    values += jnp.where(key, digit[..., None], jnp.uint32(0))
    return i + 1, values, need, left

  def in_window():
    """Does the first pass, in a window; all is as it was if that fails."""
    units, stored = operands
    sample = samples.sample_rows
    sampled = units._replace(
        scores=sample(units.scores), among=sample(units.among)
    )
    (bits, *_) = read(sampled, [sample(x) for x in stored])
    share = bits.shape[0] / shape[0]
    window = samples.likely_window(
        counting, bits, sampled.among, kept.astype(jnp.float32) * share
    )
    arrays, window = jax.lax.optimization_barrier((operands, window))
    found, least, need, left = samples.find_within(
        counting, window, read(*arrays)[0], arrays[0].among, kept
    )
    values = jnp.where(jnp.arange(len(keys)) == 0, least, jnp.uint32(0))
    begun = jnp.int32(1), values, need, left
    pick = lambda new, old: jnp.where(found, new, old)
    return jax.tree.map(pick, begun, start), pick(window.shift, nothing)

  values = jnp.zeros((*kept.shape, len(keys)), jnp.uint32)
  all_units = jnp.full(kept.shape, shape[-2] * shape[-1], jnp.int32)
  start = jnp.int32(0), values, kept, all_units
  narrowed = nothing = jnp.uint32(32)
  if counting.sampled and keys[0].width == 32:
    start, narrowed = in_window()
  _, values, need, left = jax.lax.while_loop(undecided, narrow, start)
  return values, is_tied(need, left), need

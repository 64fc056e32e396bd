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
from spdf_jax.sparsity.topk.units import across
from spdf_jax.sparsity.topk.units import candidates
from spdf_jax.sparsity.topk.units import Key
from spdf_jax.sparsity.topk.units import narrowed
from spdf_jax.sparsity.topk.units import Shape
from spdf_jax.sparsity.topk.units import Units

# Sharded matrices exchange a count per row, or a bit per column, to keep the
# first of equals: where that is less than this many bytes, it is fastest. With
# random bits there were more bytes before, and equals that are left are rare.
_FEW_BYTES = 2**15
_FEWER_BYTES = 2**13


def on_this_platform(run: Callable[..., Any], *operands: Any) -> Any:
  """Calls `run(counting, *operands)` with the counting that is fast here."""
  return jax.lax.platform_dependent(
      *operands,
      cpu=lambda *xs: run(digits.SCATTER, *xs),
      # Elsewhere scatter serialises.
      default=lambda *xs: run(digits.COMPARE, *xs),
  )


def each(
    f: Callable[..., Any],
    counting: digits.Counting,
    units: Units,
    shape: Shape,
    *per_competition: jax.Array,
) -> Any:
  """Calls `f(counting, units, shape, *per_competition)` for all competitions.

  `SCATTER` counts one matrix, so they are done one after another.
  """
  if counting is not digits.SCATTER:
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
    keys: tuple[Key, ...],
    kept: jax.Array,
    left: jax.Array,
    cuts: tuple[jax.Array, ...] = (),
) -> jax.Array:
  """Keeps the `kept` highest-ranked among the candidates of `cuts`.

  Args:
    counting: `SCATTER` for one matrix, or `COMPARE`.
    units: What competes.
    keys: From `keys_of`.
    kept: How many to keep per competition, at most `left`; int32 `[...]`.
    left: How many candidates there are, int32 `[...]`.
    cuts: Values that the first keys of all candidates have.

  Returns:
    The mask.
  """
  key = keys[len(cuts)]
  last = len(cuts) + 1 == len(keys)
  if last and cuts:
    return first_of(counting, units, keys, kept, left, cuts)
  stored = key.read(units) if key.stored else None

  def read(units, cuts, stored):
    bits = key.read(units) if stored is None else stored
    return bits, candidates(units, keys, cuts)

  operands = units, cuts, stored
  value, need, equal = _kth_largest(
      counting, read, operands, kept, left, key.width
  )

  def passing(compare):
    bits, chosen = read(*operands)
    return narrowed(chosen, compare(bits, across(value)) & across(kept > 0))

  if last:
    return passing(jnp.greater_equal)
  return jax.lax.cond(
      jnp.all(need == equal),
      lambda: passing(jnp.greater_equal),
      lambda: passing(jnp.greater) | choose(
          counting, units, keys, need, equal, (*cuts, value)
      ),
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
    read: Callable[..., tuple[jax.Array, jax.Array | None]],
    operands: tuple[Any, ...],
    need: jax.Array,
    left: jax.Array,
    width: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the k-th largest bits, how many of it to keep, and to keep from."""
  size, shifts = digits.split(width, counting)

  def narrow(i, carry):
    # The barrier has each pass compute its digits anew: without it XLA keeps
    # another 4 bytes per score alive between the passes.
    arrays, (prefix, need, left) = jax.lax.optimization_barrier(
        (operands, carry)
    )
    found = digits.after(
        *read(*arrays), across(prefix), shifts[i], shifts[i + 1], size
    )
    counts = counting.count(found, left, 2**size)
    enough = jnp.cumsum(counts[..., ::-1], -1)[..., ::-1] >= need[..., None]
    digit = jnp.sum(enough, -1, keepdims=True) - 1
    bins = jax.lax.broadcasted_iota(jnp.int32, counts.shape, counts.ndim - 1)
    need = need - jnp.sum(jnp.where(bins > digit, counts, 0), -1)
    left = jnp.sum(jnp.where(bins == digit, counts, 0), -1)
    prefix |= digit[..., 0].astype(jnp.uint32) << shifts[i + 1]
    return prefix, need, left

  first = jnp.zeros(need.shape, jnp.uint32), need, left
  return jax.lax.fori_loop(0, len(shifts) - 1, narrow, first)


def first_of(
    counting: digits.Counting,
    units: Units,
    keys: tuple[Key, ...],
    kept: jax.Array,
    left: jax.Array,
    cuts: tuple[jax.Array, ...],
) -> jax.Array:
  """Keeps the first `kept` of the `left` candidates of `cuts`, by index."""
  equals = candidates(units, keys, cuts)
  rows, columns = equals.shape[-2:]
  few = _FEW_BYTES if units.words is None else _FEWER_BYTES
  if max(4 * rows, columns) <= few:
    return _keep_first(equals, kept)
  units = units._replace(scores=None, among=equals, words=None)
  return choose(counting, units, keys[-1:], kept, left)


def _keep_first(mask: jax.Array, kept: jax.Array) -> jax.Array:
  """Keeps the first `kept` entries of a mask, in row-major order."""
  row = jax.lax.broadcasted_iota(jnp.int32, mask.shape, mask.ndim - 2)
  column = jax.lax.broadcasted_iota(jnp.int32, mask.shape, mask.ndim - 1)
  in_row = jnp.sum(mask, axis=-1, dtype=jnp.int32)
  rows, before = _whole_parts(in_row, kept)
  cut = row == across(rows)
  in_cut_row = jnp.any(mask & cut, axis=-2).astype(jnp.int32)
  columns, _ = _whole_parts(in_cut_row, kept - before)
  return mask & ((row < across(rows)) | (cut & (column < across(columns))))


def _whole_parts(
    parts: jax.Array, kept: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns how many leading parts sum to at most `kept`, and their sum.

  By halving: the parts may be sharded, and running sums would gather them.
  """
  number = parts.shape[-1]
  index = jax.lax.broadcasted_iota(jnp.int32, parts.shape, parts.ndim - 1)
  first = lambda n: jnp.sum(jnp.where(index < n[..., None], parts, 0), axis=-1)
  rounds = number.bit_length()

  def halve(i, whole):
    longer = whole | 1 << (rounds - 1 - i)
    fits = (longer <= number) & (first(longer) <= kept)
    return jnp.where(fits, longer, whole)

  whole = jax.lax.fori_loop(0, rounds, halve, jnp.zeros(kept.shape, jnp.int32))
  return whole, first(whole)

# SPDX-License-Identifier: Apache-2.0
"""Radix select: the keys of the last kept entry, digit by digit.

The search goes from the most significant digit to the least, by counting the
entries with each value of the digit: with a histogram on CPUs, and one bit at a
time on other platforms, where a scatter runs serially.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity.topk import keys
from spdf_jax.sparsity.topk.keys import Layers

PyTree = Any
Shape = tuple[int, ...]
Keys = tuple[jax.Array, ...]

_ALL_ONES = np.uint32(2**32 - 1)
_LONG_DIGIT = 11


def over_layers(
    f: Callable[..., Any], digit: int, layers: Layers, *numbers: jax.Array
) -> Any:
  """Maps `f(layer, *numbers)` over all layers of a leaf."""
  one = lambda layer, *rest: f(layer._replace(words=layers.words), *rest)
  operands = layers._replace(words=None), *numbers
  if digit > 1:
    return jax.lax.map(lambda row: one(*row), operands)
  number: Any = layers.number
  for size in reversed(number.shape):
    # `checkify` refuses the loop of a batch, even of one.
    one = _on_the_only(one) if size == 1 else jax.vmap(one)
  return one(*operands)


def _on_the_only(f: Callable[..., Any]) -> Callable[..., Any]:
  """Maps `f` over a leading axis of size one, like `jax.vmap`."""
  def on_the_only(*args):
    result = f(*jax.tree.map(lambda x: x.reshape(x.shape[1:]), args))
    return jax.tree.map(lambda x: x[None], result)
  return on_the_only


def on_this_platform(keep: Callable[..., PyTree], *operands: Any) -> PyTree:
  """Calls `keep(*operands, digit=bits)` with the platform's fastest `bits`."""
  return jax.lax.platform_dependent(
      *operands,
      cpu=functools.partial(keep, digit=_LONG_DIGIT),
      default=functools.partial(keep, digit=1),
  )


def last_keys(
    count: Callable[..., jax.Array],
    operands: PyTree,
    digit: int,
    *,
    number_of_keys: int,
    need: Any,
    left: jax.Array,
    total: Callable[[jax.Array], Any],
) -> tuple[Keys, Any, jax.Array]:
  """Finds the keys of the last kept entry, digit by digit.

  `count(operands, lasts, last, shift)` counts as `count_digits` does, with one
  row per layer; `left` is the size of each layer; `total` sums counts to the
  type of `need`. Returns the keys of the last kept entry, the number of entries
  with these keys to keep, and the number of such entries per layer. Where all
  of them are kept, the search stops early and the remaining low bits of the
  last key are ones, which no entry needs to have.
  """
  passes = -(-32 // digit)
  lasts: Keys = ()
  for _ in range(number_of_keys):

    def undecided(state):
      i, _, need, left = state
      return (i < passes) & (need < total(left))

    def narrow(state, lasts=lasts):
      # The barrier makes each pass recompute the digits. Without it, XLA keeps
      # a buffer of 4 bytes per score live across the passes.
      arrays, (i, last, need, _) = jax.lax.optimization_barrier(
          (operands, state)
      )
      shift = ((passes - 1 - i) * digit).astype(jnp.uint32)
      counts = count(arrays, lasts, last, shift)
      value, need = nth(counts, _smaller(need, total(counts)), total)
      zeros = jnp.uint32(2**digit - 1) - value.astype(jnp.uint32)
      # A comparison, because indexing would become a gather under vmap.
      of_value = jnp.arange(counts.shape[-1], dtype=jnp.int32) == value
      left = jnp.sum(counts, axis=-1, where=of_value, dtype=jnp.int32)
      return i + 1, last & ~(zeros << shift), need, left

    state = jnp.int32(0), jnp.asarray(_ALL_ONES), need, left
    _, last, need, left = jax.lax.while_loop(undecided, narrow, state)
    lasts += (last,)
  return lasts, need, left


def count_digits(
    shape: Shape,
    digit: int,
    layer: Layers,
    lasts: Keys,
    last: jax.Array,
    shift: jax.Array,
) -> jax.Array:
  """Counts the values of the digit above bit `shift`, int32 `[2^digit]`.

  Counts only entries that have the keys `lasts` and whose next key equals
  `last` in the bits above the digit.
  """
  _, chosen = keys.compare(layer, shape, lasts)
  key = keys.read_key(layer, len(lasts), shape) >> shift
  # Two shifts, because a shift by 32 bits or more is undefined.
  chosen &= key >> digit == last >> shift >> digit
  if digit == 1:
    ones = sum_int32(chosen & (key & 1 == 1))
    return jnp.stack([sum_int32(chosen) - ones, ones])
  # Adding zeros to various counts is faster than adding them all to the count
  # of masked weights, where each addition waits for the one before.
  columns = jax.lax.broadcasted_iota(jnp.uint32, shape, 1)
  value = jnp.where(chosen, key, columns) & (2**digit - 1)
  return jax.lax.scatter_add(
      jnp.zeros(2**digit, jnp.int32),
      value.astype(jnp.uint16)[..., None],
      chosen.astype(jnp.int32),
      jax.lax.ScatterDimensionNumbers((), (0,), (0,)),
      mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
  )


def cut(
    shape: Shape, lasts: Keys, layer: Layers, take: jax.Array
) -> jax.Array:
  """Keeps entries ranked before `lasts` and the first `take` equal to them."""
  before, equal = keys.compare(layer, shape, lasts)
  row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in (0, 1))
  in_rows = jnp.sum(equal, axis=1, dtype=jnp.int32)
  last_row, rest = nth(in_rows, take, sum_int32)
  in_columns = jnp.sum(equal & (row == last_row), axis=0, dtype=jnp.int32)
  last_column, _ = nth(in_columns, rest, sum_int32)
  first = (row < last_row) | ((row == last_row) & (column <= last_column))
  return before | (equal & first & (take > 0))


def nth(
    counts: jax.Array, need: Any, total: Callable[[jax.Array], Any]
) -> tuple[jax.Array, Any]:
  """Finds the index at which cumulative counts reach `need`, by bisection.

  Returns the largest index along the last axis of `counts` before which the
  counts add up to less than `need`, and how much of the count at this index is
  needed.
  """
  size = counts.shape[-1]
  bits = (size - 1).bit_length()
  indices = jnp.arange(size, dtype=jnp.int32)
  before = lambda stop: total(jnp.where(indices < stop, counts, 0))

  def step(i, index):
    trial = index + (jnp.int32(1) << (bits - 1 - i))
    return jnp.where((trial < size) & (before(trial) < need), trial, index)

  index = jax.lax.fori_loop(0, bits, step, jnp.int32(0))
  return index, need - before(index)


def _smaller(a: Any, b: Any) -> Any:
  return jax.tree.map(functools.partial(jnp.where, a < b), a, b)


def sum_int32(x: jax.Array) -> jax.Array:
  """Returns the sum as int32."""
  return jnp.sum(x, dtype=jnp.int32)


def check_number(kept: int | jax.Array) -> None:
  """Raises ValueError if the number to keep is negative."""
  if isinstance(kept, (int, np.integer)) and kept < 0:
    raise ValueError(f'kept is {kept}; give the number to keep, 0 or more.')


def check_shapes(shape: Shape, among: jax.Array | None) -> None:
  """Raises ValueError if a mask does not fit or a layer is too large."""
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

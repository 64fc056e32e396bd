# SPDX-License-Identifier: Apache-2.0
"""Exact top-k masks, per layer or over a whole model.

Scores are mapped to uint32 keys, those of 64 bits to two; smaller keys rank
first. A radix select finds
the threshold, the key of the last kept entry, digit by digit from the most
significant one, by counting the entries with each value of the digit: with a
histogram on CPUs, and one bit at a time on other platforms, where a scatter
runs serially. Very small layers compare all pairs of entries instead. Ties are
broken by random bits, if a key is given, and then in row-major order. There is
no sort and no gather, and sharded scores exchange only counts.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import keys
from spdf_jax.sparsity import random_bits
from spdf_jax.sparsity import wide
from spdf_jax.sparsity.leaves import map_leaves

PyTree = Any
Shape = tuple[int, ...]
Keys = tuple[jax.Array, ...]
Model = tuple[PyTree, PyTree, PyTree, PyTree]

_ALL_ONES = np.uint32(2**32 - 1)
_LONG_DIGIT = 11
# Below `_FEW` entries, clearing the histogram costs more than passes over
# single bits; up to `_VERY_FEW`, comparing all pairs costs less than those.
_FEW = 4096
_VERY_FEW = 16


def keep_largest(
    scores: jax.Array,
    kept: int | jax.Array,
    *,
    among: jax.Array | None = None,
    tie_break: jax.Array | None = None,
) -> jax.Array:
  """Keeps the `kept` largest scores of every layer.

  Exactly `min(kept, number of candidates)` are kept per layer, as with a stable
  argsort, for any number of ties. NaN ranks below every number. Scratch memory
  is about 6 bytes per score of one layer; sharded scores are not resharded.

  Args:
    scores: Scores, complex ones ranked by magnitude, `[layers, inputs,
      outputs]`; all axes before the last two index independent layers.
    kept: Number of entries to keep: one number, or int32 per layer; may be
      traced.
    among: Bool mask of the candidates, of the scores' shape; `None`: all.
    tie_break: `None` prefers the lower row-major index among equal scores; a
      typed PRNG key (folded for this leaf) breaks ties uniformly at random.

  Returns:
    Bool mask of the scores' shape.

  Raises:
    ValueError: an argument's shape does not fit the scores, `kept` is
      negative, or a layer has 2^31 scores or more.

  Example:
    >>> keep_largest(jnp.array([[[1., 5., 5., 5.]]]), 2).tolist()
    [[[False, True, True, False]]]
  """
  words = None if tie_break is None else random_bits.key_words(tie_break)
  return _keep(keys.Layers(scores, among, words), kept, tuple(scores.shape))


def keep_random(
    key: jax.Array,
    shape: Shape,
    kept: int | jax.Array,
    *,
    among: jax.Array | None = None,
) -> jax.Array:
  """Keeps `kept` entries of every layer, uniformly at random.

  On CPUs scratch memory is about 11 bytes per entry of one layer, 4 of which
  hold its random bits; elsewhere the bits are drawn in every pass.

  Args:
    key: A typed PRNG key, folded for this leaf.
    shape: `(layers, inputs, outputs)` of the mask.
    kept: Number of entries to keep, as in `keep_largest`.
    among: The candidates, as in `keep_largest`.

  Returns:
    `keep_largest(jax.random.bits(key, shape), kept, among=among)` for
    threefry2x32 keys, the default of JAX; for keys of other implementations the
    bits are those of the key that `random_bits.key_words` derives.

  Raises:
    ValueError: an argument does not fit the shape.

  Example:
    >>> keep_random(jax.random.key(0), (2, 4, 8), 8).sum((1, 2)).tolist()
    [8, 8]
  """
  layers = keys.Layers(None, among, random_bits.key_words(key))
  return _keep(layers, kept, tuple(shape))


def keep_largest_of_all(
    scores: PyTree,
    kept: int | jax.Array,
    *,
    among: PyTree | None = None,
    tie_break: PyTree | None = None,
    sizes: PyTree | None = None,
    first: PyTree | None = None,
) -> PyTree:
  """Keeps the `kept` largest scores of a whole tree, ranked together.

  Exactly `min(kept, number of candidates)` are kept; where entries have sizes,
  as many as fit into a total size of `kept`. Ties are broken by the order of
  the leaves and row-major within a leaf. Similar leaves share a compiled loop,
  see `map_leaves`. Counts are exact for up to 2^16 layers.

  Args:
    scores: A tree (or list) of scores, complex ones ranked by magnitude, each
      `[layers, inputs, outputs]`; `None` leaves stay `None`.
    kept: Total number of entries to keep: an int, or a pair of uint32, the high
      word first, as a tuple or an array `[2]`; a pair may be traced.
    among: A tree of bool masks of the candidates, of the scores' shapes;
      `None`, for the tree or a leaf: all.
    tie_break: `None` prefers the earlier of equal scores; a tree of typed PRNG
      keys breaks ties uniformly at random.
    sizes: A tree of ints: the size of each entry of a leaf, such as the weights
      of a block; the total of a layer must be below 2^31. `None`: all are 1.
    first: A tree of pairs of int32 `[layers]`, the row and the column of one
      entry of each layer that ranks before all others. `None`: there is none.

  Returns:
    The tree of masks.

  Raises:
    ValueError: an argument does not fit the scores, `kept` is negative, or a
      layer has 2^31 scores or more.

  Example:
    >>> scores = {'a': jnp.array([[[1., 5.]]]), 'b': jnp.array([[[5., 5.]]])}
    >>> mask = keep_largest_of_all(scores, 2)
    >>> mask['a'].tolist(), mask['b'].tolist()
    ([[[False, True]]], [[[True, False]]])
  """
  treedef: Any
  leaves, treedef = jax.tree.flatten(scores)
  if not leaves:
    return scores
  masks = [None] * len(leaves)
  if among is not None:
    masks = treedef.flatten_up_to(among)
  for leaf, mask in zip(leaves, masks):
    _check_shapes(tuple(leaf.shape), mask)
    if leaf.ndim != 3:
      raise ValueError(
          f'scores have a leaf of shape {list(leaf.shape)}; give [layers, '
          'inputs, outputs].'
      )
  words: Any = [None] * len(leaves)
  if tie_break is not None:
    words = map(random_bits.key_words, treedef.flatten_up_to(tie_break))
  _check_number(kept)
  numbers = int, np.integer, tuple
  if not isinstance(kept, numbers) and jnp.shape(kept) != (2,):
    raise ValueError(
        f'kept has shape {jnp.shape(kept)}; give an int or two uint32, the '
        'high one first.'
    )
  units = [1] * len(leaves) if sizes is None else treedef.flatten_up_to(sizes)
  units = [np.full(len(x), n, np.int32) for x, n in zip(leaves, units)]
  firsts = [None] * len(leaves)
  if first is not None:
    firsts = treedef.flatten_up_to(first)
  model = map(
      treedef.unflatten, (keys.comparable(leaves), masks, words, firsts)
  )
  return _keep_of_all(
      tuple(model), treedef.unflatten(units), wide.to_wide(kept)
  )


def _over_layers(
    f: Callable[..., Any], digit: int, layers: keys.Layers, *numbers: jax.Array
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
  """Returns `jax.vmap(f)` for arguments of one entry."""
  def on_the_only(*args):
    found = f(*jax.tree.map(lambda x: x.reshape(x.shape[1:]), args))
    return jax.tree.map(lambda x: x[None], found)
  return on_the_only


def _on_this_platform(keep: Callable[..., PyTree], *operands: Any) -> PyTree:
  """Calls `keep(*operands, digit=bits)` with the platform's fastest digits."""
  return jax.lax.platform_dependent(
      *operands,
      cpu=functools.partial(keep, digit=_LONG_DIGIT),
      default=functools.partial(keep, digit=1),
  )


def _keep(
    layers: keys.Layers, kept: int | jax.Array, shape: Shape
) -> jax.Array:
  _check_shapes(shape, layers.among)
  _check_number(kept)
  if isinstance(kept, (int, np.integer)):
    kept = min(int(kept), shape[-2] * shape[-1])
  if jnp.shape(kept) != shape[:-2][:jnp.ndim(kept)]:
    raise ValueError(
        f'kept has shape {jnp.shape(kept)} for scores of shape {shape}; give '
        'one number, or one per layer.'
    )
  if not math.prod(shape):
    return jnp.zeros(shape, bool)
  return _keep_in_layers(layers, kept, shape)


@functools.partial(jax.jit, static_argnames='shape')
def _keep_in_layers(
    layers: keys.Layers, kept: jax.Array, shape: Shape
) -> jax.Array:
  *lead, rows, columns = shape
  kept = jnp.asarray(kept, jnp.int32)
  kept = jnp.broadcast_to(
      kept.reshape(kept.shape + (1,) * (len(lead) - kept.ndim)), lead
  )
  number = jnp.arange(math.prod(lead), dtype=jnp.uint32).reshape(lead)
  # A mask is a constant with respect to the scores, so gradients stop here.
  layers = jax.lax.stop_gradient(layers._replace(number=number))

  def keep(layers, kept, digit):
    one = functools.partial(_keep_in_layer, (rows, columns), digit)
    return _over_layers(one, digit, layers, kept)

  if rows * columns <= _VERY_FEW:
    one = functools.partial(_keep_by_rank, (rows, columns))
    return _over_layers(one, 1, layers, kept)
  if rows * columns < _FEW or len(lead) > 1:
    return keep(layers, kept, digit=1)
  return _on_this_platform(keep, layers, kept)


def _keep_in_layer(
    shape: Shape, digit: int, layer: keys.Layers, kept: jax.Array
) -> jax.Array:
  if layer.scores is None and digit > 1:
    # Drawing the bits in each pass would take longer than ranking them.
    layer = layer._replace(scores=keys.draw(layer, shape), words=None)
  lasts, take, _ = _last_keys(
      functools.partial(_count_digits, shape, digit),
      layer,
      digit,
      number_of_keys=keys.number_of_keys(layer),
      need=kept,
      left=jnp.int32(math.prod(shape)),
      total=_sum,
  )
  return _cut(shape, lasts, layer, take)


def _keep_by_rank(
    shape: Shape, layer: keys.Layers, kept: jax.Array
) -> jax.Array:
  """Keeps the best entries of a very small layer by comparing all pairs."""
  index = jnp.arange(math.prod(shape), dtype=jnp.int32)
  ahead: Any = False
  equal: Any = True
  for i in range(keys.number_of_keys(layer)):
    key = keys.read_key(layer, i, shape).reshape(-1)
    ahead |= equal & (key < key[:, None])
    equal &= key == key[:, None]
  ahead |= equal & (index < index[:, None])
  among = jnp.ones(shape, bool) if layer.among is None else layer.among
  rank = jnp.sum(ahead & among.reshape(-1), axis=1, dtype=jnp.int32)
  return among & (rank < kept).reshape(shape)


@jax.jit
def _keep_of_all(model: Model, sizes: PyTree, kept: wide.Wide) -> PyTree:
  model = jax.lax.stop_gradient(model)
  return _on_this_platform(_keep_in_model, model, sizes, kept)


def _keep_in_model(
    model: Model, sizes: PyTree, kept: wide.Wide, digit: int
) -> PyTree:
  """Ranks the trees `(scores, among, words, first)` as one group."""
  scores, _, words, _ = model

  def map_layers(f, model, *numbers):
    """Maps `f(shape)(layer, *numbers)` over the layers of every leaf."""
    def in_leaf(scores, among, words, first, *numbers):
      number = jnp.arange(scores.shape[0], dtype=jnp.uint32)
      layers = keys.Layers(scores, among, words, number, first)
      return _over_layers(f(scores.shape[1:]), digit, layers, *numbers)
    return map_leaves(in_leaf, *model, *numbers)

  def count(model, *state):
    counts = map_layers(
        lambda shape: lambda layer, size: size * _count_digits(
            shape, digit, layer, *state
        ),
        model,
        sizes,
    )
    return jnp.concatenate(jax.tree.leaves(counts))

  leaves, treedef = jax.tree.flatten(scores)
  layers = [leaf.shape[0] for leaf in leaves]
  size = jnp.concatenate(jax.tree.leaves(sizes))
  entries = np.repeat([math.prod(leaf.shape[1:]) for leaf in leaves], layers)
  lasts, need, left = _last_keys(
      count,
      model,
      digit,
      number_of_keys=keys.number_of_keys(keys.Layers(
          leaves[0], None, next(iter(jax.tree.leaves(words)), None)
      )),
      need=kept,
      left=jnp.asarray(entries, jnp.int32) * size,
      total=wide.total,
  )
  # Entries equal to the threshold are kept in the order of their layers.
  number, rest = _nth(left, need, wide.total)
  index = jnp.arange(left.size, dtype=jnp.int32)
  rest = jnp.where(index == number, wide.to_int32(rest), 0)
  take = jnp.where(index < number, left, rest) // size
  return map_layers(
      lambda shape: functools.partial(_cut, shape, lasts),
      model,
      jax.tree.unflatten(treedef, jnp.split(take, np.cumsum(layers)[:-1])),
  )


def _last_keys(
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

  `count(operands, lasts, last, shift)` counts as `_count_digits` does, with one
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
      value, need = _nth(counts, _smaller(need, total(counts)), total)
      zeros = jnp.uint32(2**digit - 1) - value.astype(jnp.uint32)
      # A comparison, because indexing would become a gather under vmap.
      of_value = jnp.arange(counts.shape[-1], dtype=jnp.int32) == value
      left = jnp.sum(counts, axis=-1, where=of_value, dtype=jnp.int32)
      return i + 1, last & ~(zeros << shift), need, left

    state = jnp.int32(0), jnp.asarray(_ALL_ONES), need, left
    _, last, need, left = jax.lax.while_loop(undecided, narrow, state)
    lasts += (last,)
  return lasts, need, left


def _count_digits(
    shape: Shape,
    digit: int,
    layer: keys.Layers,
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
    ones = _sum(chosen & (key & 1 == 1))
    return jnp.stack([_sum(chosen) - ones, ones])
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


def _cut(
    shape: Shape, lasts: Keys, layer: keys.Layers, take: jax.Array
) -> jax.Array:
  """Keeps entries ranked before `lasts` and the first `take` equal to them."""
  before, equal = keys.compare(layer, shape, lasts)
  row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in (0, 1))
  in_rows = jnp.sum(equal, axis=1, dtype=jnp.int32)
  last_row, rest = _nth(in_rows, take, _sum)
  in_columns = jnp.sum(equal & (row == last_row), axis=0, dtype=jnp.int32)
  last_column, _ = _nth(in_columns, rest, _sum)
  first = (row < last_row) | ((row == last_row) & (column <= last_column))
  return before | (equal & first & (take > 0))


def _nth(
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


def _sum(x: jax.Array) -> jax.Array:
  return jnp.sum(x, dtype=jnp.int32)


def _check_number(kept: int | jax.Array) -> None:
  if isinstance(kept, (int, np.integer)) and kept < 0:
    raise ValueError(f'kept is {kept}; give the number to keep, 0 or more.')


def _check_shapes(shape: Shape, among: jax.Array | None) -> None:
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

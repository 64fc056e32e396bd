# SPDX-License-Identifier: Apache-2.0
"""Exact top-k masks of a whole model, whose layers are ranked as one group."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import trees
from spdf_jax.sparsity.structures import Structure
from spdf_jax.sparsity.topk import keys
from spdf_jax.sparsity.topk import radix_select
from spdf_jax.sparsity.topk.keys import Layers

PyTree = Any
Model = tuple[PyTree, PyTree, PyTree, PyTree]

_MOST = 2**48 - 1


class Wide(NamedTuple):
  """A non-negative integer below 2^48, `high * 2^16 + low`.

  `<` compares the integers; in `a - b`, `b` must not be larger than `a`.
  """

  high: jax.Array
  """The upper 32 bits, uint32."""

  low: jax.Array
  """The lower 16 bits, uint32."""

  def __lt__(  # type: ignore[override]  # hides tuple.__lt__
      self, other: 'Wide'
  ) -> jax.Array:
    lower = (self.high == other.high) & (self.low < other.low)
    return (self.high < other.high) | lower

  def __sub__(self, other: 'Wide') -> 'Wide':
    borrow = (self.low < other.low).astype(jnp.uint32)
    low = (self.low - other.low) & 0xffff
    return Wide(self.high - other.high - borrow, low)


def to_wide(number: int | jax.Array) -> Wide:
  """Converts a non-negative integer; 2^48 - 1 replaces larger ones.

  Args:
    number: A Python int, or a pair of uint32, the high word first, as a tuple
      or an array `[2]`; a pair may be traced.

  Returns:
    The integer.

  Example:
    >>> [int(part) for part in to_wide(3 * 2**16 + 7)]
    [3, 7]
  """
  words: Any = number
  if isinstance(number, (int, np.integer)):
    words = np.array(divmod(min(int(number), _MOST), 2**32), np.uint32)
  high, low = (jnp.asarray(word, jnp.uint32) for word in words)
  fits = high < 2**16
  return Wide(
      jnp.where(fits, high << 16 | low >> 16, np.uint32(_MOST >> 16)),
      jnp.where(fits, low & 0xffff, _MOST & 0xffff),
  )


def to_int32(number: Wide) -> jax.Array:
  """Converts to int32; 2^31 - 1 replaces larger numbers.

  Example:
    >>> int(to_int32(to_wide(2**40)))
    2147483647
  """
  bits = (number.high << 16 | number.low).astype(jnp.int32)
  return jnp.where(number.high < 2**15, bits, 2**31 - 1)


def total(counts: jax.Array) -> Wide:
  """Adds up counts of at most 2^16 layers.

  Args:
    counts: int32 `[layers, ...]`; the sum over one layer must fit into int32.

  Returns:
    The exact sum.

  Example:
    >>> int(total(jnp.full(6, 2**30)).high) == 6 * 2**14
    True
  """
  rows = counts.reshape(len(counts), -1)
  rows = jnp.sum(rows, axis=1, dtype=jnp.int32).astype(jnp.uint32)
  low = jnp.sum(rows & 0xffff, dtype=jnp.uint32)
  high = jnp.sum(rows >> 16, dtype=jnp.uint32)
  return Wide(high + (low >> 16), low & 0xffff)


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
    radix_select.check_shapes(tuple(leaf.shape), mask)
    if leaf.ndim != 3:
      raise ValueError(
          f'scores have a leaf of shape {list(leaf.shape)}; give [layers, '
          'inputs, outputs].'
      )
  words: Any = [None] * len(leaves)
  if tie_break is not None:
    words = map(keys.key_words, treedef.flatten_up_to(tie_break))
  radix_select.check_number(kept)
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
      tuple(model), treedef.unflatten(units), to_wide(kept)
  )


@jax.jit
def _keep_of_all(model: Model, sizes: PyTree, kept: Wide) -> PyTree:
  model = jax.lax.stop_gradient(model)
  return radix_select.on_this_platform(_keep_in_model, model, sizes, kept)


def _keep_in_model(
    model: Model, sizes: PyTree, kept: Wide, digit: int
) -> PyTree:
  """Ranks the trees `(scores, among, words, first)` as one group."""
  scores, _, words, _ = model

  def map_layers(f, model, *numbers):
    """Maps `f(shape)(layer, *numbers)` over the layers of every leaf."""
    def in_leaf(scores, among, words, first, *numbers):
      number = jnp.arange(scores.shape[0], dtype=jnp.uint32)
      layers = Layers(scores, among, words, number, first)
      in_layer = f(scores.shape[1:])
      return radix_select.over_layers(in_layer, digit, layers, *numbers)
    return trees.map_leaves(in_leaf, *model, *numbers)

  def count(model, *state):
    counts = map_layers(
        lambda shape: lambda layer, size: size * radix_select.count_digits(
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
  lasts, need, left = radix_select.last_keys(
      count,
      model,
      digit,
      number_of_keys=keys.number_of_keys(Layers(
          leaves[0], None, next(iter(jax.tree.leaves(words)), None)
      )),
      need=kept,
      left=jnp.asarray(entries, jnp.int32) * size,
      total=total,
  )
  # Entries equal to the threshold are kept in the order of their layers.
  number, rest = radix_select.nth(left, need, total)
  index = jnp.arange(left.size, dtype=jnp.int32)
  rest = jnp.where(index == number, to_int32(rest), 0)
  take = jnp.where(index < number, left, rest) // size
  return map_layers(
      lambda shape: functools.partial(radix_select.cut, shape, lasts),
      model,
      jax.tree.unflatten(treedef, jnp.split(take, np.cumsum(layers)[:-1])),
  )


def keep_of_model(
    scores: PyTree,
    params: PyTree,
    kept: int | jax.Array,
    structure: Structure,
    *,
    among: PyTree | None = None,
    tie_break: PyTree | None = None,
) -> PyTree:
  """Keeps units of a whole model, and at least one in every layer.

  Units that differ in size, such as the channels of different layers, are
  ranked by their scores per weight.

  Args:
    scores: Scores of units, as `structure.reduce` returns them.
    params: Leaves `[layers, inputs, outputs]`, or their shapes.
    kept: Number of weights to keep, see `model_kept`: an int, or uint32 `[2]`,
      the high word first.
    structure: Structure of the mask.
    among: Masks of the units that may be kept; `None`: all.
    tie_break: A tree of typed keys; `None` prefers the earlier of equal scores.

  Returns:
    Masks of weights, of the shapes of `params`; they keep fewer than `kept`
    weights where the next unit is too large.
  """
  sizes = jax.tree.map(
      lambda p: math.prod(p.shape) // math.prod(structure.unit_shape(p.shape)),
      params,
  )
  if len(set(jax.tree.leaves(sizes))) > 1:
    scores = jax.tree.map(
        lambda s, n: s / n if jnp.issubdtype(s.dtype, jnp.inexact) else s,
        scores, sizes,
    )
  candidates = among
  if among is None:
    candidates = jax.tree.map(lambda _: None, scores)
  units = keep_largest_of_all(
      scores, kept, among=among, tie_break=tie_break, sizes=sizes,
      first=trees.map_leaves(_best_units, scores, candidates),
  )
  return jax.tree.map(lambda p, m: structure.expand(m, p.shape), params, units)


def _best_units(
    scores: jax.Array, among: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Returns row and column of the best unit of every layer, int32 [layers]."""
  bits = keys.sortable_bits(scores)
  if among is not None:
    bits = jnp.where(among, bits, jnp.zeros_like(bits))
  # Reductions instead of an argmax, for which sharded scores would be gathered.
  best = bits == jnp.max(bits, axis=(-2, -1), keepdims=True)
  indices = []
  for axis in (-2, -1):
    index = jax.lax.broadcasted_iota(
        jnp.int32, scores.shape, scores.ndim + axis
    )
    last = jnp.int32(scores.shape[axis] - 1)
    first = jnp.min(
        jnp.where(best, index, last), axis=(-2, -1), keepdims=True
    )
    best &= index == first
    indices.append(first.reshape(-1))
  return indices[0], indices[1]

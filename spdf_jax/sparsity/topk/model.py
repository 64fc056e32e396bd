"""Exact top-k over all layers of a model at once, however many weights."""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity.leaves import map_leaves
from spdf_jax.sparsity.topk import competitions
from spdf_jax.sparsity.topk import digits
from spdf_jax.sparsity.topk import limbs
from spdf_jax.sparsity.topk import random_bits
from spdf_jax.sparsity.topk import units as units_lib

PyTree = Any
Cuts = tuple[jax.Array, ...]


class _Model(NamedTuple):
  """Trees of one structure: what competes."""

  scores: PyTree
  among: PyTree
  words: PyTree


def keep_largest_of_all(
    scores: PyTree,
    kept: int | jax.Array,
    *,
    among: PyTree | None = None,
    tie_break: PyTree | None = None,
) -> PyTree:
  """Keeps the `kept` largest scores of a whole tree: one competition.

  Exactly `min(kept, number of candidates)` are kept, equal scores in the order
  of the leaves and row-major within them. Counts are exact to 2^64. Layers
  that are alike share one compiled loop, see `map_leaves`.

  Args:
    scores: A tree (or list) of real scores of at most 32 bits, each
      `[layers, inputs, outputs]`; `None` leaves stay `None`.
    kept: How many to keep in all: an int, or a pair of uint32, the high limb
      first, as a tuple or an array `[2]`; a pair may be traced.
    among: A tree of masks of the scores' shapes: only these may be kept;
      `None`, here or for a leaf: all.
    tie_break: `None` prefers the earlier of equal scores; typed PRNG keys, one
      or a tree of one per leaf, break ties uniformly at random.

  Returns:
    The tree of masks.

  Raises:
    ValueError: an argument does not fit the scores, `kept` is negative, or a
      layer has 2^31 scores or more.
    TypeError: scores of 64 bits or of a complex type.

  Example:
    >>> scores = {'a': jnp.array([[[1., 5.]]]), 'b': jnp.array([[[5., 5.]]])}
    >>> mask = keep_largest_of_all(scores, 2)
    >>> mask['a'].tolist(), mask['b'].tolist()
    ([[[False, True]]], [[[True, False]]])
  """
  leaves, treedef = jax.tree.flatten(scores)
  if not leaves:
    return scores
  masks = [None] * len(leaves)
  if among is not None:
    masks = treedef.flatten_up_to(among)
  for leaf, mask in zip(leaves, masks):
    units_lib.check_rankable(leaf)
    units_lib.check_shapes(tuple(leaf.shape), mask)
    if leaf.ndim != 3:
      raise ValueError(
          f'scores have a leaf of shape {list(leaf.shape)}; give [layers, '
          'inputs, outputs].'
      )
  words = _words(tie_break, treedef)
  model = _Model(scores, treedef.unflatten(masks), treedef.unflatten(words))
  return _keep(model, _pair(kept))


def _pair(kept: int | jax.Array) -> limbs.Limbs:
  if isinstance(kept, (int, np.integer)):
    if kept < 0:
      raise ValueError(f'kept is {kept}; give the number to keep, 0 or more.')
    return limbs.to_limbs(int(kept))
  if not isinstance(kept, tuple) and jnp.shape(kept) != (2,):
    raise ValueError(
        f'kept has shape {jnp.shape(kept)}; give an int or two uint32, the '
        'high one first.'
    )
  return limbs.Limbs(*(jnp.asarray(limb, jnp.uint32) for limb in kept))


def _words(
    tie_break: PyTree | None, treedef: jax.tree_util.PyTreeDef
) -> list[jax.Array | None]:
  """Returns one key's words per leaf."""
  number = treedef.num_leaves
  if tie_break is None:
    return [None] * number
  if jax.tree_util.all_leaves([tie_break]):
    random_bits.key_words(tie_break)  # Raises unless it is a typed key.
    keys = [jax.random.fold_in(tie_break, i) for i in range(number)]
  else:
    keys = treedef.flatten_up_to(tie_break)
  return [random_bits.key_words(key) for key in keys]


@jax.jit
def _keep(model: _Model, kept: limbs.Limbs) -> PyTree:
  return competitions.on_this_platform(_keep_counting, 0, model, kept)


def _keep_counting(
    counting: digits.Counting, model: _Model, kept: limbs.Limbs
) -> PyTree:
  need = limbs.minimum(kept, _total(_candidates_per_layer(model, ())))
  value, need, equal = _kth_largest(counting, model, need, ())
  cuts, all_equals = (value,), limbs.at_least(need, equal)
  if any(words is not None for words in jax.tree.leaves(model.words)):
    value, need = jax.lax.cond(
        all_equals,
        lambda: (jnp.uint32(0), need),
        lambda: _kth_largest(counting, model, need, cuts)[:2],
    )
    cuts = (*cuts, value)
  equal = _candidates_per_layer(model, cuts)
  taken = _take_in_order(equal, need)

  def one(counting, units, shape, taken, equal):
    keys = units_lib.keys_of(units, shape)
    passing = lambda i, compare: units_lib.narrowed(
        units_lib.candidates(units, keys, cuts[:i]),
        compare(keys[i].read(units), cuts[i]),
    )
    equals = lambda: jax.lax.cond(
        jnp.all(taken == equal),
        lambda: units_lib.candidates(units, keys, cuts),
        lambda: competitions.choose(
            counting,
            units._replace(among=units_lib.candidates(units, keys, cuts)),
            shape, keys[-1:], taken,
        ),
    )
    return jax.lax.cond(
        all_equals,
        lambda: passing(0, jnp.greater_equal),
        lambda: functools.reduce(
            jnp.logical_or,
            [passing(i, jnp.greater) for i in range(len(cuts))], equals(),
        ),
    )

  def each(units, shape, *numbers):
    return competitions.each(one, counting, units, shape, *numbers)

  return _map_units(each, model, taken, equal)


def _kth_largest(
    counting: digits.Counting, model: _Model, need: limbs.Limbs, cuts: Cuts
) -> tuple[jax.Array, limbs.Limbs, limbs.Limbs]:
  """Returns the k-th largest bits, how many of it to keep, and to keep from."""
  passes = digits.passes([32], counting)

  def narrow(i, carry):
    (arrays, cuts_), (prefix, need, _) = jax.lax.optimization_barrier(
        ((model, cuts), carry)
    )

    def count(counting, units, shape):
      keys = units_lib.keys_of(units, shape)
      read, chosen = digits.at_pass(
          i, passes, [keys[len(cuts_)].read(units)], prefix[None],
          units_lib.candidates(units, keys, cuts_),
      )
      return counting.count(read, chosen, 2**passes.digit)

    counts = _total(_map_units(
        lambda units, shape: competitions.each(count, counting, units, shape),
        arrays,
    ))
    from_digit = limbs.sums_from_the_end(counts)
    digit = jnp.sum(limbs.at_least(from_digit, need)) - 1
    pick = lambda x: limbs.Limbs(x.high[digit], x.low[digit])
    equal = pick(counts)
    need = limbs.subtract(need, limbs.subtract(pick(from_digit), equal))
    prefix |= digit.astype(jnp.uint32) << jnp.asarray(passes.shift)[i]
    return prefix, need, equal

  first = jnp.uint32(0), need, need
  return jax.lax.fori_loop(0, len(passes.shift), narrow, first)


def _candidates_per_layer(model: _Model, cuts: Cuts) -> PyTree:
  """Counts the candidates of every layer: int32 `[layers]` per leaf."""
  def count(units, shape):
    keys = units_lib.keys_of(units, shape)
    return units_lib.number_of(units_lib.candidates(units, keys, cuts), shape)
  if not cuts and not jax.tree.leaves(model.among):
    return jax.tree.map(
        lambda s: np.full(s.shape[0], s.shape[1] * s.shape[2], np.int32),
        model.scores,
    )
  return _map_units(count, model)


def _take_in_order(numbers: PyTree, need: limbs.Limbs) -> PyTree:
  """Shares `need` out in order: from every entry, all until none is left."""
  leaves, treedef = jax.tree.flatten(numbers)
  there = jnp.concatenate(leaves).astype(jnp.uint32)
  there = limbs.Limbs(jnp.zeros_like(there), there)
  up_to = jax.lax.associative_scan(limbs.add, there)
  before = limbs.minimum(limbs.subtract(up_to, there), need)
  taken = limbs.minimum(there, limbs.subtract(need, before))
  ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
  return treedef.unflatten(jnp.split(taken.low.astype(jnp.int32), ends))


def _total(counts: PyTree) -> limbs.Limbs:
  """Adds up non-negative int32 `[layers, ...]` of all leaves, exactly."""
  total = limbs.to_limbs(0)
  for leaf in jax.tree.leaves(counts):
    # Halves of 16 bits, so that 2^16 layers add up within 32.
    halves = leaf.astype(jnp.uint32)
    add_up = lambda x: jnp.sum(x, axis=0, dtype=jnp.uint32)
    total = limbs.add(
        total, limbs.add(
            limbs.multiply(add_up(halves >> 16), 2**16),
            limbs.multiply(add_up(halves & 0xffff), 1),
        )
    )
  return total


def _map_units(f, model: _Model, *trees: PyTree) -> PyTree:
  """Maps `f(units, shape, *rest)` over the leaves of a model."""
  def call(scores, among, words, *rest):
    units = units_lib.all_units(scores, among, words, scores.shape)
    return f(units, scores.shape, *rest)
  return map_leaves(call, *model, *trees)

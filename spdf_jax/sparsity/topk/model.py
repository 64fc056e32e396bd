"""Exact top-k over all layers of a model at once, however many weights."""

import functools
import operator
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.lowerings import batch_by_reference
from spdf_jax.lowerings import define_primitive
from spdf_jax.lowerings import NATIVE
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
    by_magnitude: bool = False,
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
    by_magnitude: Ranks by `abs(scores)`, of which kernels make no arrays.

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
  return _keep(model, _pair(kept), by_magnitude)


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


@functools.partial(jax.jit, static_argnames='by_magnitude')
def _keep(model: _Model, kept: limbs.Limbs, by_magnitude: bool) -> PyTree:
  # There is no rule of differentiation: masks are constants.
  scores = jax.tree.map(jax.lax.stop_gradient, model.scores)
  operands, treedef = jax.tree.flatten((model._replace(scores=scores), kept))
  masks = keep_largest_of_all_p.bind(
      *operands, treedef=treedef, by_magnitude=by_magnitude, lowering=NATIVE
  )
  return jax.tree.structure(scores).unflatten(masks)


def _keep_in_model(
    *operands: jax.Array,
    treedef: jax.tree_util.PyTreeDef,
    by_magnitude: bool,
) -> list[jax.Array]:
  model, kept = treedef.unflatten(operands)
  rank = lambda scores: units_lib.ranked(scores, by_magnitude)
  model = model._replace(scores=jax.tree.map(rank, model.scores))
  return jax.tree.leaves(
      competitions.on_this_platform(_keep_counting, 0, model, kept)
  )


def _keep_counting(
    counting: digits.Counting, model: _Model, kept: limbs.Limbs
) -> PyTree:
  value, need, equal = _kth_largest(counting, model, kept, ())
  cuts, all_equals = (value,), need >= limbs.total(equal)
  if any(words is not None for words in jax.tree.leaves(model.words)):
    value, need, equal = jax.lax.cond(
        all_equals,
        lambda: (jnp.uint32(0), need, equal),
        lambda: _kth_largest(counting, model, need, cuts),
    )
    cuts = (*cuts, value)
  taken = _take_in_order(equal, need)
  taken, equal = (_split(x, model.scores) for x in (taken, equal))

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
) -> tuple[jax.Array, limbs.Limbs, jax.Array]:
  """Finds the k-th largest bits of all that have the first keys in `cuts`.

  Returns:
    The bits; how many units that have them are to be kept; and how many have
    them, int32 `[all layers]`.
  """
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

    counts = jnp.concatenate(jax.tree.leaves(_map_units(
        lambda units, shape: competitions.each(count, counting, units, shape),
        arrays,
    )))
    digit, need = _find(limbs.total(counts), need)
    prefix |= digit.astype(jnp.uint32) << jnp.asarray(passes.shift)[i]
    return prefix, need, counts[:, digit]

  layers = sum(scores.shape[0] for scores in jax.tree.leaves(model.scores))
  first = jnp.uint32(0), need, jnp.zeros(layers, jnp.int32)
  return jax.lax.fori_loop(0, len(passes.shift), narrow, first)


def _find(
    counts: limbs.Limbs, need: limbs.Limbs
) -> tuple[jax.Array, limbs.Limbs]:
  """Finds which digit the `need`-th largest has, and its rank among those."""
  from_each = jax.lax.associative_scan(operator.add, counts, reverse=True)
  pick = lambda x, i: jax.tree.map(lambda limb: limb[i], x)
  need = limbs.minimum(need, pick(from_each, 0))
  digit = jnp.sum(from_each >= need) - 1
  return digit, need - (pick(from_each, digit) - pick(counts, digit))


def _take_in_order(there: jax.Array, need: limbs.Limbs) -> jax.Array:
  """Shares `need` out in order: from every entry, all until none is left."""
  low = there.astype(jnp.uint32)
  wide = limbs.Limbs(jnp.zeros_like(low), low)
  before = jax.lax.associative_scan(operator.add, wide) - wide
  taken = limbs.minimum(wide, need - limbs.minimum(before, need))
  return taken.low.astype(jnp.int32)


def _split(numbers: jax.Array, scores: PyTree) -> PyTree:
  """Splits one number per layer into those of every leaf."""
  leaves, treedef = jax.tree.flatten(scores)
  ends = np.cumsum([leaf.shape[0] for leaf in leaves])[:-1]
  return treedef.unflatten(jnp.split(numbers, ends))


def _map_units(f, model: _Model, *trees: PyTree) -> PyTree:
  """Maps `f(units, shape, *rest)` over the leaves of a model."""
  def call(scores, among, words, *rest):
    units = units_lib.all_units(scores, among, words, scores.shape)
    return f(units, scores.shape, *rest)
  return map_leaves(call, *model, *trees)


keep_largest_of_all_p = define_primitive(
    'keep_largest_of_all', _keep_in_model, multiple_results=True
)
"""Masks of one competition; operands flattened: scores, among and words of all
leaves, and two limbs."""

batch_by_reference(keep_largest_of_all_p)

"""Dropping and growing connections: what algorithms that move masks share."""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity.algorithm import Algorithm
from spdf_jax.sparsity.algorithm import never
from spdf_jax.sparsity.combinators import MaskMaker
from spdf_jax.sparsity.counts import fixed
from spdf_jax.sparsity.counts import fraction_of
from spdf_jax.sparsity.counts import kept_table
from spdf_jax.sparsity.leaves import map_leaves
from spdf_jax.sparsity.masks import leaf_keys
from spdf_jax.sparsity.schedules import is_constant
from spdf_jax.sparsity.schedules import level_at
from spdf_jax.sparsity.schedules import Schedule
from spdf_jax.sparsity.schedules import value_at
from spdf_jax.sparsity.structures import Structure
from spdf_jax.sparsity.structures import UNSTRUCTURED
from spdf_jax.sparsity.times import UpdateTimes
from spdf_jax.sparsity.topk import keep_largest
from spdf_jax.sparsity.topk import keep_largest_of_all
from spdf_jax.sparsity.topk import keep_random

PyTree = Any
Distribution = Callable[[PyTree, PyTree], PyTree]


class Units(NamedTuple):
  """What competes in one leaf: weights, or blocks of them.

  Arrays are `[..., a, b]`, where the last two axes are one competition; counts
  are int32, one for all competitions or one for each.
  """

  mask: jax.Array
  """Which are kept now."""

  weights: jax.Array
  """Their weights, summed where units are blocks."""

  magnitudes: jax.Array
  """The magnitudes of the weights, summed where units are blocks."""

  grads: jax.Array
  """The magnitudes of the gradients, those of pruned weights included."""

  key: jax.Array
  """A typed key of this leaf and step."""

  kept: jax.Array
  """How many are to be kept."""

  drop_fraction: jax.Array
  """The share of the connections that is dropped, as `fixed` writes it."""


Change = Callable[[Units], jax.Array]
"""From the units of a leaf to their next mask."""


def moving(
    sparsity: PyTree,
    times: UpdateTimes,
    change: Change,
    *,
    distribution: Distribution,
    structure: Structure,
    init: MaskMaker,
    drop_fraction: float | Schedule = 0.0,
    dense_grads: bool = False,
    skip_step: bool = False,
) -> Algorithm:
  """Builds an algorithm that changes every leaf's mask at given steps.

  Under `model_wide` levels the least magnitudes of the whole model are pruned
  first, and what a layer keeps of that is the count its change keeps to.

  Args:
    sparsity: A number, a schedule, or a tree of those.
    times: When masks change.
    change: What changes in a leaf.
    distribution: `(params, sparsity) -> levels`.
    structure: What competes.
    init: Makes the first mask.
    drop_fraction: A number, or a schedule of the step.
    dense_grads: Whether updates need the gradients of pruned weights.
    skip_step: Whether an update of the mask replaces the gradient step.

  Returns:
    The algorithm.

  Raises:
    ValueError: a level or fraction is out of its range at some update.
  """
  fractions = _fractions(drop_fraction, times)
  _check_levels(sparsity, times)

  def sparsity_at(count, params):
    step = 0
    if not is_constant(sparsity) and times.index(count) >= 0:
      step = int(times.steps[times.index(count)])
    return distribution(params, level_at(sparsity, step))

  def update(key, count, mask, params, grads):
    table = kept_table(params, sparsity, distribution, times, structure)
    row = times.index(count)
    if isinstance(table, np.ndarray):
      mask = _prune_model(mask, params, _row(table, row), structure)
      kept = map_leaves(lambda m: count_kept(structure.reduce(m) > 0), mask)
    else:
      kept = jax.tree.map(lambda rows: _row(rows, row), table)
    fraction = _row(fractions, row)

    def change_leaf(m, w, g, leaf_key, n):
      units = Units(
          mask=structure.reduce(m) > 0,
          weights=structure.reduce(w),
          magnitudes=magnitudes(structure, w),
          grads=magnitudes(structure, g),
          key=leaf_key,
          kept=n,
          drop_fraction=fraction,
      )
      return structure.expand(change(units), m.shape)

    keys = leaf_keys(key, params)
    return map_leaves(change_leaf, mask, params, grads, keys, kept)

  def init_mask(key, params):
    mask = first_mask(init, key, params, sparsity_at(0, params), structure)
    table = kept_table(params, sparsity, distribution, times, structure)
    if drop_fraction != 0:
      _check_drops(table, fractions)
    return mask

  return Algorithm(
      sparsity_at=sparsity_at,
      init=init_mask,
      update=update,
      update_at=times.contains,
      dense_grads_at=times.contains if dense_grads else never,
      skip_step_at=times.contains if skip_step else never,
  )


def first_mask(
    init: MaskMaker,
    key: jax.Array,
    params: PyTree,
    levels: PyTree,
    structure: Structure,
) -> PyTree:
  """Makes the first mask, in the structure if there is one.

  Args:
    init: `(key, params, levels) -> mask`; takes `structure=` too where one is
      asked for.
    key: A typed key.
    params: Leaves `[layers, inputs, outputs]`.
    levels: What the distribution returned.
    structure: What lives and dies together, or apart.

  Returns:
    The mask.

  Raises:
    ValueError: the structure cannot have a level.
  """
  if structure is UNSTRUCTURED:
    return init(key, params, levels)
  for level in jax.tree.leaves(levels):
    structure.check(level)
  return init(key, params, levels, structure=structure)


def surviving(units: Units) -> jax.Array:
  """Counts what survives a drop of the fraction, and no more than is kept."""
  number = count_kept(units.mask)
  return jnp.minimum(
      number - fraction_of(number, units.drop_fraction), units.kept
  )


def drop_and_grow(
    units: Units,
    number: jax.Array,
    *,
    grow_by: jax.Array | None,
    regrow_dropped: bool,
) -> jax.Array:
  """Drops the least magnitudes, then grows up to the count to be kept.

  Args:
    units: The units of a leaf.
    number: How many connections survive.
    grow_by: Scores of which the largest grow; `None` grows at random.
    regrow_dropped: Whether what was just dropped may grow again.

  Returns:
    The next mask; `units.kept` are `True` in every competition.
  """
  if not regrow_dropped:
    number = jnp.maximum(number, _not_enough_pruned(units))
  survivors = keep_largest(units.magnitudes, number, among=units.mask)
  return grow(units, survivors, grow_by=grow_by, regrow_dropped=regrow_dropped)


def grow(
    units: Units,
    survivors: jax.Array,
    *,
    grow_by: jax.Array | None,
    regrow_dropped: bool,
) -> jax.Array:
  """Adds connections to the survivors, up to the count to be kept."""
  taken = survivors if regrow_dropped else units.mask
  number = jnp.maximum(units.kept - count_kept(survivors), 0)

  def grown():
    if grow_by is None:
      return keep_random(units.key, taken.shape, number, among=~taken)
    return keep_largest(grow_by, number, among=~taken)

  # Gradual pruning grows nothing at most updates.
  return survivors | jax.lax.cond(
      jnp.any(number > 0), grown, lambda: jnp.zeros_like(taken)
  )


def magnitudes(structure: Structure, x: jax.Array) -> jax.Array:
  """Returns the magnitudes of units, summed where units are blocks."""
  return structure.reduce(jnp.abs(x))


def count_kept(mask: jax.Array) -> jax.Array:
  """Counts the kept units of every competition, int32 [...]."""
  return jnp.sum(mask, axis=(-2, -1), dtype=jnp.int32)


def _not_enough_pruned(units: Units) -> jax.Array:
  """Returns how many must survive for the pruned ones to make up the rest."""
  size = units.mask.shape[-2] * units.mask.shape[-1]
  return units.kept - (size - count_kept(units.mask))


def _check_levels(sparsity: PyTree, times: UpdateTimes) -> None:
  """Evaluates every level once, before anything long begins."""
  steps = [0] if is_constant(sparsity) else [0, *times.steps.tolist()]
  for step in steps:
    level_at(sparsity, step)


def _fractions(drop_fraction: float | Schedule, times: UpdateTimes):
  steps = [0]
  if callable(drop_fraction):
    if times.endless:
      raise ValueError(
          'drop_fraction is a schedule and update_until is None; give the step '
          'of the last update.'
      )
    steps = times.steps.tolist()
  return fixed([value_at(drop_fraction, t) for t in steps], 'drop_fraction')


def _check_drops(table: PyTree, fractions: np.ndarray) -> None:
  """Raises ValueError where no layer ever has as much as one to drop."""
  if isinstance(table, np.ndarray):
    return
  most = max((int(rows.max()) for rows in jax.tree.leaves(table)), default=0)
  # In Python's integers: this is also asked while jax traces.
  if most and most * int(fractions.max()) < 2**30:
    raise ValueError(
        f'drop_fraction is at most {fractions.max() / 2**30:.3g} at updates, '
        f'which of the {most} kept per competition drops none; raise it, or '
        'let more compete.'
    )


def _row(table: np.ndarray, index: Any) -> jax.Array:
  # A constant has one row; before the first update the first holds.
  last = len(table) - 1
  return jnp.asarray(table)[jnp.clip(index, 0, last)]


def _prune_model(
    mask: PyTree, params: PyTree, kept: jax.Array, structure: Structure
) -> PyTree:
  pruned = keep_largest_of_all(
      jax.tree.map(lambda w: magnitudes(structure, w), params),
      kept,
      among=jax.tree.map(lambda m: structure.reduce(m) > 0, mask),
  )
  return jax.tree.map(
      lambda new, old: structure.expand(new, old.shape), pruned, mask
  )

# SPDX-License-Identifier: Apache-2.0
"""Algorithms that drop and grow connections leaf by leaf."""

from collections.abc import Callable
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import counts
from spdf_jax.sparsity import distributions
from spdf_jax.sparsity import initial_masks
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import schedules
from spdf_jax.sparsity import structures
from spdf_jax.sparsity import topk
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.algorithms import algorithm
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.algorithms.growth import Units
from spdf_jax.sparsity.counts import ModelTable
from spdf_jax.sparsity.distributions import Distribution
from spdf_jax.sparsity.masks import MaskMaker
from spdf_jax.sparsity.structures import Structure

PyTree = Any

_CHECKED = 100  # Updates at which a sparsity is checked at once.
_CARRY = 2  # Folded into a leaf's key to round numbers of dropped connections.


LeafUpdate = Callable[[Units], jax.Array]
"""`(units) -> mask`: the next mask of the units of a leaf."""


def leafwise(
    sparsity: PyTree,
    times: schedules.UpdateTimes,
    update_leaf: LeafUpdate,
    *,
    distribution: Distribution | str,
    structure: Structure | str,
    init: MaskMaker | str,
    drop_fraction: float | schedules.Schedule = 0.0,
    dense_grads: bool = False,
    skip_step: bool = False,
) -> Algorithm:
  """Builds an algorithm that updates the mask of every leaf at given steps.

  With `model_wide` sparsities, an update first prunes the smallest magnitudes
  of the whole model; each layer's update then keeps the count that remains in
  the layer.

  Args:
    sparsity: A number, a schedule, or a tree of those.
    times: The steps of mask updates.
    update_leaf: `(units) -> mask`: the next mask of a leaf.
    distribution: `(params, sparsity) -> sparsities`.
    structure: Structure of the mask.
    init: `(key, params, sparsities) -> mask`: the initial mask.
    drop_fraction: A number, or a schedule of the step.
    dense_grads: Whether updates need the gradients of pruned weights.
    skip_step: Whether a mask update replaces the gradient step.

  Returns:
    The algorithm.

  Raises:
    ValueError: a sparsity or fraction is out of its range at an update; of a
      schedule, some are checked at once, and all on `init`.
  """
  distribution = distributions.distribution_of(distribution)
  init = initial_masks.init_of(init)
  structure = structures.structure_of(structure)
  fractions = _fractions(drop_fraction, times)
  _check_sparsities(sparsity, times)

  def sparsity_at(count, params):
    step = 0
    if not schedules.is_constant(sparsity) and times.index(count) >= 0:
      step = int(times.steps[times.index(count)])
    return distribution(params, schedules.sparsity_at(sparsity, step))

  tables: dict[Any, PyTree] = {}

  def table_of(params):
    # Computed once, since a step outside of jit would evaluate all schedules.
    leaves, treedef = jax.tree.flatten(params)
    key = treedef, *(tuple(leaf.shape) for leaf in leaves)
    if key not in tables:
      tables[key] = counts.kept_table(
          params, sparsity, distribution, times, structure
      )
    return tables[key]

  def update(key, count, mask, params, grads):
    table = table_of(params)
    row = times.index(count)
    if isinstance(table, ModelTable):
      mask = prune_model(mask, params, _row(table.rows, row), structure)
      kept = trees.map_leaves(
          lambda m: count_kept(structure.reduce(m).astype(bool)), mask
      )
    else:
      kept = jax.tree.map(lambda rows: _row(rows, row), table)
    fraction = _row(fractions, row)

    def next_mask(m, w, g, leaf_key, n):
      units_mask = structure.reduce(m).astype(bool)
      grad_matrices = structure.sums(jnp.abs(g))
      units = Units(
          mask=units_mask,
          weights=structure.reduce(w),
          magnitudes=magnitudes(structure, w),
          grads=structure.group(grad_matrices),
          grad_matrices=grad_matrices,
          group=structure.group,
          key=leaf_key,
          kept=n,
          drop_fraction=fraction,
          carry=_carry(structure, m.shape, units_mask.shape, leaf_key),
      )
      return structure.expand(update_leaf(units), m.shape)

    keys = masks.leaf_keys(key, params)
    return trees.map_leaves(next_mask, mask, params, grads, keys, kept)

  def mask_by(maker, key, params):
    return initial_masks.initial_mask(
        maker, key, params, sparsity_at(0, params), structure
    )

  def init_mask(key, params):
    mask = mask_by(init, key, params)
    table = table_of(params)
    if drop_fraction != 0:
      _check_drops(table, params, structure, fractions)
    return mask

  return Algorithm(
      sparsity_at=sparsity_at,
      init=init_mask,
      update=update,
      update_at=times.contains,
      dense_grads_at=times.contains if dense_grads else algorithm.never,
      skip_step_at=times.contains if skip_step else algorithm.never,
      mask_by=mask_by,
      for_kernels=distributions.for_kernels(
          distribution,
          lambda bound: leafwise(
              sparsity, times, update_leaf, distribution=bound,
              structure=structure, init=init, drop_fraction=drop_fraction,
              dense_grads=dense_grads, skip_step=skip_step,
          ),
      ),
  )


def update_times_of(
    sparsity: PyTree,
    every: schedules.UpdateEvery,
    start: int | None,
    stop: int | None,
) -> schedules.UpdateTimes:
  """Returns the steps of mask updates, the last of which ends the schedule.

  If updates are `every` so many steps, and a schedule changes the sparsity
  between the last of them and `stop`, there is one more update at `stop`:
  masks would otherwise miss the final sparsity, e.g. have 79.9 % of zeros
  instead of 80 %. Steps that are listed, or given by a function, stay as they
  are.

  Args:
    sparsity: A number, a schedule, or a tree of those.
    every: As for `schedules.update_times`, like `start` and `stop`.
    start: First step that may be an update.
    stop: Last step that may be an update.

  Returns:
    The steps of mask updates.

  Raises:
    ValueError: an argument is invalid, or no step is an update.

  Example:
    >>> rising = schedules.cubic(0.0, 0.8, steps=100)
    >>> update_times_of(rising, 30, None, 100).steps.tolist()
    [30, 60, 90, 100]
    >>> update_times_of(0.8, 30, None, 100).steps.tolist()
    [30, 60, 90]
  """
  times = schedules.update_times(every, start, stop)
  is_interval = not (callable(every) or schedules.is_sequence(every))
  if stop is None or not is_interval or schedules.is_constant(sparsity):
    return times
  steps = times.steps.tolist()
  before, at_stop = (
      jax.tree.leaves(schedules.sparsity_at(sparsity, step))
      for step in (steps[-1], stop)
  )
  if before == at_stop:
    return times
  return schedules.update_times([*steps, stop])


def surviving(units: Units) -> jax.Array:
  """Returns the number of units that survive a drop, at most `units.kept`."""
  number = count_kept(units.mask)
  return jnp.minimum(number - number_dropped(units, number), units.kept)


def number_dropped(units: Units, number: jax.Array) -> jax.Array:
  """Returns the number of connections that an update drops."""
  return counts.fraction_of(number, units.drop_fraction, units.carry)


def drop_and_grow(
    units: Units,
    number: jax.Array,
    *,
    grow_by: jax.Array | None,
    regrow_dropped: bool,
) -> jax.Array:
  """Drops the smallest magnitudes, then grows to the count to keep.

  Args:
    units: The units of a leaf.
    number: Number of connections that survive the drop.
    grow_by: Scores; the units of largest score grow. `None` grows at random.
    regrow_dropped: Whether units just dropped may grow again.

  Returns:
    The next mask, `True` for `units.kept` units of every group.
  """
  if not regrow_dropped:
    number = jnp.maximum(number, not_enough_pruned(units))
  survivors = topk.keep_largest(units.magnitudes, number, among=units.mask)
  return grow(units, survivors, grow_by=grow_by, regrow_dropped=regrow_dropped)


def grow(
    units: Units,
    survivors: jax.Array,
    *,
    grow_by: jax.Array | None,
    regrow_dropped: bool,
) -> jax.Array:
  """Adds connections to the survivors, up to the count to keep."""
  taken = survivors if regrow_dropped else units.mask
  number = jnp.maximum(units.kept - count_kept(survivors), 0)

  def grown():
    if grow_by is None:
      return topk.keep_random(units.key, taken.shape, number, among=~taken)
    return topk.keep_largest(grow_by, number, among=~taken)

  # The cond skips ranking where nothing grows, as in most updates of gradual
  # pruning.
  return survivors | jax.lax.cond(
      jnp.any(number > 0), grown, lambda: jnp.zeros_like(taken)
  )


def magnitudes(structure: Structure, x: jax.Array) -> jax.Array:
  """Returns the magnitudes of units, summed where units are blocks."""
  return structure.reduce(jnp.abs(x))


def prune_model(
    mask: PyTree, params: PyTree, kept: jax.Array, structure: Structure
) -> PyTree:
  """Keeps the largest magnitudes of a whole model, among those kept before.

  Args:
    mask: The current mask, leaves `[layers, inputs, outputs]`.
    params: Parameters of the same shapes.
    kept: Number of weights to keep, uint32 `[2]`, the high word first.
    structure: Structure of the mask.

  Returns:
    The next mask, with at least one unit in every layer.
  """
  return topk.keep_of_model(
      jax.tree.map(lambda w: magnitudes(structure, w), params),
      params,
      kept,
      structure,
      among=jax.tree.map(lambda m: structure.reduce(m).astype(bool), mask),
  )


def count_kept(mask: jax.Array) -> jax.Array:
  """Counts the kept units of every group, int32 [...]."""
  return jnp.sum(mask, axis=(-2, -1), dtype=jnp.int32)


def not_enough_pruned(units: Units) -> jax.Array:
  """Returns the number of units that must survive a drop.

  With fewer survivors, the units that were pruned before are too few to grow.
  """
  size = units.mask.shape[-2] * units.mask.shape[-1]
  return units.kept - (size - count_kept(units.mask))


def _check_sparsities(sparsity: PyTree, times: schedules.UpdateTimes) -> None:
  """Evaluates the sparsity at some updates, to raise errors at once.

  `kept_table` evaluates it at all of them, once there are parameters.
  """
  steps = [0]
  if not schedules.is_constant(sparsity):
    last = len(times.steps) - 1
    rows = np.linspace(0, last, min(last + 1, _CHECKED)).astype(int)
    steps += times.steps[rows].tolist()
  for step in steps:
    schedules.sparsity_at(sparsity, step)


def _fractions(
    drop_fraction: float | schedules.Schedule, times: schedules.UpdateTimes
) -> np.ndarray:
  steps = [0]
  if callable(drop_fraction):
    if times.endless:
      raise ValueError(
          'drop_fraction is a schedule and update_until is None; give '
          'update_until, the last step that may be a mask update.'
      )
    steps = times.steps.tolist()
  elif not isinstance(drop_fraction, numbers.Real):
    raise ValueError(
        f'drop_fraction is {drop_fraction!r:.80}; give a number, or a schedule '
        'of the step.'
    )
  fractions = [schedules.value_at(drop_fraction, t) for t in steps]
  return counts.fixed(fractions, 'drop_fraction')


def _has_groups(structure: Structure, shape: tuple[int, ...]) -> bool:
  """Returns whether a layer has several groups with counts of their own."""
  return structure.unit_shape(shape)[0] != shape[0]


def _carry(
    structure: Structure,
    shape: tuple[int, ...],
    units: tuple[int, ...],
    key: jax.Array,
) -> jax.Array:
  if not _has_groups(structure, shape):
    return jnp.uint32(0)
  key = jax.random.fold_in(key, _CARRY)
  return jax.random.bits(key, units[:-2], jnp.uint32) >> 2


def _check_drops(
    table: PyTree, params: PyTree, structure: Structure, fractions: np.ndarray
) -> None:
  """Raises ValueError if no update drops a single unit of any group."""
  if isinstance(table, ModelTable) or any(
      _has_groups(structure, p.shape) for p in jax.tree.leaves(params)
  ):
    return
  most = max((int(rows.max()) for rows in jax.tree.leaves(table)), default=0)
  # Python integers, because this also runs under tracing.
  if most and most * int(fractions.max()) < 2**30:
    raise ValueError(
        f'drop_fraction is at most {fractions.max() / 2**30:.3g} at mask '
        f'updates, which drops no weight (block, channel) of a layer that '
        f'keeps {most}, the most of all layers; raise it, or lower the '
        'sparsity.'
    )


def _row(table: np.ndarray, index: Any) -> jax.Array:
  # A constant has one row, and index -1, before the first update, takes row 0.
  last = len(table) - 1
  return jnp.asarray(table)[jnp.clip(index, 0, last)]

# SPDX-License-Identifier: Apache-2.0
"""Sparse evolutionary training (SET): magnitude drop and random growth."""

from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax import names
from spdf_jax.sparsity import counts
from spdf_jax.sparsity import structures
from spdf_jax.sparsity import topk
from spdf_jax.sparsity.algorithms import growth
from spdf_jax.sparsity.algorithms import leafwise
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.algorithms.growth import Units
from spdf_jax.sparsity.distributions import Distribution
from spdf_jax.sparsity.masks import MaskMaker
from spdf_jax.sparsity.schedules import Schedule
from spdf_jax.sparsity.schedules import UpdateEvery
from spdf_jax.sparsity.structures import Structure

PyTree = Any


@names.printed_as_call
def sparse_evolution(
    sparsity: PyTree,
    *,
    update_every: UpdateEvery,
    update_until: int | None = None,
    update_from: int | None = None,
    drop_fraction: float | Schedule = 0.3,
    drop: str = 'magnitude',
    regrow_dropped: bool = True,
    grow: growth.Growth | str = 'random',
    distribution: Distribution | str = 'uniform',
    structure: Structure | str = 'unstructured',
    init: MaskMaker | str = 'random',
) -> Algorithm:
  """Drops a fraction of the kept weights and grows as many at random: SET.

  A step that updates the mask also updates the weights. Grown weights start at
  zero with zero moments.

  Args:
    sparsity: The fraction of zeros: a number, a schedule, or a tree of those
      for the sparsified leaves. Where it rises, more weights are dropped than
      grown.
    update_every: Number of steps between mask updates, a list of their steps,
      or a function of the step that is true at mask updates.
    update_until: Last step that may be a mask update. `None`: mask updates do
      not end; a schedule of the sparsity or of the drop fraction, and a
      function as `update_every`, need a last one. See `gmp` for schedules of
      the sparsity.
    update_from: First step that may be a mask update; by default
      `update_every`, if that is a number, and otherwise 0.
    drop_fraction: Fraction of the kept weights that is dropped: a number in
      [0, 1], the same at every mask update, or a schedule of the step.
    drop: `'magnitude'` drops the smallest magnitudes; `'signed'`, the rule of
      the paper, drops the fraction of the positive weights that are closest to
      zero, and the same fraction of the negative weights.
    regrow_dropped: Whether a weight just dropped may grow again; it then keeps
      its value.
    grow: Scores of growth: `'random'`, `'gradient'`, `'balanced'` (as in
      `rigl`), or a function `(units) -> scores` of `growth.Units`, e.g. of the
      mask, or its name, `'package.module:function'`. For functions of the
      gradients of pruned weights use `rigl`, since they are zero here.
    distribution: Distribution of the sparsity over leaves: `uniform`, `erk`,
      `igq`, `model_wide`, or `by_pattern`, with which `sparsity` is a mapping
      of patterns; or its name.
    structure: Structure of the mask, e.g. `structures.block(4, 4)` or `'2:4'`.
    init: Function that makes the initial mask: `(key, params, sparsities) ->
      mask`, such as those of `spdf_jax.init`, or its name: `'random'`,
      `'magnitude'` or `'nonzero'`.

  Returns:
    The algorithm.

  Raises:
    ValueError: an argument is invalid, or no step is a mask update.

  References:
    Mocanu et al., `SET <https://arxiv.org/abs/1707.04780>`_, 2018

  Example:
    >>> evolution = sparse_evolution(0.8, update_every=100)
    >>> evolution.update_at(99), evolution.update_at(100)
    (False, True)
  """
  if drop not in ('magnitude', 'signed'):
    raise ValueError(f"drop is {drop!r}; give 'magnitude' or 'signed'.")
  structure = structures.structure_of(structure)
  scores = growth.growth_of(grow)
  if drop == 'signed' and structure is not structures.UNSTRUCTURED:
    raise ValueError(
        f"drop is 'signed', which works without a structure only, but "
        f"structure is {structure}; give drop='magnitude', or no structure."
    )

  def next_mask(units):
    if drop == 'signed':
      survivors = _drop_signed(units)
      if not regrow_dropped:
        survivors = _restored(units, survivors)
      return leafwise.grow(
          units, survivors, grow_by=scores(units), regrow_dropped=regrow_dropped
      )
    return leafwise.drop_and_grow(
        units,
        leafwise.surviving(units),
        grow_by=scores(units),
        regrow_dropped=regrow_dropped,
    )

  return leafwise.leafwise(
      sparsity,
      leafwise.update_times_of(
          sparsity, update_every, update_from, update_until
      ),
      next_mask,
      distribution=distribution,
      structure=structure,
      init=init,
      drop_fraction=drop_fraction,
      dense_grads=grow in ('balanced', 'gradient'),
  )


def _drop_signed(units: Units) -> jax.Array:
  """Drops a fraction of each sign; zeros are the smallest positive weights."""
  if jnp.issubdtype(units.weights.dtype, jnp.complexfloating):
    raise ValueError(
        f"drop is 'signed', but weights of dtype {units.weights.dtype} have no "
        "sign; give 'magnitude'."
    )
  negative = units.mask & (units.weights < 0)
  survivors = jnp.zeros_like(units.mask)
  for side in (negative, units.mask & ~negative):
    number = leafwise.count_kept(side)
    number -= counts.fraction_of(number, units.drop_fraction)
    survivors |= topk.keep_largest(units.magnitudes, number, among=side)
  # Where the sparsity rises, more weights must be dropped.
  return topk.keep_largest(units.magnitudes, units.kept, among=survivors)


def _restored(units: Units, survivors: jax.Array) -> jax.Array:
  """Restores the largest dropped units where too few others may grow."""
  number = leafwise.not_enough_pruned(units) - leafwise.count_kept(survivors)
  return survivors | topk.keep_largest(
      units.magnitudes, jnp.maximum(number, 0), among=units.mask & ~survivors
  )

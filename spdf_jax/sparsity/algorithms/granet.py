# SPDX-License-Identifier: Apache-2.0
"""GraNet: gradual pruning with zero-cost neuroregeneration."""

from typing import Any

from spdf_jax import names
from spdf_jax.sparsity import schedules
from spdf_jax.sparsity.algorithms import growth
from spdf_jax.sparsity.algorithms import leafwise
from spdf_jax.sparsity.algorithms import rigl
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.distributions import Distribution
from spdf_jax.sparsity.masks import MaskMaker
from spdf_jax.sparsity.schedules import Schedule
from spdf_jax.sparsity.schedules import UpdateEvery
from spdf_jax.sparsity.structures import Structure

PyTree = Any


@names.printed_as_call
def granet(
    sparsity: PyTree,
    *,
    update_every: UpdateEvery,
    update_until: int,
    update_from: int | None = None,
    drop_fraction: float | Schedule = 0.5,
    grow: growth.Growth | str = 'gradient',
    distribution: Distribution | str = 'uniform',
    structure: Structure | str = 'unstructured',
    init: MaskMaker | str = 'random',
) -> Algorithm:
  """Prunes to a scheduled sparsity, then drops and regrows weights: GraNet.

  A mask update prunes the smallest magnitudes to the scheduled sparsity, per
  layer or, with `model_wide`, over the model. Then every layer drops a fraction
  of the remaining weights, those of smallest magnitude, and grows as many, by
  the largest gradients. Regrowth continues after the sparsity has reached its
  final value, up to `update_until`. `rigl` with a schedule is another
  interpretation of GraNet, in which the weights that are pruned to raise the
  sparsity count as part of the dropped fraction.

  Args:
    sparsity: The fraction of zeros: a number, which a `cubic` schedule reaches
      from 0 between step 0 and `update_until`; a schedule, e.g. `cubic(0.5,
      0.8, 700)`; or a tree of those for the sparsified leaves.
    update_every: Number of steps between mask updates, a list of their steps,
      or a function of the step that is true at mask updates.
    update_until: Last step that may be a mask update; see `gmp`.
    update_from: First step that may be a mask update; by default
      `update_every`, if that is a number, and otherwise 0.
    drop_fraction: Fraction of the remaining weights that is dropped and
      regrown: a number in (0, 1), which decays to zero at `update_until` by a
      cosine, or a schedule of the step.
    grow: Scores of growth: `'gradient'`, `'balanced'`, `'random'`, or a
      function, as of `rigl`.
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
    Liu et al., `GraNet <https://arxiv.org/abs/2106.10404>`_, 2021

  Example:
    >>> import jax.numpy as jnp
    >>> from spdf_jax import cubic
    >>> pruning = granet(
    ...     cubic(0.5, 0.8, 100), update_every=50, update_until=200)
    >>> pruning.sparsity_at(200, {'w': jnp.ones((1, 4, 4))})
    {'w': 0.8}
  """

  scores = growth.growth_of(grow)

  def next_mask(units):
    dropped = leafwise.number_dropped(units, units.kept)
    return leafwise.drop_and_grow(
        units, units.kept - dropped, grow_by=scores(units), regrow_dropped=True
    )

  sparsity = schedules.rising(sparsity, update_until)
  return leafwise.leafwise(
      sparsity,
      leafwise.update_times_of(
          sparsity, update_every, update_from, update_until
      ),
      next_mask,
      distribution=distribution,
      structure=structure,
      init=init,
      drop_fraction=rigl.decayed(drop_fraction, update_until),
      dense_grads=grow != 'random',
  )

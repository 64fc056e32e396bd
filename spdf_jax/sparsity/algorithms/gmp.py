# SPDX-License-Identifier: Apache-2.0
"""Gradual magnitude pruning: a sparsity that rises on a schedule."""

from typing import Any

from spdf_jax import names
from spdf_jax.sparsity import schedules
from spdf_jax.sparsity.algorithms import leafwise
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.distributions import Distribution
from spdf_jax.sparsity.masks import MaskMaker
from spdf_jax.sparsity.schedules import UpdateEvery
from spdf_jax.sparsity.structures import Structure

PyTree = Any


@names.printed_as_call
def gmp(
    sparsity: PyTree,
    *,
    update_every: UpdateEvery,
    update_until: int,
    update_from: int = 0,
    distribution: Distribution | str = 'uniform',
    structure: Structure | str = 'unstructured',
    init: MaskMaker | str = 'magnitude',
) -> Algorithm:
  """Prunes the smallest magnitudes, to a sparsity that follows a schedule.

  Between mask updates, the mask is constant. Where the sparsity falls, pruned
  weights are revived at random.

  Args:
    sparsity: The fraction of zeros: a number, which a `cubic` schedule reaches
      from 0 between step 0 and `update_until`; a schedule; or a tree of those
      for the sparsified leaves.
    update_every: Number of steps between mask updates, a list of their steps,
      or a function of the step that is true at mask updates.
    update_until: Last step that may be a mask update. If `update_every` is a
      number, the mask is also updated at this step, unless the scheduled
      sparsity is still that of the mask update before.
    update_from: First step that may be a mask update.
    distribution: Distribution of the sparsity over leaves: `uniform`, `erk`,
      `igq`, `model_wide`, or `by_pattern`, with which `sparsity` is a mapping
      of patterns; or its name.
    structure: Structure of the mask, e.g. `structures.block(4, 4)` or `'2:4'`.
    init: Function that makes the initial mask, at the sparsity of step 0:
      `(key, params, sparsities) -> mask`, such as those of `spdf_jax.init`, or
      its name: `'magnitude'`, `'random'` or `'nonzero'`.

  Returns:
    The algorithm.

  Raises:
    ValueError: an argument is invalid, or no step is a mask update.

  References:
    Zhu and Gupta, `To Prune, or Not to Prune
    <https://arxiv.org/abs/1710.01878>`_, 2017

  Example:
    Step 99 still has the mask of the update at step 50:

    >>> import jax.numpy as jnp
    >>> pruning = gmp(0.8, update_every=50, update_until=100)
    >>> pruning.sparsity_at(99, {'w': jnp.ones((1, 2, 2))})
    {'w': 0.7000000000000001}
    >>> pruning.sparsity_at(100, {'w': jnp.ones((1, 2, 2))})
    {'w': 0.8}
  """
  sparsity = schedules.rising(sparsity, update_until)
  return leafwise.leafwise(
      sparsity,
      leafwise.update_times_of(
          sparsity, update_every, update_from, update_until
      ),
      lambda units: leafwise.drop_and_grow(
          units, units.kept, grow_by=None, regrow_dropped=True
      ),
      distribution=distribution,
      structure=structure,
      init=init,
  )

"""GraNet: gradual pruning with zero-cost neuroregeneration."""

from typing import Any

from spdf_jax.sparsity import masks
from spdf_jax.sparsity.algorithm import Algorithm
from spdf_jax.sparsity.algorithms.connections import Distribution
from spdf_jax.sparsity.algorithms.connections import drop_and_grow
from spdf_jax.sparsity.algorithms.connections import moving
from spdf_jax.sparsity.algorithms.rigl import decayed
from spdf_jax.sparsity.combinators import MaskMaker
from spdf_jax.sparsity.counts import fraction_of
from spdf_jax.sparsity.distributions import uniform
from spdf_jax.sparsity.schedules import Schedule
from spdf_jax.sparsity.structures import Structure
from spdf_jax.sparsity.structures import UNSTRUCTURED
from spdf_jax.sparsity.times import update_times

PyTree = Any


def granet(
    sparsity: PyTree,
    *,
    update_every: Any,
    update_until: int,
    update_from: int | None = None,
    drop_fraction: float | Schedule = 0.5,
    distribution: Distribution = uniform,
    structure: Structure = UNSTRUCTURED,
    init: MaskMaker = masks.random_mask,
) -> Algorithm:
  """Prunes to the level of a schedule, then drops and regrows as many: GraNet.

  An update prunes the least magnitudes to the level, per layer or, with
  `model_wide`, over the model; then every layer drops the fraction of what
  remains that is smallest, and grows as many by gradient. Regrowth goes on
  after the last pruning, up to `update_until`. `rigl` with a schedule is the
  other reading of the name: there pruning counts as part of the drop.

  Args:
    sparsity: The fraction of zeros over the steps, e.g. `cubic(0.5, 0.8,
      700)`; from 0.0 it trains dense to sparse.
    update_every: Steps between updates, a list of steps, or a function of the
      step that is true at updates.
    update_until: The last step that may be an update.
    update_from: The first one; by default `update_every`, if that is a number.
    drop_fraction: The share of what remains that is dropped and regrown: a
      number, which falls to zero at `update_until` by a cosine, or a schedule.
    distribution: How a level is distributed over leaves: `uniform`, `erk`,
      `by_pattern` or `model_wide`.
    structure: What lives and dies together, or apart.
    init: Makes the first mask.

  Returns:
    The algorithm.

  Raises:
    ValueError: an argument is out of its range.

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

  def change(units):
    dropped = fraction_of(units.kept, units.drop_fraction)
    return drop_and_grow(
        units, units.kept - dropped, grow_by=units.grads, regrow_dropped=True
    )

  return moving(
      sparsity,
      update_times(update_every, update_from, update_until),
      change,
      distribution=distribution,
      structure=structure,
      init=init,
      drop_fraction=decayed(drop_fraction, update_until),
      dense_grads=True,
  )

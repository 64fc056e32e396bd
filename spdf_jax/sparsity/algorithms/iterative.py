# SPDX-License-Identifier: Apache-2.0
"""Iterative magnitude pruning: pruning of remaining weights, in rounds."""

from collections.abc import Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity.algorithm import Algorithm
from spdf_jax.sparsity.algorithm import never
from spdf_jax.sparsity.algorithms.connections import Distribution
from spdf_jax.sparsity.algorithms.connections import first_mask
from spdf_jax.sparsity.algorithms.connections import magnitudes
from spdf_jax.sparsity.algorithms.connections import prune_model
from spdf_jax.sparsity.counts import model_kept
from spdf_jax.sparsity.distributions import model_wide
from spdf_jax.sparsity.distributions import ModelWide
from spdf_jax.sparsity.distributions import uniform
from spdf_jax.sparsity.entries import distribution_of
from spdf_jax.sparsity.entries import structure_of
from spdf_jax.sparsity.leaves import map_leaves
from spdf_jax.sparsity.rounds import check_rounds
from spdf_jax.sparsity.rounds import Round
from spdf_jax.sparsity.rounds import round_starts
from spdf_jax.sparsity.structures import Structure
from spdf_jax.sparsity.structures import UNSTRUCTURED
from spdf_jax.sparsity.topk import keep_largest

PyTree = Any


def iterative(
    rounds: Sequence[Round],
    *,
    distribution: Distribution | str = uniform,
    structure: Structure | str = UNSTRUCTURED,
) -> Algorithm:
  """Prunes a fraction of the remaining weights in each round.

  A round prunes at its first step. Use `rewind_schedule` with the same rounds
  for the learning rate, `reset_state` at their starts for the moments, and
  `rewind_weights` to rewind the weights to early values as well.

  Args:
    rounds: Fractions and lengths of the rounds; the last round has no end.
    distribution: `uniform` prunes the fraction of every layer's remaining
      weights; `model_wide` prunes the fraction of all remaining weights,
      ranked together; or its name.
    structure: Structure of the mask, e.g. `block(4, 4)` or `'2:4'`.

  Returns:
    The algorithm.

  Raises:
    ValueError: there is no round, or one is invalid; the distribution is
      another one; later, if the structure cannot have the sparsity of a round.

  References:
    Renda et al., `Comparing Rewinding and Fine-tuning
    <https://arxiv.org/abs/2003.02389>`_, 2020

  Example:
    >>> from spdf_jax import Round
    >>> pruning = iterative([Round(100), Round(200, 0.25), Round(300, 0.25)])
    >>> pruning.sparsity_at(300, {'w': jnp.ones((1, 4, 4))})
    {'w': 0.4375}
  """
  distribution = distribution_of(distribution)
  if distribution not in (uniform, model_wide):
    name = getattr(distribution, '__name__', distribution)
    raise ValueError(
        f"distribution is {name!r}, but iterative prunes by 'uniform' or "
        "'model_wide'; give one of them, or use gmp."
    )
  structure = structure_of(structure)
  rounds = check_rounds(rounds)
  starts = round_starts(rounds)[1:]
  table = np.asarray(starts, np.int32)

  def kept_after(size):
    """Returns the number of `size` units that remain in each round."""
    remaining = [size - round(rounds[0].fraction * size)]
    for r in rounds[1:]:
      remaining.append(remaining[-1] - round(r.fraction * remaining[-1]))
    return np.maximum(np.asarray(remaining, np.int64), 1)

  def group_size(shape):
    return int(np.prod(structure.unit_shape(shape)[-2:]))

  def of_model(params, number):
    total = sum(math.prod(p.shape) for p in jax.tree.leaves(params))
    # `optax.tree.map_params` passes a tree without leaves as a placeholder.
    return ModelWide(1 - int(kept_after(total)[number]) / max(total, 1))

  def sparsity_at(count, params):
    number = int(np.searchsorted(table, count, side='right'))
    if distribution is model_wide:
      return of_model(params, number)

    def sparsity(p):
      size = group_size(p.shape)
      return 1 - int(kept_after(size)[number]) / size

    return jax.tree.map(sparsity, params)

  def prune(mask, params, number):
    for start in (0, *starts):
      for sparsity in jax.tree.leaves(sparsity_at(start, params)):
        structure.check(sparsity)

    def prune_leaf(m, w):
      kept = jnp.asarray(kept_after(group_size(m.shape)), jnp.int32)[number]
      units = keep_largest(
          magnitudes(structure, w), kept, among=structure.reduce(m).astype(bool)
      )
      return structure.expand(units, m.shape)

    return map_leaves(prune_leaf, mask, params)

  def prune_all(mask, params, number):
    kept = [
        divmod(model_kept(params, of_model(params, i), structure), 2**32)
        for i in range(len(rounds))
    ]
    rows = np.asarray(kept, np.uint32)
    return prune_model(mask, params, jnp.asarray(rows)[number], structure)

  cut = prune_all if distribution is model_wide else prune

  def init(key, params):
    del key
    everything = jax.tree.map(lambda p: jnp.ones(p.shape, bool), params)
    # Cut even if the first round prunes nothing, because this checks that the
    # structure and the sparsities of all rounds fit.
    return cut(everything, params, 0)

  def update(key, count, mask, params, grads):
    del key, grads
    return cut(mask, params, jnp.sum(count >= table))

  def update_at(count):
    if isinstance(count, int):
      return count in starts
    return jnp.any(count == table) if starts else False

  return Algorithm(
      sparsity_at=sparsity_at,
      init=init,
      update=update,
      update_at=update_at,
      dense_grads_at=never,
      mask_by=lambda maker, key, params: first_mask(
          maker, key, params, sparsity_at(0, params), structure
      ),
  )

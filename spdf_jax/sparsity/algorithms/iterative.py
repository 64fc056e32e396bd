# SPDX-License-Identifier: Apache-2.0
"""Iterative magnitude pruning: pruning of remaining weights, in rounds."""

from collections.abc import Iterable, Sequence
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import names
from spdf_jax.sparsity import counts
from spdf_jax.sparsity import distributions
from spdf_jax.sparsity import initial_masks
from spdf_jax.sparsity import schedules
from spdf_jax.sparsity import structures
from spdf_jax.sparsity import topk
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.algorithms import algorithm
from spdf_jax.sparsity.algorithms import leafwise
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.distributions import Distribution
from spdf_jax.sparsity.distributions import ModelWide
from spdf_jax.sparsity.structures import Structure

PyTree = Any


class Round(NamedTuple):
  """One round of iterative pruning: prune, rewind, train."""

  steps: int
  """Number of training steps."""

  fraction: float = 0.0
  """Fraction of the remaining weights, of each layer or of the whole model, to
  prune at the first step."""

  rewind_to: int = 0
  """Step of the base schedule at which the round's learning rate begins."""


def check_rounds(rounds: Iterable[Round]) -> tuple[Round, ...]:
  """Returns rounds as a tuple, or raises.

  Args:
    rounds: The rounds, each a `Round` or a tuple of its fields.

  Returns:
    The rounds.

  Raises:
    ValueError: there is no round, one is neither a `Round` nor a tuple, a
      length is not positive, a `rewind_to` is negative, or a fraction is
      outside (0, 1); the fraction of the first round may be 0.

  Example:
    >>> check_rounds([(100,), (50, 0.2)])[1].fraction
    0.2
  """
  try:
    checked = tuple(Round(*r) for r in rounds)
  except TypeError as error:
    raise ValueError(
        f'rounds is {rounds!r:.80}; give a list of Round(steps, fraction).'
    ) from error
  if not checked:
    raise ValueError('rounds is empty; give at least one Round(steps).')
  for i, r in enumerate(checked):
    schedules.check_steps(f'steps of round {i}', r.steps, 1)
    schedules.check_steps(f'rewind_to of round {i}', r.rewind_to, 0)
    if not (_is_fraction(r.fraction) or i == 0 == r.fraction):
      raise ValueError(
          f'fraction of round {i} is {r.fraction!r}; give the fraction of the '
          'remaining weights to prune, in (0, 1); only the first round may '
          'prune none.'
      )
  schedules.check_steps('the number of steps of all rounds', sum(
      r.steps for r in checked
  ), 1)
  return checked


def _is_fraction(value: Any) -> bool:
  try:
    return bool(0 < value < 1)
  except TypeError:
    return False


def round_starts(rounds: Sequence[Round]) -> list[int]:
  """Returns the first step of every round.

  Args:
    rounds: The rounds.

  Returns:
    Increasing steps that begin with 0, e.g. for `reset_state`.

  Raises:
    ValueError: the rounds are invalid, see `check_rounds`.

  Example:
    >>> round_starts([Round(100), Round(50, 0.2), Round(50, 0.2)])
    [0, 100, 150]
  """
  lengths = [r.steps for r in check_rounds(rounds)]
  return list(itertools.accumulate(lengths[:-1], initial=0))


@names.printed_as_call
def iterative(
    rounds: Sequence[Round],
    *,
    distribution: Distribution | str = 'uniform',
    structure: Structure | str = 'unstructured',
) -> Algorithm:
  """Prunes a fraction of the remaining weights, by magnitude, in each round.

  A round prunes at its first step. Use `rewind_schedule` with the same rounds
  for the learning rate, `reset_state` at the first steps of rounds for the
  moments, and `rewind_weights` to rewind the weights to early values as well.

  Args:
    rounds: Lengths of the rounds and the fractions that they prune. The mask of
      the last round is kept after its end.
    distribution: `uniform` or `'uniform'`, to prune the fraction of every
      layer's remaining weights, or `model_wide` or `'model_wide'`, to rank the
      remaining weights of all layers together and prune the fraction of these.
    structure: Structure of the mask, e.g. `structures.block(4, 4)` or `'2:4'`.

  Returns:
    The algorithm.

  Raises:
    ValueError: there is no round, a round is invalid, or the distribution is
      another one; on `init` of the optimizer, if the structure cannot have the
      sparsity of a round.

  References:
    Renda et al., `Comparing Rewinding and Fine-tuning
    <https://arxiv.org/abs/2003.02389>`_, 2020

  Example:
    >>> from spdf_jax import Round
    >>> pruning = iterative([Round(100), Round(200, 0.25), Round(300, 0.25)])
    >>> pruning.sparsity_at(300, {'w': jnp.ones((1, 4, 4))})
    {'w': 0.4375}
  """
  distribution = distributions.distribution_of(distribution)
  if distribution not in (distributions.uniform, distributions.model_wide):
    name = getattr(distribution, '__name__', distribution)
    raise ValueError(
        f"distribution is {name!r}, but iterative prunes by 'uniform' or "
        "'model_wide'; give one of them, or use gmp."
    )
  structure = structures.structure_of(structure)
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
    if distribution is distributions.model_wide:
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
      units = topk.keep_largest(
          leafwise.magnitudes(structure, w),
          kept,
          among=structure.reduce(m).astype(bool),
      )
      return structure.expand(units, m.shape)

    return trees.map_leaves(prune_leaf, mask, params)

  def prune_all(mask, params, number):
    kept = [
        divmod(counts.model_kept(params, of_model(params, i), structure), 2**32)
        for i in range(len(rounds))
    ]
    row = jnp.asarray(np.asarray(kept, np.uint32))[number]
    return leafwise.prune_model(mask, params, row, structure)

  cut = prune_all if distribution is distributions.model_wide else prune

  def init(key, params):
    del key
    everything = jax.tree.map(lambda p: jnp.ones(p.shape, bool), params)
    # Computed even if the first round prunes nothing, because this checks that
    # the structure and the sparsities of all rounds fit.
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
      dense_grads_at=algorithm.never,
      mask_by=lambda maker, key, params: initial_masks.initial_mask(
          maker, key, params, sparsity_at(0, params), structure
      ),
  )

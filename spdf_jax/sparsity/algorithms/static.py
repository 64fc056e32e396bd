# SPDX-License-Identifier: Apache-2.0
"""Static sparsity: one mask, drawn once (SPDF)."""

from typing import Any

import jax

from spdf_jax import names
from spdf_jax.sparsity import distributions
from spdf_jax.sparsity import initial_masks
from spdf_jax.sparsity import structures
from spdf_jax.sparsity.algorithms import algorithm
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.distributions import Distribution
from spdf_jax.sparsity.masks import MaskMaker
from spdf_jax.sparsity.structures import Structure

PyTree = Any


@names.printed_as_call
def static(
    sparsity: PyTree,
    *,
    distribution: Distribution | str = 'uniform',
    structure: Structure | str = 'unstructured',
    init: MaskMaker | str = 'random',
) -> Algorithm:
  """Keeps the initial mask, by default a random one: SPDF's pre-training.

  Args:
    sparsity: The fraction of zeros in [0, 1): a number, or a tree of numbers
      for the sparsified leaves.
    distribution: Distribution of the sparsity over leaves: `uniform`, `erk`,
      `igq`, `model_wide`, or `by_pattern`, with which `sparsity` is a mapping
      of patterns; or its name.
    structure: Structure of the mask, e.g. `structures.n_of_m(2, 4)` or `'2:4'`.
    init: Function that makes the mask: `(key, params, sparsities) -> mask`,
      such as those of `spdf_jax.init`, or its name: `'random'`, `'magnitude'`
      or `'nonzero'`.

  Returns:
    The algorithm.

  Raises:
    ValueError: a sparsity is not a number in [0, 1), or another argument is
      invalid.

  References:
    Thangarasa et al., `SPDF <https://arxiv.org/abs/2303.10464>`_, 2023

  Example:
    >>> import jax.numpy as jnp
    >>> static(0.75).sparsity_at(0, {'w': jnp.ones((2, 2))})
    {'w': 0.75}
  """
  distribution = distributions.distribution_of(distribution)
  init = initial_masks.init_of(init)
  structure = structures.structure_of(structure)
  if any(map(callable, jax.tree.leaves(sparsity))):
    raise ValueError(
        'sparsity is a schedule, but static keeps one mask; give a number, or '
        'use an algorithm with mask updates: gmp, rigl, granet.'
    )
  distributions.check_sparsities(sparsity)

  def sparsity_at(count, params):
    del count
    return distribution(params, sparsity)

  def mask_by(maker, key, params):
    return initial_masks.initial_mask(
        maker, key, params, sparsity_at(0, params), structure
    )

  return Algorithm(
      sparsity_at=sparsity_at,
      init=lambda key, params: mask_by(init, key, params),
      update=lambda key, count, mask, params, grads: mask,
      update_at=algorithm.never,
      dense_grads_at=algorithm.never,
      mask_by=mask_by,
      for_kernels=distributions.for_kernels(
          distribution,
          lambda bound: static(
              sparsity, distribution=bound, structure=structure, init=init
          ),
      ),
  )


@names.printed_as_call
def dense() -> Algorithm:
  """Keeps every weight: `static(0)`, e.g. as the last algorithm of `join`.

  Returns:
    The algorithm.

  Example:
    >>> import jax.numpy as jnp
    >>> dense().sparsity_at(0, {'w': jnp.ones((2, 2))})
    {'w': 0.0}
  """
  return static(0.0)

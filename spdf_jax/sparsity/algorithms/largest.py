# SPDX-License-Identifier: Apache-2.0
"""The largest weights: masks by magnitude alone, chosen anew at every step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import names
from spdf_jax.sparsity import counts
from spdf_jax.sparsity import distributions
from spdf_jax.sparsity import schedules
from spdf_jax.sparsity import structures
from spdf_jax.sparsity import topk
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.algorithms import algorithm
from spdf_jax.sparsity.algorithms import leafwise
from spdf_jax.sparsity.algorithms.algorithm import Algorithm
from spdf_jax.sparsity.distributions import Distribution
from spdf_jax.sparsity.schedules import UpdateEvery
from spdf_jax.sparsity.structures import Structure

PyTree = Any

_EACH_OUTPUT = structures.balanced(None)


@names.printed_as_call
def largest(
    sparsity: PyTree,
    *,
    least: int = 0,
    update_every: UpdateEvery = 1,
    update_until: int | None = None,
    distribution: Distribution | str = 'uniform',
    structure: Structure | str = 'unstructured',
) -> Algorithm:
  """Keeps the weights of largest magnitude, whatever the mask was before.

  This is the rule of `hard_threshold`, which explains the arguments. It is no
  algorithm for `sparsify`, under which pruned weights would stay zero.

  Returns:
    The algorithm. Its `update` ignores the current mask and the gradients.

  Raises:
    ValueError: an argument is invalid; on `init`, if a leaf keeps no weight, or
      fewer than `least` for each output.

  Example:
    >>> rule = largest(0.5)
    >>> w = {'w': jnp.array([[[1.0, -4.0], [3.0, 2.0]]])}
    >>> rule.init(None, w)['w'].tolist()
    [[[False, True], [True, False]]]
  """
  structure = structures.structure_of(structure)
  _check_least(least, structure)
  constant = schedules.is_constant(sparsity)
  times = leafwise.update_times_of(sparsity, update_every, 0, update_until)
  if not constant and times.start:  # A list or function without the first step.
    times = schedules.update_times([0, *times.steps.tolist()])

  def keep(units):
    if not _has_least(least, units.weights):
      return topk.keep_largest(units.magnitudes, units.kept)
    by_output = topk.keep_largest(_EACH_OUTPUT.reduce(units.magnitudes), least)
    sure = _EACH_OUTPUT.expand(by_output, units.weights.shape)
    rest = units.kept - least * units.weights.shape[-1]
    return sure | topk.keep_largest(units.magnitudes, rest, among=~sure)

  distribution = distributions.distribution_of(distribution)
  rule = leafwise.leafwise(
      sparsity, times, keep, distribution=distribution, structure=structure,
      init='magnitude',
  )

  def init(key, params):
    table = counts.kept_table(params, sparsity, distribution, times, structure)
    if isinstance(table, counts.ModelTable):
      if least:
        raise ValueError(
            f"least is {least} and distribution is 'model_wide', which leaves "
            'open how many weights a layer keeps; leave one of them out.'
        )
      return update(key, 0, None, params, None)  # Each layer keeps a weight.
    for (name, p), rows in zip(
        trees.by_name(params).items(), jax.tree.leaves(table)
    ):
      size = math.prod(structure.unit_shape(p.shape)[1:])
      # The sparsest steps; a count of 1 may be that of 0, rounded up.
      for row in np.flatnonzero(rows == rows.min())[[0, -1]].tolist():
        step = 0 if constant else int(times.steps[row])
        fraction = trees.by_name(rule.sparsity_at(step, params))[name]
        _check_kept(name, p, size, fraction, least)
    return update(key, 0, None, params, None)

  def update(key, count, mask, params, grads):
    del key, mask, grads
    everything = jax.tree.map(lambda p: jnp.ones(p.shape, bool), params)
    return rule.update(jax.random.key(0), count, everything, params, params)

  always = lambda count: (
      True if schedules.is_host_int(count) else jnp.ones_like(count, bool)
  )
  return rule._replace(
      init=init,
      update=update,
      update_at=always,
      dense_grads_at=always,
      sparsity_changes_at=algorithm.never if constant else times.contains,
      mask_by=lambda maker, key, params: init(key, params),
      for_kernels=distributions.for_kernels(
          distribution,
          lambda bound: largest(
              sparsity, least=least, update_every=update_every,
              update_until=update_until, distribution=bound,
              structure=structure,
          ),
      ),
  )


def _has_least(least: int, layers: jax.Array) -> bool:
  """Returns whether outputs of layers have a least number of weights.

  An output of a layer with one input, such as an entry of a bias, has none.
  """
  return least > 0 and layers.shape[-2] > 1


def _check_least(least: int, structure: Structure) -> None:
  """Raises ValueError unless outputs can have a least number of weights."""
  whole = isinstance(least, (int, np.integer))
  if not whole or isinstance(least, bool) or least < 0:
    raise ValueError(
        f'least is {least!r}; give a whole number of weights for each output, '
        '0 or more.'
    )
  if least and structure is not structures.UNSTRUCTURED:
    raise ValueError(
        f'least is {least}, which needs an unstructured mask, and structure is '
        f'{structure!r}; leave one of them out.'
    )


def _check_kept(
    name: str, layers: jax.Array, size: int, fraction: float, least: int
) -> None:
  """Raises ValueError if a leaf keeps no weight, or too few for its outputs."""
  kept, outputs = size - round(fraction * size), layers.shape[-1]
  if not kept:
    raise ValueError(
        f'sparsity is {fraction:g}, which keeps none of the {size:,} weights '
        f'of {name!r}; lower it, or leave the leaf out by `where`.'
    )
  if _has_least(least, layers) and kept < least * outputs:
    raise ValueError(
        f'least is {least} for each of the {outputs:,} outputs of {name!r}, '
        f'which is more than the {kept:,} weights that sparsity {fraction:g} '
        'keeps; lower it, or the sparsity.'
    )

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
    least: PyTree = 0,
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
  distribution = distributions.distribution_of(distribution)
  structure = structures.structure_of(structure)
  has_least = _check_least(least, structure)
  is_constant = schedules.is_constant(sparsity)
  if not is_constant and update_until is None:
    raise ValueError(
        'sparsity is a schedule and update_until is None; give update_until, '
        'the last step at which the schedule changes the sparsity.'
    )
  times = leafwise.update_times_of(sparsity, update_every, 0, update_until)
  row_at = lambda count: 0 if is_constant else times.index(count)

  def sparsity_at(count, params):
    step = 0 if is_constant else int(times.steps[times.index(count)])
    return distribution(params, schedules.sparsity_at(sparsity, step))

  tables: dict[Any, PyTree] = {}

  def table_of(params):
    # Computed once, since optax takes a fifth of a millisecond a step.
    leaves, treedef = jax.tree.flatten(params)
    key = treedef, *(tuple(leaf.shape) for leaf in leaves)
    if key not in tables:
      tables[key] = counts.kept_table(
          params, sparsity, distribution, times, structure
      )
    if isinstance(tables[key], counts.ModelTable):
      raise ValueError(
          "distribution is 'model_wide', which ranks all layers together, and "
          "hard_threshold ranks each by itself; give 'uniform', 'erk' or "
          "'by_pattern'."
      )
    return tables[key]

  def mask_at(count, params):
    row = row_at(count)
    kept = jax.tree.map(lambda rows: jnp.asarray(rows)[row], table_of(params))
    return trees.map_leaves(cut, params, kept, _as_tree(least, params))

  def cut(w, kept, least):
    sizes = jnp.abs(w)
    if not has_least:
      mask = topk.keep_largest(structure.reduce(sizes), kept)
      return structure.expand(mask, w.shape)
    sure = _EACH_OUTPUT.expand(
        topk.keep_largest(_EACH_OUTPUT.reduce(sizes), least), w.shape
    )
    rest = kept - least * w.shape[-1]
    return sure | topk.keep_largest(sizes, rest, among=~sure)

  def init(key, params):
    del key
    table = table_of(params)
    for (name, p), rows, number in zip(
        trees.by_name(params).items(), jax.tree.leaves(table),
        jax.tree.leaves(_as_tree(least, params)),
    ):
      size = math.prod(structure.unit_shape(p.shape)[1:])
      # The sparsest steps; a count of 1 may be that of 0, rounded up.
      for row in np.flatnonzero(rows == rows.min())[[0, -1]].tolist():
        step = 0 if is_constant else int(times.steps[row])
        fraction = trees.by_name(sparsity_at(step, params))[name]
        _check_kept(name, p.shape, size, fraction, number)
    return mask_at(0, params)

  return Algorithm(
      sparsity_at=sparsity_at,
      init=init,
      update=lambda key, count, mask, params, grads: mask_at(count, params),
      update_at=_always,
      dense_grads_at=_always,
      sparsity_changes_at=algorithm.never if is_constant else times.contains,
      mask_by=lambda maker, key, params: init(key, params),
      for_kernels=distributions.for_kernels(
          distribution,
          lambda bound: largest(
              sparsity, least=least, update_every=update_every,
              update_until=update_until,
              distribution=bound, structure=structure,
          ),
      ),
  )


def _always(count: Any) -> Any:
  return True if schedules.is_host_int(count) else jnp.ones_like(count, bool)


def _as_tree(least: PyTree, params: PyTree) -> PyTree:
  """Returns a number for each leaf of `params`."""
  if jax.tree_util.all_leaves([least]):
    return jax.tree.map(lambda _: least, params)
  return jax.tree.map(
      lambda n, sub: jax.tree.map(lambda _: n, sub), least, params,
      is_leaf=lambda x: x is None,
  )


def _check_least(least: PyTree, structure: Structure) -> bool:
  """Returns whether units have a least number of weights, or raises."""
  for number in jax.tree.leaves(least):
    whole = isinstance(number, (int, np.integer))
    if not whole or isinstance(number, bool) or number < 0:
      raise ValueError(
          f'least is {number!r}; give a whole number of weights for each '
          'output, 0 or more.'
      )
    if number and structure is not structures.UNSTRUCTURED:
      raise ValueError(
          f'least is {number}, which needs an unstructured mask, and structure '
          f'is {structure!r}; leave one of them out.'
      )
  return any(jax.tree.leaves(least))


def _check_kept(
    name: str, shape: tuple[int, ...], size: int, fraction: float, least: int
) -> None:
  """Raises ValueError if a leaf keeps no weight, or too few for its outputs."""
  kept, outputs = size - round(fraction * size), shape[-1]
  if not kept:
    raise ValueError(
        f'sparsity is {fraction:g}, which keeps none of the {size:,} weights '
        f'of {name!r}; lower it, or leave the leaf out by `where`.'
    )
  if kept < least * outputs:
    raise ValueError(
        f'least is {least} for each of the {outputs:,} outputs of {name!r}, '
        f'which is more than the {kept:,} weights that sparsity {fraction:g} '
        'keeps; lower it, or the sparsity.'
    )

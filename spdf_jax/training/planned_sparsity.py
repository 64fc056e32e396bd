# SPDX-License-Identifier: Apache-2.0
"""Planned sparsity of every layer at a step of a plan."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from spdf_jax.sparsity import selection
from spdf_jax.sparsity.counts import number_kept
from spdf_jax.sparsity.distributions import ModelWide
from spdf_jax.sparsity.selection import to_layers
from spdf_jax.sparsity.trees import path_name
from spdf_jax.training.plan import Plan


class PlannedSparsity(NamedTuple):
  """The planned sparsity of one sparsified layer."""

  size: int
  """Number of weights of the layer, kept and pruned."""

  sparsity: float
  """Sparsity of a whole number of kept weights."""


def planned_sparsities(
    plan: Plan, step: int, params: selection.PyTree, where: selection.Where
) -> dict[str, PlannedSparsity]:
  """Returns the planned sparsity of every layer at a step.

  Args:
    plan: The plan.
    step: The step, counted from 0; its mask update is included.
    params: Shapes of the parameters.
    where: The selection of sparsified leaves.

  Returns:
    Sparsities by the path of the layer, one per stacked layer, named as by
    `summarize`. If the whole model is one group, every layer has the sparsity
    of the model.
  """
  axes = selection.select(where, params)
  stacks = to_layers(params, params, axes)
  # The sparsity of the mask is that of the last update, since schedules also
  # change between updates.
  updates = plan.update_steps
  updated = np.searchsorted(updates, step, side='right')
  count = int(updates[updated - 1]) if updated else 0
  sparsities = plan.algorithm.sparsity_at(count, stacks)
  if isinstance(sparsities, ModelWide):
    sparsities = jax.tree.map(lambda _: sparsities.sparsity, stacks)
  found = {}
  for (path, stack), value in zip(
      jax.tree_util.tree_leaves_with_path(stacks), jax.tree.leaves(sparsities)
  ):
    size = int(np.prod(stack.shape[1:]))
    asked = PlannedSparsity(size, 1 - number_kept(size, value) / size)
    for i in range(stack.shape[0]):
      name = path_name(path)
      found[name + (f'[{i}]' if stack.shape[0] > 1 else '')] = asked
  return found


def mean_sparsity(sparsities: Mapping[str, PlannedSparsity]) -> float:
  """Returns the sparsity over all layers, weighted by their sizes.

  Example:
    >>> mean_sparsity({
    ...     'a': PlannedSparsity(100, 0.5), 'b': PlannedSparsity(300, 0.75)})
    0.6875
  """
  layers = sparsities.values()
  zeros = sum(layer.size * layer.sparsity for layer in layers)
  return zeros / sum(layer.size for layer in layers)

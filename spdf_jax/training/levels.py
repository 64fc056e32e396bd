"""The levels of sparsity that a plan asks for, layer by layer."""

from typing import NamedTuple

import jax
import numpy as np

from spdf_jax.sparsity import selection
from spdf_jax.sparsity.counts import number_kept
from spdf_jax.sparsity.distributions import ModelWide
from spdf_jax.training.phases import Plan


class Level(NamedTuple):
  """What is asked of one sparsified layer."""

  size: int
  """Weights of the layer, kept or not."""

  sparsity: float
  """Fraction of zeros, of whole weights."""


def asked_levels(
    plan: Plan, step: int, params: selection.PyTree, where: selection.Where
) -> dict[str, Level]:
  """Returns what a plan asks of every layer at a step.

  Args:
    plan: The plan.
    step: The step, counted from 0; masks are as its own update leaves them.
    params: The parameters' shapes.
    where: The selection of sparsified leaves.

  Returns:
    Levels by the layer's path, stacked layers apart, as `summarize` names them;
    each has that of the model where the whole model competes.
  """
  axes = selection.select(where, params)
  stacks = selection.to_layers(params, params, axes)
  # Between updates a schedule goes on, the mask does not.
  updates = plan.update_steps
  updated = np.searchsorted(updates, step, side='right')
  count = int(updates[updated - 1]) if updated else 0
  levels = plan.algorithm.sparsity_at(count, stacks)
  if isinstance(levels, ModelWide):
    levels = jax.tree.map(lambda _: levels.level, stacks)
  found = {}
  for (path, stack), level in zip(
      jax.tree_util.tree_leaves_with_path(stacks), jax.tree.leaves(levels)
  ):
    size = int(np.prod(stack.shape[1:]))
    asked = Level(size, 1 - number_kept(size, level) / size)
    for i in range(stack.shape[0]):
      name = selection.path_name(path)
      found[name + (f'[{i}]' if stack.shape[0] > 1 else '')] = asked
  return found


def mean_sparsity(levels: dict[str, Level]) -> float:
  """Returns the fraction of zeros over all layers.

  Example:
    >>> mean_sparsity({'a': Level(100, 0.5), 'b': Level(300, 0.75)})
    0.6875
  """
  total = sum(level.size for level in levels.values())
  return sum(lvl.size * lvl.sparsity for lvl in levels.values()) / total

# SPDX-License-Identifier: Apache-2.0
"""Parameters that phases freeze."""

from collections.abc import Callable
import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity.trees import path_name
from spdf_jax.training.plan import Plan

PyTree = Any


def frozen_at(
    plan: Plan, params: PyTree
) -> Callable[[jax.Array], PyTree] | None:
  """Returns a function from a step to the parameters that are frozen.

  Args:
    plan: The phases.
    params: The parameters, or their shapes.

  Returns:
    `(step) -> flags`, a tree of the parameters' structure: a bool scalar for
    parameters that some phase freezes, `False` for others; `None`: no phase
    freezes any.

  Raises:
    ValueError: a pattern of a phase matches no parameter, or a phase freezes
      all of them.
  """
  if not any(phase.frozen for phase in plan.phases):
    return None
  names = [
      path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)
  ]
  table = np.zeros((len(plan.phases), len(names)), bool)
  for row, phase in zip(table, plan.phases):
    for pattern in phase.frozen or ():
      matches = [fnmatch.fnmatchcase(name, pattern) for name in names]
      if not any(matches):
        raise ValueError(
            f'phase {phase.name!r} has the pattern {pattern!r} in frozen, '
            'which matches the path of no parameter; the paths are '
            f'{", ".join(names)}.'
        )
      row |= matches
    if row.all():
      raise ValueError(
          f'phase {phase.name!r} has all parameters frozen, by the patterns '
          f'{list(phase.frozen or ())}; leave some to train.'
      )

  def flags(step):
    starts = np.asarray(plan.starts[1:], np.int32)
    current = jnp.asarray(table)[jnp.sum(step >= starts)]
    return jax.tree.unflatten(jax.tree.structure(params), [
        current[i] if column.any() else False
        for i, column in enumerate(table.T)
    ])

  return flags


def keep_frozen(flags: PyTree, old: PyTree, new: PyTree) -> PyTree:
  """Returns the old leaves where they are frozen, and the new ones elsewhere.

  Args:
    flags: Flags that the function of `frozen_at` returns.
    old: Parameters.
    new: Parameters of the same structure.

  Returns:
    The parameters.
  """
  return jax.tree.map(
      lambda flag, o, n: n if flag is False else jnp.where(flag, o, n),
      flags, old, new,
  )

# SPDX-License-Identifier: Apache-2.0
"""Paths of leaves in trees, as names and for matching."""

from typing import Any

import jax

PyTree = Any

_IN_VARIABLE = jax.tree_util.GetAttrKey('value')


def path_name(path: jax.tree_util.KeyPath[Any]) -> str:
  """Returns a leaf's path as a string, e.g. `'h_0/attn/wq/kernel'`.

  An `nnx.Variable` and the array in it have the same path: `nnx.Optimizer`
  gives variables to `init`, and arrays to `update`.
  """
  if path and path[-1] == _IN_VARIABLE:
    path = path[:-1]
  return jax.tree_util.keystr(path, simple=True, separator='/')


def path_parts(path: jax.tree_util.KeyPath[Any]) -> tuple[str, ...]:
  """Returns the names of a path's entries, e.g. `('h_0', 'kernel')`."""
  if path and path[-1] == _IN_VARIABLE:
    path = path[:-1]
  return tuple(path_name((entry,)) for entry in path)


def by_name(tree: PyTree) -> dict[str, Any]:
  """Returns the leaves of a tree by their paths, e.g. `'h_0/mlp/wi/kernel'`."""
  return {
      path_name(path): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def like_params(tree: PyTree, params: PyTree) -> list[Any]:
  """Returns the leaves of a tree that belong to the leaves of `params`.

  Leaves are matched by their paths, so the nodes of the trees may have
  different types, such as `nnx.Param` and the variables of `nnx.Optimizer`.

  Args:
    tree: A mask, or another tree with some of the paths of `params`, which may
      have subtrees there.
    params: The parameters.

  Returns:
    One entry per leaf of `params`: that of `tree`, or `None` if it has none.

  Raises:
    ValueError: `tree` has a leaf at a path that `params` does not have.

  Example:
    >>> like_params({'b': None, 'w': True}, {'b': 1., 'w': 2.})
    [None, True]
  """
  paths = [
      path_parts(path)
      for path, _ in jax.tree_util.tree_leaves_with_path(params)
  ]
  known = set(paths)
  by_path = {
      path_parts(path): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(
          tree,
          is_leaf=lambda path, x: (
              path_parts(path) in known and not _is_variable(x)
          ),
          is_leaf_takes_path=True,
      )
      if leaf is not None
  }
  extra = set(by_path) - set(paths)
  if extra:
    raise ValueError(
        f'the mask has a leaf {"/".join(min(extra))!r}, but the other tree has '
        f'{", ".join(map("/".join, paths)) or "no leaves"}; give trees of the '
        'same parameters.'
    )
  return [by_path.get(path) for path in paths]


def _is_variable(x: Any) -> bool:
  return hasattr(x, 'get_value') and hasattr(x, 'set_value')


def without_empty_variables(tree: PyTree) -> PyTree:
  """Replaces variables that hold `None` by `None`.

  A mask made of the variables of `nnx.state(model)` holds `None` in those that
  are not sparsified. Functions over the variables of an `nnx.Optimizer`, such
  as one that reads their dtypes, need an array in each.

  Args:
    tree: A tree, with leaves that may be `nnx.Variable`.

  Returns:
    The tree; variables that hold arrays are unchanged.
  """
  return jax.tree.map(
      lambda x: None if _is_variable(x) and x.get_value() is None else x,
      tree, is_leaf=_is_variable,
  )

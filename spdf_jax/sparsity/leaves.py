# SPDX-License-Identifier: Apache-2.0
"""A map over leaves that compiles one loop for all similar leaves."""

import collections
from collections.abc import Callable
import re
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax.sparsity.paths import path_name

PyTree = Any

_is_none = lambda x: x is None


def map_leaves(f: Callable[..., PyTree], *trees: PyTree) -> PyTree:
  """Maps a function over corresponding leaves, compiling it once per kind.

  Under `jit`, one loop processes all leaves of equal shapes and dtypes whose
  paths differ only in numbers (`h_0/mlp/wi`, `h_1/mlp/wi`): a model of many
  equal layers compiles `f` once and needs the scratch memory of one leaf.
  Leaves with other names have their own loop, because they may be sharded
  differently. Without tracing, `f` is called leaf by leaf.

  Args:
    f: Function of one leaf of every tree that returns arrays, with shapes that
      depend only on the leaves' shapes. Values it closes over must be the same
      for all leaves.
    *trees: Trees of arrays; `None` in the first stays `None`. Subtrees of the
      others at a leaf of the first are passed to `f`, also `None` or a tuple.

  Returns:
    A tree of the results of `f`, in the structure of the first tree.

  Raises:
    ValueError: the trees' structures differ.

  Example:
    >>> map_leaves(lambda x: int(x.sum()), {'w': jnp.ones((2, 2)), 'b': None})
    {'b': None, 'w': 4}
  """
  paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(trees[0])
  columns = [_flatten_like(tree, trees[0], treedef) for tree in trees]
  rows = list(zip(*columns))
  kinds = collections.defaultdict(list)
  for i, (path, _) in enumerate(paths_and_leaves):
    looped = any(
        isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(rows[i])
    )
    kinds[_kind(path, rows[i]) if looped else i].append(i)
  results = [None] * len(rows)
  for members in kinds.values():
    for i, result in zip(members, _map_equal(f, [rows[i] for i in members])):
      results[i] = result
  return jax.tree.unflatten(treedef, results)


def _flatten_like(
    tree: PyTree, first: PyTree, treedef: jax.tree_util.PyTreeDef
) -> list[Any]:
  try:
    picked = jax.tree.map(
        lambda one, x: None if one is None else (x,), first, tree,
        is_leaf=_is_none,
    )
    return [x for (x,) in treedef.flatten_up_to(picked)]
  except (ValueError, TypeError) as error:
    raise ValueError(
        'map_leaves got trees that differ; give trees of the structure '
        f'{treedef}.'
    ) from error


def _kind(
    path: jax.tree_util.KeyPath[Any], row: tuple[Any, ...]
) -> tuple[Any, ...]:
  name = re.sub(r'\d+', '*', path_name(path))
  leaves, treedef = jax.tree.flatten(row)
  types = [(jnp.shape(x), jax.dtypes.result_type(x)) for x in leaves]
  return name, treedef, *types


def _map_equal(
    f: Callable[..., PyTree], rows: list[tuple[Any, ...]]
) -> list[PyTree]:
  """Applies `f` to rows of equal shapes."""
  if len(rows) == 1:
    return [f(*rows[0])]

  def body(i, buffers):
    row = jax.lax.switch(i, [lambda row=row: row for row in rows])
    return jax.tree.map(
        lambda buffer, x: jax.lax.dynamic_update_index_in_dim(buffer, x, i, 0),
        buffers, f(*row),
    )

  buffers = jax.tree.map(
      lambda x: jnp.zeros((len(rows), *x.shape), x.dtype),
      jax.eval_shape(f, *rows[0]),
  )
  stacked = jax.lax.fori_loop(0, len(rows), body, buffers)
  pick = lambda i: jax.tree.map(lambda x: x[i], stacked)
  return [pick(i) for i in range(len(rows))]

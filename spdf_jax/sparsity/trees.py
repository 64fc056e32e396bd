# SPDX-License-Identifier: Apache-2.0
"""Trees of parameters: paths of leaves, and maps over leaves."""

import collections
from collections.abc import Callable
import re
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

_IN_VARIABLE = jax.tree_util.GetAttrKey('value')


def path_name(path: jax.tree_util.KeyPath[Any]) -> str:
  """Returns a leaf's path as a string, e.g. `'h_0/attn/wq/kernel'`.

  An `nnx.Variable` or a box of Linen, such as `nn.Partitioned`, has the path of
  the array in it: `nnx.Optimizer` gives variables to `init`, and arrays to
  `update`.
  """
  if path and path[-1] == _IN_VARIABLE:
    path = path[:-1]
  return jax.tree_util.keystr(path, simple=True, separator='/')


def path_parts(path: jax.tree_util.KeyPath[Any]) -> tuple[str, ...]:
  """Returns the names of a path's entries, e.g. `('h_0', 'kernel')`."""
  if path and path[-1] == _IN_VARIABLE:
    path = path[:-1]
  return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def by_name(tree: PyTree) -> dict[str, Any]:
  """Returns the leaves of a tree by their paths, e.g. `'h_0/mlp/wi/kernel'`."""
  return {
      path_name(path): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def matching_leaves(
    tree: PyTree, params: PyTree, *, allow_others: bool = False
) -> list[Any]:
  """Returns the leaves of a tree that belong to the leaves of `params`.

  Leaves are matched by their paths, so the nodes of the trees may have
  different types, such as `nnx.Param` and the variables of `nnx.Optimizer`.

  Args:
    tree: A mask, or another tree with some of the paths of `params`, which may
      have subtrees there.
    params: The parameters.
    allow_others: Whether `tree` may have leaves at other paths, since `params`
      are some of the parameters.

  Returns:
    One entry per leaf of `params`: that of `tree`, or `None` if it has none.

  Raises:
    ValueError: `tree` has a leaf at a path that `params` does not have, and
      `allow_others` is false.

  Example:
    >>> matching_leaves({'b': None, 'w': True}, {'b': 1., 'w': 2.})
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
              path_parts(path) in known and not is_box(x)
          ),
          is_leaf_takes_path=True,
      )
      if leaf is not None
  }
  extra = set(by_path) - set(paths)
  if extra and not allow_others:
    raise ValueError(
        f'a tree, such as the mask, has a leaf {"/".join(min(extra))!r}, but '
        'the parameters or gradients have only '
        f'{", ".join(map("/".join, paths)) or "empty nodes"}; give trees of '
        'the same parameters.'
    )
  return [by_path.get(path) for path in paths]


def is_box(x: Any) -> bool:
  """Returns whether a node is an `nnx.Variable` or a box of Linen.

  Example:
    >>> is_box(jnp.ones(2))
    False
  """
  kind = type(x)  # An instance of `nnx.Rngs` has attributes of any name.
  return hasattr(kind, 'replace_boxed') or (
      hasattr(kind, 'get_value') and hasattr(kind, 'set_value')
  )


def without_empty_variables(tree: PyTree) -> PyTree:
  """Replaces variables and boxes that hold `None` by `None`.

  A mask made of the variables of `nnx.state(model)` holds `None` in those that
  are not sparsified. Functions over the variables of an `nnx.Optimizer`, such
  as one that reads their dtypes, need an array in each.

  Args:
    tree: A tree, with leaves that may be `nnx.Variable` or `nn.Partitioned`.

  Returns:
    The tree; variables that hold arrays are unchanged.
  """
  return jax.tree.map(
      lambda x: None if is_box(x) and not jax.tree.leaves(x) else x,
      tree, is_leaf=is_box,
  )

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


def auto_axes(f: Callable[..., PyTree], like: PyTree) -> Callable[..., PyTree]:
  """Makes the axes of a mesh Auto inside a function.

  On a mesh with Explicit axes, JAX requires the sharding of every reshaped
  array; selection of masks leaves it to the compiler instead. Without such a
  mesh, returns `f`.

  Args:
    f: Function of arrays that closes over no sharded arrays.
    like: A tree of the structure of what `f` returns, arrays with its
      shardings.

  Returns:
    A function with the arguments and results of `f`.

  Example:
    >>> w = jax.numpy.ones((4, 4))
    >>> auto_axes(lambda w: w.reshape(2, 8).reshape(4, 4), w)(w).shape
    (4, 4)
  """
  shardings = jax.tree.map(_sharding, like)
  meshes = [s.mesh for s in jax.tree.leaves(shardings)]
  if not any(jax.sharding.AxisType.Explicit in m.axis_types for m in meshes):
    return f
  # The arrays of `like` are arguments too, because they determine the devices
  # of the compiled function, where `f` has no other sharded arrays.
  inside = jax.jit(
      jax.sharding.auto_axes(
          lambda _, *args: f(*args), out_sharding=shardings
      ),
      keep_unused=True,
  )
  return lambda *args: inside(like, *args)


def _sharding(x: Any) -> jax.NamedSharding:
  return jax.typeof(x).sharding

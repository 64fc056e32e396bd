# SPDX-License-Identifier: Apache-2.0
"""Optimizer-state leaves that match parameters, by path and shape."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from spdf_jax.sparsity import trees

PyTree = Any


def check_optimizer(name: str, value: Any) -> None:
  """Raises TypeError for an argument that is not an optimizer of optax."""
  if isinstance(value, optax.MultiSteps):
    raise TypeError(
        f'{name} is an optax.MultiSteps; give its inner optimizer, and put '
        'MultiSteps around the result, optax.MultiSteps(…, '
        'every_k_schedule=k).gradient_transformation(), so that masks are '
        'updated by whole batches.'
    )
  if not isinstance(value, optax.GradientTransformation):
    raise TypeError(
        f'{name} is {value!r:.80}; give an optimizer, e.g. optax.adamw(1e-3).'
    )


def map_like_params(
    f: Callable[..., Any], state: PyTree, params: PyTree, *rest: PyTree
) -> PyTree:
  """Maps `f` over the leaves of `state` that belong to a parameter.

  A leaf of the state belongs to the parameter of equal shape whose key path is
  the longest suffix of the leaf's own path: Adam's `0/mu/h_0/kernel` belongs to
  `h_0/kernel`. This works for any optimizer that builds its state with
  `jax.tree.map` over the parameters, inside `optax.partition` too. Factored
  moments, counters and hyperparameters have other shapes and pass unchanged.

  Args:
    f: `(state_leaf, *rest_leaves) -> leaf`; each rest leaf is that of the
      matching parameter in one tree of `rest`.
    state: State of any optax transformation.
    params: The parameters, or their shapes.
    *rest: Trees of the structure of `params`; a `None` leaf is passed to `f`.

  Returns:
    `state` with the matching leaves replaced.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> params = {'w': jnp.ones(3)}
    >>> state = optax.adam(0.1).init(params)
    >>> map_like_params(lambda m: m + 1, state, params)[0].mu['w'].tolist()
    [1.0, 1.0, 1.0]
  """
  paths_and_params = jax.tree_util.tree_leaves_with_path(params)
  aligned = [trees.matching_leaves(tree, params) for tree in rest]
  by_path = {
      trees.path_parts(path): (param.shape, [column[i] for column in aligned])
      for i, (path, param) in enumerate(paths_and_params)
  }

  def visit(path, leaf):
    parts = trees.path_parts(path)
    for start in range(len(parts) + 1):
      entry = by_path.get(parts[start:])
      if entry is not None and entry[0] == getattr(leaf, 'shape', None):
        return f(leaf, *entry[1])
    return leaf

  return jax.tree_util.tree_map_with_path(visit, state)


def state_shardings(state: PyTree, params: PyTree) -> PyTree:
  """Returns a state's shardings: those of the matching parameters.

  Without `out_shardings`, `jax.jit(tx.init)` would replicate masks and moments
  on every device. Leaves that belong to no parameter are replicated.

  Args:
    state: The state, or its shapes: `jax.eval_shape(tx.init, params)`.
    params: The parameters, arrays with `NamedSharding` on one mesh.

  Returns:
    Shardings in the structure of `state`, for `out_shardings`.

  Raises:
    ValueError: the parameters are not all sharded over one mesh.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> mesh = jax.make_mesh((1,), ('x',))
    >>> rows = jax.NamedSharding(mesh, jax.P('x'))
    >>> params = {'w': jax.device_put(jnp.ones((4, 4)), rows)}
    >>> tx = optax.adam(0.1)
    >>> like = state_shardings(jax.eval_shape(tx.init, params), params)
    >>> state = jax.jit(tx.init, out_shardings=like)(params)
    >>> state[0].mu['w'].sharding == rows
    True
  """
  shardings = jax.tree.map(lambda p: p.sharding, params)
  meshes: set[Any] = {
      getattr(s, 'mesh', None) for s in jax.tree.leaves(shardings)
  }
  if len(meshes) != 1 or None in meshes:
    raise ValueError(
        'the parameters are on no mesh, or on several; put all of them on one '
        'mesh with jax.device_put(params, NamedSharding(mesh, …)).'
    )
  replicated = jax.NamedSharding(meshes.pop(), jax.P())
  like_params = map_like_params(lambda _, s: s, state, params, shardings)
  return jax.tree.map(
      lambda s: s if isinstance(s, jax.NamedSharding) else replicated,
      like_params,
  )

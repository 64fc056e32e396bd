"""Parameter-shaped leaves of optimizer states, found by path and shape."""

from collections.abc import Callable
from typing import Any

import jax

from spdf_jax.sparsity import selection

PyTree = Any


def map_like_params(
    f: Callable[..., Any], state: PyTree, params: PyTree, *rest: PyTree
) -> PyTree:
  """Maps `f` over the leaves of `state` that belong to a parameter.

  A leaf of the state belongs to the parameter whose key path is the longest
  suffix of the leaf's own path and whose shape is equal: Adam's
  `0/mu/h_0/kernel` to `h_0/kernel`. This holds for any optimizer that builds
  its state with `jax.tree.map` over the parameters, inside `optax.partition`
  too. Factored moments, counters and hyper-parameters have other shapes and
  pass unchanged.

  Args:
    f: `(state_leaf, *rest_leaves) -> leaf`, with one rest leaf per tree in
      `rest`, at the parameter it belongs to.
    state: State of any optax transformation.
    params: The parameters, or their shapes.
    *rest: Trees of the structure of `params`; `None` at a leaf is passed on.

  Returns:
    `state` with the matching leaves replaced.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> params = {'w': jnp.ones(3)}
    >>> state = optax.adam(0.1).init(params)
    >>> map_like_params(lambda m: m + 1, state, params)[0].mu['w'].tolist()
    [1.0, 1.0, 1.0]
  """
  paths_and_params, treedef = jax.tree_util.tree_flatten_with_path(params)
  aligned = [treedef.flatten_up_to(tree) for tree in rest]
  by_path = {
      _parts(path): (param.shape, [column[i] for column in aligned])
      for i, (path, param) in enumerate(paths_and_params)
  }

  def visit(path, leaf):
    parts = _parts(path)
    for start in range(len(parts) + 1):
      shape, rest_leaves = by_path.get(parts[start:], (None, None))
      if shape is not None and shape == getattr(leaf, 'shape', None):
        return f(leaf, *rest_leaves)
    return leaf

  return jax.tree_util.tree_map_with_path(visit, state)


def _parts(path: jax.tree_util.KeyPath) -> tuple[str, ...]:
  return tuple(selection.path_name((entry,)) for entry in path)

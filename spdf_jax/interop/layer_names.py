"""Layers one by one, and stacked for a model that scans over them."""

from typing import Any

import jax
import numpy as np

PyTree = Any


def unstack_layers(tree: PyTree) -> PyTree:
  """Turns parameters, or masks, of a scanned model into those of a loop.

  Args:
    tree: With a layer axis in front of everything under `'h'`, or without
      `'h'`, which is returned as it is.

  Returns:
    The same with `'h_0'`, `'h_1'` and so on.

  Example:
    >>> tree = unstack_layers({'h': {'w': np.array([[1, 2], [3, 4]])}})
    >>> tree['h_1']['w'].tolist()
    [3, 4]
  """
  if 'h' not in tree:
    return tree
  rest = {k: v for k, v in tree.items() if k != 'h'}
  depth = max((len(x) for x in jax.tree.leaves(tree['h'])), default=0)
  return rest | {
      f'h_{i}': jax.tree.map(lambda x, i=i: x[i], tree['h'])
      for i in range(depth)
  }


def stack_layers(tree: PyTree) -> PyTree:
  """Turns parameters, or masks, of a loop into those of a scanned model.

  Args:
    tree: With layers `'h_0'`, `'h_1'` and so on.

  Returns:
    The same with a layer axis in front of everything under `'h'`.

  Example:
    >>> layer = {'w': np.ones(3)}
    >>> stack_layers({'h_0': layer, 'h_1': layer})['h']['w'].shape
    (2, 3)
  """
  rest = {k: v for k, v in tree.items() if not k.startswith('h_')}
  layers = [tree[f'h_{i}'] for i in range(len(tree) - len(rest))]
  return rest | {'h': jax.tree.map(lambda *xs: np.stack(xs), *layers)}

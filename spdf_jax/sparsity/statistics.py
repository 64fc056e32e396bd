"""What masks contain: sparsity per layer and over the model."""

from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from spdf_jax.sparsity import selection

PyTree = Any


class LayerSparsity(NamedTuple):
  """Kept and all weights of one layer."""

  kept: int
  total: int

  @property
  def sparsity(self) -> float:
    """Fraction of zeros."""
    return 1 - self.kept / self.total


class Summary(NamedTuple):
  """What `summarize` counts, exactly."""

  layers: dict[str, LayerSparsity]
  """Per sparsified layer; stacked layers apart, as `path[0]`, `path[1]`, …"""

  parameters: int
  """Parameters of the model, sparsified or not."""

  @property
  def kept(self) -> int:
    """Kept weights of sparsified layers."""
    return sum(layer.kept for layer in self.layers.values())

  @property
  def sparsified(self) -> int:
    """Weights of sparsified layers, kept or not."""
    return sum(layer.total for layer in self.layers.values())

  @property
  def sparsity(self) -> float:
    """Fraction of zeros among the weights of sparsified layers."""
    return 1 - self.kept / self.sparsified

  @property
  def overall_sparsity(self) -> float:
    """Fraction of zeros S among all parameters (SPDF, section 2)."""
    return (self.sparsified - self.kept) / self.parameters

  def __str__(self) -> str:
    width = max(map(len, self.layers))
    rows = [
        f'{name:<{width}}  {layer.sparsity:6.2%}  '
        f'{layer.kept:,} of {layer.total:,} kept'
        for name, layer in self.layers.items()
    ]
    return '\n'.join(
        rows + [
            f'sparsified layers: {self.sparsity:.2%} zeros of '
            f'{self.sparsified:,}; all parameters: '
            f'{self.overall_sparsity:.2%} zeros of {self.parameters:,}'
        ]
    )


def summarize(
    mask: PyTree,
    params: PyTree,
    *,
    where: selection.Where = selection.hidden_matrices,
) -> Summary:
  """Counts the kept weights of every sparsified layer.

  Args:
    mask: A mask, as `get_mask` returns it.
    params: The parameters, or their shapes.
    where: The selection given to `sparsify`; tells stacked layers apart.

  Returns:
    Exact integer counts; printing it gives a table.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.ones((2, 2)), 'b': jnp.ones(2)}
    >>> mask = {'w': jnp.eye(2, dtype=bool), 'b': None}
    >>> summary = summarize(mask, params)
    >>> summary.sparsity, summary.overall_sparsity == 2 / 6
    (0.5, True)
  """
  axes = selection.select(where, params)
  stacks = selection.to_layers(mask, params, axes)
  layers = {}
  for path, stack in jax.tree_util.tree_leaves_with_path(stacks):
    kept = np.asarray(stack).sum(axis=(1, 2), dtype=np.int64)
    for i, count in enumerate(kept):
      name = selection.path_name(path) + (f'[{i}]' if len(kept) > 1 else '')
      layers[name] = LayerSparsity(int(count), stack[0].size)
  sizes = [int(np.prod(p.shape)) for p in jax.tree.leaves(params)]
  return Summary(layers, sum(sizes))

"""What masks contain, and what changes between two of them."""

from collections.abc import Iterator
import itertools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
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
  stacks = _stacks(mask, params, where)
  # Summed where they lie: only the counts come to the host.
  layers = {
      name: LayerSparsity(int(kept), stack.shape[1] * stack.shape[2])
      for path, stack in stacks
      for name, kept in _numbered(
          path, np.asarray(jnp.sum(stack, axis=(1, 2), dtype=jnp.uint32))
      )
  }
  sizes = [int(np.prod(p.shape)) for p in jax.tree.leaves(params)]
  return Summary(layers, sum(sizes))


class MaskChange(NamedTuple):
  """What one layer's mask gained, lost and kept."""

  grown: int
  """Weights active after, not before."""

  dropped: int
  """Weights active before, not after."""

  surviving: int
  """Weights active before and after."""

  @property
  def overlap(self) -> float:
    """Jaccard index: of the weights active in either, the share in both."""
    return self.surviving / sum(self) if any(self) else 1.0


def changes(
    before: PyTree,
    after: PyTree,
    params: PyTree,
    *,
    where: selection.Where = selection.hidden_matrices,
) -> dict[str, MaskChange]:
  """Counts what changed from one mask to another, per layer, on the host.

  Args:
    before: A mask, as `get_mask` returns it.
    after: Another of the same parameters.
    params: The parameters, or their shapes.
    where: The selection given to `sparsify`; tells stacked layers apart.

  Returns:
    Exact integer counts by layer, named as in `summarize`.

  Raises:
    ValueError: the masks have different leaves or shapes.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.ones((2, 2)), 'b': jnp.ones(2)}
    >>> one = {'w': jnp.array([[True, True], [False, False]]), 'b': None}
    >>> other = {'w': jnp.array([[True, False], [True, True]]), 'b': None}
    >>> changes(one, other, params)
    {'w': MaskChange(grown=2, dropped=1, surviving=1)}
  """
  found = {}
  pairs = itertools.zip_longest(
      _layers(before, params, where), _layers(after, params, where),
      fillvalue=(None, np.zeros(0)),
  )
  for (name, old), (other_name, new) in pairs:
    if name != other_name or old.shape != new.shape:
      raise ValueError(
          f'one mask has the layer {name!r} {old.shape} where the other has '
          f'{other_name!r} {new.shape}; compare masks of the same parameters.'
      )
    parts = new & ~old, old & ~new, old & new
    found[name] = MaskChange(*(int(m.sum(dtype=np.int64)) for m in parts))
  return found


def overlap(
    one: PyTree,
    other: PyTree,
    params: PyTree,
    *,
    where: selection.Where = selection.hidden_matrices,
) -> dict[str, float]:
  """Returns how alike two masks are in every layer, from 0 to 1.

  Args:
    one: A mask, as `get_mask` returns it.
    other: Another of the same parameters.
    params: The parameters, or their shapes.
    where: The selection given to `sparsify`; tells stacked layers apart.

  Returns:
    The Jaccard index by layer: of the weights active in either mask, the share
    that is active in both; 1 where none is active. Two random masks of density
    d have d / (2 - d).

  Raises:
    ValueError: the masks have different leaves or shapes.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.ones((2, 2))}
    >>> one = {'w': jnp.array([[True, True], [False, False]])}
    >>> overlap(one, {'w': jnp.ones((2, 2), bool)}, params)
    {'w': 0.5}
  """
  return {
      name: change.overlap
      for name, change in changes(one, other, params, where=where).items()
  }


def _layers(
    mask: PyTree, params: PyTree, where: selection.Where
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields every layer's name and mask `[inputs, outputs]`."""
  for path, stack in _stacks(mask, params, where):
    yield from _numbered(path, np.asarray(stack))


def _stacks(
    mask: PyTree, params: PyTree, where: selection.Where
) -> list[tuple[str, jax.Array]]:
  """Returns every leaf's path and masks `[layers, inputs, outputs]`."""
  axes = selection.select(where, params)
  stacks = selection.to_layers(mask, params, axes)
  return [
      (selection.path_name(path), stack)
      for path, stack in jax.tree_util.tree_leaves_with_path(stacks)
  ]


def _numbered(path: str, stack: np.ndarray) -> Iterator[tuple[str, Any]]:
  """Yields what a stack has of each layer, with the layer's name."""
  for i, layer in enumerate(stack):
    yield path + (f'[{i}]' if len(stack) > 1 else ''), layer

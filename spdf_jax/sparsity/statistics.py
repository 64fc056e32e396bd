# SPDX-License-Identifier: Apache-2.0
"""Counts of the weights that masks keep, and of differences between masks."""

from collections.abc import Iterator
import itertools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import selectors
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.selection import Where

PyTree = Any


class LayerSparsity(NamedTuple):
  """Numbers of kept weights and of all weights of one layer."""

  kept: int
  total: int

  @property
  def sparsity(self) -> float:
    """Fraction of zeros in the layer."""
    return 1 - self.kept / self.total


class Summary(NamedTuple):
  """Exact counts of a mask, as `summarize` returns them."""

  layers: dict[str, LayerSparsity]
  """Counts by sparsified layer; stacked layers are `path[0]`, `path[1]`, …"""

  parameters: int
  """Number of parameters of the model, sparsified or not."""

  @property
  def kept(self) -> int:
    """Number of kept weights of sparsified layers."""
    return sum(layer.kept for layer in self.layers.values())

  @property
  def sparsified(self) -> int:
    """Number of weights of sparsified layers, kept or pruned."""
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
    where: Where = selectors.hidden_matrices,
) -> Summary:
  """Counts the kept weights of every sparsified layer.

  Args:
    mask: A mask, as `get_mask` returns it.
    params: The parameters, or their shapes.
    where: The `where` given to `sparsify`; determines the axes of stacked
      layers.

  Returns:
    Exact integer counts; `str` formats them as a table.

  Raises:
    ValueError: the mask has a leaf that `where` does not select.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.ones((2, 2)), 'b': jnp.ones(2)}
    >>> mask = {'w': jnp.eye(2, dtype=bool), 'b': None}
    >>> summary = summarize(mask, params)
    >>> summary.sparsity, summary.overall_sparsity == 2 / 6
    (0.5, True)
  """
  stacks = _stacks(mask, params, where)
  # Sums on the devices, so that only the counts are copied to the host.
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
  """Counts of the differences between two masks of one layer."""

  grown: int
  """Number of weights kept after, not before."""

  dropped: int
  """Number of weights kept before, not after."""

  surviving: int
  """Number of weights kept before and after."""

  @property
  def overlap(self) -> float:
    """Jaccard index: the share of weights kept in both of those in either."""
    return self.surviving / sum(self) if any(self) else 1.0


def mask_changes(
    before: PyTree,
    after: PyTree,
    params: PyTree,
    *,
    where: Where = selectors.hidden_matrices,
) -> dict[str, MaskChange]:
  """Counts the differences between two masks, per layer, on the host.

  Args:
    before: A mask, as `get_mask` returns it.
    after: Another mask of the same parameters.
    params: The parameters, or their shapes.
    where: The `where` given to `sparsify`; determines the axes of stacked
      layers.

  Returns:
    Exact integer counts by layer, named as in `summarize`.

  Raises:
    ValueError: the masks have different leaves or shapes, or a leaf that
      `where` does not select.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.ones((2, 2)), 'b': jnp.ones(2)}
    >>> one = {'w': jnp.array([[True, True], [False, False]]), 'b': None}
    >>> other = {'w': jnp.array([[True, False], [True, True]]), 'b': None}
    >>> mask_changes(one, other, params)
    {'w': MaskChange(grown=2, dropped=1, surviving=1)}
  """
  found = {}
  missing: Any = (None, np.zeros(0))
  pairs = itertools.zip_longest(
      _layers(before, params, where), _layers(after, params, where),
      fillvalue=missing,
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
    where: Where = selectors.hidden_matrices,
) -> dict[str, float]:
  """Returns the overlap of two masks in every layer, from 0 to 1.

  Args:
    one: A mask, as `get_mask` returns it.
    other: Another mask of the same parameters.
    params: The parameters, or their shapes.
    where: The `where` given to `sparsify`; determines the axes of stacked
      layers.

  Returns:
    The Jaccard index by layer: the number of weights kept in both masks divided
    by the number kept in either; 1 where none is kept. Two random masks of
    sparsity s have an expected index of about (1 - s) / (1 + s).

  Raises:
    ValueError: the masks have different leaves or shapes, or a leaf that
      `where` does not select.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {'w': jnp.ones((2, 2))}
    >>> one = {'w': jnp.array([[True, True], [False, False]])}
    >>> overlap(one, {'w': jnp.ones((2, 2), bool)}, params)
    {'w': 0.5}
  """
  return {
      name: change.overlap
      for name, change in mask_changes(one, other, params, where=where).items()
  }


def _layers(
    mask: PyTree, params: PyTree, where: Where
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the name and the mask `[inputs, outputs]` of every layer."""
  for path, stack in _stacks(mask, params, where):
    yield from _numbered(path, np.asarray(stack))


def _stacks(
    mask: PyTree, params: PyTree, where: Where
) -> list[tuple[str, jax.Array]]:
  """Returns the path and masks `[layers, inputs, outputs]` of every leaf."""
  masks.check_bool(mask)
  axes = selection.select(where, params)
  for name, m, a in zip(
      trees.by_name(params), trees.matching_leaves(mask, params), axes
  ):
    if m is not None and a is None:
      raise ValueError(
          f'the mask has a leaf {name!r}, which where does not select; pass '
          'the where of sparsify.'
      )
  stacks = selection.to_layers(mask, params, axes)
  return [
      (trees.path_name(path), stack)
      for path, stack in jax.tree_util.tree_leaves_with_path(stacks)
  ]


def _numbered(path: str, stack: np.ndarray) -> Iterator[tuple[str, Any]]:
  """Yields the name and the entry of each layer of a stack."""
  for i, layer in enumerate(stack):
    yield path + (f'[{i}]' if len(stack) > 1 else ''), layer

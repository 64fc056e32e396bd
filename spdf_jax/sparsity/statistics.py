# SPDX-License-Identifier: Apache-2.0
"""Counts of the weights that masks keep, and of differences between masks."""

from collections.abc import Iterator
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.sparsity import masks
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import state
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
  """Counts by sparsified leaf, or by layer: `path[0]`, `path[1]`, …"""

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
    return (self.sparsified - self.kept) / max(self.sparsified, 1)

  @property
  def overall_sparsity(self) -> float:
    """Fraction of zeros S among all parameters (SPDF, section 2)."""
    return (self.sparsified - self.kept) / self.parameters

  def __str__(self) -> str:
    width = max(map(len, self.layers), default=0)
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
    opt_state: PyTree, params: PyTree, *, where: Where | None = None
) -> Summary:
  """Counts the kept weights of every sparsified leaf.

  Args:
    opt_state: The state of an optimizer that contains `sparsify`, or a mask.
    params: The parameters, or their shapes.
    where: The `where` given to `sparsify`, to count each layer of a leaf of
      stacked layers. `None`: one count per leaf.

  Returns:
    A `Summary` of exact integer counts; `str` formats it as a table.

  Raises:
    TypeError: `opt_state` is neither such a state nor a mask.
    ValueError: the mask has a leaf that `where` does not select, or that
      `params` does not have.

  Example:
    >>> import jax.numpy as jnp, optax, spdf_jax as spdf
    >>> params = {'w': jnp.ones((4, 4)), 'b': jnp.ones(4)}
    >>> tx = spdf.sparsify(optax.adam(0.1), spdf.static(0.75), key=0)
    >>> print(spdf.summarize(tx.init(params), params))
    w  75.00%  4 of 16 kept
    sparsified layers: 75.00% zeros of 16; all parameters: 60.00% zeros of 20
  """
  is_state = lambda x: isinstance(x, state.SparsifyState)
  has_state = any(map(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))
  mask = state.get_mask(opt_state) if has_state else opt_state
  stacks = _stacks(mask, params, where)
  layers = {
      name: LayerSparsity(kept, stack.shape[1] * stack.shape[2])
      for path, stack in stacks
      for name, kept in _numbered(path, _count(stack))
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
    where: Where | None = None,
) -> dict[str, MaskChange]:
  """Counts the differences between two masks, leaf by leaf, on the host.

  Args:
    before: A mask, as `get_mask` returns it.
    after: Another mask of the same parameters.
    params: The parameters, or their shapes.
    where: The `where` given to `sparsify`, to count the stacked layers of a
      leaf one by one.

  Returns:
    Exact integer counts by leaf, or by layer, named as in `summarize`.

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
  changes = {}
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
    changes[name] = MaskChange(*(int(m.sum(dtype=np.int64)) for m in parts))
  return changes


def _layers(
    mask: PyTree, params: PyTree, where: Where | None
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the name and the mask `[inputs, outputs]` of every layer."""
  for path, stack in _stacks(mask, params, where):
    yield from _numbered(path, np.asarray(stack))


def _stacks(
    mask: PyTree, params: PyTree, where: Where | None
) -> list[tuple[str, jax.Array]]:
  """Returns the path and masks `[layers, inputs, outputs]` of every leaf."""
  masks.check_bool(mask)
  leaves = list(zip(
      trees.by_name(params), trees.matching_leaves(mask, params)
  ))
  if where is None:
    return [
        (name, m.reshape(1, -1, m.shape[-1])) for name, m in leaves
        if m is not None
    ]
  axes = selection.select(where, params)
  for (name, m), a in zip(leaves, axes):
    if m is not None and a is None:
      raise ValueError(
          f'the mask has a leaf {name!r}, which where does not select; pass '
          'the `where` that sparsify was given.'
      )
  stacks = selection.to_layers(mask, params, axes)
  return [
      (trees.path_name(path), stack)
      for path, stack in jax.tree_util.tree_leaves_with_path(stacks)
  ]


def _count(stack: jax.Array) -> list[int]:
  """Counts the kept weights of every layer, of which there may be over 2^32."""
  # Summed on the devices, so that only counts are copied to the host.
  columns = jnp.sum(stack, axis=1, dtype=jnp.uint32)
  high, low = (
      np.asarray(jnp.sum(x, axis=1, dtype=jnp.uint32))
      for x in (columns >> 16, columns & 0xFFFF)
  )
  return [(int(h) << 16) + int(n) for h, n in zip(high, low)]


def _numbered(path: str, stack: Any) -> Iterator[tuple[str, Any]]:
  """Yields the name and the entry of each layer of a stack."""
  for i, layer in enumerate(stack):
    yield path + (f'[{i}]' if len(stack) > 1 else ''), layer

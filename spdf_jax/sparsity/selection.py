"""Selection of the sparsified leaves of a parameter tree, and of their axes."""

import collections
from collections.abc import Callable
import functools
import logging
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

PyTree = Any
Axes = optax.contrib.MuonDimensionNumbers
Where = Callable[[str, Any], Axes | bool]

logger = logging.getLogger('spdf_jax')

_WORD = re.compile(r'[A-Z]?[a-z]+|[A-Z]+(?![a-z])')
_EXCLUDED_WORDS = frozenset(
    ('wte', 'wpe', 'pos', 'position', 'positional', 'positions', 'bias', 'ln')
)


def path_name(path: jax.tree_util.KeyPath) -> str:
  """Returns a leaf's path as a string, e.g. `'h_0/attn/wq/kernel'`."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def by_name(tree: PyTree) -> dict[str, Any]:
  """Returns the leaves of a tree by their paths, e.g. `'h_0/mlp/wi/kernel'`."""
  return {
      path_name(path): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
  }


def hidden_matrices(path: str, leaf: Any) -> bool:
  """Selects the weight matrices of hidden layers: the default `where`.

  A leaf is selected if it has two axes, both longer than one, and a floating
  dtype, and no part of its path names an embedding, a position table, an
  output head, a norm or a bias. Models with stacked (scanned) layers or with
  per-head kernels need a `where` of their own, because there a norm has two
  axes and a matrix three.

  Args:
    path: The leaf's path, parts joined by `'/'`.
    leaf: Anything with `shape` and `dtype`.

  Returns:
    Whether the leaf is sparsified.

  Example:
    >>> leaf = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    >>> hidden_matrices('h_0/mlp/wi/kernel', leaf)
    True
    >>> hidden_matrices('wte/embedding', leaf)
    False
  """
  if len(leaf.shape) != 2 or min(leaf.shape) < 2:
    return False
  if not jnp.issubdtype(leaf.dtype, jnp.floating):
    return False
  return not any(_is_excluded(part) for part in path.split('/'))


def _is_excluded(part: str) -> bool:
  words = [word.lower() for word in _WORD.findall(part)]
  return bool(words) and (
      words[-1] in ('head', 'unembed')
      or any(
          word in _EXCLUDED_WORDS or word.startswith('emb') or 'norm' in word
          for word in words
      )
  )


def select(where: Where, params: PyTree) -> list[Axes | None]:
  """Returns the axes of every leaf of `params` that `where` selects.

  Args:
    where: `(path, leaf) -> Axes | bool`. `True` means that the last two axes
      are (reduction, output) and all earlier axes index independent layers.
    params: Parameters, or a tree of leaves with their shapes and dtypes.

  Returns:
    One entry per leaf, in the order of `jax.tree.leaves`: the axes with
    non-negative numbers, or `None` where the leaf is not sparsified.

  Raises:
    ValueError: `params` has leaves and none is selected; the paths are listed.
  """
  paths_and_leaves = jax.tree_util.tree_leaves_with_path(params)
  axes = [
      _normalize_axes(where(path_name(path), leaf), path_name(path), leaf)
      for path, leaf in paths_and_leaves
  ]
  # `optax.tree.map_params` passes an empty tree as a placeholder.
  if paths_and_leaves and not any(a is not None for a in axes):
    seen = ', '.join(
        f'{path_name(path)} {tuple(leaf.shape)}'
        for path, leaf in paths_and_leaves
    )
    raise ValueError(
        f'where={getattr(where, "__name__", where)!r} selects no leaf to '
        f'sparsify; pass a `where(path, leaf)` that selects some of: {seen}.'
    )
  return axes


def _normalize_axes(axes: Axes | bool, path: str, leaf: Any) -> Axes | None:
  if isinstance(axes, bool) and not axes:
    return None
  ndim = len(leaf.shape)
  if isinstance(axes, bool):
    axes = Axes(reduction_axis=ndim - 2, output_axis=ndim - 1)
  if not isinstance(axes, Axes):
    raise ValueError(
        f'where returned {axes!r} for {path}; return a bool or '
        'optax.contrib.MuonDimensionNumbers.'
    )
  as_tuple = lambda axis: (axis,) if isinstance(axis, int) else tuple(axis)
  normal = Axes(*(tuple(a % max(ndim, 1) for a in as_tuple(x)) for x in axes))
  named = normal.reduction_axis + normal.output_axis
  if ndim < 2 or len(set(named)) != len(named) or not all(normal):
    raise ValueError(
        f'where names axes {tuple(axes)} for {path} of shape '
        f'{tuple(leaf.shape)}; a sparsified leaf needs distinct reduction and '
        'output axes.'
    )
  return normal


def log_selection(params: PyTree, axes: list[Axes | None]) -> None:
  """Logs the sparsified leaves, once per set of paths and shapes."""
  chosen = [
      (path_name(path), tuple(leaf.shape))
      for (path, leaf), a in zip(
          jax.tree_util.tree_leaves_with_path(params), axes
      )
      if a is not None
  ]
  _log_once(tuple(chosen), len(axes))


@functools.cache
def _log_once(chosen: tuple[tuple[str, tuple[int, ...]], ...], leaves: int):
  # Counts numbered layers together: h_0/mlp/wi and h_1/mlp/wi are h_*/mlp/wi.
  kinds = collections.Counter(re.sub(r'\d+', '*', name) for name, _ in chosen)
  logger.info(
      'sparsify: %d of %d leaves, %s weights: %s',
      len(chosen), leaves, f'{sum(math.prod(s) for _, s in chosen):,}',
      ', '.join(f'{n} {kind}' if n > 1 else kind for kind, n in kinds.items()),
  )


def to_layers(tree: PyTree, params: PyTree, axes: list[Axes | None]) -> PyTree:
  """Reshapes selected leaves to `[layers, inputs, outputs]`, others to `None`.

  Algorithms receive parameters, gradients and masks in this form, for any
  layout of a leaf.

  Args:
    tree: Parameters, or a tree of their structure; `None` may replace a whole
      subtree.
    params: The parameters, for their structure.
    axes: Axes of the parameters, as `select` returns them.

  Returns:
    A tree of the structure of `params`.
  """
  treedef = jax.tree.structure(params)
  full = jax.tree.broadcast(tree, params, is_leaf=lambda x: x is None)
  return treedef.unflatten(
      None if a is None or x is None else _to_matrix(x, a)
      for x, a in zip(treedef.flatten_up_to(full), axes)
  )


def from_layers(
    layers: PyTree, params: PyTree, axes: list[Axes | None]
) -> PyTree:
  """Reshapes leaves to the shapes of `params`; the inverse of `to_layers`."""
  leaves, treedef = jax.tree.flatten(params)
  return treedef.unflatten(
      None if a is None else _from_matrix(x, p.shape, a)
      for x, p, a in zip(treedef.flatten_up_to(layers), leaves, axes)
  )


def _permutation(ndim: int, axes: Axes) -> tuple[int, ...]:
  named = axes.reduction_axis + axes.output_axis
  return tuple(i for i in range(ndim) if i not in named) + named


def _size(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
  size = 1
  for axis in axes:
    size *= shape[axis]
  return size


def _to_matrix(x: Any, axes: Axes) -> Any:
  inputs = _size(x.shape, axes.reduction_axis)
  outputs = _size(x.shape, axes.output_axis)
  layers = _size(x.shape, tuple(range(len(x.shape)))) // (inputs * outputs)
  shape = (layers, inputs, outputs)
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(shape, x.dtype)
  return jnp.transpose(x, _permutation(x.ndim, axes)).reshape(shape)


def _from_matrix(x: Any, shape: tuple[int, ...], axes: Axes) -> Any:
  order = _permutation(len(shape), axes)
  inverse = tuple(order.index(i) for i in range(len(shape)))
  return x.reshape([shape[i] for i in order]).transpose(inverse)

# SPDX-License-Identifier: Apache-2.0
"""Axes of the matrices in a leaf, and leaves as `[layers, inputs, outputs]`."""

from typing import Any
from typing import NamedTuple
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax.sparsity.paths import like_params
from spdf_jax.sparsity.paths import without_empty_variables

PyTree = Any


class MatrixAxes(NamedTuple):
  """The axes of a leaf that form a matrix; all others index its layers.

  `optax.contrib.MuonDimensionNumbers` is accepted in its place.

  Example:
    >>> MatrixAxes(reduction=0, output=(1, 2))  # [model, heads, head size]
    MatrixAxes(reduction=0, output=(1, 2))
  """

  reduction: int | tuple[int, ...]
  """The axes that a product sums over: the inputs."""

  output: int | tuple[int, ...]
  """The axes of the outputs."""


_KINDS = (MatrixAxes, optax.contrib.MuonDimensionNumbers)
Axes: TypeAlias = MatrixAxes | optax.contrib.MuonDimensionNumbers | bool | None


def is_axes(value: Any) -> bool:
  """Returns whether a value is what a selector returns for a leaf."""
  return value is None or isinstance(value, (bool, np.bool_, *_KINDS))


def is_matrix(leaf: Any) -> bool:
  """Returns whether a leaf has two axes longer than one, and no integers."""
  return sum(size > 1 for size in leaf.shape) > 1 and jnp.issubdtype(
      leaf.dtype, jnp.inexact
  )


def normalize_axes(axes: Axes, path: str, leaf: Any) -> MatrixAxes | None:
  """Returns axes as tuples of non-negative numbers.

  Args:
    axes: The result of a selector for a leaf; `True` selects the last two axes.
    path: The leaf's path, for error messages.
    leaf: Anything with `shape`.

  Returns:
    The axes, or `None` if the leaf is not selected.

  Raises:
    ValueError: the axes are of another type or do not form a matrix.
  """
  if isinstance(axes, (bool, np.bool_)):
    axes = bool(axes)
  if axes is None or axes is False:
    return None
  ndim = len(leaf.shape)
  if axes is True:
    axes = MatrixAxes(reduction=ndim - 2, output=ndim - 1)
  if not is_axes(axes):
    hint = '; call it first, where=stacked()' if callable(axes) else ''
    raise ValueError(
        f'where returned {axes!r:.80} for {path or "the array"}; return a bool '
        f'or spdf_jax.MatrixAxes{hint}.'
    )
  reduction, output = (
      tuple(a + ndim if a < 0 else a for a in _as_tuple(x)) for x in axes
  )
  normal = MatrixAxes(reduction, output)
  named = reduction + output
  distinct = set(named) & set(range(ndim))
  if len(distinct) != len(named) or not all(normal):
    raise ValueError(
        f'where names axes {tuple(axes)} for {path or "the array"} of shape '
        f'{tuple(leaf.shape)}; a sparsified leaf needs distinct reduction and '
        'output axes of its own.'
    )
  return normal


def _as_tuple(axis: Any) -> tuple[int, ...]:
  return (axis,) if isinstance(axis, int) else tuple(axis)


def selected(
    tree: PyTree, params: PyTree, axes: list[MatrixAxes | None]
) -> PyTree:
  """Returns the leaves of selected parameters, and `None` for all others.

  Args:
    tree: Parameters, or a tree of their paths, such as gradients.
    params: The parameters, for their structure.
    axes: Axes of the parameters, as `select` returns them.

  Returns:
    A tree of the structure of `params`.
  """
  treedef: Any = jax.tree.structure(params)
  return without_empty_variables(treedef.unflatten(
      None if a is None else x for x, a in zip(like_params(tree, params), axes)
  ))


def to_layers(
    tree: PyTree, params: PyTree, axes: list[MatrixAxes | None]
) -> PyTree:
  """Reshapes selected leaves to `[layers, inputs, outputs]`, others to `None`.

  Algorithms receive parameters, gradients and masks in this form, for any
  layout of a leaf.

  Args:
    tree: Parameters, or a tree of some of their paths.
    params: The parameters, for their structure.
    axes: Axes of the parameters, as `select` returns them.

  Returns:
    A tree of the structure of `params`.
  """
  treedef: Any = jax.tree.structure(params)
  return treedef.unflatten(
      None if a is None or x is None else _to_matrix(x, a)
      for x, a in zip(like_params(tree, params), axes)
  )


def from_layers(
    layers: PyTree, params: PyTree, axes: list[MatrixAxes | None]
) -> PyTree:
  """Reshapes leaves to the shapes of `params`; the inverse of `to_layers`."""
  treedef: Any
  leaves, treedef = jax.tree.flatten(params)
  return without_empty_variables(treedef.unflatten(
      None if a is None else _from_matrix(x, p.shape, a)
      for x, p, a in zip(treedef.flatten_up_to(layers), leaves, axes)
  ))


def _permutation(ndim: int, axes: MatrixAxes) -> tuple[int, ...]:
  named = _as_tuple(axes.reduction) + _as_tuple(axes.output)
  return tuple(i for i in range(ndim) if i not in named) + named


def _size(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
  size = 1
  for axis in axes:
    size *= shape[axis]
  return size


def _to_matrix(x: Any, axes: MatrixAxes) -> Any:
  inputs = _size(x.shape, _as_tuple(axes.reduction))
  outputs = _size(x.shape, _as_tuple(axes.output))
  layers = _size(x.shape, tuple(range(len(x.shape)))) // (inputs * outputs)
  shape = (layers, inputs, outputs)
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(shape, x.dtype)
  return jnp.transpose(x, _permutation(x.ndim, axes)).reshape(shape)


def _from_matrix(x: Any, shape: tuple[int, ...], axes: MatrixAxes) -> Any:
  order = _permutation(len(shape), axes)
  inverse = tuple(order.index(i) for i in range(len(shape)))
  return x.reshape([shape[i] for i in order]).transpose(inverse)

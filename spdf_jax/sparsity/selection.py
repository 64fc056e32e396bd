# SPDX-License-Identifier: Apache-2.0
"""Selection of the sparsified leaves and of the axes of their matrices."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import fnmatch
import math
import operator
import re
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax.sparsity import trees

PyTree = Any


class MatrixAxes(NamedTuple):
  """The axes of a leaf that form a matrix; all others index its layers.

  `optax.contrib.MuonDimensionNumbers` is accepted in its place.

  Example:
    >>> MatrixAxes(reduction=0, output=(1, 2))  # [model, heads, head size]
    MatrixAxes(reduction=0, output=(1, 2), kernel=())
  """

  reduction: int | tuple[int, ...]
  """The axes that a product sums over: the inputs. `()`: none, in a vector such
  as a bias, which is a matrix of one row."""

  output: int | tuple[int, ...]
  """The axes of the outputs."""

  kernel: int | tuple[int, ...] = ()
  """Those of the reduction axes that are spatial axes of a convolution's
  kernel, whose sizes `erk` counts."""


_KINDS = (MatrixAxes, optax.contrib.MuonDimensionNumbers)
Axes: TypeAlias = MatrixAxes | optax.contrib.MuonDimensionNumbers | bool | None
Selector = Callable[[str, Any], Axes]
Where = Selector | PyTree


def is_axes(value: Any) -> bool:
  """Returns whether a value is what a selector returns for a leaf."""
  return value is None or isinstance(value, (bool, np.bool_, *_KINDS))


def is_matrix(leaf: Any) -> bool:
  """Returns whether a leaf has two axes longer than one, and no integers."""
  return sum(size > 1 for size in leaf.shape) > 1 and jnp.issubdtype(
      leaf.dtype, jnp.inexact
  )


def _normalize(axes: Axes, path: str, leaf: Any) -> MatrixAxes | None:
  """Returns axes as tuples of non-negative numbers, `None` if not selected.

  Raises ValueError for axes of another type or that form no matrix.
  """
  if isinstance(axes, (bool, np.bool_)):
    axes = bool(axes)
  if axes is None or axes is False:
    return None
  ndim = len(leaf.shape)
  if axes is True:
    axes = MatrixAxes(reduction=ndim - 2, output=ndim - 1)
  if not is_axes(axes):
    hint = '; call it first, where=where.stacked()' if callable(axes) else ''
    raise ValueError(
        f'where returned {axes!r:.80} for {path or "the array"}; return a bool '
        f'or spdf_jax.MatrixAxes{hint}.'
    )
  try:
    normal = MatrixAxes(*(
        tuple(a + ndim if a < 0 else a for a in as_tuple(x)) for x in axes
    ))
  except TypeError as error:
    raise ValueError(
        f'where gives the axes {tuple(axes)} for {path or "the array"}; give '
        'an int, or a tuple of ints, for each.'
    ) from error
  reduction, output, kernel = map(as_tuple, normal)
  named = reduction + output
  distinct = set(named) & set(range(ndim))
  if len(distinct) != len(named) or not output:
    raise ValueError(
        f'where gives the axes {tuple(axes)} for {path or "the array"} of '
        f'shape {tuple(leaf.shape)}; give MatrixAxes(reduction axes, output '
        'axes) with at least one output axis and no axis twice, MatrixAxes((), '
        '0) for a vector, or None to keep it dense.'
    )
  if kernel and not set(kernel) < set(reduction):
    raise ValueError(
        f'where gives the kernel axes {kernel} for {path or "the array"} of '
        f'shape {tuple(leaf.shape)}; give some of its reduction axes '
        f'{reduction}, not all.'
    )
  return normal


def as_tuple(axis: Any) -> tuple[int, ...]:
  """Returns an axis, or several, as a tuple of ints."""
  try:
    return (operator.index(axis),)
  except TypeError:
    return tuple(map(operator.index, axis))


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
  leaves = trees.matching_leaves(tree, params)
  return trees.without_empty_variables(treedef.unflatten(
      None if a is None else x for x, a in zip(leaves, axes)
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
      for x, a in zip(trees.matching_leaves(tree, params), axes)
  )


def kernel_sizes(
    params: PyTree, axes: list[MatrixAxes | None]
) -> dict[str, tuple[int, ...]]:
  """Returns the sizes of the spatial axes of kernels, by the leaves' paths."""
  return {
      name: tuple(leaf.shape[axis] for axis in as_tuple(a.kernel))
      for (name, leaf), a in zip(trees.by_name(params).items(), axes)
      if a and a.kernel
  }


def from_layers(
    layers: PyTree, params: PyTree, axes: list[MatrixAxes | None]
) -> PyTree:
  """Reshapes leaves to the shapes of `params`; the inverse of `to_layers`."""
  treedef: Any
  leaves, treedef = jax.tree.flatten(params)
  return trees.without_empty_variables(treedef.unflatten(
      None if a is None or x is None else _from_matrix(x, p.shape, a)
      for x, p, a in zip(treedef.flatten_up_to(layers), leaves, axes)
  ))


def _permutation(ndim: int, axes: MatrixAxes) -> tuple[int, ...]:
  named = as_tuple(axes.reduction) + as_tuple(axes.output)
  return tuple(i for i in range(ndim) if i not in named) + named


def _to_matrix(x: Any, axes: MatrixAxes) -> Any:
  inputs, outputs = (
      math.prod(x.shape[axis] for axis in as_tuple(part))
      for part in (axes.reduction, axes.output)
  )
  shape = (math.prod(x.shape) // (inputs * outputs), inputs, outputs)
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(shape, x.dtype)
  return jnp.transpose(x, _permutation(x.ndim, axes)).reshape(shape)


def _from_matrix(x: Any, shape: tuple[int, ...], axes: MatrixAxes) -> Any:
  order = _permutation(len(shape), axes)
  inverse = tuple(order.index(i) for i in range(len(shape)))
  return x.reshape([shape[i] for i in order]).transpose(inverse)


def selector_of(
    where: Where, named: Sequence[tuple[str, Any]] = ()
) -> Selector:
  """Converts a `where` of any form to a function.

  Args:
    where: A function `(path, leaf) -> MatrixAxes | bool | None`, or a tree of
      these values or functions. The paths of the tree are shell patterns (`*`
      also matches `/`): the first that matches the path of a leaf, or of a
      subtree that contains it, applies. `True` selects matrices; biases and
      leaves with fewer axes stay dense, as those that no pattern matches. A
      function that looks at several leaves has an attribute `among`, a function
      of `named` that returns the selector.
    named: Paths and leaves of the parameters.

  Returns:
    The function.

  Raises:
    TypeError: `where` is something else.

  Example:
    >>> where = selector_of({'*/attn': MatrixAxes(0, (1, 2)), '*/mlp': True})
    >>> where('h_0/mlp/wi/kernel', jax.ShapeDtypeStruct((4, 8), 'float32'))
    True
  """
  if callable(where):
    return _among(where, named)
  patterns = {
      pattern: _among(value, named) for pattern, value in
      _patterns(where).items()
  }

  def selector(path, leaf):
    value = _first(patterns, path)[1]
    if callable(value):
      return value(path, leaf)
    if value is True:
      return is_matrix(leaf) and path.split('/')[-1] != 'bias'
    return value or False

  return selector


def _among(where: Any, named: Sequence[tuple[str, Any]]) -> Any:
  """Returns the selector for these leaves, which may depend on all of them."""
  return where.among(named) if named and hasattr(where, 'among') else where


def _patterns(where: PyTree) -> dict[str, Any]:
  """Returns the values of a tree by their paths."""
  pairs = jax.tree_util.tree_leaves_with_path(where, is_leaf=is_axes)
  for path, value in pairs:
    if not (is_axes(value) or callable(value)):
      at = f' at {trees.path_name(path)!r}' if path else ''
      raise TypeError(
          f'where is {value!r:.80}{at}; give a function (path, leaf) -> bool '
          'or MatrixAxes, or a tree of these or of patterns of paths, e.g. '
          "{'*/mlp/*': True}."
      )
  patterns = {trees.path_name(path): value for path, value in pairs}
  # A mapping keeps its own order, because the first match applies; as a pytree
  # it is sorted.
  if isinstance(where, Mapping) and set(where) == set(patterns):
    return {pattern: where[pattern] for pattern in where}
  return patterns


def _first(patterns: Mapping[str, Any], path: str) -> tuple[str | None, Any]:
  """Returns the first pattern that matches a path, and its value."""
  for pattern, value in patterns.items():
    if not pattern or any(
        fnmatch.fnmatchcase(path, p) for p in (pattern, f'{pattern}/*')
    ):
      return pattern, value
  return None, False


def select(where: Where, params: PyTree) -> list[MatrixAxes | None]:
  """Returns the axes of every leaf of `params` that `where` selects.

  Args:
    where: Selector, or tree of patterns, see `selector_of`. `True` means that
      the last two axes are (reduction, output) and all earlier axes index
      independent layers.
    params: Parameters, or a tree of leaves with their shapes and dtypes.

  Returns:
    One entry per leaf, in the order of `jax.tree.leaves`: the axes as tuples of
    non-negative numbers, or `None` where the leaf is not sparsified. Leaves
    without entries are never sparsified.

  Raises:
    TypeError: `where` is not a selector or a tree, or a leaf of `params` is not
      an array.
    ValueError: `params` has leaves and none is selected, a pattern matches or
      selects none, or an attribute is named as the array in an `nnx.Variable`.
  """
  leaves = jax.tree_util.tree_leaves_with_path(params)
  named = [(trees.path_name(path), leaf) for path, leaf in leaves]
  for name, leaf in named:
    if not (hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')):
      raise TypeError(
          f'params has {leaf!r:.80} at {name!r}, which is not an array; pass '
          'only the arrays of the model, e.g. equinox.filter(model, '
          'equinox.is_array).'
      )
  paths = {trees.path_parts(path) for path, _ in leaves}
  for above in (path[:end] for path in paths for end in range(len(path))):
    if above in paths:
      raise ValueError(
          f"params has an attribute 'value' in {'/'.join(above)!r}, beside "
          'others, which is confused with the array in an nnx.Variable; rename '
          'the attribute.'
      )
  selector = selector_of(where, named)
  axes = [
      _normalize(selector(name, leaf), name, leaf)
      if math.prod(leaf.shape) else None
      for name, leaf in named
  ]
  # `optax.tree.map_params` passes an empty tree as a placeholder.
  if not named:
    return axes
  seen = ', '.join(f'{name} {tuple(leaf.shape)}' for name, leaf in named)
  if not any(axes):
    raise ValueError(
        f'where={getattr(where, "__name__", where)!r} selects no leaf to '
        f'sparsify; give a selector such as spdf_jax.where.per_head, '
        f'where.stacked() or where.convolutions, or patterns of paths, e.g. '
        f"{{'*/mlp/*': True}}, that selects some of: {seen}."
    )
  if not callable(where):
    _check_patterns(_patterns(where), named, axes)
  return axes


def layer_shapes(
    where: Where, params: PyTree
) -> dict[str, tuple[int, int, int]]:
  """Returns how `sparsify` reads every leaf that `where` selects.

  Args:
    where: As for `sparsify`: a selector, or a mapping of patterns.
    params: The parameters, or their shapes.

  Returns:
    `(layers, inputs, outputs)` of every sparsified leaf, by path: the number of
    its independent matrices, and their shape.

  Raises:
    TypeError: `where` is not a selector or a tree, or `params` has a leaf that
      is not an array.
    ValueError: `where` selects no leaf, or has a pattern that matches none.

  Example:
    A kernel of four heads of size 2 is one matrix of eight outputs, not eight
    matrices:

    >>> import spdf_jax as spdf
    >>> params = {'attn': {'query': jnp.ones((8, 4, 2))}}
    >>> spdf.where.layer_shapes(spdf.where.per_head, params)
    {'attn/query': (1, 8, 8)}
    >>> spdf.where.layer_shapes({'attn': True}, params)
    {'attn/query': (8, 4, 2)}
  """
  axes = select(where, params)
  shapes = jax.tree.map(
      lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params
  )
  stacks = trees.by_name(to_layers(shapes, params, axes))
  return {name: leaf.shape for name, leaf in stacks.items()}


def _check_patterns(
    patterns: Mapping[str, Any],
    named: Sequence[tuple[str, Any]],
    axes: Sequence[MatrixAxes | None],
) -> None:
  """Raises ValueError for a pattern that no leaf has, or that selects none."""
  first = [_first(patterns, name)[0] for name, _ in named]
  used = {pattern for pattern, a in zip(first, axes) if a}
  for pattern, value in patterns.items():
    selects = value and not callable(value)
    # What remains for a last '*' depends on the model.
    if pattern not in (used if selects else first) and pattern != '*':
      raise ValueError(
          f'where has the pattern {pattern!r}, which '
          f'{"selects" if selects else "matches"} none of the leaves, or only '
          'leaves that a pattern before it matches; remove it, put it first, '
          f'or let it match some of: {count_kinds(name for name, _ in named)}.'
      )


def count_kinds(names: Iterable[str]) -> str:
  """Lists paths, counting those of numbered layers together.

  Example:
    >>> count_kinds(['h_0/mlp/wi', 'h_1/mlp/wi', 'head'])
    '2 h_*/mlp/wi, head'
  """
  kinds = collections.Counter(re.sub(r'\d+', '*', name) for name in names)
  return ', '.join(
      f'{n} {kind}' if n > 1 else kind for kind, n in kinds.items()
  )

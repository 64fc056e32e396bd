# SPDX-License-Identifier: Apache-2.0
"""Selection of the sparsified leaves of a parameter tree, and of their axes."""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import fnmatch
import functools
import logging
import math
import re
from typing import Any

import jax

from spdf_jax.sparsity.axes import Axes
from spdf_jax.sparsity.axes import is_axes
from spdf_jax.sparsity.axes import is_matrix
from spdf_jax.sparsity.axes import MatrixAxes
from spdf_jax.sparsity.axes import normalize_axes
from spdf_jax.sparsity.paths import path_name
from spdf_jax.sparsity.paths import path_parts

PyTree = Any

Selector = Callable[[str, Any], Axes]
Where = Selector | PyTree

logger = logging.getLogger('spdf_jax')


def selector_of(where: Where) -> Selector:
  """Returns any `where` as a function.

  Args:
    where: A function `(path, leaf) -> MatrixAxes | bool | None`, or a tree of
      these values or functions. The paths of the tree are shell patterns (`*`
      also matches `/`): the first that matches the path of a leaf, or of a
      subtree that contains it, applies. `True` selects matrices, and leaves
      with fewer axes are not sparsified, as those that no pattern matches.

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
    return where
  patterns = _patterns(where)

  def selector(path, leaf):
    found = _first(patterns, path)[1]
    if callable(found):
      return found(path, leaf)
    return is_matrix(leaf) if found is True else found or False

  return selector


def _patterns(where: PyTree) -> dict[str, Any]:
  """Returns the values of a tree by their paths."""
  pairs = jax.tree_util.tree_leaves_with_path(where, is_leaf=is_axes)
  for path, found in pairs:
    if not (is_axes(found) or callable(found)):
      at = f' at {path_name(path)!r}' if path else ''
      raise TypeError(
          f'where is {found!r:.80}{at}; give a function (path, leaf) -> bool '
          'or MatrixAxes, or a tree of these or of patterns of paths, e.g. '
          "{'*/mlp/*': True}."
      )
  patterns = {path_name(path): found for path, found in pairs}
  # A mapping keeps its own order, because the first match applies; as a pytree
  # it is sorted.
  if isinstance(where, Mapping) and set(where) == set(patterns):
    return {pattern: where[pattern] for pattern in where}
  return patterns


def _first(patterns: Mapping[str, Any], path: str) -> tuple[str | None, Any]:
  """Returns the first pattern that matches a path, and its value."""
  for pattern, found in patterns.items():
    if not pattern or any(
        fnmatch.fnmatchcase(path, p) for p in (pattern, f'{pattern}/*')
    ):
      return pattern, found
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
    ValueError: `params` has leaves and none is selected, a pattern selects
      none, or an attribute is named as the array in an `nnx.Variable`.
  """
  selector = selector_of(where)
  leaves = jax.tree_util.tree_leaves_with_path(params)
  named = [(path_name(path), leaf) for path, leaf in leaves]
  for name, leaf in named:
    if not (hasattr(leaf, 'shape') and hasattr(leaf, 'dtype')):
      raise TypeError(
          f'params has {leaf!r:.80} at {name!r}, which is not an array; pass '
          'the arrays of the model alone, e.g. equinox.filter(model, '
          'equinox.is_array).'
      )
  paths = {path_parts(path) for path, _ in leaves}
  for above in (path[:end] for path in paths for end in range(len(path))):
    if above in paths:
      raise ValueError(
          f"params has an attribute 'value' of {'/'.join(above)!r}; rename it, "
          'because that is the name of the array in an nnx.Variable.'
      )
  axes = [
      normalize_axes(selector(name, leaf), name, leaf)
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
        f'sparsify; give a selector such as per_head, stacked() or '
        f'convolutions, or patterns of paths, that selects some of: {seen}.'
    )
  if not callable(where):
    patterns = _patterns(where)
    used = {_first(patterns, n)[0] for (n, _), a in zip(named, axes) if a}
    for pattern, found in patterns.items():
      if found and not callable(found) and pattern not in used:
        raise ValueError(
            f'where has the pattern {pattern!r}, which selects none of the '
            f'leaves, or patterns before it match them; they are: {seen}.'
        )
  return axes


def report_selection(
    where: Where, params: PyTree, axes: list[MatrixAxes | None]
) -> None:
  """Logs the sparsified leaves, and warns of matrices that stay dense.

  Warns of leaves with two axes or more for which a selector returns `None`:
  their layout or name is not recognized. Logs once per set of leaves.

  Args:
    where: As for `select`.
    params: As for `select`.
    axes: The axes that `select` returns.

  Raises:
    ValueError: such leaves have more weights than the selected ones.
  """
  selector = selector_of(where)
  chosen, passed = [], []
  for (path, leaf), a in zip(
      jax.tree_util.tree_leaves_with_path(params), axes
  ):
    name = path_name(path)
    if a is not None:
      chosen.append((name, tuple(leaf.shape)))
    elif is_matrix(leaf) and selector(name, leaf) is None:
      passed.append((name, tuple(leaf.shape)))
  _log_once(tuple(chosen), len(axes))
  if not passed:
    return
  sizes = [sum(math.prod(s) for _, s in part) for part in (chosen, passed)]
  message = (
      f'where={getattr(where, "__name__", "mapping")} leaves '
      f'{sizes[1] / sum(sizes):.1%} of the weights of matrices dense, because '
      f'it does not recognize (returns None for) {_kinds(passed)}; select '
      'them with per_head, stacked() or convolutions, or name them, also those '
      "that stay dense: where={'pattern of a path': True, MatrixAxes(…) or "
      "False, '*': hidden_matrices}"
  )
  if sizes[1] > sizes[0]:
    raise ValueError(f'{message}.')
  _warn_once(message)


@functools.cache
def _warn_once(message: str) -> None:
  logger.warning('sparsify: %s', message)


@functools.cache
def _log_once(
    chosen: tuple[tuple[str, tuple[int, ...]], ...], leaves: int
) -> None:
  logger.info(
      'sparsify: %d of %d leaves, %s weights: %s',
      len(chosen), leaves, f'{sum(math.prod(s) for _, s in chosen):,}',
      _kinds(chosen),
  )


def _kinds(named: Sequence[tuple[str, tuple[int, ...]]]) -> str:
  # Counts numbered layers together: h_0/mlp/wi and h_1/mlp/wi are h_*/mlp/wi.
  kinds = collections.Counter(re.sub(r'\d+', '*', name) for name, _ in named)
  return ', '.join(
      f'{n} {kind}' if n > 1 else kind for kind, n in kinds.items()
  )

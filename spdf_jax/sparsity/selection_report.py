# SPDX-License-Identifier: Apache-2.0
"""The report of a selection: what is sparsified, and what stays dense."""

import functools
import logging
import math
from typing import Any

from spdf_jax.sparsity import selection
from spdf_jax.sparsity import trees
from spdf_jax.sparsity.selection import MatrixAxes
from spdf_jax.sparsity.selection import Where

PyTree = Any

logger = logging.getLogger('spdf_jax')


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
  named = list(trees.by_name(params).items())
  selector = selection.selector_of(where, named)
  chosen, passed = [], []
  for (name, leaf), a in zip(named, axes):
    if a is not None:
      chosen.append((name, tuple(leaf.shape)))
    elif selection.is_matrix(leaf) and selector(name, leaf) is None:
      passed.append((name, tuple(leaf.shape)))
  _log_once(tuple(chosen), len(axes), last_layer(params, axes))
  if not passed:
    return
  sizes = [sum(math.prod(s) for _, s in part) for part in (chosen, passed)]
  kinds = selection.count_kinds(name for name, _ in passed)
  message = (
      f'where={getattr(where, "__name__", "mapping")} leaves '
      f'{sizes[1] / sum(sizes):.1%} of the weights of matrices dense, because '
      f'it does not recognize (returns None for) {kinds}; select '
      'them with spdf_jax.where.per_head, where.stacked() or '
      'where.convolutions, with several of them by where.any_of(…), or by '
      'patterns of their paths, with False for '
      "those that stay dense: where={'pattern': True, MatrixAxes(…) or False, "
      "'*': where.hidden_matrices}"
  )
  if sizes[1] > sizes[0]:
    raise ValueError(f'{message}.')
  _warn_once(message)


@functools.cache
def _warn_once(message: str) -> None:
  logger.warning('sparsify: %s', message)


def last_layer(
    params: PyTree, axes: list[MatrixAxes | None]
) -> str | None:
  """Returns the path of a selected matrix that looks like a last layer.

  Its outputs are the inputs of no other matrix. A bias beside a matrix tells
  which of its axes the outputs are.

  Args:
    params: As for `select`.
    axes: The axes that `select` returns.

  Returns:
    The path; `None` if no selected matrix, or several, look so.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {'a': jnp.ones((2, 8)), 'b': jnp.ones((8, 3))}
    >>> last_layer(params, [MatrixAxes(0, 1)] * 2)
    'b'
  """
  named = list(trees.by_name(params).items())
  biases: dict[str, set[int]] = {}
  for name, leaf in named:
    if len(leaf.shape) == 1:
      biases.setdefault(name.rpartition('/')[0], set()).add(leaf.shape[0])
  sizes = {}
  for (name, leaf), a in zip(named, axes):
    if len(leaf.shape) < 2 or a and not selection.as_tuple(a.reduction):
      continue  # A vector, or a stack of them.
    inputs, outputs = (
        math.prod(leaf.shape[axis] for axis in selection.as_tuple(part))
        for part in a[:2]
    ) if a else leaf.shape[-2:]
    bias = biases.get(name.rpartition('/')[0], set())
    if inputs in bias and outputs not in bias:
      inputs, outputs = outputs, inputs
    sizes[name] = inputs, outputs
  last = [
      name for (name, _), a in zip(named, axes)
      if a is not None and name in sizes and not any(
          inputs == sizes[name][1]
          for other, (inputs, _) in sizes.items() if other != name
      )
  ] if len(sizes) > 1 else []
  return last[0] if len(last) == 1 else None


@functools.cache
def _log_once(
    chosen: tuple[tuple[str, tuple[int, ...]], ...],
    leaves: int,
    last: str | None,
) -> None:
  note = '' if last is None else (
      f'; {last}, whose outputs no other matrix takes, looks like a last '
      f"layer: to keep it dense, set where={{'{last}': False, "
      "'*': where.hidden_matrices}"
  )
  logger.info(
      'sparsify: %d of %d leaves, %s weights: %s%s',
      len(chosen), leaves, f'{sum(math.prod(s) for _, s in chosen):,}',
      selection.count_kinds(name for name, _ in chosen), note,
  )

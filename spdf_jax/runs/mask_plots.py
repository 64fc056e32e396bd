# SPDX-License-Identifier: Apache-2.0
"""Plots of masks: the positions of kept weights in each layer."""

from collections.abc import Sequence
import re
from typing import Any

import jax
import numpy as np

from spdf_jax.runs import style
from spdf_jax.sparsity import selection
from spdf_jax.sparsity import selectors
from spdf_jax.sparsity import trees

PyTree = Any

_MOST_BLOCKS = 64
_WITH_NUMBERS, _WITH_NAMES = 24, 6  # Panels per row, by kind of their titles.


def plot_masks(
    mask: PyTree,
    params: PyTree | None = None,
    *,
    where: selection.Where = selectors.hidden_matrices,
) -> Any:
  """Plots the local fraction of kept weights in every layer.

  Each layer is a panel of at most 64 x 64 blocks of weights, inputs downwards
  and outputs to the right. The colour of a block is the fraction of kept
  weights, on one scale for all layers; the number is the sparsity of the layer.
  Layers that repeat, such as `h_0/mlp/wi` and `h_1/mlp/wi`, share a row.

  Args:
    mask: Mask that `get_mask` returns, True at kept weights.
    params: Parameters or their shapes, from which `where` derives the axes of
      stacked layers and heads. None: the last two axes of each leaf of the mask
      are inputs and outputs, earlier axes are layers.
    where: The argument `where` of `sparsify`; used only with `params`.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.
    ValueError: the mask has no leaf.

  Example:
    >>> mask = {f'h_{i}': np.eye(8, dtype=bool) for i in range(3)}
    >>> figure = plot_masks(mask)
    >>> [ax.texts[0].get_text() for ax in figure.axes[:3]]
    ['87.5%', '87.5%', '87.5%']
  """
  layers = _layers(mask, params, where)
  if not layers:
    raise ValueError(
        'mask has no leaf, so no weight is sparsified; pass what get_mask '
        'returns for an optimizer that sparsifies at least one.'
    )
  rows = _rows(list(layers))
  blocks = {name: block_density(layer) for name, layer in layers.items()}
  most = max(float(density.max()) for density in blocks.values()) or 1.0
  columns = max(len(names) for _, _, names in rows)
  # The size of panels limits the figure to about a page, unless there are many
  # rows.
  size = min(1.5, max(0.5, 12 / columns), max(0.8, 8 / len(rows)))
  figure = style.new_figure(
      max(4.5, 1.6 + size * columns), 1.0 + (size + 0.22) * len(rows)
  )
  panels = figure.subplots(len(rows), columns, squeeze=False)
  for axes, (kind, heads, names) in zip(panels, rows):
    axes[0].set_ylabel(
        kind, rotation=0, ha='right', va='center', fontsize=8
    )
    for ax in axes[len(names):]:
      ax.set_visible(False)
    for ax, head, name in zip(axes, heads, names):
      image = ax.imshow(
          blocks[name], cmap='Blues', vmin=0, vmax=most, aspect='auto',
          interpolation='nearest',
      )
      ax.set_xticks([])
      ax.set_yticks([])
      ax.spines[:].set(color='#BBBBBB', linewidth=0.6)
      ax.set_title(head, fontsize=8, pad=2)
      zeros = 1 - np.count_nonzero(layers[name]) / layers[name].size
      ax.text(
          0.5, -0.04, f'{100 * zeros:.3g}%', transform=ax.transAxes,
          ha='center', va='top', fontsize=min(8, 3 + 5 * size),
      )
  bar = figure.colorbar(
      image, ax=panels, shrink=min(1, 2.5 / figure.get_figheight()), aspect=12,
      pad=0.02,
  )
  bar.set_label('Share of weights kept in a block', fontsize=8)
  bar.ax.tick_params(labelsize=8)
  bar.outline.set_visible(False)
  figure.suptitle('Kept weights, and sparsity of each layer', fontsize=11)
  return figure


def block_density(layer: np.ndarray) -> np.ndarray:
  """Returns the fraction of kept weights in the blocks of a layer.

  Args:
    layer: Mask of the layer, bool [inputs, outputs].

  Returns:
    float64 [min(inputs, 64), min(outputs, 64)]; each weight is in exactly one
    block.

  Example:
    >>> block_density(np.eye(2, dtype=bool)).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
  """
  counts, sizes = layer, np.ones((1, 1), np.int64)
  for axis, length in enumerate(layer.shape):
    edges = np.arange(min(length, _MOST_BLOCKS)) * length // min(
        length, _MOST_BLOCKS
    )
    counts = np.add.reduceat(counts, edges, axis=axis, dtype=np.int64)
    widths = np.diff(edges, append=length)
    sizes = sizes * np.expand_dims(widths, 1 - axis)
  return counts / sizes


def _layers(
    mask: PyTree, params: PyTree | None, where: selection.Where
) -> dict[str, np.ndarray]:
  """Returns every layer's mask `[inputs, outputs]` by name."""
  if params is None:
    as_stack = lambda m: np.reshape(m, (-1, *m.shape[-2:]))
    stacks = jax.tree.map(as_stack, mask)
  else:
    axes = selection.select(where, params)
    stacks = selection.to_layers(mask, params, axes)
  return {
      trees.path_name(path) + (f'[{i}]' if len(stack) > 1 else ''): layer
      for path, stack in jax.tree_util.tree_leaves_with_path(stacks)
      for i, layer in enumerate(np.asarray(stack))
  }


def _rows(names: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
  """Returns a tuple (kind, titles, names) for each row of panels.

  Names that differ only in numbers have the same kind and share a row; if no
  two do, each panel has its name as title.
  """
  kinds: dict[str, list[str]] = {}
  for name in names:
    kinds.setdefault(re.sub(r'\d+', '*', name), []).append(name)
  if len(kinds) == len(names):
    return [
        ('', list(map(_folded, part)), part)
        for part in _parts(list(names), _WITH_NAMES)
    ]
  return [
      (kind, ['.'.join(re.findall(r'\d+', name)) for name in part], part)
      for kind, found in kinds.items()
      for part in _parts(sorted(found, key=_numbers), _WITH_NUMBERS)
  ]


def _parts(names: list[str], length: int) -> list[list[str]]:
  return [names[i:i + length] for i in range(0, len(names), length)]


def _numbers(name: str) -> tuple[int, ...]:
  return tuple(map(int, re.findall(r'\d+', name)))


def _folded(name: str) -> str:
  """Wraps a path into lines that fit above a panel."""
  lines = ['']
  for part in name.split('/'):
    if lines[-1] and len(lines[-1] + part) > 20:
      lines[-1] += '/'
      lines.append(part)
    else:
      lines[-1] += ('/' if lines[-1] else '') + part
  return '\n'.join(lines)

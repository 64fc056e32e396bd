"""Heatmaps of parameter subspaces: a panel for each pair of checkpoints."""

from collections.abc import Sequence
import textwrap
from typing import Any

import numpy as np

from experiments.papers import subspaces
from experiments.papers.subspaces import Distances
from spdf_jax.runs import style

_EVERY = 2
"""Step between numbered layers if there are many."""


def plot_distances(names: Sequence[str], pairs: Sequence[Distances]) -> Any:
  """Draws the distances of every layer and module as heatmaps.

  Each pair is a panel as in the paper, with layers, counted from 1, along x and
  modules along y. All panels have the same color scale, from 0.

  Args:
    names: Titles of the panels, one for each pair.
    pairs: Results of `cosine_distances`, at least one.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  References:
    Thangarasa et al. 2023, "SPDF", figures 3 and 4.

  Example:
    >>> figure = plot_distances(['dense'], [{(0, 'wq'): 0.5, (1, 'wq'): 0.25}])
    >>> figure.axes[0].images[0].get_array().tolist()
    [[0.5, 0.25]]
  """
  grids = [_grid(distances) for distances in pairs]
  highest = max(np.nanmax(grid) for _, grid in grids) or 1.0
  columns = max(grid.shape[1] for _, grid in grids)
  rows = max(grid.shape[0] for _, grid in grids)
  figure = style.new_figure(
      max(5.5, 2.2 + 0.32 * columns), (0.75 + 0.27 * rows) * len(pairs) + 0.3
  )
  panels = figure.subplots(len(pairs), squeeze=False)[:, 0]
  for ax, name, (modules, grid) in zip(panels, names, grids):
    image = ax.imshow(
        grid, cmap='viridis', vmin=0, vmax=highest, aspect='auto',
        interpolation='nearest',
    )
    wide = int(13 * figure.get_figwidth())  # Letters in a line of the title.
    ax.set_title(textwrap.fill(name, wide), fontsize=9, loc='left')
    ax.set_yticks(
        range(len(modules)),
        [f'$W_{{{subspaces.MODULES[m][2:]}}}$' for m in modules], fontsize=9,
    )
    every = 1 if columns <= 24 else _EVERY
    layers = range(0, grid.shape[1], every)
    ax.set_xticks(layers, [str(i + 1) for i in layers], fontsize=8)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    # The minor grid draws thin white lines between the cells.
    ax.set_xticks(np.arange(grid.shape[1] - 1) + 0.5, minor=True)
    ax.set_yticks(np.arange(grid.shape[0] - 1) + 0.5, minor=True)
    ax.grid(which='minor', color='white', linewidth=0.8)
    ax.tick_params(which='minor', length=0)
  panels[-1].set_xlabel('Layer', fontsize=9)
  bar = figure.colorbar(
      image, ax=list(panels), aspect=12 * len(pairs), pad=0.02
  )
  bar.set_label('Cosine distance', fontsize=9)
  bar.ax.tick_params(labelsize=8)
  bar.formatter.set_powerlimits((-2, 3))
  bar.ax.yaxis.get_offset_text().set_fontsize(8)
  bar.outline.set_visible(False)
  return figure


def _grid(distances: Distances) -> tuple[list[str], np.ndarray]:
  """Returns modules, and distances [modules, layers], NaN where missing."""
  present = {module for _, module in distances}
  modules = [m for m in subspaces.MODULES if m in present]
  layers = 1 + max(layer for layer, _ in distances)
  return modules, np.array([
      [distances.get((layer, m), np.nan) for layer in range(layers)]
      for m in modules
  ])

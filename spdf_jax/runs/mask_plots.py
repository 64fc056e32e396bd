# SPDX-License-Identifier: Apache-2.0
"""Plots of masks: their updates, kept weights per unit, and pictures."""

from collections.abc import Mapping
import textwrap
from typing import Any

import numpy as np

from spdf_jax.runs import markdown
from spdf_jax.runs import plots
from spdf_jax.runs import read
from spdf_jax.runs import style
from spdf_jax.runs.read import RunRecord
from spdf_jax.sparsity import trees


def plot_mask_updates(runs: Mapping[str, RunRecord]) -> Any:
  """Plots sparsity, survival and exploration over steps, a panel for each run.

  A grey line is the planned sparsity, and grey points are the measured one; a
  point of survival is the fraction of kept weights that one mask update keeps;
  exploration is the fraction of sparsified weights that were kept at any step.

  Args:
    runs: Runs by label; runs without logged mask updates are omitted.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.5, 64, 5.0, 9.0)
    >>> rows = [{'step': s, 'sparsity/exploration': 0.5} for s in (1, 4)]
    >>> figure = plot_mask_updates({'toy': RunRecord('toy', (phase,), rows)})
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['sparsity', 'explored', 'p']
  """
  runs = {label: run for label, run in runs.items() if read.is_tracked(run)}
  figure, panels = plots.create_panels(runs)
  for ax, (label, run) in zip(panels, runs.items()):
    ax.set(ylim=(0, 100), ylabel='Per cent of weights')
    ends = _draw_updates(ax, run)
    plots.mark_phases(ax, run)
    style.polish(ax)
    ax.margins(y=0)
    style.label_ends(ax, ends, gap=0.1)
    style.title_above(ax, label, [(p.start, p.end, p.name) for p in run.phases])
  return figure


def _draw_updates(
    ax: Any, run: RunRecord
) -> list[tuple[float, float, str, str]]:
  """Draws a run; returns ends, names and colours of its lines."""
  last = run.phases[-1].end
  planned = plots.draw_sparsity(ax, run, last, color=style.GREY, linewidth=1.4)
  steps, sparsities = run.series('sparsity/sparsified')
  look = {'clip_on': False, 'zorder': 3}
  ax.plot(
      steps, [100 * x for x in sparsities], '.', color=style.GREY, markersize=7,
      **look,
  )
  ends: list[tuple[float, float, str, str]] = [
      (last, planned, 'sparsity', style.GREY)
  ]
  updates = [read.mask_updates_in(run, phase) for phase in run.phases]
  for inside in filter(None, updates):
    survival = [100 * update.survival for update in inside]
    ax.plot(
        [c.step for c in inside], survival, color=style.COLORS[1],
        linewidth=0.8, marker='o', markersize=3.5, **look,
    )
    end = (inside[-1].step, survival[-1], 'survival', style.COLORS[1])
  if any(updates):
    ends.append(end)
  steps, explored = _explored(run)
  mark = '.' if len(steps) == 1 else ''
  ax.plot(
      steps, explored, color=style.COLORS[2], linewidth=1.8, marker=mark,
      clip_on=False, drawstyle='steps-post',
  )
  ends.append((steps[-1], explored[-1], 'explored', style.COLORS[2]))
  return ends


def _explored(run: RunRecord) -> tuple[list[int], list[float]]:
  """Returns the exploration as a step function, in per cent.

  It changes at mask updates only, so a value that was logged after some holds
  from the last of them on.
  """
  steps: list[int] = []
  values: list[float] = []
  before = -1
  for step, share in zip(*run.series('sparsity/exploration')):
    since = read.last_update(run, step)
    if values and 100 * share != values[-1]:
      steps.append(step if since is None or since < before else since)
      values.append(100 * share)
    steps.append(step)
    values.append(100 * share)
    before = step
  return steps, values


def plot_kept_per_unit(runs: Mapping[str, RunRecord]) -> Any:
  """Plots the kept weights of units, a panel for each run whose masks move.

  Lines are layers: their inputs (their outputs) from the one with the fewest
  kept weights to the one with the most, as multiples of the layer's mean. A
  random mask rises little around 1; a line that begins at 0 has units that are
  cut off.

  Args:
    runs: Runs by label; runs without a record of masks are omitted.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> layer = {'inputs': [0, 1, 2], 'outputs': [1, 1]}
    >>> masks = {'step': 4, 'layers': {'wi': layer}}
    >>> run = RunRecord('toy', (), (), masks=masks)
    >>> figure = plot_kept_per_unit({'toy': run})
    >>> figure.axes[0].get_title(loc='left'), len(figure.axes[0].lines)
    ('toy, step 4', 3)
  """
  runs = {label: run for label, run in runs.items() if run.masks}
  figure = style.new_figure(7, 0.6 + 2.6 * max(len(runs), 1))
  panels = figure.subplots(
      max(len(runs), 1), sharex=True, sharey=True, squeeze=False
  )[:, 0]
  panels[-1].set(xlim=(0, 100), xlabel='Per cent of the units of a layer')
  for ax, (label, run) in zip(panels, runs.items()):
    ends = []
    for kind, color in zip(('inputs', 'outputs'), style.COLORS):
      top = 0.0
      for layer in run.masks['layers'].values():
        counts = np.asarray(layer[kind], float)
        counts /= max(counts.mean(), 1e-9)
        ax.plot(
            np.linspace(0, 100, len(counts)), counts, color=color,
            linewidth=0.9, alpha=0.6,
        )
        top = max(top, counts[-1])
      ends.append((100, top, kind, color))
    ax.axhline(1, color=style.GREY, linewidth=0.8, zorder=0)
    ax.set_ylim(bottom=0)
    ax.set_ylabel('Kept weights / mean')
    style.polish(ax)
    style.label_ends(ax, ends, gap=0.1)
    ax.set_title(
        f'{label}, step {run.masks["step"]:,}', loc='left', fontsize=9,
        fontweight='bold',
    )
  return figure


def plot_pictures(runs: Mapping[str, RunRecord]) -> Any:
  """Draws the mask that varies most, a panel for each run whose masks move.

  Args:
    runs: Runs by label; runs without a record of masks are omitted.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ValueError: no run has a record of masks.
    ImportError: matplotlib is not installed.

  Example:
    >>> picture = {'layer': 'wi', 'densities': [[0.0, 0.5]]}
    >>> run = RunRecord('toy', (), (), masks={'picture': picture})
    >>> plot_pictures({'toy': run}).axes[0].get_title()
    'toy, wi: 75% zeros'
  """
  pictures = {
      label: run.masks['picture'] for label, run in runs.items() if run.masks
  }
  return plot_mask({
      f'{label}, {picture["layer"]}': np.asarray(picture['densities'])
      for label, picture in pictures.items()
  })


def plot_mask(mask: Any, *, most: int = 16) -> Any:
  """Draws which weights a mask keeps, a panel for each matrix.

  Rows of a panel are all axes but the last, columns the last axis. Kept weights
  are dark; where pixels are larger than weights, the shade is their density.

  Args:
    mask: Tree of boolean arrays, `None` for leaves that are not sparsified, as
      `spdf.get_mask` returns it, or a part of it; or of densities.
    most: Largest number of matrices to draw, the first ones.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ValueError: no leaf of the mask is sparsified.
    ImportError: matplotlib is not installed.

  Example:
    >>> figure = plot_mask({'a': np.eye(4, dtype=bool), 'b': None})
    >>> [ax.get_title() for ax in figure.axes]
    ['a: 75% zeros']
  """
  leaves = trees.by_name(mask)
  if not leaves:
    raise ValueError(
        'mask has no sparsified leaf; give that of `spdf.get_mask(opt_state)`.'
    )
  shown = dict(list(leaves.items())[:most])
  columns = min(len(shown), 4)
  rows = -(-len(shown) // columns)
  figure = style.new_figure(2.2 * columns, 0.4 + 2.2 * rows)
  panels = figure.subplots(rows, columns, squeeze=False).ravel()
  for ax, (name, kept) in zip(panels, shown.items()):
    kept = np.asarray(kept)
    ax.imshow(
        kept.reshape(-1, kept.shape[-1]), cmap='Blues', vmin=0, vmax=1,
        aspect='auto',
    )
    title = f'{name}: {markdown.percent(1 - kept.mean())} zeros'
    ax.set_title(textwrap.fill(title, 30), fontsize=8)
    ax.set(xticks=[], yticks=[])
  for ax in panels[len(shown):]:
    ax.set_axis_off()
  if len(shown) < len(leaves):
    figure.suptitle(f'The first {len(shown)} of {len(leaves)} matrices')
  return figure

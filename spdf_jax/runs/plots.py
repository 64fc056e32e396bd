# SPDX-License-Identifier: Apache-2.0
"""Plots of finished runs: losses, and sparsity of layers."""

from collections.abc import Mapping
import re
import textwrap
from typing import Any

import numpy as np

from spdf_jax.runs.curves import flops_at
from spdf_jax.runs.curves import pretraining_curve
from spdf_jax.runs.curves import pretraining_phases
from spdf_jax.runs.mask_updates import STATISTICS
from spdf_jax.runs.plot_style import COLORS
from spdf_jax.runs.plot_style import GREY
from spdf_jax.runs.plot_style import label_ends
from spdf_jax.runs.plot_style import label_points
from spdf_jax.runs.plot_style import log_ticks
from spdf_jax.runs.plot_style import new_figure
from spdf_jax.runs.plot_style import PALE
from spdf_jax.runs.plot_style import polish
from spdf_jax.runs.plot_style import style_of
from spdf_jax.runs.step_axes import create_panels
from spdf_jax.runs.step_axes import LOSS
from spdf_jax.runs.step_axes import mark_phases
from spdf_jax.runs.step_axes import title_above
from spdf_jax.runs.summaries import format_sparsity
from spdf_jax.runs.workdirs import Run

_LOSSES = {
    'train/loss': ('training', PALE),
    'validation/loss': ('validation', COLORS[0]),
    'target/loss': ('target', COLORS[1]),
}
_TOTALS = {
    'sparsity/sparsified': 'all sparsified',
    'sparsity/all': 'all parameters',
}


def _natural(name: str) -> list[Any]:
  """Returns a sort key that puts block_10 after block_9."""
  parts = re.split(r'(\d+)', name)
  return [int(x) if i % 2 else x for i, x in enumerate(parts)]


def plot_loss_over_flops(runs: Mapping[str, Run]) -> Any:
  """Plots pre-training validation loss over FLOPs, all runs on one axis.

  A ring marks the boundary of two phases of a run; it is labelled with the name
  of the first phase if the run has only two.

  Args:
    runs: Runs by label.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.runs.workdirs import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': s, 'validation/loss': 4.0 / s} for s in (1, 4)]
    >>> figure = plot_loss_over_flops({'toy': Run('toy', (phase,), rows)})
    >>> figure.axes[0].get_xlabel()
    'Training FLOPs'
  """
  figure = new_figure(7, 4.2)
  ax = figure.subplots()
  ends, rings = [], []
  for index, (label, run) in enumerate(runs.items()):
    style = style_of(index)
    color = style['color']
    flops, losses = pretraining_curve(run)
    if not len(flops):
      continue
    size = 3.5 if len(flops) > 1 else 6
    ax.plot(
        flops, losses, linewidth=1.8, markersize=size, label=label, **style
    )
    ends.append((flops[-1], losses[-1], label, color))
    passed = pretraining_phases(run)[:-1]
    for phase in passed:
      spent = flops_at(run, phase.end)
      if not flops[0] <= spent <= flops[-1]:
        continue
      loss = np.interp(np.log(spent), np.log(flops), losses)
      ax.plot(spent, loss, 'o', markersize=9, mfc='white', mec=color, mew=1.8)
      if len(passed) == 1:  # Many names, e.g. of rounds, would overlap.
        rings.append((spent, loss, f'end of {phase.name}', color))
  ax.set(
      xlabel='Training FLOPs',
      ylabel='Validation loss (nats per token)',
      title='Pre-training: validation loss over training FLOPs',
      xscale='log',
  )
  polish(ax)
  ax.set(xlim=ax.get_xlim(), ylim=ax.get_ylim())
  log_ticks(ax)
  label_ends(ax, ends, gap=0.055)
  label_points(ax, rings)
  return figure


def plot_loss_over_steps(runs: Mapping[str, Run]) -> Any:
  """Plots every loss over steps, a panel for each run.

  Vertical lines mark phases, and rounds of pruning within a phase.

  Args:
    runs: Runs by label.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.runs.workdirs import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': s, 'train/loss': 4.0 / s} for s in (1, 4)]
    >>> figure = plot_loss_over_steps({'toy': Run('toy', (phase,), rows)})
    >>> figure.axes[0].get_title(loc='left')
    'toy'
  """
  figure, panels = create_panels(runs, sharey=True)
  ends: list[list[tuple[float, float, str, str]]] = []
  for ax, run in zip(panels, runs.values()):
    ends.append([])
    for key, (name, color) in _LOSSES.items():
      steps, losses = run.series(key)
      if not steps:
        continue
      # Without clipping, as the last marker is at the edge of the axes.
      style = {'linewidth': 1.8, 'marker': '.', 'clip_on': False}
      if key == 'train/loss':
        style = {'linewidth': 1.0}
      ax.plot(steps, losses, color=color, label=name, **style)
      ends[-1].append((steps[-1], losses[-1], name, color))
    mark_phases(ax, run)
    ax.set_ylabel(LOSS)
    polish(ax)
  panels[-1].set_ylim(panels[-1].get_ylim())
  # Labels come last, as they need the final limits, which all panels share.
  for ax, (label, run), run_ends in zip(panels, runs.items(), ends):
    label_ends(ax, run_ends, gap=0.1)
    title_above(ax, label, [
        (p.start, p.end, f'{p.name}\n{format_sparsity(p)} zeros')
        for p in run.phases
    ])
  return figure


def plot_layer_sparsity(runs: Mapping[str, Run]) -> Any:
  """Plots the measured sparsity of each layer at the end of each phase.

  Args:
    runs: Runs by label.

  Returns:
    A `matplotlib.figure.Figure` with a panel for each run, a row for each layer
    and a column for each phase; colour and number of a cell are the sparsity.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.runs.workdirs import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0)
    >>> rows = [{'step': 4, 'sparsity/mlp': 0.75, 'sparsity/all': 0.5}]
    >>> figure = plot_layer_sparsity({'toy': Run('toy', (phase,), rows)})
    >>> [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    ['mlp', 'all parameters']
  """
  logged = {k for run in runs.values() for row in run.rows for k in row}
  logged = {k for k in logged if k.startswith('sparsity/')}
  layers = sorted(logged - {*_TOTALS, *STATISTICS}, key=_natural)
  keys = layers + [k for k in _TOTALS if k in logged]
  names = [_TOTALS.get(k, k.removeprefix('sparsity/')) for k in keys]
  columns = [len(run.phases) for run in runs.values()]
  figure = new_figure(2.6 + 0.95 * sum(columns), 1.2 + 0.24 * len(keys))
  panels = figure.subplots(
      1,
      max(len(runs), 1),
      squeeze=False,
      sharey=True,
      width_ratios=columns or None,
  )[0]
  for ax, (label, run) in zip(panels, runs.items()):
    found = [[run.at_end(phase, k) for phase in run.phases] for k in keys]
    sparsities = np.array(
        [[np.nan if f is None else f[1] for f in row] for row in found]
    ).reshape(len(keys), len(run.phases))
    if not keys:
      ax.set_axis_off()
      continue
    ax.imshow(sparsities, cmap='Blues', vmin=0, vmax=1, aspect='auto')
    for (row, column), sparsity in np.ndenumerate(sparsities):
      text = '–' if np.isnan(sparsity) else f'{100 * sparsity:.3g}%'
      color = 'white' if sparsity > 0.6 else 'black'
      ax.text(
          column, row, text, ha='center', va='center', fontsize=8, color=color
      )
    wide = 11 * len(run.phases)  # Number of letters that fit above a panel.
    ax.set_title(textwrap.fill(label, wide), fontweight='bold', fontsize=9)
    ax.set_xticks(range(len(run.phases)), [p.name for p in run.phases])
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    ax.axhline(len(layers) - 0.5, color=GREY, linewidth=1.2)
  panels[0].set_yticks(range(len(names)), names)
  title = 'Sparsity of each layer at the end of each phase'
  if not keys:
    title = 'No sparsities were logged'
  figure.suptitle(title, fontsize=11)
  return figure

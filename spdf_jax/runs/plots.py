# SPDX-License-Identifier: Apache-2.0
"""Plots of runs: losses, and sparsity of layers."""

from collections.abc import Mapping
import re
import textwrap
from typing import Any

import numpy as np

from spdf_jax.runs import curves
from spdf_jax.runs import read
from spdf_jax.runs import style
from spdf_jax.runs.read import RunRecord

LOSS = 'Loss (nats per token)'
"""Label of an axis of losses."""

_LOSSES = {
    'train/loss': ('training', style.PALE),
    'validation/loss': ('validation', style.COLORS[0]),
    'target/loss': ('target', style.COLORS[1]),
}
_FEW = 12  # Maximum number of spans of a phase for which they are marked.
_TOTALS = {
    'sparsity/sparsified': 'all sparsified',
    'sparsity/all': 'all parameters',
}


def _natural(name: str) -> list[Any]:
  """Returns a sort key that puts block_10 after block_9."""
  parts = re.split(r'(\d+)', name)
  return [int(x) if i % 2 else x for i, x in enumerate(parts)]


def create_panels(
    runs: Mapping[str, RunRecord], *, sharey: bool = False
) -> tuple[Any, Any]:
  """Creates a figure with a panel over steps for each run.

  Args:
    runs: Runs by label.
    sharey: Whether the panels share their limits.

  Returns:
    A `matplotlib.figure.Figure` and its axes, at least one; the x axis of all
    extends to the last step of the longest run.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> figure, panels = create_panels({})
    >>> len(panels), panels[0].get_xlabel()
    (1, 'Step')
  """
  count = max(len(runs), 1)
  figure = style.new_figure(7, 0.6 + 2.6 * count)
  panels = figure.subplots(
      count, sharex=True, sharey=sharey, squeeze=False
  )[:, 0]
  last = max((run.phases[-1].end for run in runs.values()), default=1)
  panels[-1].set(xlim=(0, last), xlabel='Step')
  return figure, panels


def mark_phases(ax: Any, run: RunRecord) -> None:
  """Draws vertical lines where phases begin and where the sparsity changes.

  Changes within a phase are omitted if there are many.

  Args:
    ax: Axes over steps.
    run: RunRecord to draw.
  """
  for phase in run.phases:
    if phase.start:
      ax.axvline(phase.start, color=style.GREY, linewidth=1.0, linestyle='--')
    if len(phase.parts) <= _FEW:
      for part in phase.parts[1:]:
        ax.axvline(part.start, color=style.GREY, linewidth=0.8, linestyle=':')


def points_of(run: RunRecord, key: str, end: int) -> list[tuple[int, float]]:
  """Returns the steps and values of a metric after step 0, up to an end.

  Example:
    >>> rows = [{'step': s, 'train/loss': 4.0 / s} for s in (1, 2, 4)]
    >>> points_of(RunRecord('toy', (), rows), 'train/loss', 2)
    [(1, 4.0), (2, 2.0)]
  """
  return [(s, x) for s, x in zip(*run.series(key)) if 0 < s <= end]


def draw_sparsity(ax: Any, run: RunRecord, end: int, **look: Any) -> float:
  """Draws the planned sparsity of a run, in per cent, as a step function.

  Args:
    ax: Axes over steps.
    run: RunRecord to draw.
    end: Last step to draw.
    **look: Keyword arguments of `Axes.plot`.

  Returns:
    The last value, in per cent.
  """
  steps, sparsities = curves.sparsities_of(run)
  inside = [(s, 100 * x) for s, x in zip(steps, sparsities) if s < end]
  last = inside[-1][1]
  ax.plot(*zip(*inside, (end, last)), drawstyle='steps-post', **look)
  return last


def plot_loss_over_flops(runs: Mapping[str, RunRecord]) -> Any:
  """Plots pre-training validation loss over FLOPs, all runs on one axis.

  A ring marks the end of a phase after which the sparsity differs. Only that of
  the last run with exactly two phases is labelled.

  Args:
    runs: Runs by label.

  Returns:
    A `matplotlib.figure.Figure`; its lower panel has the planned sparsities.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': s, 'validation/loss': 4.0 / s} for s in (1, 4)]
    >>> figure = plot_loss_over_flops({'toy': RunRecord('toy', (phase,), rows)})
    >>> figure.axes[1].get_xlabel()
    'Training FLOPs'
  """
  return _plot_loss_over(runs, 'FLOPs', curves.flops_at)


def plot_loss_over_tokens(runs: Mapping[str, RunRecord]) -> Any:
  """Plots pre-training validation loss over tokens, all runs on one axis.

  Args:
    runs: Runs by label.

  Returns:
    A `matplotlib.figure.Figure` like that of `plot_loss_over_flops`.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> plot_loss_over_tokens({}).axes[1].get_xlabel()
    'Training tokens'
  """
  return _plot_loss_over(runs, 'tokens', curves.tokens_at)


def _plot_loss_over(
    runs: Mapping[str, RunRecord], what: str, spent_at: curves.Spent
) -> Any:
  figure = style.new_figure(7, 4.8)
  ax, lower = figure.subplots(2, sharex=True, height_ratios=(5, 1))
  ends: list[Any] = []
  rings: list[Any] = []
  for index, (label, run) in enumerate(runs.items()):
    look = style.line_style(index)
    color = look['color']
    amounts, losses = curves.pretraining_curve(run, spent=spent_at)
    if not len(amounts):
      continue
    size = 3.5 if len(amounts) > 1 else 6
    ax.plot(
        amounts, losses, linewidth=1.8, markersize=size, label=label, **look
    )
    ends.append((amounts[-1], losses[-1], label, color))
    phases = read.pretraining_phases(run)
    _draw_sparsities(lower, run, amounts, spent_at, color=color)
    for phase, following in zip(phases, phases[1:]):
      spent = spent_at(run, phase.end)
      changes = phase.parts[-1].sparsity != following.parts[0].sparsity
      if not changes or not amounts[0] <= spent <= amounts[-1]:
        continue
      loss = np.interp(np.log(spent), np.log(amounts), losses)
      ax.plot(spent, loss, 'o', markersize=9, mfc='white', mec=color, mew=1.8)
      if len(phases) == 2:  # Names of rounds or of all runs would overlap.
        rings = [(spent, loss, f'end of {phase.name}', color)]
  ax.set(
      ylabel='Validation loss (nats per token)',
      title=f'Pre-training: validation loss over training {what}',
      xscale='log',
  )
  lower.set(xlabel=f'Training {what}', ylabel='Zeros (%)', yticks=(0, 50, 100))
  style.polish(ax)
  style.polish(lower)
  lower.set_ylim(-8, 108)
  ax.set(xlim=ax.get_xlim(), ylim=ax.get_ylim())
  style.log_ticks(lower)
  style.label_ends(ax, ends, gap=0.055)
  style.label_points(ax, rings)
  return figure


def _draw_sparsities(
    ax: Any, run: RunRecord, amounts: np.ndarray, spent_at: curves.Spent,
    **look: Any,
) -> None:
  """Draws the planned sparsity, in per cent, between two ends of `amounts`."""
  steps, sparsities = curves.sparsities_of(run)
  spent = np.array([spent_at(run, step) for step in steps])
  inside = (amounts[0] < spent) & (spent < amounts[-1])
  at = lambda amount: sparsities[np.searchsorted(spent, amount, 'right') - 1]
  places = [amounts[0], *spent[inside], amounts[-1]]
  values = [100 * at(place) for place in places[:-1]]
  ax.plot(
      places, [*values, values[-1]], drawstyle='steps-post', linewidth=1.8,
      **look,
  )


def plot_loss_over_steps(runs: Mapping[str, RunRecord]) -> Any:
  """Plots the losses of training, validation and a task, a panel per run.

  Dashed vertical lines mark the beginnings of phases, and dotted ones changes
  of the sparsity within a phase, unless there are many.

  Args:
    runs: Runs by label.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': s, 'train/loss': 4.0 / s} for s in (1, 4)]
    >>> figure = plot_loss_over_steps({'toy': RunRecord('toy', (phase,), rows)})
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
      look = {'linewidth': 1.8, 'marker': '.', 'clip_on': False}
      if key == 'train/loss':
        look = {'linewidth': 1.0}
      ax.plot(steps, losses, color=color, label=name, **look)
      ends[-1].append((steps[-1], losses[-1], name, color))
    mark_phases(ax, run)
    ax.set_ylabel(LOSS)
    style.polish(ax)
  panels[-1].set_ylim(panels[-1].get_ylim())
  # Labels come last, as they need the final limits, which all panels share.
  for ax, (label, run), run_ends in zip(panels, runs.items(), ends):
    style.label_ends(ax, run_ends, gap=0.1)
    style.title_above(ax, label, [
        (p.start, p.end, f'{p.name}\n{read.format_sparsity(p)} zeros')
        for p in run.phases
    ])
  return figure


def plot_layer_sparsity(runs: Mapping[str, RunRecord]) -> Any:
  """Plots the measured sparsity of each layer at the end of each phase.

  Args:
    runs: Runs by label.

  Returns:
    A `matplotlib.figure.Figure` with a panel for each run, a row for each layer
    and a column for each phase; colour and number of a cell are the sparsity.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0)
    >>> rows = [{'step': 4, 'sparsity/mlp': 0.75, 'sparsity/all': 0.5}]
    >>> figure = plot_layer_sparsity({'toy': RunRecord('toy', (phase,), rows)})
    >>> [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    ['mlp', 'all parameters']
  """
  logged = {k for run in runs.values() for row in run.rows for k in row}
  logged = {k for k in logged if k.startswith('sparsity/')}
  layers = sorted(logged - {*_TOTALS, *read.STATISTICS}, key=_natural)
  keys = layers + [k for k in _TOTALS if k in logged]
  names = [_TOTALS.get(k, k.removeprefix('sparsity/')) for k in keys]
  columns = [len(run.phases) for run in runs.values()]
  figure = style.new_figure(2.6 + 0.95 * sum(columns), 1.2 + 0.24 * len(keys))
  panels = figure.subplots(
      1,
      max(len(runs), 1),
      squeeze=False,
      sharey=True,
      width_ratios=columns or None,
  )[0]
  for ax, (label, run) in zip(panels, runs.items()):
    values = [[run.at_end(phase, k) for phase in run.phases] for k in keys]
    sparsities = np.array(
        [[np.nan if v is None else v[1] for v in row] for row in values]
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
    ax.axhline(len(layers) - 0.5, color=style.GREY, linewidth=1.2)
  panels[0].set_yticks(range(len(names)), names)
  title = 'Sparsity of each layer at the end of each phase'
  if not keys:
    title = 'No sparsities were logged'
  figure.suptitle(title, fontsize=11)
  return figure

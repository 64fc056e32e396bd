# SPDX-License-Identifier: Apache-2.0
"""Plots of runs: losses, sparsity of layers, masks and their updates."""

from collections.abc import Mapping
import re
import textwrap
from typing import Any

import numpy as np

from spdf_jax.runs import curves
from spdf_jax.runs import markdown
from spdf_jax.runs import read
from spdf_jax.runs import style
from spdf_jax.runs.read import RunRecord
from spdf_jax.sparsity import trees

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

  A ring marks the boundary of two phases of a run. Only that of the last run
  with exactly two phases is labelled.

  Args:
    runs: Runs by label.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': s, 'validation/loss': 4.0 / s} for s in (1, 4)]
    >>> figure = plot_loss_over_flops({'toy': RunRecord('toy', (phase,), rows)})
    >>> figure.axes[0].get_xlabel()
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
    >>> plot_loss_over_tokens({}).axes[0].get_xlabel()
    'Training tokens'
  """
  return _plot_loss_over(runs, 'tokens', curves.tokens_at)


def _plot_loss_over(
    runs: Mapping[str, RunRecord], what: str, spent_at: curves.Spent
) -> Any:
  figure = style.new_figure(7, 4.2)
  ax = figure.subplots()
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
    passed = read.pretraining_phases(run)[:-1]
    for phase in passed:
      spent = spent_at(run, phase.end)
      if not amounts[0] <= spent <= amounts[-1]:
        continue
      loss = np.interp(np.log(spent), np.log(amounts), losses)
      ax.plot(spent, loss, 'o', markersize=9, mfc='white', mec=color, mew=1.8)
      if len(passed) == 1:  # Names of rounds or of all runs would overlap.
        rings = [(spent, loss, f'end of {phase.name}', color)]
  ax.set(
      xlabel=f'Training {what}',
      ylabel='Validation loss (nats per token)',
      title=f'Pre-training: validation loss over training {what}',
      xscale='log',
  )
  style.polish(ax)
  ax.set(xlim=ax.get_xlim(), ylim=ax.get_ylim())
  style.log_ticks(ax)
  style.label_ends(ax, ends, gap=0.055)
  style.label_points(ax, rings)
  return figure


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
  figure, panels = create_panels(runs)
  for ax, (label, run) in zip(panels, runs.items()):
    ax.set(ylim=(0, 100), ylabel='Per cent of weights')
    ends = _draw_updates(ax, run)
    mark_phases(ax, run)
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
  planned = draw_sparsity(ax, run, last, color=style.GREY, linewidth=1.4)
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


def plot_mask(mask: Any, *, most: int = 16) -> Any:
  """Draws which weights a mask keeps, a panel for each matrix.

  Rows of a panel are all axes but the last, columns the last axis. Kept weights
  are dark; where pixels are larger than weights, the shade is their density.

  Args:
    mask: Tree of boolean arrays, `None` for leaves that are not sparsified, as
      `spdf.get_mask` returns it, or a part of it.
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

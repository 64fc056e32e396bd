"""Plots of finished runs, in one style."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spdf_jax.analysis.curves import pretraining_curve, pretraining_phases
from spdf_jax.analysis.curves import flops_at
from spdf_jax.analysis.workdirs import Run
from spdf_jax.extras import require

# Okabe and Ito's palette, told apart with any kind of colour vision; the
# yellow is left out, too pale for a line on white.
COLORS = (
    '#0072B2', '#D55E00', '#009E73', '#CC79A7', '#E69F00', '#56B4E9', '#000000',
)
_GREY = '#666666'
_LINES = {
    'train/loss': ('training', '#9A9A9A'),
    'validation/loss': ('validation', COLORS[0]),
    'target/loss': ('target', COLORS[1]),
}


def _figure(width: float, height: float) -> Any:
  """Makes a figure of its own, known to no global state."""
  module = require('matplotlib.figure', 'viz')
  return module.Figure(figsize=(width, height), dpi=150, layout='constrained')


def _polish(ax: Any) -> None:
  """Leaves an axis with what is read: two lines and a light grid."""
  ax.spines[['top', 'right']].set_visible(False)
  ax.grid(True, which='major', color='#E4E4E4', linewidth=0.8)
  ax.set_axisbelow(True)


def _tick_plainly(axis: Any) -> None:
  """Writes a logarithmic axis's ticks as 2, 3, 4 instead of powers of ten."""
  ticker = require('matplotlib.ticker', 'viz')
  axis.set_major_locator(
      ticker.LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0), numticks=12)
  )
  axis.set_major_formatter(ticker.FormatStrFormatter('%g'))
  axis.set_minor_formatter(ticker.NullFormatter())


def _label_ends(
    ax: Any, labels: Sequence[tuple[float, str, str]], gap: float
) -> None:
  """Writes each line's name right of the axes at its end, none on another.

  Args:
    ax: Axes whose limits are final.
    labels: (y of the line's end, text, colour).
    gap: Least distance between two labels, as a fraction of the axes.
  """
  to_axes = ax.transAxes.inverted()
  spots = sorted(
      (to_axes.transform(ax.transData.transform((1, y)))[1], text, color)
      for y, text, color in labels
  )
  places: list[float] = []
  for y, *_ in spots:
    places.append(max(y, places[-1] + gap) if places else y)
  # Pushed up from below; settle back by half, and stay inside the axes.
  shift = sum(place - spot[0] for place, spot in zip(places, spots))
  shift = max(shift / max(len(places), 1), places[-1] - 1 if places else 0)
  for place, (_, text, color) in zip(places, spots):
    ax.annotate(
        text,
        (1.015, place - shift),
        xycoords='axes fraction',
        color=color,
        va='center',
        fontsize=9,
        annotation_clip=False,
    )


def plot_loss_over_flops(runs: Mapping[str, Run]) -> Any:
  """Plots pre-training validation loss over FLOPs, all runs on one axis.

  A ring marks where a run goes from one phase to the next.

  Args:
    runs: Runs by label.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.analysis.workdirs import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': s, 'validation/loss': 4.0 / s} for s in (1, 4)]
    >>> figure = plot_loss_over_flops({'toy': Run('toy', (phase,), rows)})
    >>> figure.axes[0].get_xlabel()
    'Training FLOPs'
  """
  figure = _figure(7, 4.2)
  ax = figure.subplots()
  ends = []
  for index, (label, run) in enumerate(runs.items()):
    color = COLORS[index % len(COLORS)]
    flops, losses = pretraining_curve(run)
    if not len(flops):
      continue
    ax.plot(flops, losses, color=color, linewidth=1.8, marker='.', label=label)
    for phase in pretraining_phases(run)[:-1]:
      spent = flops_at(run, phase.end)
      if flops[0] <= spent <= flops[-1]:
        loss = np.exp(np.interp(np.log(spent), np.log(flops), np.log(losses)))
        ax.plot(spent, loss, 'o', markersize=9, mfc='white', mec=color, mew=1.8)
        ax.annotate(
            f'end of {phase.name}',
            (spent, loss),
            (0, -13),
            textcoords='offset points',
            ha='right',
            fontsize=8,
            color=color,
        )
    ends.append((losses[-1], label, color))
  ax.set(
      xlabel='Training FLOPs',
      ylabel='Validation loss (nats per token)',
      title='Pre-training: validation loss over training FLOPs',
      xscale='log',
      yscale='log',
  )
  _tick_plainly(ax.yaxis)
  _polish(ax)
  ax.margins(y=0.08)
  ax.autoscale_view()
  _label_ends(ax, ends, gap=0.055)
  return figure


def plot_loss_over_steps(runs: Mapping[str, Run]) -> Any:
  """Plots every loss over steps, a panel for each run, phases marked.

  Args:
    runs: Runs by label.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.analysis.workdirs import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': s, 'train/loss': 4.0 / s} for s in (1, 4)]
    >>> figure = plot_loss_over_steps({'toy': Run('toy', (phase,), rows)})
    >>> figure.axes[0].get_title(loc='left')
    'toy'
  """
  figure = _figure(7, 0.6 + 2.6 * max(len(runs), 1))
  panels = figure.subplots(
      max(len(runs), 1), sharex=True, sharey=True, squeeze=False
  )[:, 0]
  drawn = []
  for ax, (label, run) in zip(panels, runs.items()):
    ends = []
    for key, (name, color) in _LINES.items():
      steps, losses = run.series(key)
      if not steps:
        continue
      thin = key == 'train/loss'
      ax.plot(
          steps,
          losses,
          color=color,
          linewidth=1.0 if thin else 1.8,
          marker='' if thin else '.',
          label=name,
      )
      ends.append((losses[-1], name, color if not thin else _GREY))
    for phase in run.phases[1:]:
      ax.axvline(phase.start, color=_GREY, linewidth=1.0, linestyle='--')
    drawn.append((ax, run, ends))
    ax.set(ylabel='Loss (nats per token)', yscale='log')
    ax.set_title(label, loc='left', fontweight='bold', pad=22)
    _tick_plainly(ax.yaxis)
    _polish(ax)
    ax.margins(y=0.08)
  panels[-1].set_xlabel('Step')
  if runs:
    panels[-1].set_xlim(0, max(run.phases[-1].end for run in runs.values()))
  for ax, run, ends in drawn:
    ax.autoscale_view()
    _label_ends(ax, ends, gap=0.1)
    for phase in run.phases:
      ax.annotate(
          f'{phase.name}\n{phase.sparsity:.0%} sparse'
          if phase.sparsity
          else f'{phase.name}\ndense',
          ((phase.start + phase.end) / 2, 1.01),
          xycoords=('data', 'axes fraction'),
          ha='center',
          va='bottom',
          fontsize=8,
          color=_GREY,
      )
  return figure


def plot_layer_sparsity(runs: Mapping[str, Run]) -> Any:
  """Plots the sparsity found in each layer at the end of each phase.

  Args:
    runs: Runs by label.

  Returns:
    A `matplotlib.figure.Figure`: for each run with logged sparsities a panel
    with a row for each layer and a column for each phase; a cell's colour
    and number are the sparsity.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.analysis.workdirs import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0)
    >>> rows = [{'step': 4, 'sparsity/mlp': 0.75, 'sparsity/all': 0.5}]
    >>> figure = plot_layer_sparsity({'toy': Run('toy', (phase,), rows)})
    >>> [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    ['mlp', 'all parameters']
  """
  totals = {
      'sparsity/sparsified': 'all sparsified', 'sparsity/all': 'all parameters'
  }
  logged = {k for run in runs.values() for row in run.rows for k in row}
  keys = sorted(k for k in logged if k.startswith('sparsity/'))
  keys = [k for k in keys if k not in totals] + [k for k in totals if k in keys]
  names = [totals.get(k, k.removeprefix('sparsity/')) for k in keys]
  columns = [len(run.phases) for run in runs.values()]
  figure = _figure(2.6 + 0.95 * sum(columns), 1.7 + 0.24 * len(keys))
  panels = figure.subplots(
      1,
      max(len(runs), 1),
      squeeze=False,
      sharey=True,
      width_ratios=columns or None,
  )[0]
  image = None
  for ax, (label, run) in zip(panels, runs.items()):
    found = [[run.at_end(phase, k) for phase in run.phases] for k in keys]
    levels = np.array(
        [[np.nan if f is None else f[1] for f in row] for row in found]
    ).reshape(len(keys), len(run.phases))
    image = ax.imshow(levels, cmap='Blues', vmin=0, vmax=1, aspect='auto')
    for (row, column), level in np.ndenumerate(levels):
      text = '–' if np.isnan(level) else f'{100 * level:.3g}%'
      color = 'white' if level > 0.6 else 'black'
      ax.text(
          column, row, text, ha='center', va='center', fontsize=8, color=color
      )
    ax.set_title(label, fontweight='bold', fontsize=10)
    ax.set_xticks(range(len(run.phases)), [p.name for p in run.phases])
    ax.tick_params(length=0, labelsize=8)
    ax.set_xlabel('At the end of phase', fontsize=9)
    ax.spines[:].set_visible(False)
    if len(names) > 1 and keys[-1] in totals:
      first = next(i for i, k in enumerate(keys) if k in totals)
      ax.axhline(first - 0.5, color=_GREY, linewidth=1.2)
  panels[0].set_yticks(range(len(names)), names)
  if image is not None:
    bar = figure.colorbar(image, ax=panels, shrink=0.8, pad=0.02)
    bar.set_label('Sparsity (fraction of zeros)', fontsize=9)
    bar.ax.tick_params(labelsize=8)
  return figure

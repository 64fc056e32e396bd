# SPDX-License-Identifier: Apache-2.0
"""Plots of training over steps: pruning rounds, algorithms and sparsity."""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any, NamedTuple

from spdf_jax.runs import markdown
from spdf_jax.runs import plots
from spdf_jax.runs import read
from spdf_jax.runs import style
from spdf_jax.runs.read import PhaseRecord
from spdf_jax.runs.read import RunRecord

_NARROW = 0.07  # Minimum width of a number, as a fraction of the axes.


def plot_sawtooth(
    pruned: Mapping[str, RunRecord], controls: Mapping[str, RunRecord]
) -> Any:
  """Plots loss and sparsity of iterative pruning over steps.

  Each round of pruning raises the loss, and training lowers it again. The
  dashed line is the loss of the dense model before pruning.

  Args:
    pruned: Runs of iterative pruning by label.
    controls: Dense runs of the same length, for some of these labels.

  Returns:
    A `matplotlib.figure.Figure` with two panels, loss and sparsity, for each
    label.

  Raises:
    ImportError: matplotlib is not installed.

  References:
    Cerebras 2022, "Iterative pruning", figure 3.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phases = (
    ...     PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0),
    ...     PhaseRecord('q', 4, 4, 2, 8, 'text', 0.5, 64, 5.0, 9.0))
    >>> rows = [{'step': s, 'validation/loss': 4.0 / s} for s in (4, 6, 8)]
    >>> figure = plot_sawtooth({'toy': RunRecord('toy', phases, rows)}, {})
    >>> [ax.get_ylabel() for ax in figure.axes]
    ['Loss (nats per token)', 'Sparsity (%)']
  """
  figure = style.new_figure(7.4, 4.4 * len(pruned))
  panels = figure.subplots(
      2 * len(pruned), squeeze=False, height_ratios=(3, 1) * len(pruned)
  )[:, 0]
  for (label, run), upper, lower in zip(
      pruned.items(), panels[::2], panels[1::2]
  ):
    ends = _draw_losses(upper, run, controls.get(label))
    phases = _phases(run)
    last = phases[-1].end
    plots.draw_sparsity(lower, run, last, color=style.GREY, linewidth=1.6)
    for ax in (upper, lower):
      for phase in phases[1:]:
        ax.axvline(phase.start, color=style.PALE, linewidth=0.8, linestyle=':')
      style.polish(ax)
      ax.set_xlim(0, 1.01 * last)  # Space for the last marker.
    lower.set_ylim(0, 100)
    lower.set(ylabel='Sparsity (%)', xlabel='Step')
    upper.tick_params(labelbottom=False)
    upper.set_ylabel(plots.LOSS)
    upper.set_ylim(upper.get_ylim())
    style.label_ends(upper, ends, gap=0.08)
    spans = [(p.start, p.end, read.format_sparsity(p)) for p in phases]
    style.title_above(upper, label, spans, pad=6, fontsize=10)
  return figure


def _phases(run: RunRecord) -> Sequence[PhaseRecord]:
  """Returns the phases of pre-training, or those of a run without them."""
  return read.pretraining_phases(run) or run.phases


def _draw_losses(
    ax: Any, run: RunRecord, control: RunRecord | None
) -> list[tuple[float, float, str, str]]:
  """Draws the losses of pre-training; returns the ends of the lines."""
  phases = _phases(run)
  last = phases[-1].end
  ends: list[tuple[float, float, str, str]] = []
  settled: list[float] = []
  lines: list[tuple[str, str, dict[str, Any]]] = [
      ('train/loss', 'training', {'color': style.PALE, 'linewidth': 0.8}),
      ('validation/loss', 'validation', {
          'color': style.COLORS[0], 'linewidth': 1.6, 'marker': 'o',
          'markersize': 4,
      }),
  ]
  for key, name, look in lines:
    points = plots.points_of(run, key, last)
    if points:
      ax.plot(*zip(*points), **look)
      ends.append((*points[-1], name, look['color']))
      settled += [x for s, x in points if s >= phases[0].end / 3]
  dense = run.at_end(phases[0], 'validation/loss')
  if dense is not None and phases[0].sparsity == 0:
    ax.axhline(dense[1], color=style.COLORS[1], linewidth=1.2, linestyle='--')
    ends.append((last, dense[1], 'dense model', style.COLORS[1]))
  steps, losses = control.series('validation/loss') if control else ([], [])
  if steps:
    ax.plot(
        steps[-1], losses[-1], 's', color=style.COLORS[2], clip_on=False,
        zorder=4,
    )
    ends.append((steps[-1], losses[-1], 'dense, as long', style.COLORS[2]))
    settled.append(losses[-1])
  if settled:
    # The limits exclude the steep start, which would hide the saw teeth.
    low, high = min(settled), max(settled)
    room = max(high - low, 1e-3)
    ax.set_ylim(low - 0.06 * room, high + 0.1 * room)
  return ends


def plot_algorithms(runs: Mapping[str, RunRecord]) -> Any:
  """Plots losses and planned sparsity of several algorithms over steps.

  Args:
    runs: Runs by label, such as one of RigL and one of GraNet.

  Returns:
    A `matplotlib.figure.Figure` with two panels: losses of pre-training (thin
    lines for training, points for validation) and planned sparsity.

  Raises:
    ImportError: matplotlib is not installed.

  References:
    Cerebras 2024, "Sparsity made easy", figure 8.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.5, 64, 5.0, 9.0)
    >>> rows = [{'step': s, 'validation/loss': 4.0 / s} for s in (1, 4)]
    >>> figure = plot_algorithms({'RigL': RunRecord('toy', (phase,), rows)})
    >>> figure.axes[0].texts[0].get_text()
    'RigL'
  """
  figure = style.new_figure(7.4, 5)
  upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 1))
  last = max(_phases(run)[-1].end for run in runs.values())
  ends: list[tuple[float, float, str, str]] = []
  sparsity_ends: list[tuple[float, float, str, str]] = []
  settled: list[float] = []
  for index, (label, run) in enumerate(runs.items()):
    line = style.line_style(index)
    end = _phases(run)[-1].end
    for key, look in (
        ('train/loss', {'linewidth': 0.8, 'alpha': 0.45, 'marker': ''}),
        ('validation/loss', {'linewidth': 1.8, 'markersize': 4.5}),
    ):
      points = plots.points_of(run, key, end)
      if points:
        upper.plot(*zip(*points), **(line | look), label=f'{label} {key}')
        ends = [e for e in ends if e[2] != label]
        ends.append((*points[-1], label, line['color']))
        settled += [x for s, x in points if s >= last / 10]
    sparsity = plots.draw_sparsity(
        lower, run, end, color=line['color'], linewidth=1.6,
        linestyle=line['linestyle'],
    )
    sparsity_ends.append((end, sparsity, f'{sparsity:.3g}%', line['color']))
  for ax in (upper, lower):
    style.polish(ax)
  if settled:
    room = 0.06 * (max(settled) - min(settled))
    upper.set_ylim(min(settled) - room, max(settled) + room)
  upper.set(ylabel=plots.LOSS, xlim=(0, 1.01 * last))
  lower.set(ylabel='Sparsity (%)', xlabel='Step', ylim=(0, 100))
  upper.set_title(
      'Training (thin) and validation (points) loss', loc='left', fontsize=10
  )
  style.label_ends(upper, ends, gap=0.08)
  style.label_ends(lower, sparsity_ends, gap=0.22)
  return figure


def plot_sparsities(runs: Mapping[str, RunRecord]) -> Any:
  """Plots the planned sparsity of each run over steps, a bar for each run.

  Args:
    runs: Runs by label.

  Returns:
    A `matplotlib.figure.Figure`: darker spans have a higher sparsity, written
    as a number where it fits. White lines separate phases; an orange line is
    below fine-tuning.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0)
    >>> figure = plot_sparsities({'toy': RunRecord('toy', (phase,), ())})
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['75%']
  """
  figure = style.new_figure(8, 1.2 + 0.36 * len(runs))
  ax = figure.subplots()
  last = max(run.phases[-1].end for run in runs.values())
  shades = _shades()
  for row, run in enumerate(runs.values()):
    for phase in run.phases:
      for part in phase.parts:
        ax.barh(
            row, part.steps, 0.72, part.start, color=shades(part.sparsity),
            linewidth=0,
        )
      first, final = phase.sparsities
      texts: list[tuple[float, float, float]] = [
          (phase.start, phase.steps, first)
      ]
      if first != final:
        edge = phase.parts[-1]
        width = max(edge.steps, _NARROW * last)
        texts = [
            (phase.start, min(phase.steps / 3, _NARROW * last), first),
            (phase.end - width, width, final),
        ]
      for start, width, sparsity in texts:
        if width >= _NARROW * last:
          ax.text(
              start + width / 2, row, markdown.percent(sparsity), ha='center',
              va='center',
              fontsize=8, color='white' if sparsity > 0.55 else 'black',
          )
      if phase.start:
        ax.vlines(phase.start, row - 0.36, row + 0.36, color='white')
      if phase.source == 'task':
        ax.hlines(
            row + 0.4, phase.start, phase.end, color=style.COLORS[1],
            linewidth=2.5,
        )
  ax.set_yticks(range(len(runs)), list(runs), fontsize=9)
  ax.set(xlim=(0, last), ylim=(len(runs) - 0.4, -0.6), xlabel='Step')
  ax.tick_params(axis='y', length=0)
  ax.spines[:].set_visible(False)
  tuned = any(p.source == 'task' for run in runs.values() for p in run.phases)
  ax.set_title(
      'Planned sparsity of the sparsified matrices'
      + ('; fine-tuning underlined' if tuned else ''), loc='left', fontsize=10,
  )
  return figure


def _shades() -> Any:
  """Returns a function from a sparsity to a colour, light grey to dark blue."""
  low, high = (0.92, 0.93, 0.94), (0.03, 0.25, 0.47)
  return lambda sparsity: tuple(
      a + sparsity * (b - a) for a, b in zip(low, high)
  )


DENSE, SPARSE = 'dense fine-tuning', 'sparse fine-tuning'
_LOOKS = {DENSE: (style.COLORS[2], 'o'), SPARSE: (style.COLORS[1], 's')}


class Tuned(NamedTuple):
  """Results of fine-tuning a pre-trained model.

  Attributes:
    model: Names of the model and the task.
    measure: Name of the metric.
    sparsity: Sparsity of pre-training.
    way: `DENSE` or `SPARSE`.
    values: Measured value of each seed.
  """

  model: str
  measure: str
  sparsity: float
  way: str
  values: tuple[float, ...]


def plot_fine_tuning(points: Sequence[Tuned]) -> Any:
  """Plots metrics after fine-tuning over the sparsity of pre-training.

  Fine-tuning of the dense model is the first point of both lines, and the
  dashed line of the baseline.

  Args:
    points: Results of fine-tuning.

  Returns:
    A `matplotlib.figure.Figure` with a panel for each model, task and measure:
    a small point for each seed, lines through the means.

  Raises:
    ImportError: matplotlib is not installed.

  References:
    Thangarasa et al. 2023, "SPDF", figure 2.

  Example:
    >>> points = [Tuned('toy', 'loss', 0.0, DENSE, (1.0,)),
    ...           Tuned('toy', 'loss', 0.75, DENSE, (1.1, 1.3)),
    ...           Tuned('toy', 'loss', 0.75, SPARSE, (1.5,))]
    >>> ax = plot_fine_tuning(points).axes[0]
    >>> sorted(text.get_text() for text in ax.texts)
    ['dense fine-tuning', 'dense model', 'sparse fine-tuning']
  """
  panels = list(dict.fromkeys(point[:2] for point in points))
  figure = style.new_figure(6.6, 0.4 + 3.1 * len(panels))
  for ax, panel in zip(
      figure.subplots(len(panels), squeeze=False)[:, 0], panels
  ):
    _draw(ax, [p for p in points if p[:2] == panel])
    model, measure = panel
    ax.set_title(model, loc='left', fontweight='bold', fontsize=10)
    ax.set_ylabel(measure)
  return figure


def _draw(ax: Any, points: Sequence[Tuned]) -> None:
  baseline = [p for p in points if p.sparsity == 0]
  ends = []
  for way, (color, marker) in _LOOKS.items():
    line = sorted(
        baseline + [p for p in points if p.way == way and p.sparsity > 0]
    )
    if len(line) == len(baseline):
      continue
    sparsities = [100 * p.sparsity for p in line]
    averages = [statistics.fmean(p.values) for p in line]
    ax.plot(
        sparsities, averages, color=color, marker=marker, linewidth=1.8,
        zorder=3,
    )
    for sparsity, point in zip(sparsities, line):
      ax.plot(
          [sparsity] * len(point.values), point.values, marker, color=color,
          markersize=4, alpha=0.35, markeredgewidth=0,
      )
    ends.append((sparsities[-1], averages[-1], way, color))
  if baseline:
    value = statistics.fmean(baseline[0].values)
    ax.axhline(value, color=style.GREY, linewidth=1.2, linestyle='--')
    ends.append((
        max(100 * p.sparsity for p in points), value, 'dense model', style.GREY
    ))
  ax.set_xticks(sorted({100 * p.sparsity for p in points}))
  ax.set(xlabel='Sparsity of pre-training (%)')
  style.polish(ax)
  low, high = ax.get_xlim()
  ax.set(xlim=(low, high), ylim=ax.get_ylim())
  style.label_ends(ax, ends, gap=0.08)

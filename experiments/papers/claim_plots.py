"""Figure of claims: the arms' losses, and the claimed differences."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from experiments.papers import claims
from experiments.papers.arms import Arm
from experiments.papers.claims import Comparison
from experiments.papers.claims import Finding
from experiments.papers.paired import Interval
from experiments.pool.pool import Entry
from experiments.pool.pool import Outcome
from spdf_jax.runs import style

_INSIDE, _OUTSIDE = 'interval inside the margin', 'interval outside the margin'
_ACROSS = 'interval across the margin'
_COLORS = {
    _INSIDE: style.COLORS[2], _OUTSIDE: style.COLORS[1],
    _ACROSS: style.PALE,
}


def plot_claims(
    entries: Sequence[Entry],
    measured: Mapping[Arm, Mapping[int, Outcome]],
    findings: Sequence[Finding],
) -> Any:
  """Plots every seed of every arm, and the differences with their intervals.

  Args:
    entries: All entries.
    measured: Measurements by arm and seed.
    findings: Result of `judge`.

  Returns:
    A figure. At the top, the losses of pre-training and of fine-tuning, a
    point per seed and a line at their mean; at the bottom, the comparisons,
    colored by whether their interval is inside, across or outside the margin,
    a tick at each margin, and the verdict of each claim. Claims in perplexity
    are left out, because their differences are several times those in nats.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> entry = Entry(Arm('dense'), {}, 1)
    >>> measured = {entry.arm: {1: {'validation/loss': 2.0}}}
    >>> len(plot_claims([entry], measured, []).axes)
    2
  """
  findings = [
      f for f in findings
      if claims.unit_of(f.claim) != claims.PERPLEXITIES
  ]
  shown = [
      entry.arm for entry in entries
      if any(
          entry.arm.metric in outcome
          for outcome in measured.get(entry.arm, {}).values()
      )
  ]
  metrics = list(dict.fromkeys(arm.metric for arm in shown))
  counts = [sum(a.metric == m for a in shown) for m in metrics] or [1]
  rows = sum(len(f.claim.comparisons) for f in findings)
  heights = [*counts, max(rows, 1)]
  # Inches of a row, and of the labels of an axis.
  height = 0.24 * sum(heights) + 0.65 * len(heights) + 0.5
  figure = style.new_figure(8, height)
  *axes, bottom = figure.subplots(len(heights), height_ratios=heights)
  for ax, metric in zip(axes, metrics):
    _plot_losses(ax, [a for a in shown if a.metric == metric], measured)
  _plot_differences(bottom, findings)
  return figure


def _plot_losses(
    ax: Any, arms: Sequence[Arm], measured: Mapping[Arm, Mapping[int, Outcome]]
) -> None:
  for place, arm in enumerate(arms):
    losses = [outcome[arm.metric] for outcome in measured[arm].values()]
    ax.plot(losses, [place] * len(losses), 'o', markersize=4, alpha=0.6,
            color=style.COLORS[0], markeredgewidth=0)
    mean = sum(losses) / len(losses)
    ax.vlines(mean, place - 0.35, place + 0.35, color=style.COLORS[0])
  ax.set_yticks(range(len(arms)), [arm.name for arm in arms], fontsize=8)
  ax.set_ylim(len(arms) - 0.4, -0.6)
  name = 'Fine-tuning' if arms[0].task else 'Validation'
  ax.set_xlabel(f'{name} loss (nats)')
  style.polish(ax)
  ax.grid(False, axis='y')
  ax.margins(y=0)


def _place(comparison: Comparison, interval: Interval) -> str:
  if interval.high < comparison.margin:
    return _INSIDE
  return _OUTSIDE if interval.low > comparison.margin else _ACROSS


def _label(finding: Finding, comparison: Comparison) -> str:
  """Returns key and text, without the arms whose rates are used."""
  text = comparison.text
  for term in comparison.terms:
    text = text.replace(term.arm.name, term.arm.folder)
  return f'({finding.claim.key}) {text}'


def _plot_differences(ax: Any, findings: Sequence[Finding]) -> None:
  rows = [
      (finding, i, comparison, interval, values)
      for finding in findings
      for i, (comparison, interval, values) in enumerate(zip(
          finding.claim.comparisons, finding.intervals, finding.values
      ))
  ]
  for row, (finding, i, comparison, interval, values) in enumerate(rows):
    if i == 0:
      ax.annotate(
          finding.verdict, (1.01, row), xycoords=('axes fraction', 'data'),
          va='center', fontsize=8, annotation_clip=False,
      )
    ax.vlines(comparison.margin, row - 0.35, row + 0.35, color='black',
              linewidth=1)
    if not values:
      continue
    color = _COLORS[_place(comparison, interval)]
    if math.isfinite(interval.low):
      ax.hlines(row, interval.low, interval.high, color=color, linewidth=2)
    ax.plot(values, [row] * len(values), '.', color=color, alpha=0.5,
            markersize=4)
    ax.plot(interval.mean, row, 'D', color=color, markersize=4)
  for text, color in _COLORS.items():
    ax.plot([], [], 'D-', color=color, markersize=4, linewidth=2, label=text)
  ax.plot([], [], '|', color='black', markersize=9, label='margin claimed')
  ax.legend(
      loc='lower center', bbox_to_anchor=(0.5, 1), ncols=2, fontsize=8,
      frameon=False,
  )
  ax.set_yticks(
      range(len(rows)), [_label(f, c) for f, _, c, *_ in rows], fontsize=8
  )
  ax.set_ylim(len(rows) - 0.4, -0.6)
  ax.axvline(0, color=style.GREY, linewidth=0.8)
  ax.set_xlabel(
      'Difference by seed, its mean and 95 % interval,\nin '
      f'{claims.describe_units(f.claim for f in findings)}'
  )
  style.polish(ax)
  ax.grid(False, axis='y')

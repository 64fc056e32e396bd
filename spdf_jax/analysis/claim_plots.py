"""A figure of claims: the arms' losses, and the differences claimed."""

from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import Any

from spdf_jax.analysis import plot_style
from spdf_jax.analysis.claims import FAILS
from spdf_jax.analysis.claims import Finding
from spdf_jax.analysis.claims import HOLDS
from spdf_jax.analysis.pool import Arm
from spdf_jax.analysis.pool import Outcome

_COLORS = {HOLDS: plot_style.COLORS[2], FAILS: plot_style.COLORS[1]}


def plot_claims(
    arms: Sequence[Arm],
    found: Mapping[str, Mapping[int, Outcome]],
    findings: Sequence[Finding],
) -> Any:
  """Plots every seed of every arm, and the differences with their intervals.

  Args:
    arms: All arms.
    found: What was measured, by arm and seed.
    findings: From `judge`.

  Returns:
    A figure: left the losses of pre-training and of fine-tuning, a point a
    seed, a line at their mean; right the claims, those that hold green, those
    that do not red, all others grey, a tick at each bound.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> arm = Arm('dense', {}, '', 'validation/loss')
    >>> found = {'dense': {1: {'validation/loss': 2.0}}}
    >>> len(plot_claims([arm], found, []).axes)
    2
  """
  shown = [a for a in arms if any(a.metric in o for o in _of(found, a))]
  metrics = list(dict.fromkeys(arm.metric for arm in shown))
  counts = [sum(a.metric == m for a in shown) for m in metrics] or [1]
  rows = sum(len(f.claim.comparisons) for f in findings)
  height = max(0.26 * max(sum(counts) + 3 * len(counts), rows + 3), 3.0)
  figure = plot_style.new_figure(13, height)
  left, right = figure.subfigures(1, 2, width_ratios=(1, 1.25))
  axes = left.subplots(len(counts), height_ratios=counts, squeeze=False)[:, 0]
  for ax, metric in zip(axes, metrics):
    _plot_losses(ax, [a for a in shown if a.metric == metric], found)
  _plot_differences(right.subplots(), findings)
  return figure


def _of(found: Mapping[str, Mapping[int, Outcome]], arm: Arm) -> list[Outcome]:
  return list(found.get(arm.name, {}).values())


def _plot_losses(
    ax: Any, arms: Sequence[Arm], found: Mapping[str, Mapping[int, Outcome]]
) -> None:
  for place, arm in enumerate(arms):
    losses = [outcome[arm.metric] for outcome in _of(found, arm)]
    ax.plot(losses, [place] * len(losses), 'o', markersize=4, alpha=0.6,
            color=plot_style.COLORS[0], markeredgewidth=0)
    mean = sum(losses) / len(losses)
    ax.vlines(mean, place - 0.35, place + 0.35, color=plot_style.COLORS[0])
  ax.set_yticks(range(len(arms)), [arm.name for arm in arms])
  ax.set_ylim(len(arms) - 0.4, -0.6)
  ax.set_xlabel(f'{arms[0].metric} (nats)')
  plot_style.polish(ax)
  ax.grid(False, axis='y')
  ax.margins(y=0)


def _plot_differences(ax: Any, findings: Sequence[Finding]) -> None:
  rows = [
      (finding, comparison, interval, values)
      for finding in findings
      for comparison, interval, values in zip(
          finding.claim.comparisons, finding.intervals, finding.values
      )
  ]
  for place, (finding, comparison, interval, values) in enumerate(rows):
    color = _COLORS.get(finding.verdict, plot_style.PALE)
    if math.isfinite(interval.low):
      ax.hlines(place, interval.low, interval.high, color=color, linewidth=2)
    ax.plot(values, [place] * len(values), '.', color=color, alpha=0.5,
            markersize=4)
    ax.plot(interval.mean, place, 'D', color=color, markersize=4)
    bounds = {comparison.bound}
    if comparison.relation == 'matches':
      bounds.add(-comparison.bound)
    for bound in bounds:
      ax.vlines(bound, place - 0.35, place + 0.35, color='black', linewidth=1)
  ax.set_yticks(
      range(len(rows)), [f'({f.claim.key}) {c.text}' for f, c, *_ in rows],
      fontsize=8,
  )
  ax.set_ylim(len(rows) - 0.4, -0.6)
  ax.axvline(0, color=plot_style.GREY, linewidth=0.8)
  ax.set_xlabel('difference with its 95 % interval, and the bound claimed')
  plot_style.polish(ax)
  ax.grid(False, axis='y')

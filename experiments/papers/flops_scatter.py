"""Figure of a scale: final losses of arms, by the FLOPs of pre-training."""

from collections.abc import Mapping
import statistics
from typing import Any

from experiments.papers import arms
from experiments.papers import scales
from experiments.papers.arms import Arm
from experiments.papers.scale import Scale
from experiments.pool.pool import Outcome
from spdf_jax.runs import style

_LABELS = (
    'dense', 'smaller dense', 'static 75 %', 'Variable', 'gradual pruning'
)


def plot_flops(
    scale: Scale, measured: Mapping[Arm, Mapping[int, Outcome]]
) -> Any:
  """Plots final losses, a row for each arm with its FLOPs of pre-training.

  Every small point is a run at the end of its own schedule, a large one the
  mean of an arm. Rows are ordered by width, then by FLOPs, so arms of equal
  FLOPs are neighbours.

  Args:
    scale: The scale.
    measured: Measurements by arm and seed.

  Returns:
    A figure, without the control.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from experiments.papers.scales import SCALES
    >>> runs = {1: {'validation/loss': 2.0, 'flops': 1e12}}
    >>> ax, = plot_flops(SCALES['context-64'], {Arm('dense'): runs}).axes
    >>> [tick.get_text() for tick in ax.get_yticklabels()]
    ['width 64, dense: 1.0e12 FLOPs']
  """
  shown = [
      arm for arm in measured
      if arm.method != 'init' and arm.sparsity != scales.CONTROL.sparsity
      and not arm.task
  ]
  order = lambda arm: (scale.sizes[arm.size].width, _flops(measured[arm]))
  shown.sort(key=order)
  figure = style.new_figure(6.5, 1.0 + 0.32 * max(len(shown), 3))
  ax = figure.subplots()
  names = []
  for row, arm in enumerate(shown):
    color = style.COLORS[_LABELS.index(_label(scale, arm))]
    values = [outcome[arms.PRETRAINED] for outcome in measured[arm].values()]
    ax.plot(values, [row] * len(values), 'o', color=color, alpha=0.35,
            markersize=4, markeredgewidth=0)
    ax.plot(statistics.fmean(values), row, 'D', color=color, markersize=6)
    width, flops = order(arm)
    amount = f'{flops:.1e}'.replace('e+', 'e')
    names.append(f'width {width}, {_label(scale, arm)}: {amount} FLOPs')
    if row and width != order(shown[row - 1])[0]:
      ax.axhline(row - 0.5, color=style.GREY, linewidth=0.8)
  ax.set_yticks(range(len(shown)), names, fontsize=8)
  ax.set_ylim(len(shown) - 0.4, -0.6)
  ax.set_xlabel('Final validation loss (nats per byte)')
  style.polish(ax)
  ax.margins(y=0)
  return figure


def _flops(outcomes: Mapping[int, Outcome]) -> float:
  return statistics.fmean(outcome['flops'] for outcome in outcomes.values())


def _label(scale: Scale, arm: Arm) -> str:
  if arm.method in ('variable', 'gmp'):
    return {'variable': 'Variable', 'gmp': 'gradual pruning'}[arm.method]
  if arm.sparsity:
    return 'static 75 %'
  is_small = scale.reference(arm.size) != arm.size
  return 'smaller dense' if is_small else 'dense'

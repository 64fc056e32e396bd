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

_METHODS = ('dense', 'smaller dense', 'static', 'variable', 'gmp')
_SAME = 1.05  # Ratio up to which FLOPs count as equal; steps are rounded.


def plot_flops(
    scale: Scale, measured: Mapping[Arm, Mapping[int, Outcome]]
) -> Any:
  """Plots final losses, a row for each arm, under the FLOPs of pre-training.

  Every small point is a run at the end of its own schedule, a large one the
  mean of an arm, which stands to the right. Arms that are compared at equal
  FLOPs have one heading, with the widths of their models.

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
    ['width 64, 1.0e12 FLOPs', 'dense']
  """
  shown = [
      arm for arm in measured
      if arm.method != 'init' and arm.sparsity != scales.CONTROL.sparsity
      and not arm.task
  ]
  width = lambda arm: scale.sizes[scale.reference(arm.size)].width
  means = lambda metric: {
      arm: statistics.fmean(run[metric] for run in measured[arm].values())
      for arm in shown
  }
  flops, losses = means('flops'), means(arms.PRETRAINED)
  groups: list[list[Arm]] = []
  for arm in sorted(shown, key=lambda arm: (width(arm), flops[arm])):
    first = groups[-1][0] if groups else None
    if first and width(first) == width(arm) and (
        flops[arm] < _SAME * flops[first]
    ):
      groups[-1].append(arm)
    else:
      groups.append([arm])

  rows = len(shown) + len(groups)
  figure = style.new_figure(6.5, 0.8 + 0.27 * max(rows, 4))
  ax = figure.subplots()
  labels = []
  for group in groups:
    amount = f'{flops[group[0]]:.1e}'.replace('e+', 'e')
    widths = sorted({scale.sizes[arm.size].width for arm in group})
    labels.append(
        f'width {" and ".join(map(str, widths))}, {amount} FLOPs'
    )
    for arm in sorted(group, key=losses.__getitem__, reverse=True):
      _plot_row(ax, len(labels), measured[arm], losses[arm], _color(scale, arm))
      labels.append(_label(scale, arm))
  ax.set_yticks(range(rows), labels, fontsize=8)
  for tick, label in zip(ax.get_yticklabels(), labels):
    if label.startswith('width'):
      tick.set(fontweight='bold')
  ax.set_ylim(rows - 0.4, -0.6)
  ax.tick_params(axis='y', length=0)
  ax.set_xlabel('Final validation loss (nats per byte), lower is better')
  style.polish(ax)
  ax.grid(False, axis='y')
  ax.margins(y=0)
  return figure


def _plot_row(
    ax: Any, row: int, runs: Mapping[int, Outcome], mean: float, color: str
) -> None:
  values = [run[arms.PRETRAINED] for run in runs.values()]
  ax.plot(values, [row] * len(values), 'o', color=color, alpha=0.35,
          markersize=4, markeredgewidth=0)
  ax.plot(mean, row, 'D', color=color, markersize=6)
  ax.annotate(f'{mean:.3f}', (1.01, row), xycoords=('axes fraction', 'data'),
              va='center', fontsize=8, color=color, annotation_clip=False)


def _is_smaller(scale: Scale, arm: Arm) -> bool:
  return scale.reference(arm.size) != arm.size


def _color(scale: Scale, arm: Arm) -> str:
  method = 'smaller dense' if _is_smaller(scale, arm) else arm.method
  return style.COLORS[_METHODS.index(method)]


def _label(scale: Scale, arm: Arm) -> str:
  """Returns what a reader who has not seen the protocol needs of an arm."""
  zeros = f'{100 * arm.sparsity:g} % zeros'
  if arm.method == 'variable':
    share = 1 - arm.dense_share
    return f'{zeros} for {share} of the steps, then dense'
  if arm.method == 'gmp':
    return f'pruned gradually to {zeros}'
  if arm.sparsity:
    return zeros
  if _is_smaller(scale, arm):
    return f'dense, width {scale.sizes[arm.size].width}'
  if arm.flops_of is None:
    return 'dense'
  share = scale.steps(arm) / scale.steps(Arm('dense', size=arm.size))
  return f'dense, {100 * share:.0f} % of the tokens'

"""Figure of a scale: final losses over the FLOPs of pre-training."""

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
_MARKERS = 'os^D'


def plot_flops(
    scale: Scale, measured: Mapping[Arm, Mapping[int, Outcome]]
) -> Any:
  """Plots final losses over the FLOPs of pre-training.

  Every small point is a run at the end of its own schedule, a large one the
  mean of an arm; arms have a color, widths a marker.

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
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['dense', 'width 64']
  """
  shown = [
      arm for arm in measured
      if arm.method != 'init' and arm.sparsity != scales.CONTROL.sparsity
      and not arm.task
  ]
  figure = style.new_figure(4.5, 3.8)
  ax = figure.subplots()
  widths = sorted({scale.sizes[arm.size].width for arm in shown})
  markers = dict(zip(widths, _MARKERS))
  for arm in shown:
    color = style.COLORS[_LABELS.index(_label(scale, arm))]
    marker = markers[scale.sizes[arm.size].width]
    outcomes = measured[arm].values()
    flops = statistics.fmean(outcome['flops'] for outcome in outcomes)
    values = [outcome[arms.PRETRAINED] for outcome in outcomes]
    ax.plot([flops] * len(values), values, marker, color=color, alpha=0.35,
            markersize=4, markeredgewidth=0)
    ax.plot(flops, statistics.fmean(values), marker, color=color, markersize=7)
  ax.set_xscale('log')
  ax.set_xlabel('FLOPs of pre-training')
  ax.set_ylabel('final validation loss (nats per byte)')
  style.polish(ax)
  labels = {_label(scale, arm) for arm in shown}
  for label, color in zip(_LABELS, style.COLORS):
    if label in labels:
      ax.plot([], [], 'o', color=color, label=label)
  for width, marker in markers.items():
    ax.plot([], [], marker, color=style.GREY, label=f'width {width}')
  ax.legend(frameon=False, fontsize=8)
  return figure


def _label(scale: Scale, arm: Arm) -> str:
  if arm.method in ('variable', 'gmp'):
    return {'variable': 'Variable', 'gmp': 'gradual pruning'}[arm.method]
  if arm.sparsity:
    return 'static 75 %'
  is_small = scale.reference(arm.size) != arm.size
  return 'smaller dense' if is_small else 'dense'

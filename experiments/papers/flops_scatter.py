"""Figure of a scale: final losses and BLEU over the FLOPs of pre-training."""

from collections.abc import Mapping
import dataclasses
import statistics
from typing import Any

from experiments.papers import arms
from experiments.papers import scales
from experiments.papers.arms import Arm
from experiments.papers.scale import Scale
from experiments.pool.pool import Outcome
from spdf_jax.runs import style

_LABELS = 'dense', 'smaller dense', 'static 75 %', 'Variable'
_MARKERS = 'o', 's', '^', 'D', 'v'


def plot_flops(
    scale: Scale, found: Mapping[Arm, Mapping[int, Outcome]]
) -> Any:
  """Plots final losses, and BLEU after fine-tuning, over pre-training FLOPs.

  Every small point is a run at the end of its own schedule, a large one the
  mean of an arm; arms have a color, widths a marker.

  Args:
    scale: The scale.
    found: Measurements by arm and seed.

  Returns:
    A figure with a panel of losses and, if fine-tuned models are scored, one of
    BLEU for each task. The control is left out, and so are arms with rotary
    positions if the main size has none.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from experiments.papers.scales import SCALES
    >>> runs = {1: {'validation/loss': 2.0, 'flops': 1e12}}
    >>> ax, = plot_flops(SCALES['flops'], {Arm('dense'): runs}).axes
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['dense', 'width 128']
  """
  shown = [
      arm for arm in found
      if arm.method != 'init' and arm.sparsity != scales.CONTROL.sparsity
      and scale.sizes[arm.size].rotary == scale.sizes[''].rotary
  ]
  tasks = dict.fromkeys(arm.task for arm in shown if arm.task)
  figure = style.new_figure(4.5 * (1 + len(tasks)), 3.8)
  panels = figure.subplots(1, 1 + len(tasks), sharex=True, squeeze=False)[0]
  widths = sorted({scale.sizes[arm.size].width for arm in shown})
  markers = dict(zip(widths, _MARKERS))
  for ax, task in zip(panels, ('', *tasks)):
    for arm in (arm for arm in shown if arm.task == task):
      marker = markers[scale.sizes[arm.size].width]
      _plot_arm(ax, scale, arm, marker, found)
    ax.set_xscale('log')
    ax.set_xlabel('FLOPs of pre-training')
    ax.set_ylabel(
        f'BLEU on {task}, test split' if task
        else 'final validation loss (nats per byte)'
    )
    style.polish(ax)
  labels = {_label(scale, arm) for arm in shown}
  for label, color in zip(_LABELS, style.COLORS):
    if label in labels:
      panels[0].plot([], [], 'o', color=color, label=label)
  for width, marker in markers.items():
    panels[0].plot([], [], marker, color=style.GREY, label=f'width {width}')
  panels[0].legend(frameon=False, fontsize=8)
  return figure


def _label(scale: Scale, arm: Arm) -> str:
  if arm.method == 'variable':
    return 'Variable'
  if arm.sparsity:
    return 'static 75 %'
  is_small = scale.reference(arm.size) != arm.size
  return 'smaller dense' if is_small else 'dense'


def _plot_arm(
    ax: Any, scale: Scale, arm: Arm, marker: str,
    found: Mapping[Arm, Mapping[int, Outcome]],
) -> None:
  color = style.COLORS[_LABELS.index(_label(scale, arm))]
  pretrained = dataclasses.replace(arm, task='', rate_of=None)
  flops, *_ = (
      outcome['flops'] for outcome in found[pretrained if arm.task else arm]
      .values()
  )
  metric = arms.SCORED_BLEU if arm.task else arms.PRETRAINED
  values = [outcome[metric] for outcome in found[arm].values()]
  ax.plot([flops] * len(values), values, marker, color=color, alpha=0.35,
          markersize=4, markeredgewidth=0)
  ax.plot(flops, statistics.fmean(values), marker, color=color, markersize=7)

"""Plots of the losses of a scale's arms over FLOPs and measured seconds."""

from collections.abc import Mapping
from collections.abc import Sequence
import statistics
from typing import Any

from experiments.papers.arms import Arm
from experiments.papers.arms import PRETRAINED
from experiments.papers.pace import step_seconds
from experiments.papers.pool import Outcome
from experiments.papers.pool_data import Prepared
from experiments.papers.scales import DENSE
from experiments.papers.scales import Scale
from experiments.papers.scales import sized
from spdf_jax.runs import style

_METHODS = 'dense', 'static', 'variable', 'set', 'rigl'


def training_seconds(
    scale: Scale, arms: Sequence[Arm], prepared: Prepared
) -> dict[Arm, float]:
  """Measures how long the pre-trainings of arms take, by timing their steps.

  Args:
    scale: The scale.
    arms: Arms of one pre-training; arms with mask updates are timed with a
      static mask of their sparsity, because few steps update the mask.
    prepared: The prepared corpus.

  Returns:
    Median seconds of a step times steps, by arm; a sixth of the steps of
    Variable SPDF are dense.
  """
  static = lambda size, sparsity: (
      Arm('static', sparsity, size=size) if sparsity else sized(DENSE, size)
  )
  timed = list(dict.fromkeys(
      [static(arm.size, arm.sparsity) for arm in arms]
      + [sized(DENSE, arm.size) for arm in arms]
  ))
  seconds = dict(zip(
      timed, step_seconds([(scale, arm) for arm in timed], prepared)
  ))

  def total(arm: Arm) -> float:
    sparse = seconds[static(arm.size, arm.sparsity)]
    dense = seconds[sized(DENSE, arm.size)]
    share = 1 / 6 if arm.method == 'variable' else 0.0
    return scale.steps(arm) * ((1 - share) * sparse + share * dense)

  return {arm: total(arm) for arm in arms}


def shown_arms(
    found: Mapping[Arm, Mapping[int, Outcome]], sizes: Sequence[str]
) -> list[Arm]:
  """Returns the arms of finished pre-trainings that are drawn, by size.

  Example:
    >>> shown_arms({Arm('dense'): {}, Arm('init'): {}}, [''])
    ... # doctest: +ELLIPSIS
    [Arm(method='dense', ...)]
  """
  return [
      arm for size in sizes for arm in found
      if arm.size == size and not arm.task and arm.method in _METHODS
      and arm.sparsity < 0.95
  ]


def plot_costs(
    scale: Scale,
    found: Mapping[Arm, Mapping[int, Outcome]],
    seconds: Mapping[Arm, float],
) -> Any:
  """Plots final losses over FLOPs and over seconds, a row per size.

  Args:
    scale: The scale.
    found: Measurements by arm and seed.
    seconds: Result of `training_seconds`.

  Returns:
    A figure: a point per seed, a larger one at the mean.

  Raises:
    ImportError: matplotlib is not installed.
  """
  sizes = list(dict.fromkeys(arm.size for arm in seconds))
  figure = style.new_figure(10, 3.4 * len(sizes))
  rows = figure.subplots(len(sizes), 2, squeeze=False)
  for axes, size in zip(rows, sizes):
    for i, arm in enumerate(arm for arm in seconds if arm.size == size):
      outcomes = list(found[arm].values())
      losses = [outcome[PRETRAINED] for outcome in outcomes]
      color = style.line_style(i)['color']
      costs = outcomes[0]['flops'], seconds[arm]
      for ax, cost in zip(axes, costs):
        ax.plot([cost] * len(losses), losses, '.', color=color, alpha=0.4)
        ax.plot(
            cost, statistics.fmean(losses), 'D', color=color, markersize=6,
            label=arm.kind,
        )
    width = scale.sizes[size].width
    for ax, label in zip(axes, (
        'FLOPs of pre-training', 'seconds of pre-training, steps timed in turn'
    )):
      ax.set_title(f'width {width}', fontsize=10)
      ax.set_xlabel(label)
      ax.set_xlim(0, 1.05 * ax.dataLim.x1)
      ax.set_ylabel('validation loss (nats per byte)')
      style.polish(ax)
    axes[1].legend(frameon=False, fontsize=8)
  return figure

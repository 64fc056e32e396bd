"""Figure of the race: validation loss over seconds of training."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from experiments.papers.arms import Arm
from spdf_jax.runs import style


def plot_race(
    found: Mapping[int, Mapping[Arm, Sequence[Sequence[tuple[float, float]]]]]
) -> Any:
  """Plots loss over seconds, a panel per width, a line per run.

  Args:
    found: Curves of seconds and losses, one for each run, by width and arm.

  Returns:
    A figure without the first tenth of the seconds, in which losses are several
    times those at the end.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> curve = [(5.0, 3.0), (10.0, 2.0)]
    >>> len(plot_race({128: {Arm('dense'): [curve]}}).axes)
    1
  """
  figure = style.new_figure(5.5 * len(found), 3.6)
  panels = figure.subplots(1, len(found), squeeze=False)[0]
  names = dict.fromkeys(arm.name for arms in found.values() for arm in arms)
  styles = {name: style.line_style(i) for i, name in enumerate(names)}
  for ax, (width, arms) in zip(panels, found.items()):
    ends = []
    for arm, curves in arms.items():
      for j, curve in enumerate(curves):
        shown = [point for point in curve if point[0] > 0.1 * curve[-1][0]]
        ax.plot(
            *zip(*shown),
            color=styles[arm.name]['color'], linewidth=1.2, alpha=0.8,
            label=arm.name if j == 0 else None,
        )
        ends.append(curve[-1][1])
    ax.set_title(f'width {width}', fontsize=10)
    ax.set_xlabel('seconds of training at the measured pace')
    ax.set_ylabel('validation loss (nats per byte)')
    ax.set_ylim(min(ends) - 0.05, min(ends) + 0.8)
    ax.legend(frameon=False, fontsize=8)
    style.polish(ax)
  return figure

"""The plot of sparse and dense fine-tuning of sparse models."""

from collections.abc import Sequence
import statistics
from typing import Any
from typing import NamedTuple

from spdf_jax.runs.plot_style import COLORS
from spdf_jax.runs.plot_style import GREY
from spdf_jax.runs.plot_style import label_ends
from spdf_jax.runs.plot_style import new_figure
from spdf_jax.runs.plot_style import polish

DENSE, SPARSE = 'dense fine-tuning', 'sparse fine-tuning'
_LOOKS = {DENSE: (COLORS[2], 'o'), SPARSE: (COLORS[1], 's')}


class Tuned(NamedTuple):
  """What fine-tuning of a pre-trained model came to.

  Attributes:
    model: The model and the task.
    measure: What was measured.
    level: Zeros in pre-training.
    way: `DENSE` or `SPARSE`.
    values: One for each seed.
  """

  model: str
  measure: str
  level: float
  way: str
  values: tuple[float, ...]


def plot_fine_tuning(points: Sequence[Tuned]) -> Any:
  """Plots quality after fine-tuning over the zeros of pre-training.

  A model without zeros has one fine-tuning, where both lines begin and where
  the dashed line of the baseline stands.

  Args:
    points: What was measured.

  Returns:
    A `matplotlib.figure.Figure` with a panel for each model, task and measure:
    a small point for each seed, lines through the means.

  Raises:
    ImportError: matplotlib is not installed.

  Source: Thangarasa et al. 2023, "SPDF", figure 2.

  Example:
    >>> points = [Tuned('toy', 'loss', 0.0, DENSE, (1.0,)),
    ...           Tuned('toy', 'loss', 0.75, DENSE, (1.1, 1.3)),
    ...           Tuned('toy', 'loss', 0.75, SPARSE, (1.5,))]
    >>> ax = plot_fine_tuning(points).axes[0]
    >>> sorted(text.get_text() for text in ax.texts)
    ['dense fine-tuning', 'dense model', 'sparse fine-tuning']
  """
  panels = list(dict.fromkeys(point[:2] for point in points))
  figure = new_figure(6.6, 0.4 + 3.1 * len(panels))
  for ax, panel in zip(
      figure.subplots(len(panels), squeeze=False)[:, 0], panels
  ):
    _draw(ax, [p for p in points if p[:2] == panel])
    model, measure = panel
    ax.set_title(model, loc='left', fontweight='bold', fontsize=10)
    ax.set_ylabel(measure)
  return figure


def _draw(ax: Any, points: Sequence[Tuned]) -> None:
  baseline = [p for p in points if p.level == 0]
  ends = []
  for way, (color, marker) in _LOOKS.items():
    line = sorted(
        baseline + [p for p in points if p.way == way and p.level > 0]
    )
    if len(line) == len(baseline):
      continue
    levels = [100 * p.level for p in line]
    averages = [statistics.fmean(p.values) for p in line]
    ax.plot(
        levels, averages, color=color, marker=marker, linewidth=1.8, zorder=3
    )
    for level, point in zip(levels, line):
      ax.plot(
          [level] * len(point.values), point.values, marker, color=color,
          markersize=4, alpha=0.35, markeredgewidth=0,
      )
    ends.append((levels[-1], averages[-1], way, color))
  if baseline:
    value = statistics.fmean(baseline[0].values)
    ax.axhline(value, color=GREY, linewidth=1.2, linestyle='--')
    ends.append((
        max(100 * p.level for p in points), value, 'dense model', GREY
    ))
  ax.set_xticks(sorted({100 * p.level for p in points}))
  ax.set(xlabel='Zeros in pre-training (%)')
  polish(ax)
  low, high = ax.get_xlim()
  ax.set(xlim=(low, high), ylim=ax.get_ylim())
  label_ends(ax, ends, gap=0.08)

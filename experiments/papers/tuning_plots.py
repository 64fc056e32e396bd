"""Plot of sparse and dense fine-tuning of sparse models."""

from collections.abc import Sequence
import statistics
from typing import Any
from typing import NamedTuple

from spdf_jax.runs import style

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

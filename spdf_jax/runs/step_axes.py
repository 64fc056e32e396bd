# SPDX-License-Identifier: Apache-2.0
"""Axes over the steps of runs: panels, phases, sparsity and titles."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from spdf_jax.runs.curves import sparsities_of
from spdf_jax.runs.plot_style import GREY
from spdf_jax.runs.plot_style import label_spans
from spdf_jax.runs.plot_style import new_figure
from spdf_jax.runs.workdirs import Run

LOSS = 'Loss (nats per token)'
"""Label of an axis of losses."""

_FEW = 12  # Maximum number of spans of a phase for which they are marked.


def create_panels(
    runs: Mapping[str, Run], *, sharey: bool = False
) -> tuple[Any, Any]:
  """Creates a figure with a panel over steps for each run.

  Args:
    runs: Runs by label.
    sharey: Whether the panels share their limits.

  Returns:
    A `matplotlib.figure.Figure` and its axes, at least one; the x axis of all
    extends to the last step of the longest run.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> figure, panels = create_panels({})
    >>> len(panels), panels[0].get_xlabel()
    (1, 'Step')
  """
  count = max(len(runs), 1)
  figure = new_figure(7, 0.6 + 2.6 * count)
  panels = figure.subplots(
      count, sharex=True, sharey=sharey, squeeze=False
  )[:, 0]
  last = max((run.phases[-1].end for run in runs.values()), default=1)
  panels[-1].set(xlim=(0, last), xlabel='Step')
  return figure, panels


def mark_phases(ax: Any, run: Run) -> None:
  """Draws vertical lines where phases begin and where the sparsity changes.

  Changes within a phase are omitted if there are many.

  Args:
    ax: Axes over steps.
    run: Run to draw.
  """
  for phase in run.phases:
    if phase.start:
      ax.axvline(phase.start, color=GREY, linewidth=1.0, linestyle='--')
    if len(phase.parts) <= _FEW:
      for part in phase.parts[1:]:
        ax.axvline(part.start, color=GREY, linewidth=0.8, linestyle=':')


def points_of(run: Run, key: str, end: int) -> list[tuple[int, float]]:
  """Returns the steps and values of a metric after step 0, up to an end.

  Example:
    >>> rows = [{'step': s, 'train/loss': 4.0 / s} for s in (1, 2, 4)]
    >>> points_of(Run('toy', (), rows), 'train/loss', 2)
    [(1, 4.0), (2, 2.0)]
  """
  return [(s, x) for s, x in zip(*run.series(key)) if 0 < s <= end]


def draw_sparsity(ax: Any, run: Run, end: int, **style: Any) -> float:
  """Draws the planned sparsity of a run, in per cent, as a step function.

  Args:
    ax: Axes over steps.
    run: Run to draw.
    end: Last step to draw.
    **style: Keyword arguments of `Axes.plot`.

  Returns:
    The last value, in per cent.
  """
  steps, sparsities = sparsities_of(run)
  inside = [(s, 100 * x) for s, x in zip(steps, sparsities) if s < end]
  last = inside[-1][1]
  ax.plot(*zip(*inside, (end, last)), drawstyle='steps-post', **style)
  return last


def title_above(
    ax: Any,
    title: str,
    spans: Sequence[tuple[float, float, str]],
    pad: float = 8,
    **style: Any,
) -> None:
  """Writes names above spans of the x axis, and a title above all of them.

  Args:
    ax: Axes with final limits.
    title: Text of the title.
    spans: Two ends and name of each span, see `label_spans`.
    pad: Distance between the names and the title, in points.
    **style: Keyword arguments of `Axes.set_title`.
  """
  height = 21 if any('\n' in name for _, _, name in spans) else 12
  rows = label_spans(ax, spans)
  ax.set_title(
      title, loc='left', fontweight='bold', pad=pad + height * rows, **style
  )

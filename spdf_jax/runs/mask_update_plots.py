# SPDX-License-Identifier: Apache-2.0
"""Plots of mask updates."""

from collections.abc import Mapping
from typing import Any

from spdf_jax.runs.mask_updates import is_tracked
from spdf_jax.runs.mask_updates import mask_updates_in
from spdf_jax.runs.plot_style import COLORS
from spdf_jax.runs.plot_style import GREY
from spdf_jax.runs.plot_style import label_ends
from spdf_jax.runs.plot_style import polish
from spdf_jax.runs.step_axes import create_panels
from spdf_jax.runs.step_axes import draw_sparsity
from spdf_jax.runs.step_axes import mark_phases
from spdf_jax.runs.step_axes import title_above
from spdf_jax.runs.workdirs import Run


def plot_mask_updates(runs: Mapping[str, Run]) -> Any:
  """Plots sparsity, survival and exploration over steps, a panel for each run.

  A line is the planned sparsity, and points on it are the measured sparsity; a
  point of survival is the fraction of kept weights that one mask update keeps;
  exploration is the fraction of weights that were kept at any time.

  Args:
    runs: Runs by label; runs without logged mask updates are omitted.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.runs.workdirs import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.5, 64, 5.0, 9.0)
    >>> rows = [{'step': s, 'sparsity/exploration': 0.5} for s in (1, 4)]
    >>> figure = plot_mask_updates({'toy': Run('toy', (phase,), rows)})
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['sparsity', 'explored', 'p']
  """
  runs = {label: run for label, run in runs.items() if is_tracked(run)}
  figure, panels = create_panels(runs)
  for ax, (label, run) in zip(panels, runs.items()):
    ax.set(ylim=(0, 100), ylabel='Per cent of weights')
    ends = _draw(ax, run)
    mark_phases(ax, run)
    polish(ax)
    ax.margins(y=0)
    label_ends(ax, ends, gap=0.1)
    title_above(ax, label, [(p.start, p.end, p.name) for p in run.phases])
  return figure


def _draw(ax: Any, run: Run) -> list[tuple[float, float, str, str]]:
  """Draws a run; returns ends, names and colours of its lines."""
  last = run.phases[-1].end
  planned = draw_sparsity(ax, run, last, color=GREY, linewidth=1.4)
  found, sparsities = run.series('sparsity/sparsified')
  style = {'clip_on': False, 'zorder': 3}
  ax.plot(
      found, [100 * x for x in sparsities], '.', color=GREY, markersize=7,
      **style,
  )
  ends: list[tuple[float, float, str, str]] = [
      (last, planned, 'sparsity', GREY)
  ]
  updates = [mask_updates_in(run, phase) for phase in run.phases]
  for inside in filter(None, updates):
    survival = [100 * update.survival for update in inside]
    ax.plot(
        [c.step for c in inside], survival, color=COLORS[1], linewidth=0.8,
        marker='o', markersize=3.5, **style,
    )
    end = (inside[-1].step, survival[-1], 'survival', COLORS[1])
  if any(updates):
    ends.append(end)
  steps, explored = run.series('sparsity/exploration')
  explored = [100 * share for share in explored]
  mark = '.' if len(steps) == 1 else ''
  ax.plot(
      steps, explored, color=COLORS[2], linewidth=1.8, marker=mark,
      clip_on=False,
  )
  ends.append((steps[-1], explored[-1], 'explored', COLORS[2]))
  return ends

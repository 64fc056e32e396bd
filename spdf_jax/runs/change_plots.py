"""The plot of how a run's masks change."""

from collections.abc import Mapping
from typing import Any

from spdf_jax.runs.curves import levels_of
from spdf_jax.runs.mask_changes import changes_in
from spdf_jax.runs.mask_changes import is_tracked
from spdf_jax.runs.plot_style import COLORS
from spdf_jax.runs.plot_style import GREY
from spdf_jax.runs.plot_style import label_ends
from spdf_jax.runs.plot_style import label_spans
from spdf_jax.runs.plot_style import new_figure
from spdf_jax.runs.plot_style import polish
from spdf_jax.runs.plots import mark_phases
from spdf_jax.runs.workdirs import Run


def plot_mask_changes(runs: Mapping[str, Run]) -> Any:
  """Plots zeros, survival and exploration over steps, a panel for each run.

  Zeros asked for are a line, those found at evaluations are points on it; a
  point of survival is the share of active weights that survived one change;
  exploration is the share of weights that were ever active.

  Args:
    runs: Runs by label; those whose masks were not tracked are left out.

  Returns:
    A `matplotlib.figure.Figure`.

  Raises:
    ImportError: matplotlib is not installed.

  Example:
    >>> from spdf_jax.runs.workdirs import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.5, 64, 5.0, 9.0)
    >>> rows = [{'step': s, 'sparsity/exploration': 0.5} for s in (1, 4)]
    >>> figure = plot_mask_changes({'toy': Run('toy', (phase,), rows)})
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['zeros', 'explored', 'p']
  """
  runs = {label: run for label, run in runs.items() if is_tracked(run)}
  count = max(len(runs), 1)
  figure = new_figure(7, 0.6 + 2.6 * count)
  panels = figure.subplots(count, sharex=True, squeeze=False)[:, 0]
  last = max((run.phases[-1].end for run in runs.values()), default=1)
  for ax, (label, run) in zip(panels, runs.items()):
    ax.set(xlim=(0, last), ylim=(0, 100), ylabel='Per cent of weights')
    ends = _draw(ax, run)
    mark_phases(ax, run)
    polish(ax)
    ax.margins(y=0)
    label_ends(ax, ends, gap=0.1)
    levels = label_spans(ax, [(p.start, p.end, p.name) for p in run.phases])
    ax.set_title(label, loc='left', fontweight='bold', pad=8 + 12 * levels)
  panels[-1].set_xlabel('Step')
  return figure


def _draw(ax: Any, run: Run) -> list[tuple[float, float, str, str]]:
  """Draws a run; returns where its lines end, their names and colours."""
  steps, asked = levels_of(run)
  zeros = [100 * level for level in asked]
  ax.plot(steps, zeros, color=GREY, linewidth=1.4, drawstyle='steps-post')
  found, levels = run.series('sparsity/sparsified')
  style = {'clip_on': False, 'zorder': 3}
  ax.plot(
      found, [100 * x for x in levels], '.', color=GREY, markersize=7, **style
  )
  ends = [(steps[-1], zeros[-1], 'zeros', GREY)]
  changes = [changes_in(run, phase) for phase in run.phases]
  for inside in filter(None, changes):
    survival = [100 * change.survival for change in inside]
    ax.plot(
        [c.step for c in inside], survival, color=COLORS[1], linewidth=0.8,
        marker='o', markersize=3.5, **style,
    )
    end = (inside[-1].step, survival[-1], 'survival', COLORS[1])
  if any(changes):
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

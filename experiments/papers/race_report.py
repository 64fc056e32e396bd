"""Report of a race: table, results and figure."""

from collections.abc import Mapping, Sequence
import contextlib
import pathlib
from typing import Any, NamedTuple

from experiments.papers import arms
from experiments.papers import json_files
from experiments.papers.paired import t_interval
from experiments.pool import pool
from spdf_jax import files
from spdf_jax.runs import markdown
from spdf_jax.runs import style


class Budget(NamedTuple):
  """What each run may take: an amount, in seconds or in FLOPs."""

  amount: float
  unit: str


class PhaseCost(NamedTuple):
  """Steps of a phase of a racer, and the cost of each in the budget's unit."""

  steps: int
  cost: float


def spent(phases: Sequence[PhaseCost], step: float) -> float:
  """Returns the cost of the first steps of a run, in the unit of its phases.

  Example:
    >>> spent([PhaseCost(10, 1.0), PhaseCost(10, 3.0)], 12)
    16.0
  """
  total = 0.0
  for phase in phases:
    total += min(step, phase.steps) * phase.cost
    step = max(step - phase.steps, 0)
  return total


def write_report(
    folder: pathlib.Path, budget: Budget, entries: Sequence[pool.Entry],
    phases: Mapping[str, Sequence[PhaseCost]], done: pool.Done,
) -> str:
  """Writes table, results and figure; returns the table."""
  chosen = pool.choose_all(entries, done)
  outcomes = {
      entry.arm: [
          done[pool.Job(entry.arm, chosen[entry.arm], seed).name]
          for seed in range(1, entry.seeds + 1)
      ]
      for entry in entries
  }
  first = [outcome[arms.PRETRAINED] for outcome in outcomes[entries[0].arm]]
  rows = []
  for arm, runs in outcomes.items():
    losses = [outcome[arms.PRETRAINED] for outcome in runs]
    mean, deviation, *_ = t_interval(losses)
    spread = f' ± {deviation:.4f}' if len(losses) > 1 else ''
    difference = markdown.MISSING
    if arm != entries[0].arm:
      paired = t_interval([x - y for x, y in zip(losses, first)])
      difference = f'{paired.mean:+.4f}'
      if len(losses) > 1:
        difference += f' ({paired.low:+.4f} to {paired.high:+.4f})'
    rate = chosen[arm].get('rate')
    longest = max(runs, key=lambda outcome: outcome['steps'])
    steps = longest['steps']  # A run that diverged has fewer steps.
    rows.append([
        arm.folder, markdown.MISSING if rate is None else f'{rate:g}',
        str(len(losses)),
        f'{steps:,}', f'{spent(phases[arm.folder], steps):.4g}',
        f'{longest["flops"]:.3g}', f'{mean:.4f}{spread}', difference,
    ])
  columns = ['config', 'rate', 'seeds', 'steps', budget.unit, 'FLOPs in all',
             'validation loss', 'minus the first (95 %)']
  report = '\n'.join([
      f'# Race for {budget.amount:g} {budget.unit}', '',
      'Losses in nats per token, mean ± deviation over seeds, at the end of '
      "each config's own schedule; differences are paired by seed.", '',
      markdown.markdown_table(columns, rows, numbers=columns[1:]), '',
  ])
  files.write_atomically(folder / 'table.md', report)
  json_files.write_json(folder / 'results.json', {
      'budget': budget._asdict(), 'phases': phases, 'runs': dict(done),
  }, indent=1)
  with contextlib.suppress(ImportError):  # matplotlib is optional.
    figure = plot_race({
        arm.folder: [
            [(spent(phases[arm.folder], step), loss)
             for step, _, loss in outcome.get('curve', ())]
            for outcome in runs
        ]
        for arm, runs in outcomes.items()
    }, budget.unit)
    style.save(figure, folder / 'race.png')
  return f'{report}\n{folder}: table.md, results.json, race.png'


def plot_race(
    curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]], unit: str
) -> Any:
  """Plots loss over the budget, a line per run, without its first tenth.

  Args:
    curves: Points of budget spent and loss, one list for each run, by name.
    unit: Unit of the budget.

  Returns:
    A figure.

  Raises:
    ImportError: matplotlib is not installed.
  """
  figure = style.new_figure(6, 3.8)
  ax = figure.subplots()
  for i, (name, runs) in enumerate(curves.items()):
    for j, curve in enumerate(runs):
      ax.plot(
          *zip(*(point for point in curve if point[0] > 0.1 * curve[-1][0])),
          color=style.line_style(i)['color'], linewidth=1.2, alpha=0.8,
          label=name if j == 0 else None,
      )
  ax.set_xlabel(
      'Training seconds at the measured pace' if unit == 'seconds'
      else 'Training FLOPs'
  )
  ax.set_ylabel('Validation loss (nats per token)')
  ax.legend(frameon=False, fontsize=8)
  style.polish(ax)
  return figure

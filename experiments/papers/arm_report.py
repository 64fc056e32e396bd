"""Report of arms: outcomes of the evaluation seeds, and tables of them."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from experiments.papers import paired
from experiments.pool import pool
from experiments.pool.pool import Done
from experiments.pool.pool import Entry
from experiments.pool.pool import Job
from experiments.pool.pool import Outcome
from spdf_jax.runs import markdown
from spdf_jax.runs import read

_UNITS = (
    'Units cut off are inputs and outputs that keep no weight. Variance\n'
    'is that of kept weights per input (output), over that of a random mask.'
)


def measured(
    entries: Sequence[Entry], done: Done, again: bool = False
) -> dict[Any, dict[int, Outcome]]:
  """Collects the outcomes of the evaluation seeds, by arm and seed.

  Args:
    entries: All entries of the pool.
    done: Outcomes of finished runs.
    again: Whether the outcomes are those of repetitions.

  Returns:
    Outcomes of runs at the chosen hyperparameters, without the seeds that only
    chose them.

  Example:
    >>> from experiments.papers.arms import Arm
    >>> measured([Entry(Arm('init'), {}, 1)], {
    ...     'init/seed=0': {'loss': 2.0}, 'init/seed=1': {'loss': 3.0}})
    ... # doctest: +ELLIPSIS
    {Arm(...): {1: {'loss': 3.0}}}
  """
  outcomes_of: dict[Any, dict[int, Outcome]] = {}
  chosen = pool.choose_all(entries, done)
  for entry in {entry.arm: entry for entry in entries}.values():
    point = chosen[entry.arm]
    if point is None:
      continue
    names = {
        seed: Job(entry.arm, point, seed, again=again).name
        for seed in entry.evaluation_seeds
    }
    outcomes = {s: done[name] for s, name in names.items() if name in done}
    if outcomes:
      outcomes_of[entry.arm] = outcomes
  return outcomes_of


def format_arms(
    entries: Sequence[Entry],
    done: Done,
    measurements: Mapping[Any, Mapping[int, Outcome]],
) -> str:
  """Formats a table of arms: chosen hyperparameters, loss and FLOPs.

  Args:
    entries: All entries.
    done: Outcomes of finished runs.
    measurements: Result of `measured`.

  Returns:
    A Markdown table; FLOPs are those of the run itself, without the runs that
    it started from.

  Example:
    >>> from experiments.papers.arms import Arm
    >>> done = {f'dense/rate=1,seed={s}': {
    ...     'validation/loss': 2.0 + s, 'flops': 1e9} for s in range(3)}
    >>> entries = [Entry(Arm('dense'), {'rate': (1,)}, 2, extend=False)]
    >>> print(format_arms(entries, done, measured(entries, done)))
    | arm | chosen | measure | mean ± deviation | seeds | FLOPs |
    | --- | --- | --- | ---: | ---: | ---: |
    | dense | rate 1 | validation/loss | 3.5000 ± 0.7071 | 2 | 1.00e+09 |
  """
  rows = []
  chosen = pool.choose_all(entries, done)
  for arm in dict.fromkeys(entry.arm for entry in entries):
    outcomes = list(measurements.get(arm, {}).values())
    if not outcomes or arm.metric not in outcomes[0]:
      continue
    mean, deviation, *_ = paired.t_interval([o[arm.metric] for o in outcomes])
    spread = markdown.MISSING if math.isnan(deviation) else f'{deviation:.4f}'
    rows.append([
        markdown.escape(arm.name),
        markdown.escape(_text(chosen[arm])) or markdown.MISSING, arm.metric,
        f'{mean:.4f} ± {spread}', str(len(outcomes)),
        f'{outcomes[0]["flops"]:.2e}',
    ])
  return markdown.markdown_table(
      ['arm', 'chosen', 'measure', 'mean ± deviation', 'seeds', 'FLOPs'],
      rows, numbers=['mean ± deviation', 'seeds', 'FLOPs'],
  )


def format_units(
    measurements: Mapping[Any, Mapping[int, Outcome]]
) -> str | None:
  """Formats a table of the units of final masks, of arms whose masks move.

  Args:
    measurements: Result of `measured`.

  Returns:
    A Markdown table and its legend: means over the seeds that did not diverge;
    None if no arm's masks move.

  Example:
    >>> from experiments.papers.arms import Arm
    >>> units = dict(zip(read.UNIT_STATISTICS, (0.0125, 40.0, 20.0)))
    >>> done = {1: units | {'validation/loss': 2.0}}
    >>> print(format_units({Arm('rigl', 0.8): done, Arm('dense'): {}}))
    | arm | units cut off | variance, inputs | variance, outputs | seeds |
    | --- | ---: | ---: | ---: | ---: |
    | rigl-80 | 1.2% | 40.0 | 20.0 | 1 |
    <BLANKLINE>
    Units cut off are inputs and outputs that keep no weight. Variance
    is that of kept weights per input (output), over that of a random mask.
  """
  rows = []
  for arm, outcomes in measurements.items():
    values = [
        [outcome[name] for name in read.UNIT_STATISTICS]
        for outcome in outcomes.values()
        if read.UNIT_STATISTICS[0] in outcome
        and math.isfinite(outcome[arm.metric])
    ]
    if values:
      cut_off, *variations = (sum(v) / len(v) for v in zip(*values))
      rows.append([
          markdown.escape(arm.name), f'{cut_off:.1%}',
          *(f'{value:.1f}' for value in variations), str(len(values)),
      ])
  if not rows:
    return None
  headings = [
      'units cut off', 'variance, inputs', 'variance, outputs', 'seeds'
  ]
  table = markdown.markdown_table(['arm', *headings], rows, numbers=headings)
  return f'{table}\n\n{_UNITS}'


def format_choices(entries: Sequence[Entry], done: Done) -> str:
  """Formats a table of all points of the grids that tuning seeds have tried.

  Args:
    entries: All entries.
    done: Outcomes of finished runs.

  Returns:
    A Markdown table of the arms whose grids are finished; the chosen point is
    bold.

  Example:
    >>> from experiments.papers.arms import Arm
    >>> entry = Entry(Arm('dense'), {'rate': (1, 2)}, 1, extend=False)
    >>> print(format_choices([entry], {
    ...     'dense/rate=1,seed=0': {'validation/loss': 3.0},
    ...     'dense/rate=2,seed=0': {'validation/loss': 4.0}}))
    | arm | tried on seed 0 |
    | --- | --- |
    | dense | **rate 1: 3.0000**; rate 2: 4.0000 |
  """
  rows = []
  chosen = pool.choose_all(entries, done)
  for entry in {entry.arm: entry for entry in entries}.values():
    points = pool.tried(entry, done)
    losses = [pool.loss_of(entry, point, done) for point in points]
    if not entry.grid or None in losses or entry.arm.rate_of is not None:
      continue
    cells = []
    for point, loss in zip(points, losses):
      text = markdown.escape(f'{_text(point)}: {loss:.4f}')
      cells.append(f'**{text}**' if point == chosen[entry.arm] else text)
    rows.append([markdown.escape(entry.arm.name), '; '.join(cells)])
  seeds = sorted({seed for e in entries for seed in e.tuning_seeds})
  noun = 'seed' if len(seeds) == 1 else 'mean of seeds'
  numbers = ', '.join(map(str, seeds))
  return markdown.markdown_table(['arm', f'tried on {noun} {numbers}'], rows)


def _text(point: Mapping[str, Any]) -> str:
  return ', '.join(
      f'{name} {value:g}' if isinstance(value, float) else f'{name} {value}'
      for name, value in point.items()
  )

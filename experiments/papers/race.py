"""A race by the clock: equal seconds for dense and sparse pre-training."""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import json
import math
import pathlib
import statistics
from typing import Any
from typing import NamedTuple

from experiments.benchmarks.machine import describe_machine
from experiments.papers import pool_data
from experiments.papers import pool_runs
from experiments.papers.arms import Arm
from experiments.papers.arms import PRETRAINED
from experiments.papers.pace import step_seconds
from experiments.papers.paired import t_interval
from experiments.papers.pool import choose_all
from experiments.papers.pool import Done
from experiments.papers.pool import Entry
from experiments.papers.pool import Job
from experiments.papers.pool import Outcome
from experiments.papers.race_plots import plot_race
from experiments.papers.reproduction import check_same
from experiments.papers.reproduction import identify
from experiments.papers.reproduction import protocol_commit
from experiments.papers.reproduction import run_pool
from experiments.papers.scales import DENSE
from experiments.papers.scales import FAIR
from experiments.papers.scales import parameters
from experiments.papers.scales import Scale
from experiments.papers.scales import Size
from experiments.papers.scales import STATIC_75
from experiments.papers.scales import STATIC_90
from experiments.papers.scales import VARIABLE
from spdf_jax.evaluation.markdown import markdown_table
from spdf_jax.evaluation.markdown import MISSING
from spdf_jax.training.metrics import write_atomically

ARMS = (DENSE, STATIC_75, VARIABLE)
_WIDTHS = 128, 256
_SEEDS = 3
_SHARE = 0.25  # Of the budget, in the runs that tune rates.
_EVALUATIONS = 20
_MICRO_BATCHES = 1, 2, 4


class Pace(NamedTuple):
  """How fast the steps of a width are.

  Attributes:
    micro_batches: Parts of a batch: those a dense step is fastest with.
    seconds: Median seconds of a step, by sparsity in percent: 0, 75 and 90.
  """

  micro_batches: int
  seconds: Mapping[str, float]

  def budget(self, scale: Scale) -> float:
    """Returns the seconds that the dense arm needs at the scale's length."""
    return scale.steps(DENSE) * self.seconds['0']

  def speeds(self) -> dict[str, float]:
    """Returns how many steps an arm takes while the dense one takes one."""
    dense = self.seconds['0']
    variable = 5 / 6 * self.seconds['90'] + 1 / 6 * dense
    return {
        STATIC_75.kind: dense / self.seconds['75'],
        VARIABLE.kind: dense / variable,
    }


def race(data: str, workdir: pathlib.Path, output: pathlib.Path) -> str:
  """Runs the race at both widths, as far as it has not been run yet.

  Args:
    data: The folder of the data.
    workdir: Folder of the runs; finished ones are not run again.
    output: Folder of `table.md`, `race.png` and, for each width, a JSON file
      with the pace and all outcomes, which are not measured again.

  Returns:
    The report.

  Raises:
    ValueError: data are missing, or the runs that are there are of another
      protocol.
    InterruptedError: a signal came; everything is saved.
  """
  prepared = pool_data.prepare(
      dataclasses.replace(FAIR, tasks={}), data, workdir
  )
  identity = identify(FAIR, prepared.fingerprints)
  check_same(workdir / 'scale.json', identity)
  output.mkdir(parents=True, exist_ok=True)
  files = {
      width: _Results(
          output / f'width-{width}.json', identity,
          workdir / f'width-{width}',
      )
      for width in _WIDTHS
  }
  narrow, wide = _WIDTHS
  scale = _scale(narrow, FAIR.tokens_per_parameter)
  pace = files[narrow].pace(scale, prepared)
  budget = pace.budget(scale)
  scale = _paced(scale, pace)
  tuning = [dataclasses.replace(arm, share=_SHARE) for arm in ARMS]
  rates = {'rate': scale.sizes[''].rates}
  stage = {'stage': ('continue',)}
  grids = [
      rates | (stage if arm.method == 'variable' else {}) for arm in ARMS
  ]
  entries = [
      Entry(Arm('init'), {}, _SEEDS),
      *(Entry(arm, grid, 0) for arm, grid in zip(tuning, grids)),
      *(
          Entry(dataclasses.replace(arm, rate_of=tuned), grid, _SEEDS)
          for arm, tuned, grid in zip(ARMS, tuning, grids)
      ),
  ]
  found = files[narrow].run(scale, prepared, entries)
  chosen = choose_all(entries, found)
  legs = [_Leg(narrow, budget, scale, pace, entries, found)]
  write_results(legs, output)

  scale = _scale(wide, FAIR.tokens_per_parameter)
  pace = files[wide].pace(scale, prepared)
  share = 2 * budget / pace.budget(scale)
  scale = _paced(_scale(wide, share * FAIR.tokens_per_parameter), pace)
  pair = [
      Entry(arm, {
          name: (value / 2 if name == 'rate' else value,)
          for name, value in chosen[tuned].items()
      }, 0, extend=False)
      for arm, tuned in zip(ARMS, tuning) if arm != STATIC_75
  ]
  entries = [Entry(Arm('init'), {}, 0), *pair]
  found = files[wide].run(scale, prepared, entries)
  legs.append(_Leg(wide, 2 * budget, scale, pace, entries, found))
  return write_results(legs, output)


class _Results:
  """The pace and the outcomes of a width, kept in one JSON file.

  Attributes:
    path: The file.
    identity: Identity of the protocol and its data; results of another one
      are ignored.
    workdir: Folder of the runs.
  """

  def __init__(
      self, path: pathlib.Path, identity: Mapping[str, Any],
      workdir: pathlib.Path,
  ):
    self._path = path
    self._workdir = workdir
    found = json.loads(path.read_text('utf-8')) if path.exists() else {}
    if found.get('identity') != identity:
      found = {'identity': identity, 'runs': {}}
    self._found = found

  def pace(self, scale: Scale, prepared: pool_data.Prepared) -> Pace:
    """Times the steps of a width, once."""
    if 'pace' not in self._found:
      self._write(pace=measure_pace(scale, prepared)._asdict())
    return Pace(**self._found['pace'])

  def run(
      self, scale: Scale, prepared: pool_data.Prepared,
      entries: Sequence[Entry],
  ) -> Done:
    """Runs entries one at a time on all cores; arms of a seed in turn."""
    runner = pool_runs.Runner(
        scale, str(self._workdir), prepared.corpus, '', _EVALUATIONS
    )
    known = lambda: (
        self._found['runs'] | pool_runs.read_outcomes(self._workdir)
    )
    try:
      return run_pool(
          runner, entries, known(), cores=(), workers=1,
          select=lambda jobs: sorted(jobs, key=lambda job: job.seed),
      )
    finally:
      self._write(runs=known())

  def _write(self, **fields: Any) -> None:
    self._found |= fields
    write_atomically(self._path, json.dumps(self._found, indent=1) + '\n')


class _Leg(NamedTuple):
  """The race at one width."""

  width: int
  budget: float
  scale: Scale
  pace: Pace
  entries: Sequence[Entry]
  done: Done

  def outcomes(self) -> dict[Arm, dict[int, Outcome]]:
    """Returns what the arms' full runs have measured, by seed."""
    chosen = choose_all(self.entries, self.done)
    found: dict[Arm, dict[int, Outcome]] = {}
    for entry in self.entries:
      if entry.arm.share != 1 or entry.arm.method == 'init':
        continue
      for seed in range(1, entry.seeds + 1) if entry.seeds else (0,):
        name = Job(entry.arm, chosen[entry.arm], seed).name
        plain = dataclasses.replace(entry.arm, rate_of=None)
        found.setdefault(plain, {})[seed] = self.done[name]
    return found


def _scale(width: int, tokens_per_parameter: float) -> Scale:
  return dataclasses.replace(
      FAIR, sizes={'': Size(width, FAIR.sizes['large'].rates)}, blocks=(),
      stages=('continue',), tokens_per_parameter=tokens_per_parameter,
      tasks={}, demonstration=True,
  )


def _paced(scale: Scale, pace: Pace) -> Scale:
  return dataclasses.replace(
      scale, speeds=pace.speeds(), micro_batches=pace.micro_batches
  )


def measure_pace(scale: Scale, prepared: pool_data.Prepared) -> Pace:
  """Times the steps of a width in turn.

  Args:
    scale: The scale; its main size is timed.
    prepared: The prepared corpus.

  Returns:
    The pace.
  """
  in_parts = lambda n: dataclasses.replace(scale, micro_batches=n)
  dense = step_seconds([(in_parts(n), DENSE) for n in _MICRO_BATCHES], prepared)
  parts = _MICRO_BATCHES[dense.index(min(dense))]
  seconds = step_seconds([
      (in_parts(parts), arm) for arm in (DENSE, STATIC_75, STATIC_90)
  ], prepared)
  return Pace(parts, dict(zip(('0', '75', '90'), seconds)))


def write_results(legs: Sequence[_Leg], output: pathlib.Path) -> str:
  """Writes table, numbers and figure; returns the table."""
  machine = describe_machine()
  lines = [
      '# The race by the clock', '',
      'Equal training seconds for every arm, all cores, evaluation and '
      'compilation not counted. Losses are of the validation text, in nats per '
      'byte, at the end of each arm\'s own schedule.', '',
      *(f'* {name}: {machine[name]}' for name in
        ('processor', 'cores', 'jax', 'python')),
      f'* protocol: commit {protocol_commit()}',
  ]
  for leg in legs:
    lines += ['', f'## Width {leg.width}', '', *_describe(leg)]
  report = '\n'.join(lines) + '\n'
  write_atomically(output / 'table.md', report)
  with contextlib.suppress(ImportError):  # The table is whole without it.
    plot_race({leg.width: leg.outcomes() for leg in legs}).savefig(
        output / 'race.png'
    )
  return report


def _describe(leg: _Leg) -> list[str]:
  scale, found = leg.scale, leg.outcomes()
  count = parameters(leg.width, scale.layers, scale.length, scale.vocab_size)
  seconds = ', '.join(
      f'{1000 * value:.0f} ms at {name} %'
      for name, value in leg.pace.seconds.items()
  )
  lines = [
      f'{count:,} parameters; budget {leg.budget:.0f} s; steps measured '
      f'before take {seconds}, in {leg.pace.micro_batches} parts of a batch. '
      f'The dense arm reads {scale.tokens_per_parameter:.1f} tokens per '
      'parameter'
      + ('.' if scale.tokens_per_parameter >= 20 else ': under-trained.'), '',
  ]
  chosen = choose_all(leg.entries, leg.done)
  rates = {
      dataclasses.replace(arm, rate_of=None): point
      for arm, point in chosen.items()
  }
  dense = found[DENSE]
  rows = []
  for arm, outcomes in found.items():
    mean = lambda key, outcomes=outcomes: statistics.fmean(
        outcome[key] for outcome in outcomes.values()
    )
    losses = [outcome[PRETRAINED] for outcome in outcomes.values()]
    against = MISSING
    if arm != DENSE:
      interval = t_interval([
          outcomes[s][PRETRAINED] - dense[s][PRETRAINED]
          for s in outcomes.keys() & dense.keys()
      ])
      against = f'{interval.mean:+.4f}'
      if math.isfinite(interval.low):
        against += f' ({interval.low:+.4f} to {interval.high:+.4f})'
    spread = f' ± {statistics.stdev(losses):.4f}' if len(losses) > 1 else ''
    steps = mean('steps')
    rows.append([
        arm.name, f'{rates[arm]["rate"]:g}', str(len(losses)),
        f'{mean("training_seconds"):.0f}', f'{steps:,.0f}',
        f'{steps * scale.batch_size * scale.length / 1e6:.1f}M',
        f'{mean("flops"):.2e}',
        f'{statistics.fmean(losses):.4f}{spread}', against,
    ])
  columns = ['arm', 'rate', 'seeds', 'seconds', 'steps', 'tokens', 'FLOPs',
             'loss', 'less dense (95 %)']
  return [*lines, markdown_table(columns, rows, numbers=columns[1:])]

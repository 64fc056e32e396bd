"""Report of the race for equal seconds: a table and a figure."""

from collections.abc import Sequence
import contextlib
import dataclasses
import math
import pathlib
import statistics
from typing import NamedTuple

from experiments.benchmarks.machine import describe_machine
from experiments.papers.arms import Arm
from experiments.papers.arms import PRETRAINED
from experiments.papers.pace import Pace
from experiments.papers.paired import t_interval
from experiments.papers.pool import choose_all
from experiments.papers.pool import Done
from experiments.papers.pool import Entry
from experiments.papers.pool import Job
from experiments.papers.pool import Outcome
from experiments.papers.pool_identity import protocol_commit
from experiments.papers.race_plots import plot_race
from experiments.papers.scales import DENSE
from experiments.papers.scales import parameters
from experiments.papers.scales import Scale
from spdf_jax.runs.markdown import markdown_table
from spdf_jax.runs.markdown import MISSING
from spdf_jax.training.metrics import write_atomically


class Leg(NamedTuple):
  """The race at one width.

  Attributes:
    width: Width of the models.
    budget: Seconds of training of every arm.
    scale: Scale of the runs at this width.
    pace: Measured seconds of the steps.
    entries: All entries of the pool.
    done: Outcomes of finished runs.
  """

  width: int
  budget: float
  scale: Scale
  pace: Pace
  entries: Sequence[Entry]
  done: Done

  def outcomes(self) -> dict[Arm, dict[int, Outcome]]:
    """Returns the outcomes of full-length runs, by arm and seed."""
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

  def curves(self) -> dict[Arm, list[list[tuple[float, float]]]]:
    """Returns seconds and losses of full-length runs, by arm and run."""
    return {
        arm: [
            [
                (self.pace.seconds_until(arm, step, outcome['steps']), loss)
                for step, _, loss in outcome['curve']
            ]
            for outcome in outcomes.values() if 'curve' in outcome
        ]
        for arm, outcomes in self.outcomes().items()
    }


def write_report(legs: Sequence[Leg], output: pathlib.Path) -> str:
  """Writes the report and the figure of a race; returns the report.

  Without matplotlib no figure is written.

  Args:
    legs: The race at each width.
    output: Folder of `table.md` and `race.png`.

  Returns:
    Markdown.
  """
  machine = describe_machine()
  lines = [
      '# Race for equal seconds', '',
      'Every arm trains for as many steps as take equal seconds at the pace '
      'that was measured before on idle cores, all of which a step used; '
      'seconds are counted at this pace, without evaluation and compilation. '
      'Runs were then trained one on each core, not alone as the protocol '
      'plans, and the seconds that this took are in the next column. Losses '
      'are on the validation text, in nats per byte, at the end of each '
      "arm's own schedule.", '',
      f'* pace: {legs[0].pace.machine}',
      *(f'* {name}: {machine[name]}' for name in ('jax', 'python')),
      f'* protocol: commit {protocol_commit(legs[0].scale.protocol)}',
  ]
  for leg in legs:
    lines += ['', f'## Width {leg.width}', '', *_describe(leg)]
  report = '\n'.join(lines) + '\n'
  write_atomically(output / 'table.md', report)
  with contextlib.suppress(ImportError):  # matplotlib is optional.
    plot_race({leg.width: leg.curves() for leg in legs}).savefig(
        output / 'race.png'
    )
  return report


def _describe(leg: Leg) -> list[str]:
  scale, found = leg.scale, leg.outcomes()
  count = parameters(scale.model(''))
  each = ', '.join(
      f'{1000 * value:.0f} ms at {name} %'
      for name, value in leg.pace.seconds.items()
  )
  lines = [
      f'{count:,} parameters; budget {leg.budget:.0f} s; a step, timed before '
      f'the race, takes {each} (micro-batches: {leg.pace.micro_batches}). '
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
    seconds = leg.pace.seconds_until(arm, steps, steps)
    rows.append([
        arm.name, f'{rates[arm]["rate"]:g}', str(len(losses)),
        f'{seconds:.0f}', f'{mean("training_seconds"):.0f}', f'{steps:,.0f}',
        f'{steps * scale.batch_size * scale.length / 1e6:.1f}M',
        f'{mean("flops"):.2e}',
        f'{statistics.fmean(losses):.4f}{spread}', against,
    ])
  columns = ['arm', 'rate', 'seeds', 'seconds', 'on one core', 'steps',
             'tokens', 'FLOPs', 'loss', 'minus dense (95 %)']
  return [*lines, markdown_table(columns, rows, numbers=columns[1:])]

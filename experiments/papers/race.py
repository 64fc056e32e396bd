"""Race: dense and sparse pre-training for equal seconds."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import os
import pathlib
from typing import Any

from experiments.papers import pool_data
from experiments.papers import pool_runs
from experiments.papers.arms import Arm
from experiments.papers.json_files import read_json
from experiments.papers.json_files import write_json
from experiments.papers.pace import measure_pace
from experiments.papers.pace import Pace
from experiments.papers.pool import choose_all
from experiments.papers.pool import Done
from experiments.papers.pool import Entry
from experiments.papers.pool_identity import check_same
from experiments.papers.pool_identity import identify
from experiments.papers.pool_processes import run_pool
from experiments.papers.race_report import Leg
from experiments.papers.race_report import write_report
from experiments.papers.scales import DENSE
from experiments.papers.scales import FAIR
from experiments.papers.scales import Scale
from experiments.papers.scales import Size
from experiments.papers.scales import STATIC_75
from experiments.papers.scales import VARIABLE
from spdf_jax.files import lock_folder

ARMS = (DENSE, STATIC_75, VARIABLE)
_WIDTHS = 128, 256
_SEEDS = 3
_SHARE = 0.25
"""Length of the runs that tune learning rates, as a share of the budget."""
_EVALUATIONS = 20


def race(data: str, workdir: pathlib.Path, output: pathlib.Path) -> str:
  """Runs the unfinished runs of the race, at both widths.

  The steps of the arms are timed first, at both widths and on all cores. Every
  arm then trains for the number of steps that take equal seconds at this pace,
  so that the outcome does not depend on what else the machine does, or on which
  machine resumes the race; runs are trained one on each core.

  Args:
    data: Folder of the data.
    workdir: Folder of the runs; finished ones are not run again.
    output: Folder of `table.md`, `race.png` and, for each width, a JSON file
      with the pace and all outcomes, which are not measured again.

  Returns:
    The report, and a line that names the files.

  Raises:
    ValueError: data are missing, `workdir` or `output` has runs of another
      protocol or pace, or another process trains there.
    InterruptedError: a signal arrived; everything is saved.
  """
  prepared = pool_data.prepare(
      dataclasses.replace(FAIR, tasks={}), data, workdir
  )
  lock_folder(workdir, 'workdir')  # Held until the process ends.
  identity = identify(FAIR, prepared.fingerprints)
  check_same(workdir / 'scale.json', identity)
  output.mkdir(parents=True, exist_ok=True)
  files = {
      width: _Results(width, output, workdir, identity) for width in _WIDTHS
  }
  paces = {width: files[width].pace(prepared) for width in _WIDTHS}
  narrow, wide = _WIDTHS
  scale = _scale(narrow, FAIR.tokens_per_parameter)
  pace = paces[narrow]
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
  legs = [Leg(narrow, budget, scale, pace, entries, found)]
  write_report(legs, output)

  scale = _scale(wide, FAIR.tokens_per_parameter)
  pace = paces[wide]
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
  legs.append(Leg(wide, 2 * budget, scale, pace, entries, found))
  report = write_report(legs, output)
  return f'{report}\n{output}: table.md, race.png, width-*.json'


class _Results:
  """Pace and outcomes at a width, stored in a JSON file.

  Args:
    width: The width.
    output: Folder of the file.
    workdir: Folder of the runs at all widths. The folder of a width has the
      pace by which the steps of its runs were chosen.
    identity: Identity of the protocol and its data.

  Raises:
    ValueError: the file has another identity.
  """

  def __init__(
      self, width: int, output: pathlib.Path, workdir: pathlib.Path,
      identity: Mapping[str, Any],
  ):
    self._width = width
    self._path = output / f'width-{width}.json'
    self._workdir = workdir / f'width-{width}'
    found = read_json(self._path) if self._path.exists() else {}
    if found and found.get('identity') != identity:
      raise ValueError(
          f'{self._path} is of a race of another protocol or other data; give '
          'another output, or move it away.'
      )
    self._found = found or {'identity': identity, 'runs': {}}

  def pace(self, prepared: pool_data.Prepared) -> Pace:
    """Returns the pace, which is measured once.

    Raises:
      ValueError: runs in the workdir were made at another pace.
    """
    path = self._workdir / 'pace.json'
    if 'pace' not in self._found:
      # Timed on few tokens: the corpus is too short for the widest models.
      found = read_json(path) if path.exists() else (
          measure_pace(_scale(self._width, 1), prepared)._asdict()
      )
      self._write(pace=found)
    check_same(path, self._found['pace'])
    return Pace(**self._found['pace'])

  def run(
      self, scale: Scale, prepared: pool_data.Prepared,
      entries: Sequence[Entry],
  ) -> Done:
    """Runs entries, one on each core and all arms of a seed in a row."""
    cores = sorted(os.sched_getaffinity(0))
    runner = pool_runs.Runner(
        scale, str(self._workdir), prepared.corpus, '',
        evaluations=_EVALUATIONS,
    )
    known = lambda: (
        self._found['runs'] | pool_runs.read_outcomes(self._workdir)
    )
    try:
      return run_pool(
          runner, entries, known(), cores, len(cores),
          select=lambda jobs: sorted(jobs, key=lambda job: job.seed),
      )
    finally:
      self._write(runs=known())

  def _write(self, **fields: Any) -> None:
    self._found |= fields
    write_json(self._path, self._found, indent=1)


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

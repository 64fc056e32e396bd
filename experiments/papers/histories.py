"""Histories: all launches that led to a checkpoint, read as one run."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import statistics
from typing import Any

from spdf_jax.runs import read
from spdf_jax.runs.ancestry import Ancestry
from spdf_jax.runs.read import PhaseRecord
from spdf_jax.runs.read import RunRecord
from spdf_jax.training.workdir import find_checkpoint
from spdf_jax.training.workdir import split_source

_EXPLORED = 'sparsity/exploration'


def read_history(ancestry: Ancestry) -> RunRecord:
  """Reads all launches of an ancestry as one run.

  Args:
    ancestry: Result of `read_ancestry`.

  Returns:
    A run with the phases and rows of all launches and consecutive steps.

  Raises:
    FileNotFoundError: a workdir lacks a file.
    ValueError: the content of a file is invalid.
  """
  runs = []
  for source in ancestry.sources:
    workdir, phase, which = split_source(source)
    run = read.read_run(workdir)
    if which:
      run = run.until(int(find_checkpoint(source).name))
    elif phase:
      run = run.until(next(p.end for p in run.phases if p.name == phase))
    runs.append(run)
  return join_runs(runs)


def join_runs(runs: Sequence[RunRecord]) -> RunRecord:
  """Joins launches, each of which continued from the end of the one before.

  Rows that a launch logged at step 0 are left out, since the launch before it
  logged the same step. Every launch starts a new count of the weights that were
  ever kept: after a dense phase in an earlier launch all of them were;
  otherwise the fraction is unknown and left out.

  Args:
    runs: Launches in order, at least one.

  Returns:
    A run with the name, sizes and generations of the last one.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> run = RunRecord('toy', (phase,), ({'step': 4, 'train/loss': 2.0},))
    >>> joined = join_runs([run, run])
    >>> [p.start for p in joined.phases], joined.series('train/loss')
    ([0, 4], ([4, 8], [2.0, 2.0]))
  """
  phases: list[PhaseRecord] = []
  rows: list[dict[str, Any]] = []
  for run in runs:
    offset = phases[-1].end if phases else 0
    phases += [_later(phase, offset) for phase in run.phases]
    rows += [
        _explored(row, phases[:-len(run.phases)])
        | {'step': row['step'] + offset}
        for row in run.rows if row['step'] or not offset
    ]
  return dataclasses.replace(
      runs[-1], phases=tuple(phases), rows=tuple(rows)
  )


def _explored(
    row: Mapping[str, Any], earlier: Sequence[PhaseRecord]
) -> dict[str, Any]:
  """Returns a row with the fraction of weights ever kept in any launch.

  The fraction is left out if it is unknown.
  """
  row = dict(row)
  if earlier and row.pop(_EXPLORED, None) is not None and any(
      part.sparsity == 0 for phase in earlier for part in phase.parts
  ):
    row[_EXPLORED] = 1.0
  return row


def _later(phase: PhaseRecord, steps: int) -> PhaseRecord:
  return phase._replace(
      start=phase.start + steps,
      mask_updates=tuple(step + steps for step in phase.mask_updates),
      spans=tuple(
          part._replace(start=part.start + steps) for part in phase.spans
      ),
  )


def average_runs(runs: Sequence[RunRecord]) -> RunRecord:
  """Averages the logged values of runs that differ only in their seed.

  Args:
    runs: Runs of one plan, at least one.

  Returns:
    The first run, with rows that have the means of all numbers that every run
    has logged at that step.

  Example:
    >>> toy = lambda loss: RunRecord(
    ...     'toy', (), ({'step': 4, 'train/loss': loss},))
    >>> average_runs([toy(2.0), toy(3.0)]).rows
    ({'step': 4, 'train/loss': 2.5},)
  """
  others = [{row['step']: row for row in run.rows} for run in runs]
  rows = []
  for row in runs[0].rows:
    found = [rows_by_step.get(row['step'], {}) for rows_by_step in others]
    rows.append({'step': row['step']} | {
        key: statistics.fmean(other[key] for other in found)
        for key in row
        if key != 'step'
        and all(isinstance(other.get(key), int | float) for other in found)
    })
  return dataclasses.replace(runs[0], rows=tuple(rows))

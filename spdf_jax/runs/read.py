# SPDX-License-Identifier: Apache-2.0
"""Runs read from disk: plans, metrics, generations and mask updates."""

import bisect
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import logging
import os
import pathlib
from typing import Any, NamedTuple

from spdf_jax import files
from spdf_jax.costs.plan_costs import Span
from spdf_jax.runs import markdown
from spdf_jax.training.loop import mask_record
from spdf_jax.training.loop import metrics

logger = logging.getLogger('spdf_jax')

_IN_PLAN = (
    'name', 'phases', 'model', 'parameters', 'sparsified_parameters', 'bigram',
    'compute', 'totals',
)
"""Fields of a run that `plan.json` has."""


class PhaseRecord(NamedTuple):
  """One phase of a run, as recorded in `plan.json`.

  Attributes:
    name: Name of the phase.
    start: Number of steps before the phase.
    steps: Number of steps in the phase.
    batch_size: Number of sequences in a batch.
    length: Number of tokens in a sequence.
    source: Source of the batches, e.g. `'corpus'` or `'task'`.
    sparsity: Planned fraction of zeros in the sparsified weights at the end of
      the phase.
    tokens: Number of training tokens.
    flops_per_step: Mean training FLOPs of a step.
    dense_flops_per_step: Training FLOPs of a step without sparsity.
    mask_updates: Ranges of the planned steps of mask updates.
    spans: Spans of constant sparsity; empty if the sparsity is constant.
    overall_sparsity: Planned fraction of zeros in all parameters at the end of
      the phase; `None`: unknown.
    notes: Descriptions of what the phase does to weights beyond training them.
  """

  name: str
  start: int
  steps: int
  batch_size: int
  length: int
  source: str
  sparsity: float
  tokens: int
  flops_per_step: float
  dense_flops_per_step: float
  mask_updates: tuple[range, ...] = ()
  spans: tuple[Span, ...] = ()
  overall_sparsity: float | None = None
  notes: tuple[str, ...] = ()

  @property
  def end(self) -> int:
    """Number of steps up to the end of the phase."""
    return self.start + self.steps

  @property
  def parts(self) -> tuple[Span, ...]:
    """Spans of the phase, split where its planned sparsity changes."""
    return self.spans or (
        Span(self.start, self.steps, self.sparsity, self.flops_per_step),
    )

  def until(self, step: int) -> 'PhaseRecord':
    """Returns the phase up to one of its steps."""
    if step >= self.end:
      return self
    parts = tuple(
        part._replace(steps=min(part.steps, step - part.start))
        for part in self.parts if part.start < step
    )
    steps = step - self.start
    return self._replace(
        steps=steps,
        sparsity=parts[-1].sparsity,
        tokens=self.tokens * steps // self.steps,
        flops_per_step=sum(p.steps * p.cost_per_step for p in parts) / steps,
        mask_updates=_between(self.mask_updates, 0, step + 1),
        spans=parts,
    )

  def updates_until(self, step: int) -> int:
    """Returns the number of mask updates after its start, up to a step."""
    ranges = _between(self.mask_updates, self.start + 1, step + 1)
    return sum(map(len, ranges))

  @property
  def sparsities(self) -> tuple[float, float]:
    """Planned sparsity at the first and at the last step."""
    return self.parts[0].sparsity, self.parts[-1].sparsity


def _between(
    ranges: Sequence[range], start: int, stop: int
) -> tuple[range, ...]:
  """Returns the parts of ascending ranges within a range of steps."""
  return tuple(filter(None, (
      x[max(-(-(start - x.start) // x.step), 0):
        max(-(-(stop - x.start) // x.step), 0)]
      for x in ranges
  )))


class SpentBefore(NamedTuple):
  """Cost of other runs up to the checkpoint that a run starts from.

  The past phases of a run that continues another one by `resume` are phases of
  its own plan, so that of those only the seconds are counted here.

  Attributes:
    source: The checkpoint, as the config names it; `''`: there is none.
    is_recorded: Whether the run of the checkpoint could be read.
    steps: Number of steps.
    tokens: Number of training tokens.
    flops: Training FLOPs.
    dense_flops: Training FLOPs of the same steps without sparsity.
    seconds: Training seconds; `None`: unknown.
  """

  source: str = ''
  is_recorded: bool = True
  steps: int = 0
  tokens: int = 0
  flops: float = 0.0
  dense_flops: float = 0.0
  seconds: float | None = 0.0


FROM_SCRATCH = SpentBefore()
"""Nothing was spent for a run that starts from initial parameters."""


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """A run: its plan, and one row of values for each logged step.

  Attributes:
    name: Name of the run.
    phases: Phases of the run, in order.
    rows: Logged values by name, one row for each step with values, in order;
      `'step'` is the number of completed steps.
    generations: Generations by step, each a list of records with `context`,
      `reference` and `generation`.
    model: Sizes of the model by name.
    parameters: Number of parameters.
    sparsified_parameters: Number of parameters in sparsified matrices.
    bigram: Values of the bigram baseline by name, or None without one.
    compute: A sentence on the kernels of the products.
    totals: Planned totals against dense training, see `costs.plan_costs`.
    data: The `corpus`, `tokenizer` and `task` of the config.
    before: Cost of other runs up to the checkpoint that this one starts from.
    masks: The last masks of a run whose masks move, see
      `training.loop.mask_record`; empty for others.

  Example:
    >>> phase = PhaseRecord('dense', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': 2, 'train/loss': 3.0}, {'step': 4, 'train/loss': 2.0}]
    >>> run = RunRecord('toy', (phase,), tuple(rows))
    >>> run.last_step, run.series('train/loss')
    (4, ([2, 4], [3.0, 2.0]))
    >>> run.at_end(phase, 'train/loss')
    (4, 2.0)
  """

  name: str
  phases: tuple[PhaseRecord, ...]
  rows: tuple[Mapping[str, Any], ...]
  generations: Mapping[int, Sequence[Mapping[str, Any]]] = (
      dataclasses.field(default_factory=dict)
  )
  model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  parameters: int = 0
  sparsified_parameters: int = 0
  bigram: Mapping[str, float] | None = None
  compute: str = ''
  totals: Sequence[Mapping[str, Any]] = ()
  data: Mapping[str, str] = dataclasses.field(default_factory=dict)
  before: SpentBefore = FROM_SCRATCH
  masks: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def is_sparse(self) -> bool:
    """Whether a phase is planned with zeros."""
    return any(any(phase.sparsities) for phase in self.phases)

  @property
  def last_step(self) -> int:
    """Number of completed steps in the last row."""
    return self.rows[-1]['step'] if self.rows else 0

  def until(self, step: int) -> 'RunRecord':
    """Returns the run up to a step.

    Example:
      >>> phase = PhaseRecord('dense', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
      >>> run = RunRecord('toy', (phase,), tuple({'step': s} for s in (2, 4)))
      >>> run.until(2).rows, run.until(2).phases[0].tokens
      (({'step': 2},), 32)
    """
    return dataclasses.replace(
        self,
        phases=tuple(p.until(step) for p in self.phases if p.start < step),
        rows=tuple(row for row in self.rows if row['step'] <= step),
    )

  def series(self, key: str) -> tuple[list[int], list[float]]:
    """Returns the steps at which a value was logged, and the values."""
    rows = [r for r in self.rows if r.get(key) is not None]
    return [r['step'] for r in rows], [r[key] for r in rows]

  def within(self, phase: PhaseRecord) -> list[Mapping[str, Any]]:
    """Returns the rows logged after the steps of a phase."""
    first, stop = (
        bisect.bisect_right(self.rows, step, key=lambda row: row['step'])
        for step in (phase.start, phase.end)
    )
    return list(self.rows[first:stop])

  def at_end(self, phase: PhaseRecord, key: str) -> tuple[int, float] | None:
    """Returns the last step and value of `key` in a phase, or None."""
    for row in reversed(self.within(phase)):
      if row.get(key) is not None:
        return row['step'], row[key]
    return None


def _merge_rows(
    rows: Iterable[dict[str, Any]],
) -> tuple[Mapping[str, Any], ...]:
  """Merges the rows of each step into one; later values take precedence."""
  merged: dict[int, dict[str, Any]] = {}
  for row in rows:
    merged.setdefault(row['step'], row).update(row)
  return tuple(merged[step] for step in sorted(merged))


def _read_plan(path: pathlib.Path) -> dict[str, Any]:
  """Reads the fields of a `Run` that `plan.json` has."""
  fix = 'restore it, or train the run anew.'
  stored = files.read_object(path, fix)
  try:
    files.unseal(stored, path)
  except ValueError as error:
    logger.warning('%s', error)
  with files.reading(path, fix):
    plan = {name: stored[name] for name in _IN_PLAN}
    # The archived runs of the papers' tables have no such field.
    plan['data'] = stored.get('data', {})
    plan['before'] = SpentBefore(**stored.get('before') or {})
    plan['phases'] = tuple(map(_phase_record, plan['phases']))
    if max(phase.end for phase in plan['phases']) < 1:
      raise ValueError('it has no steps')
  return plan


def _phase_record(phase: Mapping[str, Any]) -> PhaseRecord:
  fields = {name: phase[name] for name in PhaseRecord._fields}
  return PhaseRecord(**fields | {
      'mask_updates': tuple(
          range(first, last + 1, every)
          for first, last, every in phase['mask_updates']
      ),
      'spans': tuple(
          Span(
              span['start'], span['steps'], span['sparsity'],
              cost_per_step=span['flops_per_step'],
          )
          for span in phase['spans']
      ),
      'notes': tuple(phase['notes']),
  })


def read_run(workdir: str | os.PathLike[str]) -> RunRecord:
  """Reads a run, finished or not, from its working directory.

  Reads `plan.json`, `metrics.jsonl` and, if present, `masks.json` and
  `generations/step_<step>.jsonl`. Lines of metrics with the same step become
  one row. An incomplete last line of a killed run is ignored.

  Args:
    workdir: Working directory of the run, as given to `launch`.

  Returns:
    The plan of the run, and its metrics and generations by step.

  Raises:
    FileNotFoundError: `plan.json` or `metrics.jsonl` is missing.
    ValueError: a file has the wrong format, or there are no metrics.

  Example:
    >>> read_run('runs/missing')  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    FileNotFoundError: runs/missing has no plan.json; give the working ...
  """
  workdir = pathlib.Path(workdir)
  for name in ('plan.json', 'metrics.jsonl'):
    if not (workdir / name).is_file():
      raise FileNotFoundError(
          f'{workdir} has no {name}; give the working directory of a run '
          'that has been trained.'
      )
  plan = _read_plan(workdir / 'plan.json')
  path = workdir / 'metrics.jsonl'
  rows = _merge_rows(metrics.read_rows(path))
  if not rows:
    raise ValueError(f'{path} holds no rows; train the run first.')
  generations = {
      int(file.stem.removeprefix('step_')): metrics.read_json_lines(file)
      for file in sorted((workdir / 'generations').glob('step_*.jsonl'))
      if file.stem.removeprefix('step_').isdigit()
  }
  return RunRecord(
      **plan, rows=rows, generations=generations, masks=read_masks(workdir)
  )


def read_masks(workdir: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads the record of a run's masks from its working directory.

  Args:
    workdir: Working directory of the run.

  Returns:
    The record, see `training.loop.mask_record`; empty if there is none, since
    the masks of the run do not move.

  Raises:
    ValueError: the file is damaged.

  Example:
    >>> read_masks('runs/missing')
    {}
  """
  path = pathlib.Path(workdir) / mask_record.FILE
  if not path.is_file():
    return {}
  fix = 'delete it; the report is then written without pictures of masks.'
  return files.unseal(files.read_object(path, fix), path)


def pretraining_phases(run: RunRecord) -> list[PhaseRecord]:
  """Returns the first phases of a run, up to a change of the data source.

  A run that begins with fine-tuning on a task has none.

  Example:
    >>> phases = (
    ...     PhaseRecord('sparse', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0),
    ...     PhaseRecord('tune', 4, 4, 2, 8, 'task', 0.0, 64, 9.0, 9.0))
    >>> run = RunRecord('toy', phases, ())
    >>> [phase.name for phase in pretraining_phases(run)]
    ['sparse']
  """
  phases = []
  for phase in run.phases:
    if phase.source != run.phases[0].source or phase.source == 'task':
      break
    phases.append(phase)
  return phases


def seconds_of(
    run: RunRecord,
    phases: Sequence[PhaseRecord],
    before: SpentBefore = FROM_SCRATCH,
) -> float | None:
  """Returns the training seconds logged in phases, and those before, or None.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': 2, 'time/seconds': 1.0}, {'step': 9}]
    >>> seconds_of(RunRecord('toy', (phase,), tuple(rows)), [phase])
    1.0
  """
  rows = [row for phase in phases for row in run.within(phase)]
  logged = [row['time/seconds'] for row in rows if row.get('time/seconds')]
  if before.seconds is None or not logged:
    return None
  return before.seconds + sum(logged)


def format_sparsity(phase: PhaseRecord) -> str:
  """Formats the planned sparsity of a phase, first to last if it changes.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 10.0)
    >>> format_sparsity(phase)
    '75%'
  """
  return ' to '.join(dict.fromkeys(map(markdown.percent, phase.sparsities)))


UNIT_STATISTICS = (
    'sparsity/cut_off', 'sparsity/row_variation', 'sparsity/column_variation'
)
"""Names of logged statistics of the inputs and outputs of layers."""
STATISTICS = UNIT_STATISTICS + tuple(
    f'sparsity/{name}'
    for name in ('grown', 'dropped', 'surviving', 'overlap', 'exploration')
)
"""Names of logged statistics of masks, which are not names of layers."""


class MaskUpdate(NamedTuple):
  """One update of a run's masks, summed over layers.

  Attributes:
    step: Number of steps before the update.
    grown: Number of pruned weights that became kept.
    dropped: Number of kept weights that were pruned.
    surviving: Number of weights kept before and after the update.
  """

  step: int
  grown: float
  dropped: float
  surviving: float

  @property
  def survival(self) -> float:
    """Fraction of the kept weights that stayed kept."""
    return self.surviving / max(self.surviving + self.dropped, 1)


def is_tracked(run: RunRecord) -> bool:
  """Returns whether a run logged its mask updates."""
  return bool(run.series('sparsity/exploration')[0])


def mask_updates_in(run: RunRecord, phase: PhaseRecord) -> list[MaskUpdate]:
  """Returns the logged mask updates of a phase.

  A row of metrics describes the last update before it, so earlier updates since
  the previous row are unknown.

  Args:
    run: A run.
    phase: A phase of the run.

  Returns:
    The known updates, in order.

  Example:
    >>> phase = PhaseRecord('p', 0, 9, 2, 8, 'text', 0.5, 64, 5.0, 9.0,
    ...                     (range(3, 9, 3),))
    >>> row = {'sparsity/grown': 1.0, 'sparsity/dropped': 1.0,
    ...        'sparsity/surviving': 3.0}
    >>> run = RunRecord('toy', (phase,), ({'step': 2} | row, {'step': 5} | row))
    >>> mask_updates_in(run, phase)
    [MaskUpdate(step=3, grown=1.0, dropped=1.0, surviving=3.0)]
  """
  rows = (r for r in run.rows if r.get('sparsity/surviving') is not None)
  updates, last = [], None
  for row in rows:
    step = last_update(run, row['step'])
    if step not in (None, last) and phase.start <= step < phase.end:
      names = MaskUpdate._fields[1:]
      updates.append(MaskUpdate(step, *(row[f'sparsity/{x}'] for x in names)))
    last = step
  return updates


def last_update(run: RunRecord, step: int) -> int | None:
  """Returns the last planned mask update before a step; `None`: there is none.

  Example:
    >>> phase = PhaseRecord('p', 0, 9, 2, 8, 'text', 0.5, 64, 5.0, 9.0,
    ...                     (range(3, 9, 3),))
    >>> [last_update(RunRecord('toy', (phase,), ()), s) for s in (3, 6, 9)]
    [None, 3, 6]
  """
  ranges = [x for p in run.phases for x in _between(p.mask_updates, 0, step)]
  return ranges[-1][-1] if ranges else None

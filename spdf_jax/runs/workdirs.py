"""Working directories of finished runs, read back for the report."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
from typing import Any
from typing import NamedTuple

from spdf_jax.costs.sparsity_spans import Segment
from spdf_jax.training.metrics import read_json_lines
from spdf_jax.training.metrics import read_rows


class PhaseRecord(NamedTuple):
  """One phase of a run, as `plan.json` states it.

  Attributes:
    name: What the phase is called.
    start: Steps completed before it.
    steps: Steps it takes.
    batch_size: Sequences in a batch.
    length: Tokens in a sequence.
    source: What its batches are drawn from.
    sparsity: Fraction of zeros in the sparsified weights at its end, as asked.
    tokens: Tokens it trains on.
    flops_per_step: Training FLOPs of a step, the mean over all of them.
    dense_flops_per_step: Training FLOPs of the same step, dense.
    mask_updates: The steps at which its masks change, as planned.
    segments: Its steps, cut where the level changes; none: it does not.
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
  mask_updates: tuple[int, ...] = ()
  segments: tuple[Segment, ...] = ()

  @property
  def end(self) -> int:
    """Steps completed after the phase."""
    return self.start + self.steps

  @property
  def parts(self) -> tuple[Segment, ...]:
    """Its segments, one at least."""
    return self.segments or (
        Segment(self.start, self.steps, self.sparsity, self.flops_per_step),
    )

  @property
  def levels(self) -> tuple[float, float]:
    """The fractions of zeros asked for from its first and at its last step."""
    return self.parts[0].sparsity, self.parts[-1].sparsity


@dataclasses.dataclass(frozen=True)
class Run:
  """A run: its plan, and one row of values for each logged step.

  Attributes:
    name: What the run is called.
    phases: Its phases, in order.
    rows: For each step with values, in order, the step's values by name and
      the step itself under `'step'` (steps completed).
    generations: Generations by step, each a list of records with `context`,
      `reference` and `generation`.
    model: The model's sizes by name.
    parameters: Number of parameters.
    sparsified_parameters: Number of parameters that sparsity applies to.
    bigram: The bigram baseline's values by name, or None without one.
    compute: A note on how the products were computed.

  Example:
    >>> phase = PhaseRecord('dense', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': 2, 'train/loss': 3.0}, {'step': 4, 'train/loss': 2.0}]
    >>> run = Run('toy', (phase,), tuple(rows))
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

  @property
  def last_step(self) -> int:
    """Steps completed when the last row was written."""
    return self.rows[-1]['step'] if self.rows else 0

  def series(self, key: str) -> tuple[list[int], list[float]]:
    """Returns the steps at which a value was logged, and the values."""
    found = [r for r in self.rows if r.get(key) is not None]
    return [r['step'] for r in found], [r[key] for r in found]

  def within(self, phase: PhaseRecord) -> list[Mapping[str, Any]]:
    """Returns the rows logged after the steps of a phase."""
    return [r for r in self.rows if phase.start < r['step'] <= phase.end]

  def at_end(self, phase: PhaseRecord, key: str) -> tuple[int, float] | None:
    """Returns the last step and value of `key` in a phase, None if none."""
    for row in reversed(self.within(phase)):
      if row.get(key) is not None:
        return row['step'], row[key]
    return None


def _merge_rows(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[Mapping[str, Any], ...]:
  """Joins the rows of each step into one, later values winning."""
  merged: dict[int, dict[str, Any]] = {}
  for row in rows:
    merged.setdefault(row['step'], {}).update(row)
  return tuple(merged[step] for step in sorted(merged))


def _read_plan(path: pathlib.Path) -> tuple[dict[str, Any], list[PhaseRecord]]:
  """Reads `plan.json` and its phases."""
  try:
    plan = json.loads(path.read_text(encoding='utf-8'))
    phases = [_phase_record(phase) for phase in plan['phases']]
    plan['name'], phases[0]
  except json.JSONDecodeError as error:
    raise ValueError(
        f'{path} is not JSON ({error}); restore it, or train the run anew.'
    ) from error
  except (KeyError, IndexError, TypeError) as error:
    raise ValueError(
        f'{path} is not the plan of a run, which has a "name" and "phases" '
        f'with {", ".join(PhaseRecord._fields)}: {error!r}.'
    ) from error
  return plan, phases


def _phase_record(phase: Mapping[str, Any]) -> PhaseRecord:
  """Reads a phase; plans written before there were segments have none."""
  optional = PhaseRecord._field_defaults
  fields = {n: phase[n] for n in PhaseRecord._fields if n not in optional}
  return PhaseRecord(
      **fields,
      mask_updates=tuple(
          step for first, last, every in phase.get('mask_updates', ())
          for step in range(first, last + 1, every)
      ),
      segments=tuple(Segment(**s) for s in phase.get('segments', ())),
  )


def read_run(workdir: str | os.PathLike[str]) -> Run:
  """Reads a run from its working directory, finished or not.

  Reads `plan.json`, `metrics.jsonl` and, where there are any,
  `generations/step_<step>.jsonl`. Values of one step on several lines become
  one row. A last line that a killed run left unfinished is ignored.

  Args:
    workdir: The run's directory.

  Returns:
    The run.

  Raises:
    FileNotFoundError: `plan.json` or `metrics.jsonl` is missing.
    ValueError: A file does not hold what it should.

  Example:
    >>> import tempfile
    >>> phase = dict(name='sparse', start=0, steps=4, batch_size=2, length=8,
    ...              source='text', sparsity=0.75, tokens=64,
    ...              flops_per_step=5.0, dense_flops_per_step=9.0)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   workdir = pathlib.Path(directory)
    ...   plan = {'name': 'toy', 'phases': [phase]}
    ...   _ = (workdir / 'plan.json').write_text(json.dumps(plan))
    ...   _ = (workdir / 'metrics.jsonl').write_text(
    ...       '{"step": 4, "train/loss": 2.0}\\n{"step": 4, "time/sec')
    ...   run = read_run(workdir)
    >>> run.phases[0].end, run.rows
    (4, ({'step': 4, 'train/loss': 2.0},))
  """
  workdir = pathlib.Path(workdir)
  for name in ('plan.json', 'metrics.jsonl'):
    if not (workdir / name).is_file():
      raise FileNotFoundError(
          f'{workdir} has no {name}; give the working directory of a run '
          'that has been trained.'
      )
  plan, phases = _read_plan(workdir / 'plan.json')
  path = workdir / 'metrics.jsonl'
  rows = _merge_rows(read_rows(path))
  if not rows:
    raise ValueError(f'{path} holds no rows; train the run first.')
  generations = {
      int(file.stem.removeprefix('step_')): read_json_lines(file)
      for file in sorted((workdir / 'generations').glob('step_*.jsonl'))
      if file.stem.removeprefix('step_').isdigit()
  }
  return Run(
      name=plan['name'],
      phases=tuple(phases),
      rows=rows,
      generations=generations,
      model=plan.get('model') or {},
      parameters=plan.get('parameters') or 0,
      sparsified_parameters=plan.get('sparsified_parameters') or 0,
      bigram=plan.get('bigram'),
      compute=plan.get('compute') or '',
  )

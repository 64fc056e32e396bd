"""Groups of finished runs, the seeds of one config, and their labels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math
import pathlib
import statistics
from typing import Any, NamedTuple

from experiments.scores.ancestry import Ancestry
from experiments.scores.scored_runs import ScoredRun
from experiments.scores.scored_runs import Scores
from spdf_jax.runs import markdown
from spdf_jax.runs import read
from spdf_jax.runs.read import PhaseRecord
from spdf_jax.runs.read import RunRecord
from spdf_jax.training.checkpoints import workdir
from spdf_jax.training.checkpoints.workdir import find_checkpoint
from spdf_jax.training.checkpoints.workdir import split_source

_NAMES = {
    'dense': 'dense', 'static': 'static', 'set': 'SET',
    'rigl': 'RigL', 'granet': 'GraNet', 'gmp': 'GMP', 'variable': '',
    'iterative': 'pruned',
}
"""Names of algorithms in figures, in the order in which runs are shown."""


class Group(NamedTuple):
  """Runs that differ in their seed only.

  Attributes:
    ancestry: Ancestry of the first run.
    task: Task of fine-tuning; `''`: the runs are not fine-tuned.
    runs: History of each seed.
    scores: Scores of each seed.
    sources: Workdir of each seed.
  """

  ancestry: Ancestry
  task: str
  runs: tuple[RunRecord, ...]
  scores: tuple[Scores, ...]
  sources: tuple[str, ...]

  @property
  def mean(self) -> RunRecord:
    """Mean over seeds."""
    return average_runs(self.runs)

  @property
  def parameters(self) -> int:
    """Number of parameters of the model."""
    return self.runs[0].parameters

  @property
  def loss(self) -> float:
    """Last loss on the task, or else on the corpus, averaged over seeds."""
    key = 'target/loss' if self.task else 'validation/loss'
    return last_value(self.mean, key)


def last_value(run: RunRecord, key: str) -> float:
  """Returns the last value that a run logged, infinite if there is none.

  Example:
    >>> last_value(RunRecord('toy', (), ({'step': 4, 'train/loss': 2.0},)), 'x')
    inf
  """
  _, values = run.series(key)
  return values[-1] if values and math.isfinite(values[-1]) else math.inf


def group_runs(
    runs: Iterable[ScoredRun],
) -> tuple[list[Group], list[str]]:
  """Groups the seeds of each config, and chooses among similar configs.

  Of configs with the same model, phases and task, which may differ in learning
  rates, the one with the most seeds is kept, and of those the one with the
  lowest final loss.

  Args:
    runs: Finished runs, see `find_runs`.

  Returns:
    The groups, dense ones first; and a sentence for every run or group that is
    left out.
  """
  members: dict[str, list[ScoredRun]] = {}
  notes = []
  for run in runs:
    if '@' in run.source:
      notes.append(f'{run.source} is a part of a run')
      continue
    held = members.setdefault(run.ancestry.identity, [])
    same = [r for r in held if r.ancestry.seed == run.ancestry.seed]
    if same:
      notes.append(f'{run.source} has config and seed of {same[0].source}')
    else:
      held.append(run)
  kinds: dict[tuple, list[Group]] = {}
  for held in members.values():
    group = _group(held)
    ancestry = group.ancestry
    key = ancestry.model, group.parameters, ancestry.stages, group.task
    kinds.setdefault(key, []).append(group)
  groups = []
  for held in kinds.values():
    held.sort(key=lambda g: (-len(g.runs), g.loss))
    groups.append(held[0])
    notes += [
        f'{", ".join(group.sources)}: replaced by {held[0].sources[0]}, which '
        'has the same phases, and more seeds or a lower loss'
        for group in held[1:]
    ]
  return sorted(groups, key=_order), notes


def _group(runs: Sequence[ScoredRun]) -> Group:
  ancestry = runs[0].ancestry
  task = ancestry.task
  if task == 'jsonl':  # The folder identifies the task.
    config = workdir.read_workdir_config(ancestry.workdir)
    task = pathlib.Path(config.data.task_dir).name
  return Group(
      ancestry, task,
      tuple(read_history(run.ancestry) for run in runs),
      tuple(run.scores for run in runs),
      tuple(run.source for run in runs),
  )


def _order(group: Group) -> tuple:
  algorithm, sparsity = group.ancestry.recipe
  names = list(_NAMES)
  place = names.index(algorithm) if algorithm in names else len(names)
  return (
      group.parameters, place, sparsity, group.ancestry.tokens, group.task,
      group.ancestry.tuned_sparsely,
  )


def describe_pretraining(group: Group) -> str:
  """Returns the label of a group's pre-training, such as `'static 75%'`."""
  algorithm, sparsity = group.ancestry.recipe
  name = _NAMES.get(algorithm, algorithm)
  stages = group.ancestry.pretraining
  if algorithm == 'variable':
    first = next(stage for stage in stages if stage.sparsity)
    kind = _NAMES.get(first.algorithm, first.algorithm)
    return f'{kind} {markdown.percent(first.sparsity)}, then dense'
  if algorithm == 'granet':
    return f'{name} {read.format_sparsity(group.runs[0].phases[0])}'
  if algorithm == 'iterative':
    return f'{name} to {markdown.percent(sparsity)}'
  return f'{name} {markdown.percent(sparsity)}' if sparsity else name


def describe_run(group: Group) -> str:
  """Returns the label of a group's pre-training and fine-tuning."""
  name = describe_pretraining(group)
  if not group.task:
    return name
  kept = ' sparsely' if group.ancestry.tuned_sparsely else ''
  return f'{name}, {group.task}{kept}'


def pretrained(groups: Sequence[Group]) -> list[Group]:
  """Keeps one group of each pre-training, preferably without fine-tuning.

  Of fine-tuned groups the one with the most seeds is kept.
  """
  best: dict[tuple, Group] = {}
  for group in sorted(groups, key=lambda g: (bool(g.task), -len(g.runs))):
    if group.ancestry.pretraining:
      ancestry = group.ancestry
      key = ancestry.model, group.parameters, ancestry.pretraining
      best.setdefault(key, group)
  return sorted(best.values(), key=_order)


def by_label(
    groups: Sequence[Group], describe: Callable[[Group], str]
) -> dict[str, Group]:
  """Gives every group a unique label.

  Args:
    groups: Groups.
    describe: Returns the label of a group. If labels are equal, parameters,
      tokens and at last workdirs are appended to distinguish them.

  Returns:
    Groups by label.
  """
  labels = list(map(describe, groups))
  for detail in (
      lambda g: f'{short_count(g.parameters)} parameters',
      lambda g: f'{short_count(g.ancestry.tokens)} tokens',
      lambda g: g.sources[0],
  ):
    labels = [
        f'{label}, {detail(group)}'
        if len({
            detail(g) for g, other in zip(groups, labels) if other == label
        }) > 1 else label
        for label, group in zip(labels, groups)
    ]
  return dict(zip(labels, groups, strict=True))


def means(labeled: Mapping[str, Group]) -> dict[str, RunRecord]:
  """Returns the mean run of each group; labels have the number of seeds."""
  return {
      label + (f' ({len(group.runs)} seeds)' if len(group.runs) > 1 else ''):
      group.mean
      for label, group in labeled.items()
  }


def short_count(count: float) -> str:
  """Formats a count with three digits and K, M or B.

  Example:
    >>> short_count(691_200), short_count(26e9), short_count(64)
    ('691K', '26B', '64')
  """
  for size, letter in ((1e9, 'B'), (1e6, 'M'), (1e3, 'K')):
    if count >= size:
      return f'{count / size:.3g}{letter}'
  return f'{count:.3g}'


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
      mask_updates=tuple(
          range(x.start + steps, x.stop + steps, x.step)
          for x in phase.mask_updates
      ),
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
    at_step = [rows_by_step.get(row['step'], {}) for rows_by_step in others]
    rows.append({'step': row['step']} | {
        key: statistics.fmean(other[key] for other in at_step)
        for key in row
        if key != 'step'
        and all(isinstance(other.get(key), int | float) for other in at_step)
    })
  return dataclasses.replace(runs[0], rows=tuple(rows))

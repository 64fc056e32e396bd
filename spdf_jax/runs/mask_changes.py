"""Changes of masks in a run: what survived them, and what was explored."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

from spdf_jax.evaluation.markdown import escape
from spdf_jax.evaluation.markdown import markdown_table
from spdf_jax.evaluation.markdown import MISSING
from spdf_jax.evaluation.markdown import number
from spdf_jax.evaluation.markdown import percent
from spdf_jax.runs.summaries import zeros
from spdf_jax.runs.workdirs import PhaseRecord
from spdf_jax.runs.workdirs import Run

STATISTICS = tuple(
    f'sparsity/{name}'
    for name in ('grown', 'dropped', 'surviving', 'overlap', 'exploration')
)
"""Values that a step logs of its masks; they are no layers."""

_HEADER = (
    'run', 'phase', 'zeros asked', 'zeros found', 'changes', 'survival',
    'explored',
)


class Change(NamedTuple):
  """One change of a run's masks, all layers together.

  Attributes:
    step: Steps completed before it.
    grown: Weights that became active.
    dropped: Weights that were pruned.
    surviving: Weights that stayed active.
  """

  step: int
  grown: float
  dropped: float
  surviving: float

  @property
  def survival(self) -> float:
    """Share of the active weights that stayed active."""
    return self.surviving / max(self.surviving + self.dropped, 1)


def is_tracked(run: Run) -> bool:
  """Returns whether a run logged the changes of its masks."""
  return bool(run.series('sparsity/exploration')[0])


def changes_in(run: Run, phase: PhaseRecord) -> list[Change]:
  """Returns the changes of a phase, as far as they were logged.

  A row tells of the last change before it: of changes that share the row, only
  the last is known.

  Args:
    run: A run.
    phase: One of its phases.

  Returns:
    Changes, in order.

  Example:
    >>> phase = PhaseRecord('p', 0, 9, 2, 8, 'text', 0.5, 64, 5.0, 9.0, (3, 6))
    >>> row = {'sparsity/grown': 1.0, 'sparsity/dropped': 1.0,
    ...        'sparsity/surviving': 3.0}
    >>> run = Run('toy', (phase,), ({'step': 2} | row, {'step': 5} | row))
    >>> changes_in(run, phase)
    [Change(step=3, grown=1.0, dropped=1.0, surviving=3.0)]
  """
  rows = [r for r in run.rows if r.get('sparsity/surviving') is not None]
  planned = [step for p in run.phases for step in p.mask_updates]
  found = []
  for step, following in zip(planned, [*planned[1:], run.phases[-1].end]):
    row = next((r for r in rows if step < r['step'] <= following), None)
    if row is not None and phase.start <= step < phase.end:
      found.append(Change(step, *(row[key] for key in STATISTICS[:3])))
  return found


def changes_table(runs: Mapping[str, Run]) -> str | None:
  """Makes the table of masks: a row for each phase of each tracked run.

  Args:
    runs: Runs by label.

  Returns:
    A Markdown table: zeros asked for and those found at each phase's end, the
    number of changes, the share of active weights that survived one, and the
    share that was ever active; None if no run is tracked.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.5, 64, 5.0, 9.0, (2,))
    >>> row = {'step': 4, 'sparsity/sparsified': 0.5, 'sparsity/grown': 1.0,
    ...        'sparsity/dropped': 1.0, 'sparsity/surviving': 3.0,
    ...        'sparsity/exploration': 0.625}
    >>> table = changes_table({'toy': Run('toy', (phase,), (row,))})
    >>> print(table.splitlines()[2])
    | toy | p | 50% | 50% | 1 | 75% | 62.5% |
  """
  rows = []
  for label, run in runs.items():
    if not is_tracked(run):
      continue
    for phase in run.phases:
      found = run.at_end(phase, 'sparsity/sparsified')
      explored = run.at_end(phase, 'sparsity/exploration')
      rows.append([
          escape(label),
          escape(phase.name),
          zeros(phase),
          MISSING if found is None else percent(found[1]),
          str(len(phase.mask_updates)),
          _survival(changes_in(run, phase)) or MISSING,
          MISSING if explored is None else percent(explored[1]),
      ])
  return markdown_table(_HEADER, rows, numbers=_HEADER[2:]) if rows else None


def _survival(changes: Sequence[Change]) -> str:
  """Writes the least and the most that survived a change."""
  shares = [change.survival for change in changes]
  ends = dict.fromkeys(percent(f(shares)) for f in (min, max) if shares)
  return ' to '.join(ends)


def movement(label: str, run: Run) -> str | None:
  """States how much a run's masks moved and what they explored.

  Args:
    label: What the run is called.
    run: A run.

  Returns:
    A sentence or two, or None where masks do not move within a phase.
  """
  parts = []
  for phase in run.phases:
    changes = [c for c in changes_in(run, phase) if c.step > phase.start]
    if changes:
      mean = sum(c.survival for c in changes) / len(changes)
      times = {1: 'once', 2: 'twice'}.get(
          len(changes), f'{len(changes)} times'
      )
      parts.append(
          f'{times} within {phase.name}, where {percent(mean)} of the active '
          'weights survive a change on average'
      )
  if not parts:
    return None
  text = f"{label}'s masks change {'; '.join(parts)}."
  steps, explored = run.series('sparsity/exploration')
  moving = [p for p in run.phases if len(p.mask_updates) > 1]
  end = moving[-1].end if moving else run.last_step
  before = [share for step, share in zip(steps, explored) if step <= end]
  if before and before[0] < 1:
    text += (
        f' By the end of that {percent(before[-1])} of the sparsified weights '
        f'have been active, {percent(before[0])} at first.'
    )
  return text


def sawtooth(label: str, run: Run) -> str | None:
  """States how the validation loss rises and falls over rounds of pruning.

  Args:
    label: What the run is called.
    run: A run.

  Returns:
    Two sentences, or None where no phase begins by pruning, or none of those
    is evaluated before its end.
  """
  teeth, later, ends = [], [], []
  for last, phase in zip(run.phases, run.phases[1:]):
    if phase.levels[0] <= last.levels[1] or phase.source != last.source:
      continue
    before = run.at_end(last, 'validation/loss')
    losses = [
        (row['step'], row['validation/loss']) for row in run.within(phase)
        if row.get('validation/loss') is not None
    ]
    if before is None or len(losses) < 2:
      continue
    teeth.append(
        f'from {number(before[1])} to {number(losses[0][1])} at '
        f'{percent(phase.levels[0])} zeros'
    )
    later.append(losses[0][0] - phase.start)
    ends.append(number(losses[-1][1]))
  if not teeth:
    return None
  steps = ' to '.join(dict.fromkeys(str(f(later)) for f in (min, max)))
  return (
      f"In {label} pruning and a new round's learning rate take the validation "
      f'loss {", ".join(teeth)}, {steps} steps later. It ends those rounds at '
      f'{", ".join(ends)}.'
  )

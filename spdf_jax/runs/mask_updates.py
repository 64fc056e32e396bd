# SPDX-License-Identifier: Apache-2.0
"""Mask updates of a run: survival of kept weights, and exploration."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

from spdf_jax.evaluation.markdown import escape
from spdf_jax.evaluation.markdown import markdown_table
from spdf_jax.evaluation.markdown import MISSING
from spdf_jax.evaluation.markdown import number
from spdf_jax.evaluation.markdown import percent
from spdf_jax.runs.summaries import format_sparsity
from spdf_jax.runs.workdirs import PhaseRecord
from spdf_jax.runs.workdirs import Run

STATISTICS = tuple(
    f'sparsity/{name}'
    for name in ('grown', 'dropped', 'surviving', 'overlap', 'exploration')
)
"""Names of logged statistics of masks, which are not names of layers."""

_HEADER = (
    'run', 'phase', 'planned sparsity', 'measured sparsity', 'mask updates',
    'survival', 'explored',
)


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


def is_tracked(run: Run) -> bool:
  """Returns whether a run logged its mask updates."""
  return bool(run.series('sparsity/exploration')[0])


def mask_updates_in(run: Run, phase: PhaseRecord) -> list[MaskUpdate]:
  """Returns the logged mask updates of a phase.

  A row of metrics describes the last update before it, so earlier updates since
  the previous row are unknown.

  Args:
    run: A run.
    phase: A phase of the run.

  Returns:
    The known updates, in order.

  Example:
    >>> phase = PhaseRecord('p', 0, 9, 2, 8, 'text', 0.5, 64, 5.0, 9.0, (3, 6))
    >>> row = {'sparsity/grown': 1.0, 'sparsity/dropped': 1.0,
    ...        'sparsity/surviving': 3.0}
    >>> run = Run('toy', (phase,), ({'step': 2} | row, {'step': 5} | row))
    >>> mask_updates_in(run, phase)
    [MaskUpdate(step=3, grown=1.0, dropped=1.0, surviving=3.0)]
  """
  rows = [r for r in run.rows if r.get('sparsity/surviving') is not None]
  planned = [step for p in run.phases for step in p.mask_updates]
  found = []
  for step, following in zip(planned, [*planned[1:], run.phases[-1].end]):
    row = next((r for r in rows if step < r['step'] <= following), None)
    if row is not None and phase.start <= step < phase.end:
      found.append(MaskUpdate(step, *(row[key] for key in STATISTICS[:3])))
  return found


def mask_updates_table(runs: Mapping[str, Run]) -> str | None:
  """Formats a table of masks: a row for each phase of runs with mask updates.

  Args:
    runs: Runs by label.

  Returns:
    A Markdown table: planned sparsity, measured sparsity at the end of each
    phase, number of updates, fraction of kept weights that survive an update,
    and fraction of weights kept at any time; None if no run logged mask
    updates.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.5, 64, 5.0, 9.0, (2,))
    >>> row = {'step': 4, 'sparsity/sparsified': 0.5, 'sparsity/grown': 1.0,
    ...        'sparsity/dropped': 1.0, 'sparsity/surviving': 3.0,
    ...        'sparsity/exploration': 0.625}
    >>> table = mask_updates_table({'toy': Run('toy', (phase,), (row,))})
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
          format_sparsity(phase),
          MISSING if found is None else percent(found[1]),
          str(len(phase.mask_updates)),
          _survival(mask_updates_in(run, phase)) or MISSING,
          MISSING if explored is None else percent(explored[1]),
      ])
  return markdown_table(_HEADER, rows, numbers=_HEADER[2:]) if rows else None


def _survival(updates: Sequence[MaskUpdate]) -> str:
  """Formats the lowest and the highest survival of updates."""
  shares = [update.survival for update in updates]
  ends = dict.fromkeys(percent(f(shares)) for f in (min, max) if shares)
  return ' to '.join(ends)


def describe_updates(label: str, run: Run) -> str | None:
  """Describes survival and exploration of a run's mask updates.

  Args:
    label: Name of the run in the text.
    run: A run.

  Returns:
    One or two sentences, or None if no mask is updated within a phase.
  """
  parts = []
  for phase in run.phases:
    updates = [u for u in mask_updates_in(run, phase) if u.step > phase.start]
    if updates:
      mean = sum(u.survival for u in updates) / len(updates)
      times = {1: 'once', 2: 'twice'}.get(
          len(updates), f'{len(updates)} times'
      )
      parts.append(
          f'{times} within {phase.name}, where {percent(mean)} of the kept '
          'weights survive an update on average'
      )
  if not parts:
    return None
  text = f"{label}'s masks are updated {'; '.join(parts)}."
  steps, explored = run.series('sparsity/exploration')
  updated = [p for p in run.phases if len(p.mask_updates) > 1]
  end = updated[-1].end if updated else run.last_step
  before = [share for step, share in zip(steps, explored) if step <= end]
  if before and before[0] < 1:
    text += (
        f' By then {percent(before[-1])} of the sparsified weights have been '
        f'kept at some step, {percent(before[0])} at first.'
    )
  return text


def sawtooth(label: str, run: Run) -> str | None:
  """Describes the rise and fall of the validation loss over pruning rounds.

  Args:
    label: Name of the run in the text.
    run: A run.

  Returns:
    Two sentences, or None if no phase begins with pruning and is evaluated
    before its end.
  """
  teeth, later, ends = [], [], []
  for last, phase in zip(run.phases, run.phases[1:]):
    if phase.sparsities[0] <= last.sparsities[1] or phase.source != last.source:
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
        f'{percent(phase.sparsities[0])} zeros'
    )
    later.append(losses[0][0] - phase.start)
    ends.append(number(losses[-1][1]))
  if not teeth:
    return None
  steps = ' to '.join(dict.fromkeys(str(f(later)) for f in (min, max)))
  return (
      f'In {label}, pruning and the learning rate of a new round change the '
      f'validation loss {", ".join(teeth)}, {steps} steps later. These rounds '
      f'end at {", ".join(ends)}.'
  )

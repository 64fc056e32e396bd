# SPDX-License-Identifier: Apache-2.0
"""Losses of runs at equal tokens, FLOPs or seconds of pre-training."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spdf_jax.runs import curves
from spdf_jax.runs import markdown
from spdf_jax.runs.read import RunRecord

_EQUAL = 1.02  # Largest ratio of amounts that count as equal.


class Comparison(NamedTuple):
  """Losses of runs at equal tokens, FLOPs or seconds of pre-training.

  Attributes:
    spent: Tokens, FLOPs or seconds, the most that all runs with a loss took.
    losses: Validation loss of each run, in nats per token; `None` for a run
      whose evaluations all come before those of another.
    longer: Whether each run takes over 2 % more than `spent`, so that its loss
      there is one in the middle of its schedule.
  """

  spent: float
  losses: tuple[float | None, ...]
  longer: tuple[bool, ...]


def losses_at_equal(
    spent: curves.Spent, runs: Sequence[RunRecord]
) -> Comparison | None:
  """Compares pre-training losses at equal FLOPs, tokens or seconds.

  The losses are those at the largest amount that all runs spent, interpolated
  linearly over the logarithm of the amount between the nearest evaluations. For
  runs whose total amount is at most 2 % larger it is their final loss.

  Args:
    spent: Function of the amount to compare at: `flops_at`, `tokens_at` or
      `seconds_at`.
    runs: Runs, as `read_run` returns them, evaluated on the same validation
      text.

  Returns:
    The amount, and the validation losses there. The shortest runs have none if
    their last evaluation comes before the first one of another run; the result
    is `None` if fewer than two runs are left.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> def toy(cost):
    ...   phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, cost, 9.0)
    ...   rows = [{'step': s, 'validation/loss': 4.0 - s} for s in (1, 4)]
    ...   return RunRecord('toy', (phase,), tuple(rows))
    >>> comparison = losses_at_equal(curves.flops_at, [toy(1.0), toy(2.0)])
    >>> comparison.spent, comparison.longer
    (4.0, (False, True))
    >>> [round(loss, 3) for loss in comparison.losses]
    [0.0, 1.5]
  """
  lines = [curves.pretraining_curve(run, spent=spent) for run in runs]
  compared = sorted(
      (index for index, (amounts, _) in enumerate(lines) if len(amounts)),
      key=lambda index: lines[index][0][-1],
  )
  while compared and lines[compared[0]][0][-1] < max(
      lines[index][0][0] for index in compared
  ):
    del compared[0]
  if len(compared) < 2:
    return None
  most = float(lines[compared[0]][0][-1])
  losses: list[float | None] = [None] * len(runs)
  longer = [False] * len(runs)
  for index in compared:
    amounts, values = lines[index]
    longer[index] = bool(amounts[-1] > _EQUAL * most)
    losses[index] = float(
        np.interp(np.log(most), np.log(amounts), values)
        if longer[index] else values[-1]
    )
  return Comparison(most, tuple(losses), tuple(longer))


_SPENT = {
    'tokens': curves.tokens_at,
    'FLOPs': curves.flops_at,
    'seconds': curves.seconds_at,
}
_LONGER = '†'
_NOTES = (
    'Validation losses of pre-training, in nats per token, after the tokens, '
    'FLOPs or seconds that all runs with a loss there took, interpolated '
    'between evaluations. Each is of one run: other seeds may differ by '
    'hundredths of a nat, or by more where training is short, so compare means '
    'over seeds. The cost of the runs that a run starts from is included. '
    'Seconds also depend on what else the machine does.'
)
_OF_LONGER = (
    f'{_LONGER} The run takes more in all and is there in the middle of its '
    'learning-rate schedule, which favours the runs without this mark.'
)
_OF_MISSING = (
    f'{markdown.MISSING} Not logged, or all evaluations of the run come before '
    'those of another; a lower eval_every in the config evaluates more often.'
)


def by_text(
    runs: Mapping[str, RunRecord],
) -> dict[str, dict[str, RunRecord]]:
  """Groups runs whose validation losses are means over the same tokens.

  Args:
    runs: Runs by label.

  Returns:
    Runs by label, by a description of corpus, tokenizer and sequences. Runs
    without evaluations in pre-training are left out.
  """
  groups: dict[str, dict[str, RunRecord]] = {}
  for label, run in runs.items():
    text = 'an unknown corpus' if not run.data else (
        f'corpus {run.data["corpus"]!r} in tokens of {run.data["tokenizer"]!r}'
    )
    # Evaluations have the longest sequences of the phases on the corpus.
    lengths = [p.length for p in run.phases if p.source != 'task']
    if lengths:
      text += f' in sequences of {max(lengths)}'
    if len(curves.pretraining_curve(run)[0]):
      groups.setdefault(text, {})[label] = run
  return groups


def losses_tables(runs: Mapping[str, RunRecord]) -> list[str]:
  """Formats the losses of runs at equal tokens, FLOPs and seconds.

  Args:
    runs: Runs by label.

  Returns:
    Parts of a Markdown page: a table for the runs of each validation text, with
    notes. There is no table for a single run.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> def toy(cost):
    ...   phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, cost, 9.0)
    ...   rows = [{'step': s, 'validation/loss': 4.0 - s} for s in (2, 4)]
    ...   return RunRecord('toy', (phase,), tuple(rows))
    >>> table, *_ = losses_tables({'a': toy(1.0), 'b': toy(2.0)})
    >>> print(table)
    | run | after 64 tokens | after 4 FLOPs |
    | --- | ---: | ---: |
    | a | 0.000 | 0.000 |
    | b | 0.000 | 2.000† |
  """
  tables = map(_losses_table, by_text(runs).values())
  parts = [table for table in tables if table is not None]
  if parts:
    parts.append(_NOTES)
    parts += [
        note for mark, note in (
            (_LONGER, _OF_LONGER), (f' {markdown.MISSING} |', _OF_MISSING),
        ) if any(mark in table for table in parts[:-1])
    ]
  return parts


def _losses_table(runs: Mapping[str, RunRecord]) -> str | None:
  if len(runs) < 2:
    return None
  header, columns = ['run'], [list(map(markdown.escape, runs))]
  for what, spent in _SPENT.items():
    logged = [
        len(curves.pretraining_curve(run, spent=spent)[0]) > 0
        for run in runs.values()
    ]
    if sum(logged) < 2:
      continue
    comparison = losses_at_equal(spent, list(runs.values()))
    if comparison is None:
      header.append(f'after equal {what}')
      columns.append([markdown.MISSING] * len(runs))
      continue
    amount = markdown.number(comparison.spent, int(what == 'seconds'))
    header.append(f'after {amount} {what}')
    columns.append([
        markdown.number(loss, 3) + (_LONGER if longer else '')
        for loss, longer in zip(comparison.losses, comparison.longer)
    ])
  return markdown.markdown_table(
      header, list(zip(*columns)), numbers=header[1:]
  )

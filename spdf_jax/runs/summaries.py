# SPDX-License-Identifier: Apache-2.0
"""Tables of a report: a row of values for each phase of each run."""

from collections.abc import Mapping
from collections.abc import Sequence

from spdf_jax.evaluation.markdown import escape
from spdf_jax.evaluation.markdown import markdown_table
from spdf_jax.evaluation.markdown import MISSING
from spdf_jax.evaluation.markdown import number
from spdf_jax.evaluation.markdown import percent
from spdf_jax.runs.curves import dense_flops_at
from spdf_jax.runs.curves import flops_at
from spdf_jax.runs.workdirs import PhaseRecord
from spdf_jax.runs.workdirs import Run

_HEADER = (
    'run', 'phase', 'steps', 'tokens', 'sparsity', 'validation perplexity',
    'target perplexity', 'chrF', 'FLOPs against dense', 'seconds',
)


def format_sparsity(phase: PhaseRecord) -> str:
  """Formats the planned sparsity of a phase, first to last if it changes.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 10.0)
    >>> format_sparsity(phase)
    '75%'
  """
  return ' to '.join(dict.fromkeys(map(percent, phase.sparsities)))


def _value(run: Run, phase: PhaseRecord, key: str) -> str:
  """Formats a phase's last value, with the step if the phase went on."""
  found = run.at_end(phase, key)
  if found is None:
    return MISSING
  step, value = found
  last = min(phase.end, run.last_step)
  return number(value) + (f' (step {step:,})' if step != last else '')


def _sparsity(run: Run, phase: PhaseRecord) -> str:
  """Formats the planned sparsity, and the measured one if it differs."""
  found = run.at_end(phase, 'sparsity/sparsified')
  text = format_sparsity(phase)
  if found is not None and abs(found[1] - phase.sparsity) > 1e-3:
    text += f' ({percent(found[1])} at the end)'
  return text


def seconds_of(run: Run, phases: Sequence[PhaseRecord]) -> float | None:
  """Returns the total of training seconds logged in phases, or None.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': 2, 'time/seconds': 1.0}, {'step': 9}]
    >>> seconds_of(Run('toy', (phase,), tuple(rows)), [phase])
    1.0
  """
  rows = [row for phase in phases for row in run.within(phase)]
  logged = [row['time/seconds'] for row in rows if row.get('time/seconds')]
  return sum(logged) if logged else None


def _steps(done: int, planned: int) -> str:
  return f'{done:,}' if done == planned else f'{done:,} of {planned:,}'


def _run_rows(label: str, run: Run) -> list[list[str]]:
  """Returns a row for each phase of a run, and one for the whole run."""
  rows = []
  total_steps, total_tokens = 0, 0
  for phase in run.phases:
    done = min(max(run.last_step - phase.start, 0), phase.steps)
    tokens = round(phase.tokens * done / phase.steps)
    total_steps += done
    total_tokens += tokens
    step = phase.start + done
    rows.append([
        escape(label),
        escape(phase.name),
        _steps(done, phase.steps),
        f'{tokens:,}',
        _sparsity(run, phase),
        _value(run, phase, 'validation/perplexity'),
        _value(run, phase, 'target/perplexity'),
        _value(run, phase, 'task/chrf'),
        f'{flops_at(run, step) / dense_flops_at(run, step):.3f}'
        if done
        else MISSING,
        number(seconds_of(run, [phase]), 1),
    ])
  last = rows[-1]
  pretraining = [
      row for row, phase in zip(rows, run.phases) if phase.source != 'task'
  ]
  validation = (pretraining or rows)[-1][5]
  planned = sum(phase.steps for phase in run.phases)
  totals = [_steps(total_steps, planned), f'{total_tokens:,}', MISSING]
  end = run.last_step
  ratio = flops_at(run, end) / dense_flops_at(run, end) if end else None
  seconds = number(seconds_of(run, run.phases), 1)
  rows.append(
      [last[0], 'total', *totals, validation, *last[6:8], number(ratio, 3),
       seconds]
  )
  return [row if row[1] != 'total' else _bold(row) for row in rows]


def best_steps(runs: Mapping[str, Run]) -> list[str]:
  """Describes where phases with an early stop were best.

  Args:
    runs: Runs by label.

  Returns:
    A sentence for each phase that has logged its best evaluation.

  Example:
    >>> phase = PhaseRecord('tune', 0, 8, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': 8, 'best/step': 4, 'best/target/loss': 2.0}]
    >>> best_steps({'toy': Run('toy', (phase,), tuple(rows))})
    ... # doctest: +NORMALIZE_WHITESPACE
    ['toy: tune was best at step 4 (target/loss 2.00) and ends with its weights
    at step 8.']
  """
  found = []
  for label, run in runs.items():
    for phase in run.phases:
      best = run.at_end(phase, 'best/step')
      if best is None:
        continue
      row = next(
          r for r in reversed(run.rows)
          if r['step'] == best[0] and 'best/step' in r
      )
      values = ', '.join(
          f'{name.removeprefix("best/")} {number(value)}'
          for name, value in row.items()
          if name.startswith('best/') and name != 'best/step'
      )
      end = f'ends with its weights at step {phase.end:,}' if (
          run.last_step >= phase.end
      ) else f'is at step {run.last_step:,}'
      found.append(
          f'{label}: {phase.name} was best at step {best[1]:,} ({values}) and '
          f'{end}.'
      )
  return found


def _bold(cells: Sequence[str]) -> list[str]:
  return [cell if cell == MISSING else f'**{cell}**' for cell in cells]


def runs_table(runs: Mapping[str, Run]) -> str:
  """Formats the table of a report: a row for each phase of each run.

  Values are those at the end of each phase; FLOPs against dense are the FLOPs
  up to there divided by those of the same steps trained dense. A row of totals
  follows each run, with the validation perplexity at the end of pre-training;
  the bigram baseline is the last row.

  Args:
    runs: Runs by label.

  Returns:
    A Markdown table.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 10.0)
    >>> rows = [{'step': 4, 'validation/perplexity': 9.0}]
    >>> table = runs_table({'toy': Run('toy', (phase,), tuple(rows))})
    >>> print(table.splitlines()[2])
    | toy | p | 4 | 64 | 75% | 9.00 | – | – | 0.500 | – |
  """
  rows = [row for label, run in runs.items() for row in _run_rows(label, run)]
  baselines = {
      run.bigram['validation/perplexity']
      for run in runs.values()
      if run.bigram and 'validation/perplexity' in run.bigram
  }
  for perplexity in sorted(baselines):
    cells = [MISSING] * len(_HEADER)
    cells[0], cells[5] = 'bigram baseline', number(perplexity)
    rows.append(cells)
  return markdown_table(_HEADER, rows, numbers=_HEADER[2:])

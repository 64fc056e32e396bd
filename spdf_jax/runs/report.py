# SPDX-License-Identifier: Apache-2.0
"""Reports on finished runs: a Markdown page and its plots."""

from collections.abc import Mapping, Sequence
import os
import pathlib
from typing import Any

from spdf_jax import files
from spdf_jax.runs import curves
from spdf_jax.runs import equal_cost
from spdf_jax.runs import markdown
from spdf_jax.runs import plots
from spdf_jax.runs import read
from spdf_jax.runs import statements
from spdf_jax.runs import style
from spdf_jax.runs.read import MaskUpdate
from spdf_jax.runs.read import PhaseRecord
from spdf_jax.runs.read import RunRecord

_HEADER = (
    'run', 'phase', 'steps', 'tokens', 'sparsity', 'validation perplexity',
    'target perplexity', 'chrF', 'FLOPs against dense', 'seconds',
)
_MASK_HEADER = (
    'run', 'phase', 'planned sparsity', 'measured sparsity', 'mask updates',
    'survival', 'explored',
)
_CELL_WIDTH = 80  # Characters of a generation, its context and reference.
_COLUMNS = (
    'Perplexities and chrF are those at the end of each phase, on the few '
    'batches and generations of the config (evaluation); experiments.evaluate '
    'scores all. The bigram baseline predicts a token from the one before it, '
    'by counts over the whole training split of the corpus. Target perplexity '
    'is that of the answers of the task. FLOPs '
    'are counted by the formula of the papers, without those of pruned '
    'weights; FLOPs against dense are those up to the end of the row, divided '
    'by those of the same steps trained dense. Seconds are those of training, '
    'without evaluations and without the first step of each phase, which '
    'compiles.'
)
_CURVES = (
    'Validation loss over the training FLOPs of pre-training. Learning rates '
    'fall over a whole schedule, so only the end of a curve is the loss of a '
    'finished run; before it, the run is in the middle of its schedule. Dotted '
    'lines extend final losses to compare them.'
)
_MASKS = (
    'Measured sparsity is that of the sparsified weights at the end of each '
    'phase. Survival is the fraction of the kept weights that stay kept in a '
    'mask update, lowest to highest of those logged; explored is the fraction '
    'of the sparsified weights that have been kept at any step of the run.'
)
_PLOTS = {
    'loss_over_tokens': ('Loss over tokens', plots.plot_loss_over_tokens),
    'loss_over_steps': ('Loss over steps', plots.plot_loss_over_steps),
    'layer_sparsity': ('Sparsity per layer', plots.plot_layer_sparsity),
}


def _pick(count: int, wanted: int) -> list[int]:
  """Returns evenly spaced indices of a list, including the first one."""
  wanted = min(count, wanted)
  return [index * count // wanted for index in range(wanted)]


def _reference_text(reference: str | Sequence[str]) -> str:
  if isinstance(reference, str):
    return reference
  return '\n'.join(reference)


def generations_table(
    runs: Mapping[str, RunRecord], wanted: int = 10
) -> str | None:
  """Formats generations of each run's last evaluation beside the references.

  Long texts are truncated.

  Args:
    runs: Runs by label.
    wanted: Maximum number of generations, evenly spaced over all of them.

  Returns:
    A Markdown table with a column for each run, or None if no run has
    generations.

  Example:
    >>> record = {'context': 'f()', 'reference': 'Run.', 'generation': 'Go.'}
    >>> run = RunRecord('toy', (), (), {8: [record]})
    >>> print(generations_table({'toy': run}))
    | context | reference | toy, step 8 |
    | --- | --- | --- |
    | f() | Run. | Go. |
  """
  last = {
      label: (max(run.generations), run.generations[max(run.generations)])
      for label, run in runs.items()
      if run.generations
  }
  if not last:
    return None
  _, records = next(iter(last.values()))
  answers = [
      {record['context']: record['generation'] for record in generations}
      for _, generations in last.values()
  ]
  header = ['context', 'reference']
  header += [
      f'{markdown.escape(label)}, step {s:,}' for label, (s, _) in last.items()
  ]
  rows = []
  for index in _pick(len(records), wanted):
    context = records[index]['context']
    cells = [context, _reference_text(records[index]['reference'])]
    cells += [answer.get(context, markdown.MISSING) for answer in answers]
    rows.append([
        markdown.escape(markdown.shorten(cell, _CELL_WIDTH)) for cell in cells
    ])
  return markdown.markdown_table(header, rows)


def _sizes(label: str, run: RunRecord) -> str:
  """Describes a run's model in a sentence."""
  preset = run.model.get('preset')
  dropout = run.model.get('dropout')
  dtype = run.model.get('dtype', 'float32')
  rate = f', dropout {dropout}' if dropout else ''
  computes = f', computes in {dtype}' if dtype != 'float32' else ''
  model = f' (preset {preset}{rate}{computes})' if preset else ''
  zeros = ', '.join(
      f'{markdown.percent(phase.overall_sparsity)} after {phase.name}'
      for phase in run.phases if phase.overall_sparsity
  )
  overall = zeros and f'Zeros over all parameters: {zeros}. '
  sparsified = ''
  if run.is_sparse:
    sparsified = (
        f', {run.sparsified_parameters:,} of them in sparsified matrices'
    )
  return markdown.escape(
      f'{label}: {run.parameters:,} parameters{model}{sparsified}. '
      f'{overall}{run.compute}'
  ).rstrip()


def _list(texts: Sequence[str]) -> list[str]:
  """Formats a list as one part of the page; no part if it is empty."""
  lines = [f'* {markdown.escape(text)}' for text in texts]
  return ['\n'.join(lines)] if lines else []


def _value(run: RunRecord, phase: PhaseRecord, key: str) -> str:
  """Formats a phase's last value, with the step if the phase went on."""
  logged = run.at_end(phase, key)
  if logged is None:
    return markdown.MISSING
  step, value = logged
  last = min(phase.end, run.last_step)
  return markdown.number(value) + (f' (step {step:,})' if step != last else '')


def _sparsity(run: RunRecord, phase: PhaseRecord) -> str:
  """Formats the planned sparsity, and the measured one if it differs."""
  measured = run.at_end(phase, 'sparsity/sparsified')
  text = read.format_sparsity(phase)
  if measured is not None and abs(measured[1] - phase.sparsity) > 1e-3:
    text += f' ({markdown.percent(measured[1])} at the end)'
  return text


def _steps(done: int, planned: int) -> str:
  return f'{done:,}' if done == planned else f'{done:,} of {planned:,}'


def _run_rows(label: str, run: RunRecord) -> list[list[str]]:
  """Returns a row for each phase of a run, all pre-training, and the run."""
  pretraining = read.pretraining_phases(run)
  rows = []
  for phase in run.phases:
    rows.append(_row(label, run, phase.name, [phase]))
    if phase in pretraining[-1:] and 1 < len(pretraining) < len(run.phases):
      rows.append(_bold(_row(label, run, 'all pre-training', pretraining)))
  return [*rows, _bold(_row(label, run, 'total', run.phases))]


def _row(
    label: str, run: RunRecord, name: str, phases: Sequence[PhaseRecord]
) -> list[str]:
  """Returns the row of one phase, or of several in order."""
  done = [min(max(run.last_step - p.start, 0), p.steps) for p in phases]
  tokens = sum(round(p.tokens * n / p.steps) for p, n in zip(phases, done))
  step = min(run.last_step, phases[-1].end)
  missing = [markdown.MISSING] * 4
  values = missing if len(phases) > 1 else [
      _sparsity(run, phases[0]),
      *(
          _value(run, phases[0], key) for key in
          ('validation/perplexity', 'target/perplexity', 'task/chrf')
      ),
  ]
  ratio = None
  if any(done):
    ratio = curves.flops_at(run, step) / curves.dense_flops_at(run, step)
  return [
      markdown.escape(label),
      markdown.escape(name),
      _steps(sum(done), sum(phase.steps for phase in phases)),
      f'{tokens:,}',
      *values,
      markdown.number(ratio, 3),
      markdown.number(read.seconds_of(run, phases), 1),
  ]


def _bold(cells: Sequence[str]) -> list[str]:
  return [cell if cell == markdown.MISSING else f'**{cell}**' for cell in cells]


def runs_table(runs: Mapping[str, RunRecord]) -> str:
  """Formats the table of a report: a row for each phase of each run.

  Values are those at the end of each phase; FLOPs against dense are the FLOPs
  up to there divided by those of the same steps trained dense. Rows of all
  pre-training, if it has several phases, and of all phases follow each run; the
  bigram baseline is the last row.

  Args:
    runs: Runs by label.

  Returns:
    A Markdown table.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 10.0)
    >>> rows = [{'step': 4, 'validation/perplexity': 9.0}]
    >>> table = runs_table({'toy': RunRecord('toy', (phase,), tuple(rows))})
    >>> print(table.splitlines()[2])
    | toy | p | 4 | 64 | 75% | 9.00 | – | – | 0.500 | – |
  """
  rows = [row for label, run in runs.items() for row in _run_rows(label, run)]
  baselines: dict[float, list[str]] = {}
  for label, run in runs.items():
    perplexity = (run.bigram or {}).get('validation/perplexity')
    if perplexity is not None:
      baselines.setdefault(perplexity, []).append(label)
  for perplexity, labels in sorted(baselines.items()):
    name = 'bigram baseline'
    if len(baselines) > 1:
      name += f' of {", ".join(map(markdown.escape, labels))}'
    cells = [markdown.MISSING] * len(_HEADER)
    cells[0], cells[5] = name, markdown.number(perplexity)
    rows.append(cells)
  return markdown.markdown_table(_HEADER, rows, numbers=_HEADER[2:])


def best_steps(runs: Mapping[str, RunRecord]) -> list[str]:
  """Describes where phases with an early stop were best.

  Args:
    runs: Runs by label.

  Returns:
    A sentence for each phase that has logged its best evaluation.

  Example:
    >>> phase = PhaseRecord('tune', 0, 8, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
    >>> rows = [{'step': 8, 'best/step': 4, 'best/target/loss': 2.0}]
    >>> best_steps({'toy': RunRecord('toy', (phase,), tuple(rows))})
    ... # doctest: +NORMALIZE_WHITESPACE
    ['toy: tune was best at step 4 (target/loss 2.00) and ends with its weights
    at step 8.']
  """
  sentences = []
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
          f'{name.removeprefix("best/")} {markdown.number(value)}'
          for name, value in row.items()
          if name.startswith('best/') and name != 'best/step'
      )
      end = f'ends with its weights at step {phase.end:,}' if (
          run.last_step >= phase.end
      ) else f'is at step {run.last_step:,}'
      sentences.append(
          f'{label}: {phase.name} was best at step {best[1]:,} ({values}) and '
          f'{end}.'
      )
  return sentences


def mask_updates_table(runs: Mapping[str, RunRecord]) -> str | None:
  """Formats a table of masks: a row for each phase of runs with mask updates.

  Args:
    runs: Runs by label.

  Returns:
    A Markdown table: planned sparsity, measured sparsity at the end of each
    phase, number of updates, fraction of kept weights that survive an update,
    and fraction of weights kept at any time; None if no run logged mask
    updates.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.5, 64, 5.0, 9.0,
    ...                     (range(2, 3),))
    >>> row = {'step': 4, 'sparsity/sparsified': 0.5, 'sparsity/grown': 1.0,
    ...        'sparsity/dropped': 1.0, 'sparsity/surviving': 3.0,
    ...        'sparsity/exploration': 0.625}
    >>> table = mask_updates_table({'toy': RunRecord('toy', (phase,), (row,))})
    >>> print(table.splitlines()[2])
    | toy | p | 50% | 50% | 1 | 75% | 62.5% |
  """
  rows = []
  for label, run in runs.items():
    if not read.is_tracked(run):
      continue
    for phase in run.phases:
      measured = run.at_end(phase, 'sparsity/sparsified')
      explored = run.at_end(phase, 'sparsity/exploration')
      rows.append([
          markdown.escape(label),
          markdown.escape(phase.name),
          read.format_sparsity(phase),
          _percent(measured),
          str(sum(map(len, phase.mask_updates))),
          _survival(read.mask_updates_in(run, phase)) or markdown.MISSING,
          _percent(explored),
      ])
  if not rows:
    return None
  return markdown.markdown_table(
      _MASK_HEADER, rows, numbers=_MASK_HEADER[2:]
  )


def _percent(point: tuple[int, float] | None) -> str:
  return markdown.MISSING if point is None else markdown.percent(point[1])


def _survival(updates: Sequence[MaskUpdate]) -> str:
  """Formats the lowest and the highest survival of updates."""
  shares = [update.survival for update in updates]
  ends = [markdown.percent(f(shares)) for f in (min, max) if shares]
  return ' to '.join(dict.fromkeys(ends))


def write_report(
    directory: str | os.PathLike[str], runs: Mapping[str, RunRecord]
) -> pathlib.Path:
  """Writes `report.md` on finished runs, and its plots.

  Args:
    directory: Folder for the report, created if missing.
    runs: Runs, as `read_run` returns them, by label, in the order in which the
      report lists them.

  Returns:
    The path of `report.md`, which shows the plots beside it.

  Raises:
    ValueError: there are no runs.
    ImportError: matplotlib is not installed.

  Example:
    >>> import tempfile
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 10.0)
    >>> run = RunRecord('toy', (phase,), ({'step': 4, 'validation/loss': 2.0},))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   path = write_report(directory, {'toy': run})
    ...   sorted(file.name for file in path.parent.iterdir())
    ... # doctest: +NORMALIZE_WHITESPACE
    ['layer_sparsity.png', 'loss_over_flops.png', 'loss_over_steps.png',
     'loss_over_tokens.png', 'report.md']
  """
  if not runs:
    raise ValueError('runs is empty; give at least one run to report on.')
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  parts: list[Any] = [
      '# Report',
      '\n'.join(f'* {_sizes(label, run)}' for label, run in runs.items()),
  ]
  figures = dict(_PLOTS)
  if any(read.pretraining_phases(run) for run in runs.values()):
    path = directory / 'loss_over_flops.png'
    style.save(plots.plot_loss_over_flops(runs), path)
    parts += ['![Loss over FLOPs](loss_over_flops.png)', _CURVES]
  else:
    del figures['loss_over_tokens']
  parts += [
      '## Runs',
      runs_table(runs),
      _COLUMNS,
      *_list(sorted({
          'Validation losses and perplexities are means over '
          f'{run.bigram["validation/tokens"]:,.0f} tokens.'
          for run in runs.values()
          if run.bigram and 'validation/tokens' in run.bigram
      })),
      *_list(best_steps(runs)),
      *_list([
          f'{label}: {phase.name}, {note}.' for label, run in runs.items()
          for phase in run.phases for note in phase.notes
      ]),
      *equal_cost.losses_tables(runs),
      '## Findings',
      *_list(statements.find(runs)),
  ]
  masks = mask_updates_table(runs)
  if masks is not None:
    style.save(plots.plot_mask_updates(runs), directory / 'mask_updates.png')
    parts += ['## Masks', masks, _MASKS, '![Masks](mask_updates.png)']
  parts.append('## Plots')
  for name, (title, plot) in figures.items():
    style.save(plot(runs), directory / f'{name}.png')
    parts.append(f'![{title}]({name}.png)')
  table = generations_table(runs)
  if table is not None:
    parts += ['## Generations', table]
  path = directory / 'report.md'
  files.write_atomically(path, '\n\n'.join(parts) + '\n')
  return path

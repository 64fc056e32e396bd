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
from spdf_jax.runs import mask_plots
from spdf_jax.runs import plots
from spdf_jax.runs import read
from spdf_jax.runs import statements
from spdf_jax.runs import style
from spdf_jax.runs.read import MaskUpdate
from spdf_jax.runs.read import PhaseRecord
from spdf_jax.runs.read import RunRecord
from spdf_jax.runs.read import SpentBefore

_HEADER = (
    'run', 'phase', 'steps', 'tokens', 'sparsity', 'validation perplexity',
    'target perplexity', 'chrF', 'FLOPs against dense', 'seconds',
)
_MASK_HEADER = (
    'run', 'phase', 'planned sparsity', 'measured sparsity', 'mask updates',
    'survival', 'explored', 'units cut off', 'variation, inputs',
    'variation, outputs',
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
_BEFORE = (
    'A row that begins with from has the cost of other runs up to the '
    'checkpoint that a run starts from; rows of all phases, figures and '
    'comparisons include it. Phases that were trained before a run that '
    'resumes have rows of their own, but for their seconds.'
)
_CURVES = (
    'Validation loss over the training FLOPs of pre-training. Learning rates '
    'fall over a whole schedule, so only the end of a curve is the loss of a '
    'finished run; before it, the run is in the middle of its schedule. Dotted '
    'lines extend final losses to compare them. The lower panel has the '
    'planned zeros of sparsified matrices.'
)
_MASKS = (
    'Measured sparsity is that of the sparsified weights at the end of each '
    'phase. Survival is the fraction of the kept weights that stay kept in a '
    'mask update, lowest to highest of those logged; explored is the fraction '
    'of the sparsified weights that have been kept at any step of the run. '
    'Units cut off are the inputs and outputs of layers that keep no weight, '
    'as a fraction of all. Variation is the variance of the number of kept '
    'weights per input (output), divided by that of a random mask, on average '
    'over layers: random masks have 1, larger values mean that kept weights '
    'gather in few units.'
)
_UNITS = (
    'Kept weights of the inputs and outputs of each layer, from the fewest to '
    'the most, at the last evaluation with zeros; and the mask of the layer '
    'that varies most, in which darker pixels keep more weights.'
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
  """Returns rows of what came before, each phase, pre-training, and the run."""
  pretraining, before = read.pretraining_phases(run), run.before
  rows = []
  if before.source and before.is_recorded:
    rows.append(_before_row(label, before))
  for phase in run.phases:
    rows.append(_row(label, run, phase.name, [phase]))
    if phase in pretraining[-1:] and 1 < len(pretraining) < len(run.phases):
      rows.append(_bold(
          _row(label, run, 'all pre-training', pretraining, before)
      ))
  return [*rows, _bold(_row(label, run, 'total', run.phases, before))]


def _before_row(label: str, before: SpentBefore) -> list[str]:
  ratio = before.flops / before.dense_flops if before.steps else None
  amounts = [f'{n:,}' if before.steps else markdown.MISSING
             for n in (before.steps, before.tokens)]
  return [
      markdown.escape(label),
      markdown.escape(f'from {before.source}'),
      *amounts,
      *[markdown.MISSING] * 4,
      markdown.number(ratio, 3),
      markdown.number(before.seconds, 1),
  ]


def _row(
    label: str,
    run: RunRecord,
    name: str,
    phases: Sequence[PhaseRecord],
    before: SpentBefore = read.FROM_SCRATCH,
) -> list[str]:
  """Returns the row of one phase, or of several in order after `before`."""
  done = [min(max(run.last_step - p.start, 0), p.steps) for p in phases]
  tokens = before.tokens + sum(
      round(p.tokens * n / p.steps) for p, n in zip(phases, done)
  )
  planned = sum(phase.steps for phase in phases)
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
      _steps(before.steps + sum(done), before.steps + planned),
      f'{tokens:,}',
      *values,
      markdown.number(ratio, 3),
      markdown.number(read.seconds_of(run, phases, before), 1),
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


def mask_updates_table(runs: Mapping[str, RunRecord]) -> str | None:
  """Formats a table of masks: a row for each phase of runs with mask updates.

  Args:
    runs: Runs by label.

  Returns:
    A Markdown table: planned sparsity, measured sparsity at the end of each
    phase, number of updates, fraction of kept weights that survive an update,
    fraction of weights kept at any time, fraction of units that are cut off,
    and variation of units; None if no run logged mask updates.

  Example:
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.5, 64, 5.0, 9.0,
    ...                     (range(2, 3),))
    >>> row = {'step': 4, 'sparsity/sparsified': 0.5, 'sparsity/grown': 1.0,
    ...        'sparsity/dropped': 1.0, 'sparsity/surviving': 3.0,
    ...        'sparsity/exploration': 0.625, 'sparsity/cut_off': 0.25,
    ...        'sparsity/row_variation': 1.5, 'sparsity/column_variation': 2.0}
    >>> table = mask_updates_table({'toy': RunRecord('toy', (phase,), (row,))})
    >>> print(table.splitlines()[2])
    | toy | p | 50% | 50% | 1 | 75% | 62.5% | 25% | 1.5 | 2.0 |
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
          _percent(run.at_end(phase, 'sparsity/cut_off')),
          *(
              markdown.number(value and value[1], 1) for value in (
                  run.at_end(phase, f'sparsity/{axis}_variation')
                  for axis in ('row', 'column')
              )
          ),
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
      *([_BEFORE] if any(run.before.source for run in runs.values()) else []),
      *_list([
          f'{label} starts from {run.before.source}; its cost is not '
          'recorded and not counted.'
          for label, run in runs.items() if not run.before.is_recorded
      ]),
      *_list(sorted({
          'Validation losses and perplexities are means over '
          f'{run.bigram["validation/tokens"]:,.0f} tokens.'
          for run in runs.values()
          if run.bigram and 'validation/tokens' in run.bigram
      })),
      *_list(statements.best_steps(runs)),
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
    drawn = {'mask_updates': mask_plots.plot_mask_updates}
    parts += ['## Masks', masks, _MASKS, '![Masks](mask_updates.png)']
    if any(run.masks for run in runs.values()):
      drawn['kept_per_unit'] = mask_plots.plot_kept_per_unit
      drawn['masks'] = mask_plots.plot_pictures
      parts += [
          _UNITS, '![Kept weights per unit](kept_per_unit.png)',
          '![Pictures of masks](masks.png)',
      ]
    for name, plot in drawn.items():
      style.save(plot(runs), directory / f'{name}.png')
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

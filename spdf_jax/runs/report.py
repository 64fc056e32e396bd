# SPDX-License-Identifier: Apache-2.0
"""Reports on finished runs: a Markdown page and its plots."""

from collections.abc import Mapping
from collections.abc import Sequence
import os
import pathlib
from typing import Any

from spdf_jax.evaluation.markdown import escape
from spdf_jax.evaluation.markdown import markdown_table
from spdf_jax.evaluation.markdown import MISSING
from spdf_jax.evaluation.markdown import percent
from spdf_jax.evaluation.markdown import shorten
from spdf_jax.runs import findings
from spdf_jax.runs import plots
from spdf_jax.runs.mask_update_plots import plot_mask_updates
from spdf_jax.runs.mask_updates import mask_updates_table
from spdf_jax.runs.summaries import best_steps
from spdf_jax.runs.summaries import runs_table
from spdf_jax.runs.workdirs import Run

_CELL_WIDTH = 80  # Characters of a generation, its context and reference.
_COMPUTE = (
    'FLOPs are counted by the formula of the papers, without those of pruned '
    'weights. The list above names the kernels of each run: XLA multiplies the '
    'zeros, so sparsity lowers FLOPs but not seconds; native kernels skip '
    'them, so sparsity also lowers the seconds of products.'
)
_MASKS = (
    'Measured sparsity is that of the sparsified weights at the end of each '
    'phase. Survival is the fraction of the kept weights that stay kept in a '
    'mask update, lowest to highest of the phase; explored is the fraction of '
    'the sparsified weights that have been kept at any step of the run.'
)
_PLOTS = {
    'loss_over_flops': ('Loss over FLOPs', plots.plot_loss_over_flops),
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


def generations_table(runs: Mapping[str, Run], wanted: int = 10) -> str | None:
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
    >>> print(generations_table({'toy': Run('toy', (), (), {8: [record]})}))
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
      {record['context']: record['generation'] for record in found}
      for _, found in last.values()
  ]
  header = ['context', 'reference']
  header += [f'{escape(label)}, step {s:,}' for label, (s, _) in last.items()]
  rows = []
  for index in _pick(len(records), wanted):
    context = records[index]['context']
    cells = [context, _reference_text(records[index]['reference'])]
    cells += [answer.get(context, MISSING) for answer in answers]
    rows.append([escape(shorten(cell, _CELL_WIDTH)) for cell in cells])
  return markdown_table(header, rows)


def _sizes(label: str, run: Run) -> str:
  """Describes a run's model in a sentence."""
  preset = run.model.get('preset')
  dropout = run.model.get('dropout')
  rate = f', dropout {dropout}' if dropout else ''
  model = f' (preset {preset}{rate})' if preset else ''
  zeros = ', '.join(
      f'{percent(phase.overall_sparsity)} after {phase.name}'
      for phase in run.phases if phase.overall_sparsity
  )
  overall = zeros and f'Zeros over all parameters: {zeros}. '
  return escape(
      f'{label}: {run.parameters:,} parameters{model}, '
      f'{run.sparsified_parameters:,} of them in sparsified matrices. '
      f'{overall}{run.compute}'
  ).rstrip()


def _list(texts: Sequence[str]) -> list[str]:
  """Formats a list as one part of the page; no part if it is empty."""
  return ['\n'.join(f'* {escape(text)}' for text in texts)] if texts else []


def write_report(
    directory: str | os.PathLike[str], runs: Mapping[str, Run]
) -> pathlib.Path:
  """Writes `report.md` on finished runs, and its plots.

  Args:
    directory: Folder for the report, created if missing.
    runs: Runs by label, the baseline first.

  Returns:
    The path of `report.md`, which shows the plots beside it.

  Raises:
    ValueError: There are no runs.
    ImportError: matplotlib is not installed.

  Example:
    >>> import tempfile
    >>> from spdf_jax.runs.workdirs import PhaseRecord
    >>> phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 10.0)
    >>> run = Run('toy', (phase,), ({'step': 4, 'validation/loss': 2.0},))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   path = write_report(directory, {'toy': run})
    ...   sorted(file.name for file in path.parent.iterdir())
    ... # doctest: +NORMALIZE_WHITESPACE
    ['layer_sparsity.png', 'loss_over_flops.png', 'loss_over_steps.png',
     'report.md']
  """
  if not runs:
    raise ValueError('runs is empty; give at least one run to report on.')
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  parts: list[Any] = [
      '# Report',
      '\n'.join(f'* {_sizes(label, run)}' for label, run in runs.items()),
      '## Runs',
      runs_table(runs),
      'Values are those at the end of each phase; the validation perplexity of '
      'totals is that at the end of pre-training. FLOPs against dense are the '
      'FLOPs up to there divided by those of the same steps trained dense; '
      'seconds are those of training, without evaluation.',
      *_list(best_steps(runs)),
      *_list([
          f'{label}: {phase.name}, {note}.' for label, run in runs.items()
          for phase in run.phases for note in phase.notes
      ]),
      _COMPUTE,
      '## Findings',
      *_list(findings.find(runs)),
  ]
  masks = mask_updates_table(runs)
  if masks is not None:
    plot_mask_updates(runs).savefig(directory / 'mask_updates.png')
    parts += ['## Masks', masks, _MASKS, '![Masks](mask_updates.png)']
  parts.append('## Plots')
  for name, (title, plot) in _PLOTS.items():
    plot(runs).savefig(directory / f'{name}.png')
    parts.append(f'![{title}]({name}.png)')
    if name == 'loss_over_flops':
      parts.append('Dotted lines extend final losses to compare them.')
  table = generations_table(runs)
  if table is not None:
    parts += ['## Generations', table]
  path = directory / 'report.md'
  path.write_text('\n\n'.join(parts) + '\n', encoding='utf-8')
  return path

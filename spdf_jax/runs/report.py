"""The report on finished runs: one Markdown page and its plots."""

from collections.abc import Mapping
from collections.abc import Sequence
import os
import pathlib
from typing import Any

from spdf_jax.evaluation.markdown import escape
from spdf_jax.evaluation.markdown import markdown_table
from spdf_jax.evaluation.markdown import MISSING
from spdf_jax.evaluation.markdown import shorten
from spdf_jax.runs import findings
from spdf_jax.runs import plots
from spdf_jax.runs.change_plots import plot_mask_changes
from spdf_jax.runs.mask_changes import changes_table
from spdf_jax.runs.summaries import runs_table
from spdf_jax.runs.workdirs import Run

_CELL_WIDTH = 80  # characters of a generation, its context and reference
_COMPUTE = (
    'FLOPs are counted by the formula of the papers, with zeros skipped. How '
    'the products of a run were computed stands above: where XLA multiplies '
    'the zeros, FLOPs fall and seconds do not; kernels that skip them turn the '
    'one into the other, but for what a step does besides.'
)
_MASKS = (
    'Zeros are those of the sparsified weights, found at the end of each '
    'phase. '
    'Survival is the share of the active weights that stay active at a change '
    'of the masks, the least and the most of the phase; explored is the share '
    'of the sparsified weights that have been active at any time of the run.'
)
_PLOTS = {
    'loss_over_flops': ('Loss over FLOPs', plots.plot_loss_over_flops),
    'loss_over_steps': ('Loss over steps', plots.plot_loss_over_steps),
    'layer_sparsity': ('Sparsity per layer', plots.plot_layer_sparsity),
}


def _pick(count: int, wanted: int) -> list[int]:
  """Picks indices spread evenly over a list, the first one included."""
  wanted = min(count, wanted)
  return [index * count // wanted for index in range(wanted)]


def _reference_text(reference: str | Sequence[str]) -> str:
  if isinstance(reference, str):
    return reference
  return '\n'.join(reference)


def generations_table(runs: Mapping[str, Run], wanted: int = 10) -> str | None:
  """Prints generations of each run's last evaluation beside the references.

  Long texts are cut.

  Args:
    runs: Runs by label.
    wanted: Number of generations, spread evenly over those there are.

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
  model = f' (preset {preset})' if preset else ''
  return escape(
      f'{label}: {run.parameters:,} parameters{model}, '
      f'{run.sparsified_parameters:,} of them in sparsified matrices. '
      f'{run.compute}'
  ).rstrip()


def write_report(
    directory: str | os.PathLike[str], runs: Mapping[str, Run]
) -> pathlib.Path:
  """Writes `report.md` and its plots on finished runs.

  Args:
    directory: Where to write; made if missing.
    runs: Runs by label, the one to compare with first.

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
      'Values are those at the end of each phase; FLOPs against dense are '
      'those of the run so far over those of the same steps trained dense; '
      'seconds are of training, without evaluation.',
      _COMPUTE,
      '## Findings',
      '\n'.join(f'* {escape(text)}' for text in findings.find(runs)),
  ]
  masks = changes_table(runs)
  if masks is not None:
    plot_mask_changes(runs).savefig(directory / 'mask_changes.png')
    parts += ['## Masks', masks, _MASKS, '![Masks](mask_changes.png)']
  parts.append('## Plots')
  for name, (title, plot) in _PLOTS.items():
    plot(runs).savefig(directory / f'{name}.png')
    parts.append(f'![{title}]({name}.png)')
  table = generations_table(runs)
  if table is not None:
    parts += ['## Generations', table]
  path = directory / 'report.md'
  path.write_text('\n\n'.join(parts) + '\n', encoding='utf-8')
  return path

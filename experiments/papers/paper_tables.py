"""The papers' results tables, filled from finished runs."""

from collections.abc import Sequence
import os
import re
import statistics
from typing import NamedTuple

from experiments.papers import published_results
from experiments.papers.published_results import Arm
from experiments.papers.published_results import Result
from experiments.scores import scored_runs
from experiments.scores.scored_runs import ScoredRun
from spdf_jax import names
from spdf_jax.runs import markdown

_TOLERANCE = 0.005
"""Largest difference between the sparsity of a run and that of its row."""
_MOST = 20
"""Largest number of runs that are listed."""
_HEADER = ('row', 'column', 'ours', 'runs', 'tokens', 'printed', 'difference')


class Filled(NamedTuple):
  """A cell, and the scores of runs that belong in it.

  Attributes:
    result: The cell.
    values: Score of each run, in printed units.
    tokens: Number of tokens that each run was pre-trained on.
    reason: Reason why there are no values; `''` if there are some.
  """

  result: Result
  values: tuple[float, ...] = ()
  tokens: tuple[int, ...] = ()
  reason: str = ''


def fill_results(
    results: Sequence[Result], runs: Sequence[ScoredRun]
) -> list[Filled]:
  """Fills cells, of a paper or of a table of your own.

  The config of a run and those of its ancestry determine its row: by the model,
  the algorithm and sparsity of pre-training, the fine-tuning task, and whether
  fine-tuning was sparse. Runs that differ in more than their seeds are not
  averaged. Rounds of iterative pruning that no row has, such as
  `WORKDIR@round3`, are rows of their own.

  Args:
    results: The cells.
    runs: Finished runs, such as those of `find_runs`.

  Returns:
    Every cell, in order; those of rounds follow by sparsity.

  Example:
    >>> arm = Arm('gpt-mini', 'dense', 0.0)
    >>> measure = ('validation', 'mean over tokens', 'loss', 1)
    >>> cells = [Result('Ours', 'dense', 'loss', arm, measure)]
    >>> fill_results(cells, [])[0].reason
    'no run'
  """
  return [_fill(result, runs) for result in _with_rounds(results, runs)]


def _with_rounds(
    results: Sequence[Result], runs: Sequence[ScoredRun]
) -> list[Result]:
  """Adds rows for the rounds of iterative pruning that have none."""
  cells = list(results)
  for run in sorted(runs, key=lambda run: run.ancestry.recipe[1]):
    if any(belongs(run, cell.arm) for cell in cells):
      continue
    _, sparsity = run.ancestry.recipe
    number = sum(s.sparsity > 0 for s in run.ancestry.pretraining)
    for cell in filter(_is_pruned, results):
      arm = cell.arm and cell.arm._replace(sparsity=sparsity)
      row = f'{markdown.percent(sparsity)}, round {number}'
      added = cell._replace(row=row, arm=arm, printed='')
      if belongs(run, arm) and added not in cells:
        cells.append(added)
  first = {r.source: i for i, r in reversed([*enumerate(results)])
           if _is_pruned(r)}
  return sorted(cells, key=lambda cell: (
      (first[cell.source], cell.arm.sparsity) if cell.arm and _is_pruned(cell)
      else (results.index(cell), 0.0)
  ))


def _is_pruned(cell: Result) -> bool:
  return cell.arm is not None and cell.arm.algorithm == 'iterative'


def _fill(result: Result, runs: Sequence[ScoredRun]) -> Filled:
  if result.arm is None:
    return Filled(result, reason='a published model')
  arms = [run for run in runs if belongs(run, result.arm)]
  if not arms:
    return Filled(result, reason='no run')
  key = result.measure[:3]
  scored = [run for run in arms if key in run.scores]
  if not scored:
    return Filled(result, reason=f'not scored: {_names(arms)}')
  if len({run.ancestry.identity for run in scored}) > 1:
    return Filled(result, reason=f'several configs: {_names(scored)}')
  seeds = [run.ancestry.seed for run in scored]
  if len(set(seeds)) < len(seeds):
    return Filled(result, reason=f'same seed: {_names(scored)}')
  return Filled(
      result,
      tuple(run.scores[key] * result.measure.factor for run in scored),
      tuple(run.ancestry.tokens for run in scored),
  )


def belongs(run: ScoredRun, arm: Arm | None) -> bool:
  """Returns whether a run belongs in the row of an arm."""
  if arm is None:
    return False
  ancestry = run.ancestry
  algorithm, sparsity = ancestry.recipe
  return (
      ancestry.model == arm.model
      and algorithm == arm.algorithm
      and abs(sparsity - arm.sparsity) <= _TOLERANCE
      and ancestry.task == arm.task
      and ancestry.tuned_sparsely == arm.sparsely
      and (
          arm.tokens is None
          or abs(ancestry.tokens / arm.tokens - 1) <= 0.1
      )
  )


def format_filled(cells: Sequence[Filled]) -> str:
  """Formats filled cells as Markdown, a table for each source.

  Means have as many digits as the printed values, ± the standard deviation over
  seeds.

  Example:
    >>> arm, measure = Arm('gpt2-small', 'dense', 0.0), ('e2e', 'x', 'bleu', 1)
    >>> cell = Result('A paper', 'dense', 'BLEU', arm, measure, '67.5±0.60')
    >>> print(format_filled([Filled(cell, (67.0, 68.0), (100, 100))]))
    A paper: 1 of 1 cells filled
    <BLANKLINE>
    | row | column | ours | runs | tokens | printed | difference |
    | --- | --- | ---: | ---: | ---: | ---: | ---: |
    | dense | BLEU | 67.5 ± 0.7 | 2 | 100 | 67.5 ± 0.60 | 0.0 |
  """
  blocks = []
  for source in dict.fromkeys(cell.result.source for cell in cells):
    held = [cell for cell in cells if cell.result.source == source]
    filled = sum(bool(cell.values) for cell in held)
    open_cells = sum(cell.result.arm is not None for cell in held)
    count = f': {filled} of {open_cells} cells filled' if open_cells else ''
    blocks.append(
        f'{source}{count}\n\n'
        + markdown.markdown_table(
            _HEADER, [_row(cell) for cell in held], numbers=_HEADER[2:]
        )
    )
  if any(cell.result.measure[0] == published_results.SEEN for cell in cells):
    blocks.append(
        'WebNLG is scored on the categories seen in training, which agree with '
        'the printed values; the paper does not state the categories.'
    )
  return '\n\n'.join(blocks)


def _row(cell: Filled) -> list[str]:
  result = cell.result
  printed = result.printed.partition('±')
  digits = len(printed[0].partition('.')[2]) if result.printed else 2
  write = lambda value: re.sub('^-(0[.0]*)$', r'\1', f'{value:.{digits}f}')
  ours = tokens = difference = markdown.MISSING
  number = cell.reason
  if cell.values:
    mean = statistics.fmean(cell.values)
    ours = write(mean)
    if len(cell.values) > 1:
      ours += f' ± {write(statistics.stdev(cell.values))}'
    number = str(len(cell.values))
    tokens = f'{statistics.fmean(cell.tokens):.3g}'
    if result.printed:
      difference = write(mean - float(printed[0]))
  return [
      markdown.escape(result.row), markdown.escape(result.column), ours,
      markdown.escape(number), tokens,
      result.printed.replace('±', ' ± ') or markdown.MISSING, difference,
  ]


def _names(runs: Sequence[ScoredRun]) -> str:
  return ', '.join(run.source for run in runs)


def of_model(results: Sequence[Result], model: str) -> list[Result]:
  """Returns the rows of the first model of a table, for another model.

  Args:
    results: The cells of the table.
    model: Model of the runs, as `Ancestry` names it.

  Returns:
    The cells of the first model, with its printed numbers.

  Example:
    >>> cells = of_model(published_results.RESULTS['spdf'], 'gpt-mini resized')
    >>> cells[4].row, cells[4].arm.model, cells[4].printed
    ('GPT-2 Small 50%, here gpt-mini resized', 'gpt-mini resized', '67.39±0.38')
  """
  arms = [result.arm for result in results if result.arm is not None]
  return [
      result._replace(
          row=f'{result.row}, here {model}',
          arm=result.arm._replace(model=model, tokens=None),
      )
      for result in results
      if result.arm is not None and result.arm.model == arms[0].model
  ]


def report(
    table: str, folders: Sequence[str | os.PathLike[str]], model: str = ''
) -> str:
  """Formats a paper's table filled from runs on disk, and lists unused runs.

  Args:
    table: A key of `RESULTS`.
    folders: Workdirs, or folders that contain some, see `find_runs`.
    model: Model of the runs, see `of_model`; `''`: those of the table.

  Returns:
    Markdown.

  Raises:
    ValueError: the table is unknown, or a folder contains no run.
  """
  results: Sequence[Result] = names.lookup(
      'table', table, published_results.RESULTS
  )
  scored = scored_runs.find_runs(folders)
  cells = fill_results(
      of_model(results, model) if model else results, scored.runs
  )
  arms = {cell.result.arm for cell in cells}
  lines = [format_filled(cells)]
  others = [
      run for run in scored.runs if not any(belongs(run, arm) for arm in arms)
  ]
  for title, entries in (
      ('Runs that belong in no row',
       [f'{run.source}: {_describe(run)}' for run in others]),
      ('Left out', scored.problems),
  ):
    if entries:
      rest = len(entries) - _MOST
      more = [f'and {rest} more'] if rest > 0 else []
      shown = [
          f'* {markdown.escape(text)}' for text in [*entries[:_MOST], *more]
      ]
      lines.append('\n'.join([f'{title}:', '', *shown]))
  return '\n\n'.join(lines)


def _describe(run: ScoredRun) -> str:
  ancestry = run.ancestry
  algorithm, sparsity = ancestry.recipe
  words = [ancestry.model, algorithm]
  if sparsity:
    words.append(f'{100 * sparsity:.3g}%')
  words.append(f'on {ancestry.tokens:.3g} tokens')
  if ancestry.task:
    kept = ' sparsely' if ancestry.tuned_sparsely else ''
    words.append(f'fine-tuned{kept} on {ancestry.task}')
  return ' '.join(words)

"""The papers' results tables, filled from finished runs."""

from collections.abc import Sequence
import os
import re
import statistics
from typing import NamedTuple

from experiments.papers.published_results import Arm
from experiments.papers.published_results import Result
from experiments.papers.published_results import RESULTS
from experiments.papers.published_results import SEEN
from spdf_jax.evaluation.markdown import escape
from spdf_jax.evaluation.markdown import markdown_table
from spdf_jax.evaluation.markdown import MISSING
from spdf_jax.names import lookup
from spdf_jax.runs.scored_runs import find_runs
from spdf_jax.runs.scored_runs import ScoredRun

_LEVEL = 0.005  # How far a level may be from a row's.
_MOST = 20  # Runs that are listed.
_HEADER = ('row', 'column', 'ours', 'runs', 'tokens', 'printed', 'difference')


class Filled(NamedTuple):
  """A cell with what runs found.

  Attributes:
    result: The cell.
    values: A number for each run that belongs in it, in printed units.
    tokens: That each of them was pre-trained on.
    reason: Why there are none; `''` where there are.
  """

  result: Result
  values: tuple[float, ...] = ()
  tokens: tuple[int, ...] = ()
  reason: str = ''


def fill(table: str, runs: Sequence[ScoredRun]) -> list[Filled]:
  """Fills a table of a paper, see `fill_results`.

  Args:
    table: A key of `RESULTS`.
    runs: From `find_runs`.

  Returns:
    Every cell of the table, in order.

  Raises:
    ValueError: the table is unknown.

  Example:
    >>> {cell.reason for cell in fill('spdf', [])}
    {'no run'}
  """
  return fill_results(lookup('table', table, RESULTS), runs)


def fill_results(
    results: Sequence[Result], runs: Sequence[ScoredRun]
) -> list[Filled]:
  """Fills cells, of a paper or of a table of your own.

  A run belongs in a row by its config, and those of the runs that it started
  from: model, algorithm and level of pre-training, fine-tuning and its zeros.
  Runs of a cell that differ in more than their seeds are not averaged.

  Args:
    results: The cells.
    runs: From `find_runs`.

  Returns:
    Every cell, in order.

  Example:
    >>> arm = Arm('gpt-mini', 'dense', 0.0)
    >>> measure = ('validation', 'mean over tokens', 'loss', 1)
    >>> cells = [Result('Ours', 'dense', 'loss', arm, measure)]
    >>> fill_results(cells, [])[0].reason
    'no run'
  """
  return [_fill(result, runs) for result in results]


def _fill(result: Result, runs: Sequence[ScoredRun]) -> Filled:
  arms = [run for run in runs if belongs(run, result.arm)]
  if not arms:
    return Filled(result, reason='no run')
  key = result.measure[:3]
  scored = [run for run in arms if key in run.scores]
  if not scored:
    return Filled(result, reason=f'not scored: {_names(arms)}')
  if len({run.lineage.identity for run in scored}) > 1:
    return Filled(result, reason=f'of several configs: {_names(scored)}')
  seeds = [run.lineage.seed for run in scored]
  if len(set(seeds)) < len(seeds):
    return Filled(result, reason=f'of one seed: {_names(scored)}')
  return Filled(
      result,
      tuple(run.scores[key] * result.measure.factor for run in scored),
      tuple(run.lineage.tokens for run in scored),
  )


def belongs(run: ScoredRun, arm: Arm) -> bool:
  """Tells whether a run is of a row."""
  lineage = run.lineage
  algorithm, level = lineage.recipe
  return (
      lineage.model == arm.model
      and algorithm == arm.algorithm
      and abs(level - arm.sparsity) <= _LEVEL
      and lineage.task == arm.task
      and lineage.tuned_sparsely == arm.sparsely
      and (
          arm.tokens is None
          or abs(lineage.tokens / arm.tokens - 1) <= 0.1
      )
  )


def format_filled(cells: Sequence[Filled]) -> str:
  """Writes filled cells as Markdown, a table for each printed one.

  Means are written with the printed digits, ± the deviation over seeds.

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
    blocks.append(
        f'{source}: {filled} of {len(held)} cells filled\n\n'
        + markdown_table(
            _HEADER, [_row(cell) for cell in held], numbers=_HEADER[2:]
        )
    )
  if any(cell.result.measure[0] == SEEN for cell in cells):
    blocks.append(
        'WebNLG is of categories seen in training, which the printed values '
        'fit; the paper does not say.'
    )
  return '\n\n'.join(blocks)


def _row(cell: Filled) -> list[str]:
  result = cell.result
  printed = result.printed.partition('±')
  digits = len(printed[0].partition('.')[2]) if result.printed else 2
  write = lambda value: re.sub('^-(0[.0]*)$', r'\1', f'{value:.{digits}f}')
  ours, number, tokens, difference = MISSING, cell.reason, MISSING, MISSING
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
      escape(result.row), escape(result.column), ours, escape(number), tokens,
      result.printed.replace('±', ' ± ') or MISSING, difference,
  ]


def _names(runs: Sequence[ScoredRun]) -> str:
  return ', '.join(run.source for run in runs)


def report(table: str, folders: Sequence[str | os.PathLike[str]]) -> str:
  """Writes a paper's table filled from runs on disk, and what was left out.

  Args:
    table: A key of `RESULTS`.
    folders: As `find_runs` takes them.

  Returns:
    Markdown.

  Raises:
    ValueError: the table is unknown, or a folder holds nothing.
  """
  lookup('table', table, RESULTS)
  found = find_runs(folders)
  cells = fill(table, found.runs)
  arms = {cell.result.arm for cell in cells}
  lines = [format_filled(cells)]
  others = [
      run for run in found.runs if not any(belongs(run, arm) for arm in arms)
  ]
  for title, entries in (
      ('Runs of no row', [f'{run.source}: {_describe(run)}' for run in others]),
      ('Left out', found.problems),
  ):
    if entries:
      rest = len(entries) - _MOST
      more = [f'and {rest} more'] if rest > 0 else []
      shown = [f'* {escape(text)}' for text in [*entries[:_MOST], *more]]
      lines.append('\n'.join([f'{title}:', '', *shown]))
  return '\n\n'.join(lines)


def _describe(run: ScoredRun) -> str:
  lineage = run.lineage
  algorithm, level = lineage.recipe
  words = [lineage.model, algorithm]
  if level:
    words.append(f'{100 * level:.3g}%')
  words.append(f'on {lineage.tokens:.3g} tokens')
  if lineage.task:
    kept = ' sparsely' if lineage.tuned_sparsely else ''
    words.append(f'fine-tuned{kept} on {lineage.task}')
  return ' '.join(words)

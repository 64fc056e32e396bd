"""The papers' FLOPs tables: printed and computed, cell by cell."""

from collections.abc import Sequence
import csv
import functools
import io
import pathlib
import re
from typing import NamedTuple

from experiments.papers import computed_flops
from experiments.papers import printed_numbers
from experiments.papers import published_flops
from experiments.papers.published_flops import Printed
from spdf_jax import names
from spdf_jax.runs import markdown

FOLLOWS, OTHERWISE = 'follows', 'follows otherwise'
MISPRINT, FAILS = 'misprint', 'does not follow'

_EXCEPTIONS = pathlib.Path(__file__).parent / 'flops_exceptions.csv'
"""Cells whose printed digits are not those of the computed value."""
_HEADER = ('row', 'column', 'printed', 'ours', 'difference', 'verdict')


class Cell(NamedTuple):
  """A printed number and the computed one.

  Attributes:
    source: Paper and table.
    row: Label of the row, such as a model and its sparsity.
    column: Label of the column, the quantity.
    printed: Text of the cell in the paper.
    value: Computed value.
    verdict: `FOLLOWS`: the computed value has the printed digits; `OTHERWISE`:
      another reading of the same quantity has them; `MISPRINT`: the printed
      number is the value of another cell, or wrongly rounded; `FAILS`: none of
      these.
    note: The other reading, or the error and the nearest reading.
  """

  source: str
  row: str
  column: str
  printed: str
  value: float
  verdict: str
  note: str = ''

  @property
  def ours(self) -> str:
    """Computed value, written with the digits and unit of the printed one."""
    return printed_numbers.as_printed(self.value, self.printed)

  @property
  def difference(self) -> float:
    """Difference of computed and printed value, relative to the printed one."""
    return self.value / printed_numbers.value_of(self.printed) - 1


def compare(table: str) -> list[Cell]:
  """Computes every cell of a paper's FLOPs tables.

  Args:
    table: A key of `published_flops.TABLES`.

  Returns:
    Cells in the order of the paper.

  Raises:
    ValueError: the table is unknown.

  Example:
    >>> cell = compare('iterative')[0]
    >>> cell.printed, round(cell.value, 2), cell.verdict
    ('3x', 3.02, 'follows')
  """
  return [
      _judge(printed, row, column, text)
      for printed in names.lookup('table', table, published_flops.TABLES)
      for row, cells in printed.rows.items()
      for column, text in zip(printed.columns, cells.split())
      if text != '–'
  ]


def _judge(printed: Printed, row: tuple, column: str, text: str) -> Cell:
  value = computed_flops.VALUES[printed.source](row, column)
  label = ' '.join(map(_label, row))
  verdict, note = FOLLOWS, ''
  if printed_numbers.as_printed(value, text) != text:
    verdict, note = _exceptions()[printed.source, label, column]
  return Cell(printed.source, label, column, text, value, verdict, note)


@functools.cache
def _exceptions() -> dict[tuple[str, ...], tuple[str, str]]:
  """Reads verdict and note of the cells that do not follow."""
  with _EXCEPTIONS.open(encoding='utf-8') as file:
    return {
        (row['source'], row['row'], row['column']): (
            row['verdict'], row['note']
        )
        for row in csv.DictReader(file)
    }


def _label(part: str | float) -> str:
  if isinstance(part, str):
    return part
  return markdown.percent(part) if part <= 1 else f'{part / 1e9:.0f}B tokens'


def format_cells(cells: Sequence[Cell]) -> str:
  """Formats cells as aligned text: a block for each source with its notes.

  Example:
    >>> cell = Cell('A paper', 'small', 'FLOPs', '1.2e9', 1.25e9, MISPRINT,
    ...             'it is of another row')
    >>> print(format_cells([cell]))
    A paper
    row    column  printed   ours  difference  verdict
    small  FLOPs     1.2e9  1.2e9       +4.2%  misprint [1]
    [1] it is of another row
    <BLANKLINE>
    1 cell: 0 follow, 0 follow otherwise, 1 misprint, 0 do not follow
  """
  blocks = []
  for source in dict.fromkeys(cell.source for cell in cells):
    notes: dict[str, int] = {}
    rows = [_HEADER]
    for cell in cells:
      if cell.source != source:
        continue
      mark = ''
      if cell.note:
        mark = f' [{notes.setdefault(cell.note, len(notes) + 1)}]'
      rows.append((
          cell.row, cell.column, cell.printed, cell.ours,
          re.sub('^[+-](0.0%)$', r'\1', f'{cell.difference:+.1%}'),
          cell.verdict + mark,
      ))
    lines = [source, markdown.align(rows, '<<>>><')]
    blocks.append('\n'.join(
        lines + [f'[{number}] {note}' for note, number in notes.items()]
    ))
  return '\n\n'.join([*blocks, summarize(cells)])


def summarize(cells: Sequence[Cell]) -> str:
  """Returns a line with the number of cells for each verdict."""
  count = lambda verdict: sum(cell.verdict == verdict for cell in cells)
  misprints = count(MISPRINT)
  return (
      f'{len(cells)} cell{"s" * (len(cells) != 1)}: {count(FOLLOWS)} follow, '
      f'{count(OTHERWISE)} follow otherwise, {misprints} '
      f'misprint{"s" * (misprints != 1)}, {count(FAILS)} do not follow'
  )


def as_csv(cells: Sequence[Cell]) -> str:
  """Formats cells as CSV with all digits, a row for each."""
  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow(['source', *_HEADER, 'value', 'note'])
  for c in cells:
    writer.writerow([
        c.source, c.row, c.column, c.printed, c.ours, f'{c.difference:.6f}',
        c.verdict, repr(c.value), c.note,
    ])
  return text.getvalue()



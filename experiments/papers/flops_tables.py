"""The papers' FLOPs tables: printed and computed, cell by cell."""

from collections.abc import Sequence
import csv
import io
import re
from typing import NamedTuple

from experiments.papers import post_readings
from experiments.papers import printed_numbers
from experiments.papers import published_flops
from experiments.papers import spdf_readings
from experiments.papers.published_flops import Printed
from experiments.papers.readings import Reading
from spdf_jax import names
from spdf_jax.runs import markdown

FOLLOWS, OTHERWISE = 'follows', 'follows otherwise'
MISPRINT, FAILS = 'misprint', 'does not follow'

_READINGS = spdf_readings.SPDF_READINGS | post_readings.POST_READINGS
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
  first, *others = _READINGS[printed.source](row, column)
  name = ' '.join(_label(part) for part in row)
  judged = lambda verdict, note='': Cell(
      printed.source, name, column, text, first.value, verdict, note
  )
  if printed_numbers.as_printed(first.value, text) == text:
    return judged(FOLLOWS)
  slip = printed.slips.get((row, column), '')
  for reading in others:
    if printed_numbers.as_printed(reading.value, text) != text:
      continue
    if reading.slip:
      return judged(MISPRINT, slip or f'it is {reading.how}')
    if printed.is_open:
      break
    return judged(OTHERWISE, f'{reading.how}; {slip}' if slip else reading.how)
  if printed.is_open:
    readings = sorted(
        [first, *others],
        key=lambda r: abs(r.value - printed_numbers.value_of(text))
    )
    counts = '; '.join(
        f'{markdown.percent(r.value)} {r.how or "as the other tables"}'
        for r in readings
    )
    return judged(FAILS, f'the source does not state how it counts: {counts}')
  nearest = _nearest([first, *others], text)
  return judged(FAILS, f'{slip}; {nearest}' if slip else nearest)


def _nearest(readings: Sequence[Reading], text: str) -> str:
  same = [reading for reading in readings if not reading.slip]
  nearest = min(
      same, key=lambda r: abs(r.value - printed_numbers.value_of(text))
  )
  how = f' ({nearest.how})' if nearest.how else ''
  printed = printed_numbers.as_printed(nearest.value, text)
  return f'nearest reading: {printed}{how}'


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



"""The papers' FLOPs tables: printed and computed, cell by cell."""

from collections.abc import Sequence
import csv
import functools
import io
import pathlib
import re
from typing import NamedTuple

from experiments.papers import computed_flops
from spdf_jax import names
from spdf_jax.runs import markdown

FOLLOWS, OTHERWISE = 'follows', 'follows otherwise'
MISPRINT, FAILS = 'misprint', 'does not follow'

TABLES = ('spdf', 'variable', 'iterative')
"""Names of the papers. Table 1 of the post on iterative pruning and the tables
of the Llama runs are images, whose numbers are not in the text."""

_PRINTED = pathlib.Path(__file__).parent / 'printed_flops.csv'
_NUMBER = re.compile(
    r'(?P<sign>[~<]?)(?P<digits>\d+(?:\.(?P<decimals>\d+))?)'
    r'(?:e(?P<power>\d+))?(?P<unit>[xMB%]?)'
)
_UNITS = {'': 1.0, 'x': 1.0, '%': 1e-2, 'M': 1e6, 'B': 1e9}
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
    return as_printed(self.value, self.printed)

  @property
  def difference(self) -> float:
    """Difference of computed and printed value, relative to the printed one."""
    return self.value / value_of(self.printed) - 1


def compare(table: str) -> list[Cell]:
  """Computes every cell of a paper's FLOPs tables.

  Args:
    table: One of `TABLES`.

  Returns:
    Cells in the order of the paper.

  Raises:
    ValueError: the table is unknown.

  Example:
    >>> cell = compare('iterative')[0]
    >>> cell.printed, round(cell.value, 2), cell.verdict
    ('3x', 3.02, 'follows')
  """
  names.lookup('table', table, dict.fromkeys(TABLES))
  return [_cell(row) for row in _printed() if row['table'] == table]


def printed_value(
    source: str, model: str, setting: str | float, column: str
) -> float:
  """Returns the value of a printed number.

  Args:
    source: Paper and table.
    model: Name of the model.
    setting: Sparsity, task or plan.
    column: Label of the column.

  Example:
    >>> printed_value('SPDF, table 2', 'gpt3-xl', 0.75, 'E2E speedup')
    2.48
  """
  text, = (
      row['printed'] for row in _printed()
      if (row['source'], row['model'], _setting(row), row['column'])
      == (source, model, setting, column)
  )
  return value_of(text)


@functools.cache
def _printed() -> list[dict[str, str]]:
  with _PRINTED.open(encoding='utf-8') as file:
    return list(csv.DictReader(file))


def _setting(row: dict[str, str]) -> str | float:
  try:
    return float(row['setting'])
  except ValueError:
    return row['setting']


def _cell(row: dict[str, str]) -> Cell:
  model, setting = row['model'], _setting(row)
  value = computed_flops.VALUES[row['source']](model, setting, row['column'])
  return Cell(
      row['source'], f'{model} {_label(setting)}'.rstrip(), row['column'],
      row['printed'], value, row['verdict'], row['note'],
  )


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


def value_of(text: str) -> float:
  """Returns the value of a printed number.

  Args:
    text: Digits, with an exponent or a unit: x, %, M or B.

  Returns:
    The value; percentages are divided by 100.

  Raises:
    ValueError: `text` has another form.

  Example:
    >>> value_of('1.22e6'), value_of('75%'), value_of('~26B')
    (1220000.0, 0.75, 26000000000.0)
  """
  match = _parse(text)
  digits = f'{match["digits"]}e{match["power"] or 0}'
  unit = match['unit']
  return float(digits) / 100 if unit == '%' else float(digits) * _UNITS[unit]


def as_printed(value: float, text: str) -> str:
  """Formats a number with the digits, exponent and unit of a printed one.

  Args:
    value: The number.
    text: The printed number.

  Returns:
    The number, rounded to as many digits as `text`; `text` itself if it begins
    with `<` and the number is less.

  Example:
    >>> as_printed(54_321, '0.54e5'), as_printed(0.6416, '64%')
    ('0.54e5', '64%')
    >>> as_printed(0.0002, '<0.05%'), as_printed(0.0007, '<0.05%')
    ('<0.05%', '0.07%')
  """
  match = _parse(text)
  if match['sign'] == '<' and value < value_of(text):
    return text
  scale = _UNITS[match['unit']] * 10.0 ** int(match['power'] or 0)
  digits = len(match['decimals'] or '')
  power = f'e{match["power"]}' if match['power'] else ''
  sign = match['sign'].replace('<', '')
  return f'{sign}{value / scale:.{digits}f}{power}{match["unit"]}'


def _parse(text: str) -> re.Match[str]:
  match = _NUMBER.fullmatch(text)
  if match is None:
    raise ValueError(
        f'{text!r} is not a printed number, such as 1.22e6, 75% or 2.5B.'
    )
  return match

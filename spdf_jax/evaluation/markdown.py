"""Markdown: tables, escapes and numbers of reports."""

from collections.abc import Sequence
import re

MISSING = '–'


def escape(text: str) -> str:
  """Writes any text so that Markdown shows it as it is, in a table's cell.

  Args:
    text: Any text, which may have lines.

  Returns:
    Markdown on one line.

  Example:
    >>> print(escape('f(*args) -> int | None'))
    f(\\*args) -\\> int \\| None
    >>> print(escape('two\\nlines'))
    two<br>lines
  """
  text = text.replace('&', '&amp;')
  text = re.sub(r'([\\`*_\[\]<>|~$])', r'\\\1', text)
  return '<br>'.join(text.split('\n'))


def shorten(text: str, width: int) -> str:
  """Cuts a text that is longer than a cell should be wide.

  Args:
    text: Any text.
    width: Characters to keep at most, the mark of the cut included.

  Returns:
    The text without spaces around it, its end replaced by `…` if it was cut.

  Example:
    >>> shorten(' Return a list of names.', 16)
    'Return a list o…'
  """
  text = text.strip()
  return text if len(text) <= width else text[: width - 1].rstrip() + '…'


def markdown_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
) -> str:
  """Lays out a Markdown table.

  Args:
    header: The columns' names.
    rows: Cells, already escaped.
    numbers: Names of the columns that are set to the right.

  Returns:
    The table's lines.

  Example:
    >>> print(markdown_table(['run', 'loss'], [['toy', '2.5']],
    ...                      numbers=['loss']))
    | run | loss |
    | --- | ---: |
    | toy | 2.5 |
  """
  rule = ['---:' if name in numbers else '---' for name in header]
  return '\n'.join(
      f'| {" | ".join(cells)} |' for cells in [header, rule, *rows]
  )


def align(rows: Sequence[Sequence[str]], sides: str) -> str:
  """Sets cells in columns of text, two spaces between.

  Args:
    rows: Cells, as many in each row.
    sides: For each column `<` or `>`: where its cells stand.

  Returns:
    The rows' lines, without spaces at their ends.

  Example:
    >>> print(align([['run', 'loss'], ['toy', '12.5']], '<>'))
    run  loss
    toy  12.5
  """
  widths = [max(map(len, column)) for column in zip(*rows)]
  return '\n'.join(
      '  '.join(
          f'{text:{side}{width}}'
          for text, side, width in zip(row, sides, widths)
      ).rstrip()
      for row in rows
  )


def number(value: float | None, digits: int = 2) -> str:
  """Writes a number for reading.

  Args:
    value: A number, or None if there is none.
    digits: Digits after the point, below a thousand.

  Returns:
    The number; from a million on in powers of ten.

  Example:
    >>> number(8.5), number(12345.6), number(2.5e9), number(None)
    ('8.50', '12,346', '2.50e+09', '–')
  """
  if value is None:
    return MISSING
  if abs(value) >= 1e6:
    return f'{value:.2e}'
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.{digits}f}'


def percent(value: float) -> str:
  """Writes a fraction as a percentage of at most three digits.

  Example:
    >>> percent(0.75), percent(0.8383)
    ('75%', '83.8%')
  """
  return f'{100 * value:.3g}%'

# SPDX-License-Identifier: Apache-2.0
"""Markdown for reports: tables, escapes and formatted numbers."""

from collections.abc import Sequence
import re

MISSING = '–'


def escape(text: str) -> str:
  """Escapes a text for a cell of a Markdown table.

  Args:
    text: Any text, possibly with line breaks.

  Returns:
    Markdown on one line. Characters that are not printable, such as those that
    control a terminal or the direction of text, are shown by their codes.

  Example:
    >>> print(escape('f(*args) -> int | None'))
    f(\\*args) -\\> int \\| None
    >>> print(escape('two\\nlines'))
    two<br>lines
    >>> print(escape(chr(7) + ' bell'))
    \\\\x07 bell
  """
  text = ''.join(
      c if c.isprintable() or c == '\n'
      else c.encode('unicode_escape').decode('ascii') for c in text
  )
  text = text.replace('&', '&amp;')
  text = re.sub(r'([\\`*_\[\]<>|~$])', r'\\\1', text)
  return '<br>'.join(text.split('\n'))


def shorten(text: str, width: int) -> str:
  """Truncates a text that is wider than a cell.

  Args:
    text: Any text.
    width: Maximum number of characters, including the ellipsis.

  Returns:
    The stripped text, ending in `…` if it was truncated.

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
  """Formats a Markdown table.

  Args:
    header: Names of the columns.
    rows: Escaped cells of each row.
    numbers: Names of the columns to align to the right.

  Returns:
    The lines of the table.

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
  """Aligns cells in columns of plain text, separated by two spaces.

  Args:
    rows: Cells of each row, equally many in all rows.
    sides: Alignment of each column: `<` left or `>` right.

  Returns:
    The lines, without trailing spaces.

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
  """Formats a number for a report.

  Args:
    value: Number to format, or None for a missing one.
    digits: Number of decimal places below a thousand.

  Returns:
    The number, in scientific notation from a million on.

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
  """Formats a fraction as a percentage with at most three significant digits.

  Example:
    >>> percent(0.75), percent(0.8383)
    ('75%', '83.8%')
  """
  return f'{100 * value:.3g}%'

# SPDX-License-Identifier: Apache-2.0
"""A line that is overwritten in place, or repeated in a log."""

import sys
from typing import TextIO

# The module of stdout and stderr in Jupyter and Colab.
_NOTEBOOK = 'ipykernel.iostream'


class LiveLine:
  """A printer of the current state of long work.

  Terminals and notebooks show one line, which is overwritten; files get a line
  for each call.

  Args:
    out: Output stream; `None`: stderr.

  Attributes:
    overwrites: Whether the line is overwritten.

  Example:
    >>> line = LiveLine(sys.stdout)
    >>> line.show('step 1'), line.show('step 2', last=True)
    step 1
    step 2
    (None, None)
  """

  def __init__(self, out: TextIO | None = None):
    self._out = sys.stderr if out is None else out
    self.overwrites = (
        self._out.isatty() or type(self._out).__module__ == _NOTEBOOK
    )
    self._shown = 0

  def show(self, line: str, *, last: bool = False) -> None:
    """Shows a line instead of the one before it; the last one stays."""
    if self.overwrites:
      # Notebooks ignore the code that erases a line, so it is padded.
      text = '\r' + line.ljust(self._shown) + ('\n' if last else '')
      self._shown = 0 if last else len(line)
    else:
      text = line + '\n'
    self._out.write(text)
    self._out.flush()

  def clear(self) -> None:
    """Removes the line, before other output; a log keeps its lines."""
    if self.overwrites and self._shown:
      self._out.write('\r' + ' ' * self._shown + '\r')
      self._out.flush()
      self._shown = 0

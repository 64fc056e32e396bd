# SPDX-License-Identifier: Apache-2.0
"""Shares of an input: what each of several machines reads of it."""

from collections.abc import Sequence
from pathlib import Path
import re
from typing import NamedTuple

DIVISIBLE = ('.jsonl',)
"""Suffixes of files that are divided between parts, at line breaks."""


class Span(NamedTuple):
  """A file, or a range of its lines.

  Attributes:
    file: The file.
    start: Byte offset; the first line that starts here or later is the first.
    stop: Byte offset; lines that start here or later are not included. `None`:
      the end of the file.
  """

  file: Path
  start: int = 0
  stop: int | None = None


class Part(NamedTuple):
  """One of several parts of a corpus.

  Attributes:
    number: Number of the part, from 1.
    total: Number of parts.
  """

  number: int
  total: int

  def __str__(self) -> str:
    return f'{self.number}/{self.total}'

  @property
  def folder(self) -> str:
    """Name of the part's folder."""
    return f'{self.number}-of-{self.total}'


def parse_part(text: str) -> Part:
  """Parses a part written as `'i/n'`, with i from 1 to n.

  Args:
    text: The text.

  Returns:
    The part.

  Raises:
    ValueError: The text does not have that form.

  Example:
    >>> parse_part('2/3')
    Part(number=2, total=3)
  """
  found = re.fullmatch(r'(\d{1,6})/(\d{1,6})', text)
  part = Part(int(found[1]), int(found[2])) if found else Part(0, 0)
  if not 1 <= part.number <= part.total:
    raise ValueError(
        f'part={text!r} is not i/n with i from 1 to n; give 1/3, 2/3 and 3/3,'
        ' for example.'
    )
  return part


def spans_of(
    files: Sequence[Path], sizes: Sequence[int], part: Part
) -> list[Span]:
  """Returns the files, and ranges of files, of a part.

  The files are concatenated and cut into equal ranges of bytes. A line of a
  `DIVISIBLE` file belongs to the part that contains its first byte, any other
  file as a whole to the part that contains its first byte, and empty files at
  the end to the last part. So the shares of all parts, in order, contain every
  document once, in the order of the files. A part may be empty if there are few
  files that cannot be divided.

  Args:
    files: All files, in order.
    sizes: Number of bytes of each file.
    part: The part.

  Returns:
    Spans in order.

  Example:
    >>> files = [Path('a.jsonl'), Path('b.txt')]
    >>> [(s.file.name, s.start, s.stop)
    ...  for s in spans_of(files, [80, 20], Part(1, 2))]
    [('a.jsonl', 0, 50)]
    >>> [(s.file.name, s.start, s.stop)
    ...  for s in spans_of(files, [80, 20], Part(2, 2))]
    [('a.jsonl', 50, 80), ('b.txt', 0, None)]
  """
  total = sum(sizes)
  low = total * (part.number - 1) // part.total
  high = total * part.number // part.total
  spans, offset = [], 0
  for file, size in zip(files, sizes):
    start, stop = max(low - offset, 0), min(high - offset, size)
    if file.suffix in DIVISIBLE:
      if start < stop:
        spans.append(Span(file, start, stop))
    elif low <= offset < high or (
        offset == total and part.number == part.total
    ):
      spans.append(Span(file))
    offset += size
  return spans


def parts_in(output: Path) -> dict[Part, Path]:
  """Returns the folders of the parts in the output folder of a corpus."""
  found = {}
  for folder in (output / 'partial').glob('*-of-*'):
    name = re.fullmatch(r'(\d{1,6})-of-(\d{1,6})', folder.name)
    if name and folder.is_dir():
      found[Part(int(name[1]), int(name[2]))] = folder
  return dict(sorted(found.items()))


def check_parts(output: Path, part: Part | None) -> None:
  """Checks that an output folder holds no other division of the input.

  Args:
    output: Folder of the corpus.
    part: The part to prepare; `None`: the whole input.

  Raises:
    ValueError: The folder holds parts of another number, parts and the whole
      is to be prepared, or the beginning of the whole.
  """
  others = [
      other for other in parts_in(output)
      if part is None or other.total != part.total
  ]
  if others:
    raise ValueError(
        f'output={str(output)!r} holds part {others[0]} of a corpus; prepare'
        f' the other parts of {others[0].total} and join them, or give another'
        ' folder.'
    )
  if part is not None and (output / 'partial' / 'state.json').exists():
    raise ValueError(
        f'output={str(output)!r} holds the beginning of a corpus that is not'
        f' divided into parts; finish it without part={part}, or give another'
        ' folder.'
    )

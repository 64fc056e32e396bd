"""Splits: which documents train, which validate, which test."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from pathlib import Path
import re
from typing import final
import zlib

from spdf_jax.data.pieces import Piece
from spdf_jax.data.pieces import Skipped

_NAMES = {
    'validation': 'validation', 'valid': 'validation', 'val': 'validation',
    'dev': 'validation', 'test': 'test',
}
_NAMED = re.compile(rf'({"|".join(_NAMES)})(?![a-z])')


@final
@dataclasses.dataclass(frozen=True)
class Splits:
  """Where documents go: by the name of their file, else by their hash.

  Attributes:
    files: The split of files that are named after one.
    validation: Other documents whose hash, 0 to 1, is below it validate.
    test: Those below it, and not below `validation`, test.
  """

  files: Mapping[Path, str]
  validation: float
  test: float

  def split_of(self, file: Path, piece: Piece) -> str:
    """Returns the split of the document of a file that begins with a piece.

    Example:
      >>> splits = Splits({Path('val.txt'): 'validation'}, 0.0, 1.0)
      >>> [splits.split_of(Path(name), Piece('A text'))
      ...  for name in ('a.txt', 'val.txt')]
      ['test', 'validation']
    """
    if file in self.files:
      return self.files[file]
    place = _place(piece)
    if place < self.validation:
      return 'validation'
    return 'test' if place < self.test else 'train'


def name_splits(files: Sequence[Path], root: Path) -> dict[Path, str]:
  """Finds the files that are named after the split they hold.

  Args:
    files: All files.
    root: The folder they are in; a single file is its own.

  Returns:
    `'validation'` or `'test'` of files whose name, or that of a folder below
    the root, begins with validation, valid, val, dev or test.

  Example:
    >>> names = 'train.jsonl', 'val-00.jsonl', 'test/0.txt', 'tests/value.md'
    >>> found = name_splits([Path('in', name) for name in names], Path('in'))
    >>> list(found.values())
    ['validation', 'test']
  """
  found = {}
  for file in files:
    parts = file.relative_to(root).parts
    names = [m[1] for m in map(_NAMED.match, map(str.lower, parts)) if m]
    if names:
      found[file] = _NAMES[names[0]]
  return found


def choose_splits(
    files: Sequence[Path],
    named: Mapping[Path, str],
    read: Callable[[Path], Iterable[Piece | Skipped]] | None,
    *,
    validation: float,
    test: float,
) -> Splits:
  """Has documents go to a split by name or by hash, none of them empty.

  Args:
    files: All files.
    named: Those with a split of their own, from `name_splits`; no other
      documents go there.
    read: Reads the documents of a file; `None`: there are so many that each
      share is some of them.
    validation: Share of the other documents to validate on.
    test: Share of them to test on.

  Returns:
    The splits. Where a share is of less than one document, it is the one
    with the least hash that is left.

  Example:
    >>> read = lambda file: [Piece(f'Text {i}') for i in range(9)]
    >>> splits = choose_splits([Path('a')], {}, read, validation=1e-3, test=0.3)
    >>> [splits.split_of(Path('a'), piece) for piece in read(0)].count(
    ...     'validation')
    1
  """
  validation = 0.0 if 'validation' in named.values() else validation
  test = 0.0 if 'test' in named.values() else test
  places = [] if read is None else sorted(_places(
      [file for file in files if file not in named], read
  ))
  below_validation = _reach(places, 0.0, validation)
  below_test = _reach(places, below_validation, below_validation + test)
  return Splits(named, below_validation, below_test)


def _reach(places: Sequence[float], start: float, end: float) -> float:
  """Moves the end behind the first place from `start` on, unless it is."""
  first = next((place for place in places if place >= start), None)
  if end == start or first is None or first < end:
    return end
  return math.nextafter(first, 2.0)


def _places(files, read) -> Iterable[float]:
  for file in files:
    begins = True
    for item in read(file):
      if isinstance(item, Piece):
        if begins:
          yield _place(item)
        begins = item.last


def _place(piece: Piece) -> float:
  content = piece.content
  data = content.encode('utf-8') if isinstance(content, str) else (
      content.tobytes()
  )
  return zlib.crc32(data) / 2**32

"""Splits of documents into training, validation and test data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import math
from pathlib import Path
import re
from typing import final
import zlib

from experiments.preparation.documents import Piece
from experiments.preparation.documents import Skipped

_NAMES = {
    'validation': 'validation', 'valid': 'validation', 'val': 'validation',
    'dev': 'validation', 'test': 'test',
}
_NAMED = re.compile(rf'({"|".join(_NAMES)})(?![a-z])')


@final
@dataclasses.dataclass(frozen=True)
class Splits:
  """An assignment of documents to splits, by file name or else by hash.

  Attributes:
    files: Splits of the files that are named after one.
    validation: Upper bound of the hashes, in [0, 1), of validation documents.
    test: Upper bound of the hashes of test documents, which are not below
      `validation`.
  """

  files: Mapping[Path, str]
  validation: float
  test: float

  def split_of(self, file: Path, piece: Piece) -> str:
    """Returns the split of a document.

    Args:
      file: File of the document.
      piece: First piece of the document.

    Returns:
      `'train'`, `'validation'` or `'test'`.

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
  """Finds the files that are named after a split.

  Args:
    files: All files.
    root: Folder of the files.

  Returns:
    The split, `'validation'` or `'test'`, of each file whose name, or that of a
    folder below the root, begins with validation, valid, val, dev or test.

  Example:
    >>> names = 'train.jsonl', 'val-00.jsonl', 'test/0.txt', 'tests/value.md'
    >>> named = name_splits([Path('in', name) for name in names], Path('in'))
    >>> list(named.values())
    ['validation', 'test']
  """
  named = {}
  for file in files:
    parts = file.relative_to(root).parts
    names = [m[1] for m in map(_NAMED.match, map(str.lower, parts)) if m]
    if names:
      named[file] = _NAMES[names[0]]
  return named


def choose_splits(
    files: Sequence[Path],
    named: Mapping[Path, str],
    read: Callable[[Path], Iterable[Piece | Skipped]] | None,
    *,
    validation: float,
    test: float,
) -> Splits:
  """Assigns documents to splits by name or by hash, none of them empty.

  Args:
    files: All files.
    named: Names of splits by file, for files that belong to one as a whole.
      Such a split gets no other documents.
    read: Function that reads the documents of a file, to count them. `None`:
      they are not counted, since there are enough for all splits.
    validation: Share of validation documents among the others.
    test: Share of test documents among the others.

  Returns:
    The splits. A split that would be empty gets the remaining document with the
    smallest hash; of few that are all for validation, the last is for testing.

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
  if test and len(places) > 1:  # Leaves one document to test on.
    below_validation = min(below_validation, places[-1])
  below_test = _reach(places, below_validation, below_validation + test)
  return Splits(named, below_validation, below_test)


def _reach(places: Sequence[float], start: float, end: float) -> float:
  """Returns `end`, or more if no document would be between `start` and it."""
  first = next((place for place in places if place >= start), None)
  if end == start or first is None or first < end:
    return end
  return math.nextafter(first, 2.0)


def _places(
    files: Iterable[Path], read: Callable[[Path], Iterable[Piece | Skipped]]
) -> Iterable[float]:
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

"""Pieces of documents, and documents that are left out."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
  """A document, or a part of a long one.

  Attributes:
    content: Text, or token ids [tokens].
    last: Whether the document ends with it.
  """

  content: str | np.ndarray
  last: bool = True


class Skipped(NamedTuple):
  """A document that is left out.

  Attributes:
    reason: Why, the same words for the same kind of fault.
    where: File and place.
  """

  reason: str
  where: str


EMPTY = 'empty'
"""The one reason for leaving out that is no fault."""


def text_or_fault(value: object, where: str) -> Iterator[Piece | Skipped]:
  """Yields a document, or why its value is none.

  Args:
    value: What stood where text should.
    where: File and place.

  Example:
    >>> list(text_or_fault(3, 'a.jsonl line 1'))
    [Skipped(reason='text is missing', where='a.jsonl line 1')]
  """
  if not isinstance(value, str):
    yield Skipped('text is missing', where)
  elif not value.strip():
    yield Skipped(EMPTY, where)
  else:
    try:
      value.encode('utf-8')
    except UnicodeEncodeError:
      yield Skipped('broken UTF-8', where)
      return
    yield Piece(value)

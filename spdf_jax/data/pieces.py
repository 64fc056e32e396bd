# SPDX-License-Identifier: Apache-2.0
"""Pieces of documents, and skipped documents."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Piece(NamedTuple):
  """A document, or a part of a long one.

  Attributes:
    content: Text, or token ids [tokens].
    last: Whether this is the last piece of its document.
  """

  content: str | np.ndarray
  last: bool = True


class Skipped(NamedTuple):
  """A skipped document.

  Attributes:
    reason: Reason, identical for all faults of a kind.
    where: File and position in it.
  """

  reason: str
  where: str


EMPTY = 'empty'
"""The only reason to skip a document that is not counted as a fault."""


def text_or_fault(value: object, where: str) -> Iterator[Piece | Skipped]:
  """Yields a document, or the reason to skip it.

  Args:
    value: Value of the text field.
    where: File and position in it.

  Yields:
    One piece, or one skipped document.

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

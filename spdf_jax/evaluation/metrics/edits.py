# SPDX-License-Identifier: Apache-2.0
"""Edit distance: fewest insertions, deletions and substitutions of words."""

from typing import NamedTuple

import numpy as np

_NEVER = 10**6  # More edits than any text needs.


def edit_distances(
    many_NxL: np.ndarray, wanted_W: np.ndarray, beam: int = _NEVER
) -> np.ndarray:
  """Returns the Levenshtein distances of rows to one reference.

  Args:
    many_NxL: Ids of the words of each row.
    wanted_W: Ids of the words of the reference.
    beam: Maximum number of edits above the best alignment that ends in a kept
      or substituted word; after each word of a row, alignments with more are
      pruned, so that distances may not be minimal. By default none is pruned.

  Returns:
    Number of edits of each row [N].

  Example:
    >>> edit_distances(np.array([[1, 2, 3], [3, 1, 2]]), np.array([1, 2, 4]))
    array([1, 2])
  """
  return _rows(many_NxL, wanted_W, beam)[-1][:, -1]


class Alignment(NamedTuple):
  """An alignment of words with those of a reference.

  Attributes:
    edits: Number of edits.
    differs: True for words that are substituted or deleted [L].
    missed: True for reference words that are substituted or inserted [W].
    places: Index of the last word consumed at each reference word; -1 before
      the first word [W].
  """

  edits: int
  differs: np.ndarray
  missed: np.ndarray
  places: np.ndarray


def align(
    words_L: np.ndarray, wanted_W: np.ndarray, beam: int = _NEVER
) -> Alignment:
  """Aligns words with a reference by the fewest edits.

  Ties are broken from the end: a kept or substituted word first, then a
  deletion, then an insertion.

  Args:
    words_L: Ids of the words.
    wanted_W: Ids of the words of the reference.
    beam: Pruning threshold as in `edit_distances`.

  Returns:
    The alignment.

  Example:
    >>> found = align(np.array([1, 5, 2]), np.array([1, 2, 3]))
    >>> found.edits, found.differs, found.places
    (2, array([False,  True,  True]), array([0, 1, 2]))
  """
  table = [row[0] for row in _rows(words_L[None], wanted_W, beam)]
  differs = np.ones(len(words_L), bool)
  missed = np.ones(len(wanted_W), bool)
  places = np.empty(len(wanted_W), int)
  i, j = len(words_L), len(wanted_W)
  while i or j:
    same = bool(i and j and words_L[i - 1] == wanted_W[j - 1])
    if i and j and table[i][j] == table[i - 1][j - 1] + (not same):
      i, j = i - 1, j - 1
      differs[i] = missed[j] = not same
      places[j] = i
    elif i and table[i][j] == table[i - 1][j] + 1:
      i -= 1
    else:
      j -= 1
      places[j] = i - 1
  return Alignment(int(table[-1][-1]), differs, missed, places)


def _rows(
    many_NxL: np.ndarray, wanted_W: np.ndarray, beam: int
) -> list[np.ndarray]:
  """Returns edit distances of prefixes: L + 1 arrays [N, W + 1]."""
  steps = np.arange(len(wanted_W) + 1)
  rows = [np.broadcast_to(steps, (len(many_NxL), len(steps)))]
  for i in range(many_NxL.shape[1]):
    above = rows[-1]
    beside_NxW = above[:, :-1] + (many_NxL[:, i:i + 1] != wanted_W)
    reached = above + 1
    reached[:, 1:] = np.minimum(reached[:, 1:], beside_NxW)
    # Insertions: the minimum over earlier columns plus one per column between.
    reached = np.minimum.accumulate(reached - steps, axis=1) + steps
    if i + 1 < many_NxL.shape[1]:
      best_Nx1 = beside_NxW.min(axis=1, initial=_NEVER)[:, None]
      reached = np.where(reached > best_Nx1 + beam, _NEVER, reached)
    rows.append(reached)
  return rows

"""Edits: the least insertions, deletions and substitutions between words."""

from typing import NamedTuple

import numpy as np

_NEVER = 10**6  # More edits than any text takes.


def edit_distances(
    many_NxL: np.ndarray, wanted_W: np.ndarray, beam: int = _NEVER
) -> np.ndarray:
  """Returns Levenshtein distances of rows of one length.

  Args:
    many_NxL: Ids of words.
    wanted_W: What each row is to become.
    beam: After each word, ways are left that have taken so many edits more
      than the best that just kept or substituted it; then they may not be the
      shortest. By default none is.

  Returns:
    Edits [N].

  Example:
    >>> edit_distances(np.array([[1, 2, 3], [3, 1, 2]]), np.array([1, 2, 4]))
    array([1, 2])
  """
  return _rows(many_NxL, wanted_W, beam)[-1][:, -1]


class Alignment(NamedTuple):
  """How words become the wanted ones.

  Attributes:
    edits: The least number.
    differs: Which words are not kept [L].
    missed: Which wanted words have no equal word beside them [W].
    places: The last word used up at each wanted one; -1 before the first [W].
  """

  edits: int
  differs: np.ndarray
  missed: np.ndarray
  places: np.ndarray


def align(
    words_L: np.ndarray, wanted_W: np.ndarray, beam: int = _NEVER
) -> Alignment:
  """Aligns words with the fewest edits.

  Where several ways are as short, the last edit is rather a word kept or
  substituted than one left out, and that rather than one added.

  Args:
    words_L: Ids of words.
    wanted_W: What they are to become.
    beam: As of `edit_distances`.

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
  """Edits from each beginning of the rows to each of what is wanted."""
  steps = np.arange(len(wanted_W) + 1)
  rows = [np.broadcast_to(steps, (len(many_NxL), len(steps)))]
  for i in range(many_NxL.shape[1]):
    above = rows[-1]
    beside_NxW = above[:, :-1] + (many_NxL[:, i:i + 1] != wanted_W)
    reached = above + 1
    reached[:, 1:] = np.minimum(reached[:, 1:], beside_NxW)
    # Words added: the least of what any earlier column costs.
    reached = np.minimum.accumulate(reached - steps, axis=1) + steps
    if i + 1 < many_NxL.shape[1]:
      best_Nx1 = beside_NxW.min(axis=1, initial=_NEVER)[:, None]
      reached = np.where(reached > best_Nx1 + beam, _NEVER, reached)
    rows.append(reached)
  return rows

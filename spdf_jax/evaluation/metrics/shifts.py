# SPDX-License-Identifier: Apache-2.0
"""Shifts of word sequences to their position in a reference, as in tercom."""

from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np

from spdf_jax.evaluation.metrics.edits import align
from spdf_jax.evaluation.metrics.edits import Alignment
from spdf_jax.evaluation.metrics.edits import edit_distances

_LONGEST = 10  # Maximum length of a shifted sequence, in words.
_FARTHEST = 50  # Maximum distance of a shift, in words.
_BEAM = 20  # Pruning threshold of alignments, in edits above the best.


def translation_edits(words: Sequence[str], reference: Sequence[str]) -> int:
  """Counts the edits and shifts that turn words into a reference.

  Shifts are chosen greedily: the one that leaves the fewest edits; ties go to
  the longest, then to the first in the words and in the reference. A sequence
  of at most 10 words may move to the position of an equal sequence of the
  reference, or beside it, by at most 50 words, unless the words or the
  reference there are already aligned without an edit.

  Args:
    words: Words of a generation.
    reference: Words of the reference.

  Returns:
    Number of shifts and edits.

  Source: Snover et al. 2006, "A Study of Translation Edit Rate with Targeted
    Human Annotation"; order and limits are those of tercom 0.7.25.

  Example:
    >>> translation_edits('b c a d'.split(), 'a b c d'.split())
    1
  """
  ids: dict[str, int] = {}
  found, wanted = (
      np.array([ids.setdefault(word, len(ids)) for word in text], np.int32)
      for text in (words, reference)
  )
  shifts = 0
  while True:
    alignment = align(found, wanted, _BEAM)
    shifted = sorted(_shifted(found, wanted, alignment), key=lambda x: -x[0])
    if not shifted:
      return shifts + alignment.edits
    many_NxL = np.stack(list({x.tobytes(): x for _, x in shifted}.values()))
    edits_N = edit_distances(many_NxL, wanted, _BEAM)
    best = int(edits_N.argmin())
    if edits_N[best] >= alignment.edits:
      return shifts + alignment.edits
    found, shifts = many_NxL[best], shifts + 1


def _shifted(
    found: np.ndarray, wanted: np.ndarray, alignment: Alignment
) -> Iterator[tuple[int, np.ndarray]]:
  """Yields pairs: length of a shift, and the words after the shift."""
  places = alignment.places
  runs_LxW = _equal_runs(found, wanted)
  for start in range(len(found)):
    ways = places[wanted == found[start]] - start
    if not ((ways != 0) & (ways >= -_FARTHEST - 1) & (ways <= _FARTHEST)).any():
      continue
    for length in range(1, min(_LONGEST, runs_LxW[start].max()) + 1):
      if not alignment.differs[start:start + length].any():
        continue
      equal = np.flatnonzero(runs_LxW[start] >= length)
      ways = places[equal] - start
      elsewhere = (ways < 0) | (ways >= length)
      may = equal[elsewhere & (np.abs(ways) <= _FARTHEST)]
      if not len(may):
        break
      for j in may:
        if alignment.missed[j:j + length].any():
          for after in _targets(places, start, j, length):
            yield length, _move(found, start, length, after)


def _equal_runs(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
  """Returns the number of equal words from each pair of positions on."""
  runs_LxW = np.zeros((len(found) + 1, len(wanted) + 1), int)
  for i in reversed(range(len(found))):
    runs_LxW[i, :-1] = (runs_LxW[i + 1, 1:] + 1) * (found[i] == wanted)
  return runs_LxW[:-1, :-1]


def _targets(
    places: np.ndarray, start: int, j: int, length: int
) -> Iterator[int]:
  """Yields indices of words after which a sequence may go; -1: at the start."""
  if j == 0:
    yield -1
  for offset in range(-1 if j else 0, length):
    place = int(places[j + offset])
    if place != start and (offset == 0 or place != places[j]):
      yield place


def _move(
    found: np.ndarray, start: int, length: int, after: int
) -> np.ndarray:
  """Moves the `length` words from `start` on behind the word at `after`.

  If that word is one of those, the sequence moves right by its index in it.
  """
  end = start + length
  rest = np.delete(found, np.s_[start:end])
  if after < start:
    to = after + 1
  elif after < end:
    to = min(after, len(rest))
  else:
    to = after + 1 - length
  return np.insert(rest, to, found[start:end])

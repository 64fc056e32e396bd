"""Shifts: runs of words moved to where a reference has them, as tercom does."""

from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np

from spdf_jax.evaluation.metrics.edits import align
from spdf_jax.evaluation.metrics.edits import Alignment
from spdf_jax.evaluation.metrics.edits import edit_distances

_LONGEST = 10  # Words that move together.
_FARTHEST = 50  # Words that they move.
_BEAM = 20  # Edits beyond the best at which an alignment is given up.


def translation_edits(words: Sequence[str], reference: Sequence[str]) -> int:
  """Counts the edits and shifts that make a reference of words.

  Shifts are taken greedily: the one after which the fewest edits are left, of
  equal ones the longest, then the first in the words and in the reference. A
  run of at most 10 words moves where an equal run of the reference stands or
  beside it, by at most 50 words, if in neither place all is right already.

  Args:
    words: What was generated.
    reference: What it is compared with.

  Returns:
    Shifts and edits.

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
  """Yields the length of a shift and the words after it."""
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
  """Counts the equal words from each pair of places on."""
  runs_LxW = np.zeros((len(found) + 1, len(wanted) + 1), int)
  for i in reversed(range(len(found))):
    runs_LxW[i, :-1] = (runs_LxW[i + 1, 1:] + 1) * (found[i] == wanted)
  return runs_LxW[:-1, :-1]


def _targets(
    places: np.ndarray, start: int, j: int, length: int
) -> Iterator[int]:
  """Yields the words after which a run may go; -1: before the first."""
  if j == 0:
    yield -1
  for offset in range(-1 if j else 0, length):
    place = int(places[j + offset])
    if place != start and (offset == 0 or place != places[j]):
      yield place


def _move(
    found: np.ndarray, start: int, length: int, after: int
) -> np.ndarray:
  """Moves a run behind a word; within itself, by as far as that is in it."""
  end = start + length
  rest = np.delete(found, np.s_[start:end])
  if after < start:
    to = after + 1
  elif after < end:
    to = min(after, len(rest))
  else:
    to = after + 1 - length
  return np.insert(rest, to, found[start:end])

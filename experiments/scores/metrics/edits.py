"""Translation edit rates: edits and shifts per word of the reference."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from spdf_jax.evaluation import texts

_LONGEST = 10  # Maximum length of a shifted sequence, in words.
_FARTHEST = 50  # Maximum distance of a shift, in words.
_BEAM = 20  # Pruning threshold of alignments, in edits above the best.
_NEVER = 10**6  # More edits than any text needs.


def ter(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  """Computes TER of the corpus as tercom 0.7.25 does, case-insensitive.

  The reference with the fewest edits counts; references without a word are
  ignored.

  Args:
    hypotheses: One tokenized generation for each input.
    references: Tokenized references of each hypothesis.

  Returns:
    Edits divided by the mean number of words of the references; 0 is best.
    Without a word in any reference: 1 if there is an edit, else 0.

  References:
    Snover et al. 2006, "A Study of Translation Edit Rate with Targeted
    Human Annotation".

  Example:
    >>> ter(['b c a d'], [['a b c d']])
    0.25
  """
  edits, words = 0, 0.0
  for hypothesis, group in zip(hypotheses, texts.without_empty(references)):
    tokens = hypothesis.lower().split()
    wanted = [reference.lower().split() for reference in group]
    edits += min(translation_edits(tokens, reference) for reference in wanted)
    words += sum(map(len, wanted)) / len(wanted)
  return edits / words if words else float(edits > 0)


def ter_segment_minima(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  """Computes the mean over segments of the lowest TER to any reference.

  WebNLG's GenerationEval, and with it Hu et al., report this as TER. Unlike
  `ter`, it averages the rates of segments, a hypothesis with its references
  each, and is case-sensitive. Shifts are greedy and may have any length; the
  rate to an empty reference is 1.

  Args:
    hypotheses: One tokenized generation for each input.
    references: Tokenized references of each hypothesis.

  Returns:
    The mean of edits per word of the reference; 0 is best.

  Example:
    >>> ter_segment_minima(['b c a d', 'x'], [['a b c d', ''], ['x y']])
    0.375
  """
  scores = [
      min(_rate(hypothesis.split(), r.split()) for r in set(group))
      for hypothesis, group in zip(hypotheses, references)
  ]
  return sum(scores) / len(scores)


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

  References:
    Snover et al. 2006, "A Study of Translation Edit Rate with Targeted
    Human Annotation"; order and limits are those of tercom 0.7.25.

  Example:
    >>> translation_edits('b c a d'.split(), 'a b c d'.split())
    1
  """
  ids: dict[str, int] = {}
  words_L, wanted_W = (
      np.array([ids.setdefault(word, len(ids)) for word in text], np.int32)
      for text in (words, reference)
  )
  shifts = 0
  while True:
    alignment = align(words_L, wanted_W, _BEAM)
    shifted = sorted(
        _tercom_shifts(words_L, wanted_W, alignment), key=lambda x: -x[0]
    )
    if not shifted:
      return shifts + alignment.edits
    many_NxL = np.stack(list({x.tobytes(): x for _, x in shifted}.values()))
    edits_N = edit_distances(many_NxL, wanted_W, _BEAM)
    best = int(edits_N.argmin())
    if edits_N[best] >= alignment.edits:
      return shifts + alignment.edits
    words_L, shifts = many_NxL[best], shifts + 1


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
    beam: Largest distance from the diagonal of the table of edits that is
      searched.

  Returns:
    The words and the words of the reference that each edit aligns.

  Example:
    >>> alignment = align(np.array([1, 5, 2]), np.array([1, 2, 3]))
    >>> alignment.edits, alignment.differs, alignment.places
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


def _rate(words: Sequence[str], reference: Sequence[str]) -> float:
  if not reference:
    return 1.0
  # Ids in alphabetical order, since the original breaks ties by spelling.
  ids = {w: i for i, w in enumerate(sorted({*words, *reference}))}
  words_L = np.array([ids[word] for word in words], np.int32)
  wanted_W = np.array([ids[word] for word in reference], np.int32)
  distance = int(edit_distances(words_L[None], wanted_W)[0])
  shifts = 0
  while distance:
    shifted = np.array(list(_greedy_shifts(words_L, wanted_W)), np.int32)
    if not len(shifted):
      break
    distances = edit_distances(shifted, wanted_W)
    least = int(distances.min())
    if least >= distance:
      break
    best = shifted[distances == least]
    words_L = best[np.lexsort(best.T[::-1])[-1]]
    distance, shifts = least, shifts + 1
  return (shifts + distance) / len(reference)


def _greedy_shifts(
    words_L: np.ndarray, wanted_W: np.ndarray
) -> Iterator[np.ndarray]:
  """Yields `words_L` with words moved to their position in `wanted_W`."""
  for i, j in zip(*np.nonzero(words_L[:, None] == wanted_W[None])):
    if i == j:
      continue
    room = min(len(words_L) - i, len(wanted_W) - j)
    differs = np.nonzero(words_L[i:i + room] != wanted_W[j:j + room])[0]
    length = differs[0] if len(differs) else room
    rest = np.delete(words_L, np.s_[i:i + length])
    yield np.insert(rest, min(j, len(rest)), words_L[i:i + length])


def _tercom_shifts(
    words_L: np.ndarray, wanted_W: np.ndarray, alignment: Alignment
) -> Iterator[tuple[int, np.ndarray]]:
  """Yields pairs: length of a shift, and the words after the shift."""
  places = alignment.places
  runs_LxW = _equal_runs(words_L, wanted_W)
  for start in range(len(words_L)):
    ways = places[wanted_W == words_L[start]] - start
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
            yield length, _move(words_L, start, length, after)


def _equal_runs(words_L: np.ndarray, wanted_W: np.ndarray) -> np.ndarray:
  """Returns the number of equal words from each pair of positions on."""
  runs_LxW = np.zeros((len(words_L) + 1, len(wanted_W) + 1), int)
  for i in reversed(range(len(words_L))):
    runs_LxW[i, :-1] = (runs_LxW[i + 1, 1:] + 1) * (words_L[i] == wanted_W)
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
    words_L: np.ndarray, start: int, length: int, after: int
) -> np.ndarray:
  """Moves the `length` words from `start` on behind the word at `after`.

  If that word is one of those, the sequence moves right by its index in it.
  """
  end = start + length
  rest = np.delete(words_L, np.s_[start:end])
  if after < start:
    to = after + 1
  elif after < end:
    to = min(after, len(rest))
  else:
    to = after + 1 - length
  return np.insert(rest, to, words_L[start:end])


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

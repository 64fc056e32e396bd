# SPDX-License-Identifier: Apache-2.0
"""Translation edit rate: edits and shifts per word of the reference."""

from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np

from spdf_jax.evaluation.metrics.edits import edit_distances
from spdf_jax.evaluation.metrics.segments import without_empty
from spdf_jax.evaluation.metrics.shifts import translation_edits


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

  Source: Snover et al. 2006, "A Study of Translation Edit Rate with Targeted
    Human Annotation".

  Example:
    >>> ter(['b c a d'], [['a b c d']])
    0.25
  """
  edits, words = 0, 0.0
  for hypothesis, group in zip(hypotheses, without_empty(references)):
    found = hypothesis.lower().split()
    wanted = [reference.lower().split() for reference in group]
    edits += min(translation_edits(found, reference) for reference in wanted)
    words += sum(map(len, wanted)) / len(wanted)
  return edits / words if words else float(edits > 0)


def ter_segment_minima(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  """Computes the mean over segments of the lowest TER to any reference.

  WebNLG's GenerationEval, and with it Hu et al., report this as TER; it differs
  from `ter`. Shifts are greedy and may have any length; an empty reference
  counts as 1.

  Args:
    hypotheses: One tokenized generation for each input.
    references: Tokenized references of each hypothesis.

  Returns:
    The mean; 0 is best.

  Example:
    >>> ter_segment_minima(['b c a d', 'x'], [['a b c d', ''], ['x y']])
    0.375
  """
  scores = [
      min(_rate(hypothesis.split(), r.split()) for r in set(group))
      for hypothesis, group in zip(hypotheses, references)
  ]
  return sum(scores) / len(scores)


def _rate(words: Sequence[str], reference: Sequence[str]) -> float:
  if not reference:
    return 1.0
  # Ids in alphabetical order, since the original breaks ties by spelling.
  ids = {w: i for i, w in enumerate(sorted({*words, *reference}))}
  found = np.array([ids[word] for word in words], np.int32)
  wanted = np.array([ids[word] for word in reference], np.int32)
  distance = int(edit_distances(found[None], wanted)[0])
  shifts = 0
  while distance:
    shifted = np.array(list(_shifted(found, wanted)), np.int32)
    if not len(shifted):
      break
    distances = edit_distances(shifted, wanted)
    least = int(distances.min())
    if least >= distance:
      break
    best = shifted[distances == least]
    found = best[np.lexsort(best.T[::-1])[-1]]
    distance, shifts = least, shifts + 1
  return (shifts + distance) / len(reference)


def _shifted(found: np.ndarray, wanted: np.ndarray) -> Iterator[np.ndarray]:
  """Yields `found` with words moved to their position in `wanted`."""
  for i, j in zip(*np.nonzero(found[:, None] == wanted[None])):
    if i == j:
      continue
    room = min(len(found) - i, len(wanted) - j)
    differs = np.nonzero(found[i:i + room] != wanted[j:j + room])[0]
    length = differs[0] if len(differs) else room
    rest = np.delete(found, np.s_[i:i + length])
    yield np.insert(rest, min(j, len(rest)), found[i:i + length])

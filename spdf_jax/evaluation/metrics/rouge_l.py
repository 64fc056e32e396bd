# SPDX-License-Identifier: Apache-2.0
"""ROUGE-L as defined by COCO's caption evaluation."""

from collections.abc import Sequence

from spdf_jax.evaluation.metrics.words import caption_words

_BETA2 = 1.2**2


def rouge_l(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  """Computes the mean `(1 + β²) P R / (R + β² P)` over segments, β = 1.2.

  P and R are the length of the longest common subsequence divided by that of
  the hypothesis and of the reference, each maximized over the references. The
  package rouge-score computes another metric.

  Args:
    hypotheses: One generation for each input.
    references: References of each hypothesis.

  Returns:
    The mean score, 0 to 1.

  Raises:
    ImportError: nltk is not installed.

  Source: Lin 2004, "ROUGE", section 3; Chen et al. 2015, "Microsoft COCO
    Captions".

  Example:
    >>> rouge_l(['A b c.'], [['a x b c', 'b c']])
    1.0
  """
  scores = [
      _score(caption_words(hypothesis), list(map(caption_words, group)))
      for hypothesis, group in zip(hypotheses, references)
  ]
  return sum(scores) / len(scores)


def _score(words: Sequence[str], references: list[Sequence[str]]) -> float:
  common = [_common_subsequence(words, r) for r in references]
  precision = max(common) / max(len(words), 1)
  recall = max(c / max(len(r), 1) for c, r in zip(common, references))
  if not precision or not recall:
    return 0.0
  return (1 + _BETA2) * precision * recall / (recall + _BETA2 * precision)


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
  """Returns the length of the longest common subsequence."""
  row = [0] * (len(b) + 1)
  for x in a:
    above, row = row, [0]
    for j, y in enumerate(b):
      row.append(above[j] + 1 if x == y else max(above[j + 1], row[-1]))
  return row[-1]

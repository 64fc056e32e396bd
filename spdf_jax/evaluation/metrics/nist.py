# SPDX-License-Identifier: Apache-2.0
"""NIST: n-gram matches weighted by the information of each n-gram."""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence
import math

from spdf_jax.extras import require

_ORDERS = 5
# The brevity penalty is one half at two thirds of the reference length.
_BETA = -math.log(0.5) / math.log(1.5) ** 2


def nist(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  """Computes NIST of mteval-v13a.pl: up to 5-grams, case-insensitive.

  `exp(-beta log²(min(1, L / R))) sum_n (information of matches / n-grams)`,
  where L is the number of words of the hypotheses and R that of all references
  divided by the mean number of references per hypothesis.

  Args:
    hypotheses: One generation for each input.
    references: References of each hypothesis.

  Returns:
    The score, 0 or more.

  Raises:
    ImportError: sacrebleu, whose tokenizer is used, is not installed.

  Source: Doddington 2002, "Automatic Evaluation of Machine Translation
    Quality Using N-gram Co-Occurrence Statistics"

  Example:
    >>> round(nist(['a b c'], [['a b c', 'a c b']]), 4)
    2.585
  """
  hypotheses, references = _tokens(hypotheses, references)
  words = sum(len(r) for group in references for r in group)
  mean_references = sum(map(len, references)) / len(references)
  sizes = [
      sum(max(len(h) - n, 0) for h in hypotheses) for n in range(_ORDERS)
  ]
  return _score(hypotheses, references, sizes, words / mean_references)


def nist_python(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  """Computes NIST of the E2E challenge's Python port of mteval (`-p`).

  It differs from `nist` in two ways: R is the sum over segments of the mean
  length of the references, and a hypothesis of fewer than n - 1 words adds a
  negative number of n-grams.

  Args:
    hypotheses: One generation for each input.
    references: References of each hypothesis.

  Returns:
    The score, 0 or more.

  Raises:
    ImportError: sacrebleu, whose tokenizer is used, is not installed.

  Example:
    >>> round(nist_python(['a b c d e'], [['a b c d e']]), 4)
    2.3219
  """
  hypotheses, references = _tokens(hypotheses, references)
  length = sum(
      sum(map(len, group)) / len(group) for group in references
  )
  sizes = [sum(len(h) - n for h in hypotheses) for n in range(_ORDERS)]
  return _score(hypotheses, references, sizes, length)


def _tokens(hypotheses, references):
  tokenizer = require('sacrebleu', 'eval').BLEU(tokenize='13a').tokenizer
  split = lambda text: tokenizer(text).lower().split()
  return (
      [split(text) for text in hypotheses],
      [[split(text) for text in group] for group in references],
  )


def _score(
    hypotheses: Sequence[Sequence[str]],
    references: Sequence[Sequence[Sequence[str]]],
    sizes: Sequence[int],
    reference_length: float,
) -> float:
  length = sum(map(len, hypotheses))
  if not length or not reference_length:
    return 0.0
  counts: Counter[tuple[str, ...]] = Counter()
  for group in references:
    for words in group:
      counts.update(_ngrams(words))
      counts[()] += len(words)
  information = [0.0] * _ORDERS
  for words, group in zip(hypotheses, references):
    allowed: Counter[tuple[str, ...]] = Counter()
    for reference in group:
      allowed |= Counter(_ngrams(reference))
    for ngram, hits in (Counter(_ngrams(words)) & allowed).items():
      information[len(ngram) - 1] += hits * math.log2(
          counts[ngram[:-1]] / counts[ngram]
      )
  total = sum(i / size for i, size in zip(information, sizes) if size > 0)
  ratio = min(1.0, length / reference_length)
  return total * math.exp(-_BETA * math.log(ratio) ** 2)


def _ngrams(words: Sequence[str]) -> Iterable[tuple[str, ...]]:
  for n in range(1, _ORDERS + 1):
    for start in range(len(words) - n + 1):
      yield tuple(words[start:start + n])

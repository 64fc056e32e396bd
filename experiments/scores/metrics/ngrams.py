"""BLEU, chrF++ and NIST: overlap of n-grams, by definitions of the scripts.

BLEU and chrF++ are computed by sacrebleu.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
import math
from typing import Any

from spdf_jax import extras
from spdf_jax.evaluation import texts

Groups = Sequence[Sequence[str]]

_ORDERS = 5
# The brevity penalty is one half at two thirds of the reference length.
_BETA = -math.log(0.5) / math.log(1.5) ** 2


def mteval_bleu(hypotheses: Sequence[str], references: Groups) -> float:
  """Computes BLEU as mteval-v13a.pl does: its tokenization, case-insensitive.

  Args:
    hypotheses: One generation for each input.
    references: References of each hypothesis.

  Returns:
    BLEU in percent.

  Raises:
    ImportError: sacrebleu is not installed.

  Example:
    >>> round(mteval_bleu(['a b c d e.'], [['A B C D E.', 'x']]), 4)
    100.0
  """
  return _bleu(
      hypotheses, texts.streams(references), tokenize='13a', lowercase=True
  )


def multi_bleu(hypotheses: Sequence[str], references: Groups) -> float:
  """Computes BLEU as multi-bleu.perl -lc: split at spaces, case-insensitive.

  If hypotheses have different numbers of references, the missing ones count as
  references of length 0, like empty lines in the script's files.

  Args:
    hypotheses: One tokenized generation for each input.
    references: Tokenized references of each hypothesis.

  Returns:
    BLEU in percent.

  Raises:
    ImportError: sacrebleu is not installed.

  Example:
    >>> round(multi_bleu(['A b c d', 'e'], [['a b c d'], ['e', 'f']]), 4)
    100.0
  """
  return _bleu(
      hypotheses,
      texts.streams(references, empty=True),
      tokenize='none',
      lowercase=True,
  )


def multi_bleu_detok(hypotheses: Sequence[str], references: Groups) -> float:
  """Computes BLEU as multi-bleu-detok.perl: 13a tokenization, case-sensitive.

  If hypotheses have different numbers of references, the missing ones count as
  references of length 0, like empty lines in the script's files.

  Args:
    hypotheses: One generation for each input.
    references: References of each hypothesis.

  Returns:
    BLEU in percent.

  Raises:
    ImportError: sacrebleu is not installed.

  Example:
    >>> multi_bleu_detok(['A B C D.'], [['a b c d.']]) < 50
    True
  """
  return _bleu(
      hypotheses,
      texts.streams(references, empty=True),
      tokenize='13a',
      lowercase=False,
  )


def _bleu(
    hypotheses: Sequence[str],
    reference_streams: list[list[str | None]],
    **settings: Any,
) -> float:
  # No smoothing: the scripts give 0 where an n-gram order has no match.
  metric = extras.require('sacrebleu', 'eval').BLEU(
      smooth_method='none', force=True, **settings
  )
  return float(metric.corpus_score(list(hypotheses), reference_streams).score)


def chrf_plus_plus(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  """Computes corpus chrF++, of character 1- to 6-grams and word 1- and 2-grams.

  Recall is weighted twice as much as precision (β = 2). References without a
  word are ignored.

  Args:
    hypotheses: One generation for each input.
    references: References of each hypothesis.

  Returns:
    The score of the corpus, 0 to 100.

  Raises:
    ImportError: sacrebleu is not installed.

  References:
    Popović 2017, "chrF++: words helping character n-grams".

  Example:
    >>> chrf_plus_plus(['Return the name.'], [['', 'Return the name.']])
    100.0
  """
  metric = extras.require('sacrebleu', 'eval').CHRF(
      word_order=2, eps_smoothing=True  # Averages orders as chrF++.py does.
  )
  result = metric.corpus_score(
      list(hypotheses), texts.streams(texts.without_empty(references))
  )
  return float(result.score)


def nist(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  """Computes NIST of mteval-v13a.pl: up to 5-grams, case-insensitive.

  `exp(-beta log²(min(1, L / R))) sum_n(information_n / count_n)`, where
  `information_n` is summed over the n-grams of the hypotheses that match a
  reference and `count_n` is the number of all n-grams of the hypotheses. L is
  the number of words of the hypotheses, and R that of all references divided by
  the mean number of references per hypothesis; beta gives a factor of 1/2 at
  L / R = 2/3.

  Args:
    hypotheses: One generation for each input.
    references: References of each hypothesis.

  Returns:
    The score, 0 or more.

  Raises:
    ImportError: sacrebleu, whose tokenizer is used, is not installed.

  References:
    Doddington 2002, "Automatic Evaluation of Machine Translation Quality
    Using N-gram Co-Occurrence Statistics"

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
  """Computes NIST as the E2E challenge's script does with `-p`, in Python.

  This port of mteval differs from `nist` in two ways: R is the sum, over the
  hypotheses, of the mean length of their references, and a hypothesis of fewer
  than n - 1 words adds a negative number of n-grams.

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
  tokenizer = extras.require('sacrebleu', 'eval').BLEU(tokenize='13a').tokenizer
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

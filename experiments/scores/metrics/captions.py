"""ROUGE-L and CIDEr-D, by definitions of COCO's caption evaluation."""

from collections import Counter
from collections.abc import Mapping, Sequence
import math

from spdf_jax.evaluation import texts

_BETA2 = 1.2**2


def rouge_l(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  """Computes the mean ROUGE-L over segments, as COCO's evaluation does.

  The score of a segment, a hypothesis with its references, is
  `(1 + β²) P R / (R + β² P)` with β = 1.2. P and R are the length of the
  longest common subsequence divided by that of the hypothesis and of the
  reference, each maximized over the references. The package rouge-score
  computes another metric.

  Args:
    hypotheses: One generation for each input.
    references: References of each hypothesis.

  Returns:
    The mean score, 0 to 1.

  Raises:
    ImportError: nltk is not installed.

  References:
    Lin 2004, "ROUGE", section 3; Chen et al. 2015, "Microsoft COCO
    Captions".

  Example:
    >>> rouge_l(['A b c.'], [['a x b c', 'b c']])
    1.0
  """
  split = texts.caption_words
  scores = [
      _score(split(hypothesis), list(map(split, group)))
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


_ORDERS = 4
_SIGMA = 6.0

_Ngram = tuple[str, ...]
_Vectors = tuple[list[dict[_Ngram, float]], list[float], int]


def cider(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
  """Computes the mean CIDEr-D over segments, as COCO's evaluation does.

  The score of a segment, a hypothesis with its references, is 10 times the
  mean, over n-gram orders 1 to 4 and references, of the cosine of TF-IDF
  vectors, with the hypothesis' entries clipped to the reference's, times
  `exp(-(l - l')² / (2 σ²))` with σ = 6. The lengths l and l' of hypothesis and
  reference are counted in bigrams; document frequencies count segments with the
  n-gram in any reference.

  Args:
    hypotheses: One generation for each input.
    references: References of each hypothesis.

  Returns:
    The mean score, 0 to 10; 0 for a single segment, as its n-grams have an
    inverse document frequency of 0.

  Raises:
    ImportError: nltk is not installed.

  References:
    Vedantam et al. 2015, "CIDEr", section 5 and equation 4.

  Example:
    >>> round(cider(['a b c d', 'e f g h'], [['a b c d'], ['e f g h']]), 4)
    10.0
  """
  counts = [
      [_count(texts.caption_words(reference)) for reference in group]
      for group in references
  ]
  frequency: Counter[_Ngram] = Counter()
  for group in counts:
    frequency.update({ngram for reference in group for ngram in reference})
  documents = math.log(len(references))
  weigh = lambda count: _weigh(count, frequency, documents)
  scores = []
  for hypothesis, group in zip(hypotheses, counts):
    vectors = weigh(_count(texts.caption_words(hypothesis)))
    total = sum(_similarity(vectors, weigh(count)) for count in group)
    scores.append(10.0 * total / _ORDERS / len(group))
  return sum(scores) / len(scores)


def _count(words: Sequence[str]) -> Counter[_Ngram]:
  return Counter(
      tuple(words[start:start + n])
      for n in range(1, _ORDERS + 1)
      for start in range(len(words) - n + 1)
  )


def _weigh(
    counts: Mapping[_Ngram, int],
    frequency: Mapping[_Ngram, int],
    documents: float,
) -> _Vectors:
  """Returns TF-IDF vectors and norms of each order, and the length."""
  vectors: list[dict[_Ngram, float]] = [{} for _ in range(_ORDERS)]
  for ngram, count in counts.items():
    rarity = documents - math.log(max(1, frequency.get(ngram, 0)))
    vectors[len(ngram) - 1][ngram] = count * rarity
  norms = [math.sqrt(sum(x * x for x in v.values())) for v in vectors]
  length = sum(n for ngram, n in counts.items() if len(ngram) == 2)
  return vectors, norms, length


def _similarity(hypothesis: _Vectors, reference: _Vectors) -> float:
  vectors, norms, length = hypothesis
  other_vectors, other_norms, other_length = reference
  total = 0.0
  for n in range(_ORDERS):
    other = other_vectors[n]
    product = sum(
        min(x, other[ngram]) * other[ngram]
        for ngram, x in vectors[n].items() if ngram in other
    )
    if norms[n] and other_norms[n]:
      product /= norms[n] * other_norms[n]
    total += product
  return total * math.exp(-(length - other_length) ** 2 / (2 * _SIGMA**2))

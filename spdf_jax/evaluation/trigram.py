"""A trigram: a stronger baseline than a bigram, for small vocabularies."""

from collections.abc import Iterable
from typing import Any
from typing import NamedTuple

import numpy as np

from spdf_jax.evaluation.bigram import Bigram
from spdf_jax.evaluation.bigram import bigram_probabilities
from spdf_jax.evaluation.bigram import fit_bigram
from spdf_jax.evaluation.perplexity import Loss

_STRENGTHS = 2.0 ** np.arange(-4, 17)


class Trigram(NamedTuple):
  """A smoothed distribution of the next token given the two before it.

  Attributes:
    triples: int64 [N], sorted, the triples that occur as one number each.
    counts: int64 [N], how often.
    bigram: The distribution that it is smoothed with; its `pairs` are the
      counts of the contexts.
    strength: How many observations the bigram counts for, in tokens.
  """

  triples: np.ndarray
  counts: np.ndarray
  bigram: Bigram
  strength: float


def fit_trigram(train_tokens: np.ndarray, vocab_size: int) -> Trigram:
  """Fits a trigram, its smoothing chosen on the end of the training tokens.

  Counts of the first nine tenths choose the weight of the bigram by the loss of
  the last tenth; the trigram returned then counts everything.

  Args:
    train_tokens: Integer [N], at least 23 tokens: the first nine tenths are 20.
    vocab_size: Number of token ids, V, at most 8192.

  Returns:
    The fitted trigram.

  Raises:
    ValueError: as `fit_bigram` raises.

  Source: MacKay and Peto 1995, "A hierarchical Dirichlet language model".

  Example:
    >>> trigram = fit_trigram(np.array([0, 0, 1] * 50), 2)
    >>> bool(trigram_probabilities(trigram, 0, 0, 1) > 0.98)
    True
  """
  tokens = np.asarray(train_tokens, np.int64)
  cut = len(tokens) * 9 // 10
  head = _counted(tokens[:cut], fit_bigram(tokens[:cut], vocab_size))
  tail = tokens[cut - 2:]

  def nats(strength: float) -> float:
    found = trigram_probabilities(
        head._replace(strength=strength), tail[:-2], tail[1:-1], tail[2:]
    )
    return -np.log(found).sum()

  strength = min(_STRENGTHS, key=nats)
  whole = _counted(tokens, fit_bigram(tokens, vocab_size))
  return whole._replace(strength=float(strength))


def trigram_probabilities(
    trigram: Trigram, first: np.ndarray, second: np.ndarray, third: np.ndarray
) -> np.ndarray:
  """Returns the probability of tokens given the two before them.

  Args:
    trigram: A fitted trigram.
    first: Integer ids, any shape: two tokens before.
    second: Integer ids, the same shape: one token before.
    third: Integer ids, the same shape.

  Returns:
    float64 probabilities, the same shape; over all third tokens they sum to
    one, but for the context that ends the training tokens.
  """
  keys = _keys(first, second, third, len(trigram.bigram.unigram))
  places = np.minimum(
      np.searchsorted(trigram.triples, keys), len(trigram.triples) - 1
  )
  counts = np.where(
      trigram.triples[places] == keys, trigram.counts[places], 0
  )
  prior = trigram.strength * bigram_probabilities(
      trigram.bigram, second, third
  )
  contexts = trigram.bigram.pairs[first, second]
  return (counts + prior) / (contexts + trigram.strength)


def trigram_loss(
    train_tokens: np.ndarray, batches: Iterable[Any], vocab_size: int
) -> Loss:
  """Evaluates a trigram of the training tokens on a model's own batches.

  The first token of a sequence has one token before it, and is scored by the
  bigram.

  Args:
    train_tokens: Integer [N].
    batches: Batches as `evaluate_loss` takes them, with their weights.
    vocab_size: Number of token ids, V, at most 8192.

  Returns:
    The total loss, to compare with `evaluate_loss` of a model.

  Raises:
    ValueError: as `fit_bigram` raises.

  Example:
    >>> from types import SimpleNamespace
    >>> batch = SimpleNamespace(inputs=np.array([[0, 0, 1]]),
    ...                         targets=np.array([[0, 1, 0]]),
    ...                         weights=np.array([[0.0, 1.0, 1.0]]))
    >>> loss = trigram_loss(np.array([0, 0, 1] * 500), [batch], 2)
    >>> loss.tokens, round(loss.perplexity, 2)
    (2.0, 1.0)
  """
  trigram = fit_trigram(train_tokens, vocab_size)
  nats = tokens = 0.0
  for batch in batches:
    inputs, targets = np.asarray(batch.inputs), np.asarray(batch.targets)
    weights = np.asarray(batch.weights, np.float64)
    chosen = np.concatenate([
        bigram_probabilities(trigram.bigram, inputs[:, :1], targets[:, :1]),
        trigram_probabilities(
            trigram, inputs[:, :-1], inputs[:, 1:], targets[:, 1:]
        ),
    ], axis=1)
    nats -= float(np.sum(weights * np.log(chosen)))
    tokens += float(weights.sum())
  return Loss(nats, tokens)


def _keys(
    first: np.ndarray, second: np.ndarray, third: np.ndarray, vocab_size: int
) -> np.ndarray:
  first, second, third = (
      np.asarray(x, np.int64) for x in (first, second, third)
  )
  return (first * vocab_size + second) * vocab_size + third


def _counted(tokens: np.ndarray, bigram: Bigram) -> Trigram:
  keys = _keys(tokens[:-2], tokens[1:-1], tokens[2:], len(bigram.unigram))
  return Trigram(*np.unique(keys, return_counts=True), bigram, 1.0)

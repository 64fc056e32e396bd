"""A bigram: the baseline that any trained language model has to beat."""

from collections.abc import Iterable
from typing import Any
from typing import NamedTuple

import numpy as np

from spdf_jax.evaluation.perplexity import Loss

LARGEST_VOCABULARY = 8192  # counts of 8192 x 8192 pairs take 256 MiB
_CHUNK = 1 << 20
_STRENGTHS = 2.0 ** np.arange(-4, 17)


class Bigram(NamedTuple):
  """A smoothed distribution of the next token given the one before it.

  Attributes:
    pairs: int32 [V, V], how often the column's token followed the row's.
    contexts: int64 [V], how often a token was followed by any.
    unigram: float64 [V], add-one probabilities of single tokens.
    strength: How many observations the unigram counts for, in tokens.
  """

  pairs: np.ndarray
  contexts: np.ndarray
  unigram: np.ndarray
  strength: float


def _check_ids(what: str, tokens: np.ndarray, vocab_size: int) -> None:
  """Refuses token ids that the vocabulary does not have."""
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
    raise ValueError(
        f'{what} holds token ids from {tokens.min()} to {tokens.max()}, '
        f'but vocab_size is {vocab_size}; use the tokenizer that made them.'
    )


def count_bigrams(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
  """Counts how often each token follows each other one.

  Args:
    tokens: Integer [N], may be memory-mapped; read in chunks.
    vocab_size: Number of token ids, V, at most 8192.

  Returns:
    int32 [V, V], first token by row, second by column.

  Raises:
    ValueError: The vocabulary is too large, or an id is outside of it.

  Example:
    >>> count_bigrams(np.array([0, 1, 1, 0, 1]), 2)
    array([[0, 2],
           [1, 1]], dtype=int32)
  """
  if vocab_size > LARGEST_VOCABULARY:
    raise ValueError(
        f'vocab_size is {vocab_size}, but the bigram baseline counts every '
        f'pair and takes at most {LARGEST_VOCABULARY}; leave it out for '
        'larger vocabularies.'
    )
  pairs = np.zeros(vocab_size * vocab_size, np.int32)
  for first in range(0, len(tokens), _CHUNK):
    chunk = np.asarray(tokens[first : first + _CHUNK + 1], np.int64)
    _check_ids('tokens', chunk, vocab_size)
    np.add.at(pairs, chunk[:-1] * vocab_size + chunk[1:], 1)
  return pairs.reshape(vocab_size, vocab_size)


def bigram_probabilities(
    bigram: Bigram, previous: np.ndarray, following: np.ndarray
) -> np.ndarray:
  """Returns the probability of tokens given the ones before them.

  With a context's count n and the strength k, counts and unigram are
  interpolated with the weights n / (n + k) and k / (n + k):
  `(pairs[a, b] + k * unigram[b]) / (contexts[a] + k)`.

  Args:
    bigram: A fitted bigram.
    previous: Integer ids, any shape.
    following: Integer ids, the same shape.

  Returns:
    float64 probabilities, the same shape; over all following tokens they
    sum to one.

  Source: MacKay and Peto 1995, "A hierarchical Dirichlet language model".

  Example:
    >>> bigram = fit_bigram(np.array([0, 1] * 50), 2)
    >>> bool(bigram_probabilities(bigram, 0, 1) > 0.99)
    True
  """
  counts = bigram.pairs[previous, following]
  prior = bigram.strength * bigram.unigram[following]
  return (counts + prior) / (bigram.contexts[previous] + bigram.strength)


def _smoothed(
    tokens: np.ndarray, vocab_size: int, strength: float
) -> Bigram:
  """Counts tokens and smooths them with a given strength."""
  pairs = count_bigrams(tokens, vocab_size)
  contexts = pairs.sum(axis=1, dtype=np.int64)
  singles = contexts.copy()
  singles[tokens[-1]] += 1  # the last token is no context
  unigram = (singles + 1.0) / (len(tokens) + vocab_size)
  return Bigram(pairs, contexts, unigram, float(strength))


def _best_strength(tokens: np.ndarray, vocab_size: int) -> float:
  """Chooses the smoothing of the head that predicts the tail best."""
  cut = len(tokens) * 9 // 10
  head = _smoothed(tokens[:cut], vocab_size, 1.0)
  tail = np.asarray(tokens[cut - 1 :], np.int64)
  _check_ids('train_tokens', tail, vocab_size)

  def nats(strength):
    candidate = head._replace(strength=strength)
    return -np.log(bigram_probabilities(candidate, tail[:-1], tail[1:])).sum()

  return min(_STRENGTHS, key=nats)


def fit_bigram(train_tokens: np.ndarray, vocab_size: int) -> Bigram:
  """Fits a bigram, its smoothing chosen on the end of the training tokens.

  Counts of the first nine tenths choose, by the loss of the last tenth, how
  much the unigram weighs; the bigram returned then counts everything.

  Args:
    train_tokens: Integer [N], at least 20 tokens.
    vocab_size: Number of token ids, V, at most 8192.

  Returns:
    The fitted bigram.

  Raises:
    ValueError: Too few tokens, too large a vocabulary or an id outside it.

  Example:
    >>> fit_bigram(np.array([0, 1] * 50), 2).contexts
    array([50, 49])
  """
  if len(train_tokens) < 20:
    raise ValueError(
        f'train_tokens has {len(train_tokens)} tokens; a bigram needs at '
        'least 20 to choose its smoothing on some of them.'
    )
  strength = _best_strength(train_tokens, vocab_size)
  return _smoothed(train_tokens, vocab_size, strength)


def bigram_loss(
    train_tokens: np.ndarray, batches: Iterable[Any], vocab_size: int
) -> Loss:
  """Evaluates a bigram of the training tokens on a model's own batches.

  Args:
    train_tokens: Integer [N].
    batches: Batches as `evaluate_loss` takes them, with their weights.
    vocab_size: Number of token ids, V, at most 8192.

  Returns:
    The total loss, to compare with `evaluate_loss` of a model.

  Raises:
    ValueError: As `fit_bigram` raises, or the batches hold no target token.

  Example:
    >>> from types import SimpleNamespace
    >>> batch = SimpleNamespace(inputs=np.array([[0, 1]]),
    ...                         targets=np.array([[1, 0]]),
    ...                         weights=np.array([[1.0, 0.0]]))
    >>> loss = bigram_loss(np.array([0, 1] * 500), [batch], 2)
    >>> loss.tokens, round(loss.perplexity, 2)
    (1.0, 1.0)
  """
  bigram = fit_bigram(train_tokens, vocab_size)
  nats = tokens = 0.0
  for batch in batches:
    weights = np.asarray(batch.weights, np.float64)
    keep = weights > 0
    previous = np.asarray(batch.inputs)[keep]
    following = np.asarray(batch.targets)[keep]
    _check_ids('batches', previous, vocab_size)
    _check_ids('batches', following, vocab_size)
    chosen = bigram_probabilities(bigram, previous, following)
    nats -= float(np.sum(weights[keep] * np.log(chosen)))
    tokens += float(weights.sum())
  if not tokens > 0:
    raise ValueError(
        f'batches hold target tokens of total weight {tokens}; give at '
        'least one batch with a positive weight.'
    )
  return Loss(nats, tokens)

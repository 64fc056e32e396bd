# SPDX-License-Identifier: Apache-2.0
"""A baseline: the smoothed bigram, for small vocabularies.

References:
  MacKay and Peto 1995, "A hierarchical Dirichlet language model".
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from spdf_jax.evaluation import loss
from spdf_jax.evaluation.loss import TokenLoss

LARGEST_VOCABULARY = 8192  # Counts of 8192 x 8192 pairs take 256 MiB.
_CHUNK = 1 << 20
# Tokens at a time, whose probabilities are arrays in memory.
_HELD_OUT = 1 << 22


class Bigram(NamedTuple):
  """A smoothed distribution of the next token given the one before it.

  Attributes:
    pairs: int32 [V, V], counts of pairs: first token by row, second by column.
    contexts: int64 [V], counts of tokens that are followed by another one.
    unigram: float64 [V], add-one probabilities of single tokens.
    strength: Weight of the unigram, as a number of observations.
  """

  pairs: np.ndarray
  contexts: np.ndarray
  unigram: np.ndarray
  strength: float


def count_bigrams(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
  """Counts pairs of consecutive tokens.

  Args:
    tokens: Integer [N], possibly memory-mapped; read in chunks.
    vocab_size: Number of token ids, V, at most 8192.

  Returns:
    int32 [V, V], first token by row, second by column.

  Raises:
    ValueError: the vocabulary is too large, or a token id is outside it.

  Example:
    >>> count_bigrams(np.array([0, 1, 1, 0, 1]), 2)
    array([[0, 2],
           [1, 1]], dtype=int32)
  """
  if vocab_size > LARGEST_VOCABULARY:
    raise ValueError(
        f'vocab_size is {vocab_size}, but the bigram baseline counts every '
        f'pair and takes at most {LARGEST_VOCABULARY}; leave the baseline out '
        'for larger vocabularies.'
    )
  pairs = np.zeros(vocab_size * vocab_size, np.int32)
  for first in range(0, len(tokens), _CHUNK):
    chunk = np.asarray(tokens[first : first + _CHUNK + 1], np.int64)
    check_ids('tokens', chunk, vocab_size)
    np.add.at(pairs, chunk[:-1] * vocab_size + chunk[1:], 1)
  return pairs.reshape(vocab_size, vocab_size)


def bigram_probabilities(
    bigram: Bigram, previous: np.ndarray, following: np.ndarray
) -> np.ndarray:
  """Returns the probabilities of tokens given the preceding token.

  With a context's count n and the strength k, relative frequencies and the
  unigram are interpolated with the weights n / (n + k) and k / (n + k):
  `(pairs[a, b] + k * unigram[b]) / (contexts[a] + k)`.

  Args:
    bigram: A fitted bigram.
    previous: Integer ids of the preceding tokens, any shape.
    following: Integer ids of the tokens, the same shape.

  Returns:
    float64 probabilities, the same shape; they sum to one over all following
    tokens.

  References:
    MacKay and Peto 1995, "A hierarchical Dirichlet language model".

  Example:
    >>> bigram = fit_bigram(np.array([0, 1] * 50), 2)
    >>> bool(bigram_probabilities(bigram, 0, 1) > 0.99)
    True
  """
  k = bigram.strength
  return (bigram.pairs[previous, following] + k * bigram.unigram[following]) / (
      bigram.contexts[previous] + k
  )


def fit_bigram(train_tokens: np.ndarray, vocab_size: int) -> Bigram:
  """Fits a bigram and its smoothing strength to training tokens.

  The strength minimizes the loss on the last tenth of the tokens, at most 4M of
  them, of a bigram of the first nine tenths; the returned bigram counts all.

  Args:
    train_tokens: Integer [N], at least 20 tokens.
    vocab_size: Number of token ids, V, at most 8192.

  Returns:
    The fitted bigram.

  Raises:
    ValueError: there are too few tokens, the vocabulary is too large, or a
      token id is outside it.

  Example:
    >>> fit_bigram(np.array([0, 1] * 50), 2).contexts
    array([50, 49])
  """
  if len(train_tokens) < 20:
    raise ValueError(
        f'train_tokens has {len(train_tokens)} tokens; a bigram needs at least '
        '20, as some are held out to choose its smoothing.'
    )
  cut = len(train_tokens) * 9 // 10
  head = _counted_bigram(train_tokens[:cut], vocab_size)
  tail = np.asarray(train_tokens[cut - 1 :][: _HELD_OUT + 1], np.int64)
  check_ids('train_tokens', tail, vocab_size)
  strength = choose_strength(lambda strength: bigram_probabilities(
      head._replace(strength=strength), tail[:-1], tail[1:]
  ))
  whole = _counted_bigram(train_tokens, vocab_size)
  return whole._replace(strength=strength)


def bigram_loss(
    train_tokens: np.ndarray, batches: Iterable[Any], vocab_size: int
) -> TokenLoss:
  """Fits a smoothed bigram to tokens, and evaluates it on a model's batches.

  Args:
    train_tokens: Token ids to fit, integer [N], at least 20.
    batches: Batches in the format of `evaluate_loss`. Targets of weight 0 are
      ignored.
    vocab_size: Number of token ids, at most 8192.

  Returns:
    The total loss, comparable to the result of `evaluate_loss`.

  Raises:
    ValueError: there are too few training tokens, the vocabulary is too large,
      a token id is outside it, or no target token has a positive weight.

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
    previous = np.asarray(batch.inputs, np.int64)[keep]
    following = np.asarray(batch.targets)[keep]
    check_ids('batches', previous, vocab_size)
    check_ids('batches', following, vocab_size)
    chosen = bigram_probabilities(bigram, previous, following)
    nats -= float(np.sum(weights[keep] * np.log(chosen)))
    tokens += float(weights.sum())
  return loss.total_loss(nats, tokens)


def _counted_bigram(tokens: np.ndarray, vocab_size: int) -> Bigram:
  pairs = count_bigrams(tokens, vocab_size)
  contexts = pairs.sum(axis=1, dtype=np.int64)
  singles = contexts.copy()
  singles[tokens[-1]] += 1  # The last token is not a context.
  unigram = (singles + 1.0) / (len(tokens) + vocab_size)
  return Bigram(pairs, contexts, unigram, 1.0)


def check_ids(what: str, tokens: np.ndarray, vocab_size: int) -> None:
  """Raises ValueError for token ids outside the vocabulary."""
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
    raise ValueError(
        f'{what} holds token ids from {tokens.min()} to {tokens.max()}, '
        f'but vocab_size is {vocab_size}; use the tokenizer that made them.'
    )


def choose_strength(probabilities: Callable[[float], np.ndarray]) -> float:
  """Returns the strength under which held-out tokens are most probable.

  Args:
    probabilities: Function from a strength to the probabilities of the tokens.

  Returns:
    A power of two from 1 / 16 to 2**16, the smallest one among equals.
  """
  nats = lambda strength: -np.log(probabilities(strength)).sum()
  return float(min(2.0 ** np.arange(-4, 17), key=nats))

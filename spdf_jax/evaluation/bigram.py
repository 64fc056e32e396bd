# SPDX-License-Identifier: Apache-2.0
"""A bigram model: the baseline that any trained language model has to beat."""

from collections.abc import Iterable
from typing import Any
from typing import NamedTuple

import numpy as np

from spdf_jax.evaluation.ngrams import check_ids
from spdf_jax.evaluation.ngrams import choose_strength
from spdf_jax.evaluation.ngrams import ngram_loss
from spdf_jax.evaluation.ngrams import smooth
from spdf_jax.evaluation.perplexity import Loss

LARGEST_VOCABULARY = 8192  # Counts of 8192 x 8192 pairs take 256 MiB.
_CHUNK = 1 << 20


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
    ValueError: The vocabulary is too large, or a token id is outside it.

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

  Source: MacKay and Peto 1995, "A hierarchical Dirichlet language model".

  Example:
    >>> bigram = fit_bigram(np.array([0, 1] * 50), 2)
    >>> bool(bigram_probabilities(bigram, 0, 1) > 0.99)
    True
  """
  return smooth(
      bigram.pairs[previous, following], bigram.contexts[previous],
      bigram.strength, bigram.unigram[following],
  )


def _smoothed(
    tokens: np.ndarray, vocab_size: int, strength: float
) -> Bigram:
  """Fits a bigram with a given smoothing strength."""
  pairs = count_bigrams(tokens, vocab_size)
  contexts = pairs.sum(axis=1, dtype=np.int64)
  singles = contexts.copy()
  singles[tokens[-1]] += 1  # The last token is not a context.
  unigram = (singles + 1.0) / (len(tokens) + vocab_size)
  return Bigram(pairs, contexts, unigram, float(strength))


def _best_strength(tokens: np.ndarray, vocab_size: int) -> float:
  """Returns the strength under which the first 90 % predict the rest best."""
  cut = len(tokens) * 9 // 10
  head = _smoothed(tokens[:cut], vocab_size, 1.0)
  tail = np.asarray(tokens[cut - 1 :], np.int64)
  check_ids('train_tokens', tail, vocab_size)
  return choose_strength(lambda strength: bigram_probabilities(
      head._replace(strength=strength), tail[:-1], tail[1:]
  ))


def fit_bigram(train_tokens: np.ndarray, vocab_size: int) -> Bigram:
  """Fits a bigram and its smoothing strength to training tokens.

  The strength minimizes the loss on the last tenth of the tokens, of a bigram
  of the first nine tenths; the returned bigram counts all tokens.

  Args:
    train_tokens: Integer [N], at least 20 tokens.
    vocab_size: Number of token ids, V, at most 8192.

  Returns:
    The fitted bigram.

  Raises:
    ValueError: There are too few tokens, the vocabulary is too large, or a
      token id is outside it.

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
  """Evaluates a bigram of the training tokens on a model's batches.

  Args:
    train_tokens: Integer [N].
    batches: Batches in the format of `evaluate_loss`, with weights.
    vocab_size: Number of token ids, V, at most 8192.

  Returns:
    The total loss, comparable to the result of `evaluate_loss`.

  Raises:
    ValueError: `fit_bigram` refuses the training tokens, or the batches hold
      no target token.

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
  return ngram_loss(
      lambda _, previous, following: bigram_probabilities(
          bigram, previous, following
      ),
      batches, vocab_size,
  )

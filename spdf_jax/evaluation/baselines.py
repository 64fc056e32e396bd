# SPDX-License-Identifier: Apache-2.0
"""Baselines: smoothed bigrams and trigrams, for small vocabularies.

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
_HELD_OUT = 1 << 22  # Tokens, whose probabilities are arrays in memory.


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
    _check_ids('tokens', chunk, vocab_size)
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
  return _smooth(
      bigram.pairs[previous, following], bigram.contexts[previous],
      bigram.strength, bigram.unigram[following],
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
  _check_number(train_tokens, 20, 'bigram')
  cut = len(train_tokens) * 9 // 10
  head = _counted_bigram(train_tokens[:cut], vocab_size)
  tail = np.asarray(train_tokens[cut - 1 :][: _HELD_OUT + 1], np.int64)
  _check_ids('train_tokens', tail, vocab_size)
  strength = _choose_strength(lambda strength: bigram_probabilities(
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
    batches: Batches in the format of `evaluate_loss`.
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
  return _ngram_loss(
      lambda _, previous, following: bigram_probabilities(
          bigram, previous, following
      ),
      batches, vocab_size,
  )


class Trigram(NamedTuple):
  """A smoothed distribution of the next token given the two before it.

  Attributes:
    triples: int64 [N], sorted, the observed triples, each encoded as a number.
    counts: int64 [N], counts of the triples.
    bigram: Bigram that smooths the distribution; `bigram.pairs` are the counts
      of the contexts.
    strength: Weight of the bigram, as a number of observations.
  """

  triples: np.ndarray
  counts: np.ndarray
  bigram: Bigram
  strength: float


def fit_trigram(train_tokens: np.ndarray, vocab_size: int) -> Trigram:
  """Fits a trigram and its smoothing strength to training tokens.

  The strength minimizes the loss on the last tenth of the tokens, of a trigram
  of the first nine tenths; the returned trigram counts all tokens.

  Args:
    train_tokens: Integer [N], at least 23 tokens, so that nine tenths are 20.
    vocab_size: Number of token ids, V, at most 8192.

  Returns:
    The fitted trigram.

  Raises:
    ValueError: there are too few tokens, the vocabulary is too large, or a
      token id is outside it.

  References:
    MacKay and Peto 1995, "A hierarchical Dirichlet language model".

  Example:
    >>> trigram = fit_trigram(np.array([0, 0, 1] * 50), 2)
    >>> bool(trigram_probabilities(trigram, 0, 0, 1) > 0.98)
    True
  """
  _check_number(train_tokens, 23, 'trigram')
  tokens = np.asarray(train_tokens, np.int64)
  whole = _counted_trigram(tokens, fit_bigram(tokens, vocab_size))
  cut = len(tokens) * 9 // 10
  head = _counted_trigram(tokens[:cut], fit_bigram(tokens[:cut], vocab_size))
  tail = tokens[cut - 2:]
  strength = _choose_strength(lambda strength: trigram_probabilities(
      head._replace(strength=strength), tail[:-2], tail[1:-1], tail[2:]
  ))
  return whole._replace(strength=strength)


def trigram_probabilities(
    trigram: Trigram, first: np.ndarray, second: np.ndarray, third: np.ndarray
) -> np.ndarray:
  """Returns the probabilities of tokens given the two tokens before them.

  Args:
    trigram: A fitted trigram.
    first: Integer ids of the tokens two places before, any shape.
    second: Integer ids of the tokens one place before, the same shape.
    third: Integer ids of the tokens, the same shape.

  Returns:
    float64 probabilities, the same shape; they sum to one over all third
    tokens, except for the context that ends the training tokens.
  """
  keys = _keys(first, second, third, len(trigram.bigram.unigram))
  places = np.minimum(
      np.searchsorted(trigram.triples, keys), len(trigram.triples) - 1
  )
  counts = np.where(
      trigram.triples[places] == keys, trigram.counts[places], 0
  )
  return _smooth(
      counts, trigram.bigram.pairs[first, second], trigram.strength,
      bigram_probabilities(trigram.bigram, second, third),
  )


def trigram_loss(
    train_tokens: np.ndarray, batches: Iterable[Any], vocab_size: int
) -> TokenLoss:
  """Fits a smoothed trigram to tokens, and evaluates it on a model's batches.

  The first target of a sequence has one token before it, so a bigram of the
  same tokens scores it.

  Args:
    train_tokens: Token ids to fit, integer [N], at least 23.
    batches: Batches in the format of `evaluate_loss`.
    vocab_size: Number of token ids, at most 8192.

  Returns:
    The total loss, comparable to the result of `evaluate_loss`.

  Raises:
    ValueError: there are too few training tokens, the vocabulary is too large,
      a token id is outside it, or no target token has a positive weight.

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

  def probabilities(first, second, third):
    found = bigram_probabilities(trigram.bigram, second, third)
    inside = first >= 0
    _check_ids('batches', first[inside], vocab_size)
    found[inside] = trigram_probabilities(
        trigram, first[inside], second[inside], third[inside]
    )
    return found

  return _ngram_loss(probabilities, batches, vocab_size)


def _keys(
    first: np.ndarray, second: np.ndarray, third: np.ndarray, vocab_size: int
) -> np.ndarray:
  first, second, third = (
      np.asarray(x, np.int64) for x in (first, second, third)
  )
  return (first * vocab_size + second) * vocab_size + third


def _counted_bigram(tokens: np.ndarray, vocab_size: int) -> Bigram:
  pairs = count_bigrams(tokens, vocab_size)
  contexts = pairs.sum(axis=1, dtype=np.int64)
  singles = contexts.copy()
  singles[tokens[-1]] += 1  # The last token is not a context.
  unigram = (singles + 1.0) / (len(tokens) + vocab_size)
  return Bigram(pairs, contexts, unigram, 1.0)


def _counted_trigram(tokens: np.ndarray, bigram: Bigram) -> Trigram:
  keys = _keys(tokens[:-2], tokens[1:-1], tokens[2:], len(bigram.unigram))
  return Trigram(*np.unique(keys, return_counts=True), bigram, 1.0)


def _check_number(train_tokens: np.ndarray, least: int, kind: str) -> None:
  """Raises an error for fewer than `least` training tokens."""
  if len(train_tokens) < least:
    raise ValueError(
        f'train_tokens has {len(train_tokens)} tokens; a {kind} needs at '
        f'least {least}, as some are held out to choose its smoothing.'
    )


def _check_ids(what: str, tokens: np.ndarray, vocab_size: int) -> None:
  """Raises an error for token ids outside the vocabulary."""
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
    raise ValueError(
        f'{what} holds token ids from {tokens.min()} to {tokens.max()}, '
        f'but vocab_size is {vocab_size}; use the tokenizer that made them.'
    )


def _smooth(
    counts: np.ndarray, contexts: np.ndarray, strength: float, prior: np.ndarray
) -> np.ndarray:
  """Interpolates frequencies and a prior, see `bigram_probabilities`."""
  return (counts + strength * prior) / (contexts + strength)


def _choose_strength(probabilities: Callable[[float], np.ndarray]) -> float:
  """Returns the strength under which held-out tokens are most probable.

  The smallest one among equals; `probabilities` are those of the tokens.
  """
  nats = lambda strength: -np.log(probabilities(strength)).sum()
  return float(min(2.0 ** np.arange(-4, 17), key=nats))


def _ngram_loss(
    probabilities: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    batches: Iterable[Any],
    vocab_size: int,
) -> TokenLoss:
  """Evaluates an n-gram on a model's batches.

  Args:
    probabilities: Function `(first_N, second_N, targets_N) -> float64 [N]` of
      the ids two tokens before, one token before and of the targets; the first
      id is -1 at the first token of a sequence.
    batches: Batches in the format of `evaluate_loss`, with weights. Targets of
      weight 0 are ignored.
    vocab_size: Number of token ids.
  """
  nats = tokens = 0.0
  for batch in batches:
    weights = np.asarray(batch.weights, np.float64)
    keep = weights > 0
    inputs = np.asarray(batch.inputs, np.int64)
    before = np.pad(inputs[:, :-1], ((0, 0), (1, 0)), constant_values=-1)[keep]
    previous, following = inputs[keep], np.asarray(batch.targets)[keep]
    _check_ids('batches', previous, vocab_size)
    _check_ids('batches', following, vocab_size)
    chosen = probabilities(before, previous, following)
    nats -= float(np.sum(weights[keep] * np.log(chosen)))
    tokens += float(weights.sum())
  return loss.total_loss(nats, tokens)

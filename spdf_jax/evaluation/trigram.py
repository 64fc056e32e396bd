# SPDX-License-Identifier: Apache-2.0
"""A trigram model: a baseline above the bigram, for small vocabularies."""

from collections.abc import Iterable
from typing import Any
from typing import NamedTuple

import numpy as np

from spdf_jax.evaluation.bigram import Bigram
from spdf_jax.evaluation.bigram import bigram_probabilities
from spdf_jax.evaluation.bigram import fit_bigram
from spdf_jax.evaluation.ngrams import check_ids
from spdf_jax.evaluation.ngrams import choose_strength
from spdf_jax.evaluation.ngrams import ngram_loss
from spdf_jax.evaluation.ngrams import smooth
from spdf_jax.evaluation.perplexity import Loss


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
    ValueError: `fit_bigram` refuses the training tokens.

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
  strength = choose_strength(lambda strength: trigram_probabilities(
      head._replace(strength=strength), tail[:-2], tail[1:-1], tail[2:]
  ))
  whole = _counted(tokens, fit_bigram(tokens, vocab_size))
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
  return smooth(
      counts, trigram.bigram.pairs[first, second], trigram.strength,
      bigram_probabilities(trigram.bigram, second, third),
  )


def trigram_loss(
    train_tokens: np.ndarray, batches: Iterable[Any], vocab_size: int
) -> Loss:
  """Evaluates a trigram of the training tokens on a model's batches.

  The bigram scores the first target of a sequence, which has one token before
  it.

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
    check_ids('batches', first[inside], vocab_size)
    found[inside] = trigram_probabilities(
        trigram, first[inside], second[inside], third[inside]
    )
    return found

  return ngram_loss(probabilities, batches, vocab_size)


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

"""A smoothed trigram of the tokens that a run reads, a baseline of gate G1.

References:
  MacKay and Peto 1995, "A hierarchical Dirichlet language model".
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from spdf_jax.evaluation import baselines
from spdf_jax.evaluation import loss
from spdf_jax.evaluation.baselines import Bigram
from spdf_jax.evaluation.loss import TokenLoss


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
  if len(train_tokens) < 23:
    raise ValueError(
        f'train_tokens has {len(train_tokens)} tokens; a trigram needs at '
        'least 23, as some are held out to choose its smoothing.'
    )
  tokens = np.asarray(train_tokens, np.int64)
  whole = _counted(tokens, baselines.fit_bigram(tokens, vocab_size))
  cut = len(tokens) * 9 // 10
  head = _counted(tokens[:cut], baselines.fit_bigram(tokens[:cut], vocab_size))
  tail = tokens[cut - 2:]
  strength = baselines.choose_strength(lambda strength: trigram_probabilities(
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
  prior = baselines.bigram_probabilities(trigram.bigram, second, third)
  contexts = trigram.bigram.pairs[first, second]
  return (counts + trigram.strength * prior) / (contexts + trigram.strength)


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
  nats = tokens = 0.0
  for batch in batches:
    weights = np.asarray(batch.weights, np.float64)
    keep = weights > 0
    inputs = np.asarray(batch.inputs, np.int64)
    first = np.pad(inputs[:, :-1], ((0, 0), (1, 0)), constant_values=-1)[keep]
    second, third = inputs[keep], np.asarray(batch.targets)[keep]
    inside = first >= 0
    for ids in (first[inside], second, third):
      baselines.check_ids('batches', ids, vocab_size)
    chosen = baselines.bigram_probabilities(trigram.bigram, second, third)
    chosen[inside] = trigram_probabilities(
        trigram, first[inside], second[inside], third[inside]
    )
    nats -= float(np.sum(weights[keep] * np.log(chosen)))
    tokens += float(weights.sum())
  return loss.total_loss(nats, tokens)


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

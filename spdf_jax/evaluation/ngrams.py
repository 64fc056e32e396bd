# SPDX-License-Identifier: Apache-2.0
"""N-grams: smoothing and evaluation, shared by bigrams and trigrams.

Source: MacKay and Peto 1995, "A hierarchical Dirichlet language model".
"""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import numpy as np

from spdf_jax.evaluation.perplexity import Loss

STRENGTHS = 2.0 ** np.arange(-4, 17)
"""Candidate strengths of the smoothing, in tokens."""


def check_ids(what: str, tokens: np.ndarray, vocab_size: int) -> None:
  """Raises an error for token ids outside the vocabulary.

  Args:
    what: Name of the tokens for error messages.
    tokens: Integer ids, any shape.
    vocab_size: Number of token ids.

  Raises:
    ValueError: An id is outside the vocabulary.
  """
  if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
    raise ValueError(
        f'{what} holds token ids from {tokens.min()} to {tokens.max()}, '
        f'but vocab_size is {vocab_size}; use the tokenizer that made them.'
    )


def smooth(
    counts: np.ndarray, contexts: np.ndarray, strength: float, prior: np.ndarray
) -> np.ndarray:
  """Returns the probabilities of tokens from counts and a prior.

  With a context's count n and the strength k, relative frequencies and the
  prior are interpolated with the weights n / (n + k) and k / (n + k).

  Args:
    counts: Counts of each token after its context, any shape.
    contexts: Counts of any token after each context, the same shape.
    strength: Weight of the prior, as a number of observations.
    prior: Probabilities of the tokens in a shorter context, the same shape.

  Returns:
    float64 probabilities, the same shape.

  Example:
    >>> float(smooth(np.array(3), np.array(4), 4.0, np.array(0.25)))
    0.5
  """
  return (counts + strength * prior) / (contexts + strength)


def choose_strength(probabilities: Callable[[float], np.ndarray]) -> float:
  """Chooses the strength under which held-out tokens are most probable.

  Args:
    probabilities: Function from a strength to the probabilities of the tokens.

  Returns:
    One of `STRENGTHS`, the smallest one among equals.

  Example:
    >>> choose_strength(lambda strength: np.array([1 / (1 + strength)]))
    0.0625
  """
  nats = lambda strength: -np.log(probabilities(strength)).sum()
  return float(min(STRENGTHS, key=nats))


def ngram_loss(
    probabilities: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    batches: Iterable[Any],
    vocab_size: int,
) -> Loss:
  """Evaluates an n-gram on a model's batches.

  Args:
    probabilities: Function `(first_N, second_N, targets_N) -> float64 [N]` of
      the ids two tokens before, one token before and of the targets; the first
      id is -1 at the first token of a sequence.
    batches: Batches in the format of `evaluate_loss`, with weights. Targets of
      weight 0 are ignored.
    vocab_size: Number of token ids.

  Returns:
    The total loss.

  Raises:
    ValueError: An id is outside the vocabulary, or the batches hold no target
      token.
  """
  nats = tokens = 0.0
  for batch in batches:
    weights = np.asarray(batch.weights, np.float64)
    keep = weights > 0
    inputs = np.asarray(batch.inputs, np.int64)
    before = np.pad(inputs[:, :-1], ((0, 0), (1, 0)), constant_values=-1)[keep]
    previous, following = inputs[keep], np.asarray(batch.targets)[keep]
    check_ids('batches', previous, vocab_size)
    check_ids('batches', following, vocab_size)
    chosen = probabilities(before, previous, following)
    nats -= float(np.sum(weights[keep] * np.log(chosen)))
    tokens += float(weights.sum())
  if not tokens > 0:
    raise ValueError(
        f'batches hold target tokens of total weight {tokens}; give at '
        'least one batch with a positive weight.'
    )
  return Loss(nats, tokens)

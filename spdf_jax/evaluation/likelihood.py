# SPDX-License-Identifier: Apache-2.0
"""Likelihood of continuations, in batches of few shapes."""

from collections.abc import Iterator, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.evaluation.loss import ApplyFn

_SHORTEST = 32  # Minimum sequence length of a batch.


class Continuation(NamedTuple):
  """A context and the target that is scored after it.

  Attributes:
    context: Token ids of the context, at least one.
    target: Token ids to score, at least one.
  """

  context: Sequence[int]
  target: Sequence[int]


class Likelihood(NamedTuple):
  """Likelihood of a target under a model.

  Attributes:
    log_probability: Sum over the target's tokens, in nats.
    greedy: Whether each token of the target is the most likely one.
  """

  log_probability: float
  greedy: bool


def score_continuations(
    apply_fn: ApplyFn,
    params: Any,
    continuations: Sequence[Continuation],
    *,
    length: int,
    batch_tokens: int = 4096,
) -> list[Likelihood]:
  """Computes the likelihoods of continuations of any lengths.

  Continuations are sorted by length and padded on the right to powers of two,
  so that at most `log2(length)` shapes are compiled. Contexts are truncated on
  the left to fit the model.

  Args:
    apply_fn: `(params, tokens_BxL) -> logits_BxLxV`, causal and hashable; pass
      the same object each time to avoid recompilation.
    params: Parameters of the model.
    continuations: Contexts and targets to score.
    length: Maximum sequence length of the model, in tokens.
    batch_tokens: Number of tokens in a batch, which bounds the memory of the
      logits.

  Returns:
    One likelihood for each continuation, in the same order.

  Raises:
    ValueError: a context or target is empty, a target is longer than `length`,
      or a token is not in the model's vocabulary.

  Example:
    >>> uniform = lambda params, tokens: jnp.zeros(tokens.shape + (4,))
    >>> scores = score_continuations(
    ...     uniform, None, [Continuation([1], [0, 0])], length=8)
    >>> round(float(np.exp(scores[0].log_probability)), 4), scores[0].greedy
    (0.0625, True)
  """
  for number, (context, target) in enumerate(continuations):
    if not len(context):
      raise ValueError(
          f'context {number} is empty; give at least the end-of-text token.'
      )
    if not len(target):
      raise ValueError(
          f'target {number} is empty; give the tokens to score, at least one.'
      )
    if len(target) > length:
      raise ValueError(
          f'target {number} has {len(target)} tokens, more than length'
          f' {length}; divide it into windows, and score each.'
      )
  scores: dict[int, Likelihood] = {}
  for chosen, batch in _batches(continuations, length, batch_tokens):
    sums_B, greedy_B, vocab_size = jax.device_get(
        _score(apply_fn, params, *batch)
    )
    ids_2xBxL = np.stack(batch[:2])
    wrong = ids_2xBxL[(ids_2xBxL < 0) | (ids_2xBxL >= vocab_size)]
    if wrong.size:
      raise ValueError(
          f'a continuation has the token {wrong[0]}; token ids are at least 0 '
          f'and below {vocab_size}, so use the tokenizer of the model.'
      )
    for row, number in enumerate(chosen):
      scores[number] = Likelihood(float(sums_B[row]), bool(greedy_B[row]))
  return [scores[number] for number in range(len(continuations))]


def _batches(
    continuations: Sequence[Continuation], length: int, batch_tokens: int
) -> Iterator[tuple[list[int], tuple[np.ndarray, ...]]]:
  sizes = [
      min(len(context) + len(target) - 1, length)
      for context, target in continuations
  ]
  widths = [_width(size, length) for size in sizes]
  order = sorted(range(len(sizes)), key=lambda i: (widths[i], sizes[i]))
  start = 0
  while start < len(order):
    width = widths[order[start]]
    rows = max(batch_tokens // width, 1)
    chosen = [
        i for i in order[start:start + rows] if widths[i] == width
    ]
    start += len(chosen)
    inputs = np.zeros((rows, width), np.int32)
    targets = np.zeros((rows, width), np.int32)
    scored = np.zeros((rows, width), bool)
    for row, i in enumerate(chosen):
      context, target = continuations[i]
      ids = np.array([*context, *target][-sizes[i] - 1:], np.int32)
      inputs[row, :sizes[i]] = ids[:-1]
      targets[row, :sizes[i]] = ids[1:]
      scored[row, sizes[i] - len(target):sizes[i]] = True
    yield chosen, (inputs, targets, scored)


def _width(size: int, length: int) -> int:
  return min(max(_SHORTEST, 1 << max(size - 1, 0).bit_length()), length)


@functools.partial(jax.jit, static_argnums=0)
def _score(apply_fn, params, inputs_BxL, targets_BxL, scored_BxL):
  logits_BxLxV = apply_fn(params, inputs_BxL).astype(jnp.float32)
  chosen_BxL = jnp.take_along_axis(
      logits_BxLxV, targets_BxL[..., None], axis=-1
  )[..., 0]
  log_BxL = chosen_BxL - jax.nn.logsumexp(logits_BxLxV, axis=-1)
  best_BxL = jnp.argmax(logits_BxLxV, axis=-1) == targets_BxL
  return (
      jnp.where(scored_BxL, log_BxL, 0.0).sum(axis=1),
      jnp.all(best_BxL | ~scored_BxL, axis=1),
      logits_BxLxV.shape[-1],
  )

# SPDX-License-Identifier: Apache-2.0
"""Loss of a language model on batches: nats, perplexity, bits per byte."""

from collections.abc import Callable, Iterable, Iterator
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The result is `Any`, since Flax's `apply` may also return a tuple.
ApplyFn = Callable[..., Any]
Evaluator = Callable[[int, Any], Iterator[tuple[str, float]]]


class TokenLoss(NamedTuple):
  """Cross-entropy summed over target tokens.

  Attributes:
    nats: Total weighted cross-entropy, in nats.
    tokens: Total weight of the target tokens.

  Example:
    >>> loss = TokenLoss(nats=math.log(8.0) * 5, tokens=5.0)
    >>> round(loss.loss, 4), round(loss.perplexity, 4)
    (2.0794, 8.0)
  """

  nats: float
  tokens: float

  @property
  def loss(self) -> float:
    """Mean cross-entropy, in nats per token."""
    return self.nats / self.tokens

  @property
  def perplexity(self) -> float:
    """Exponential of the mean cross-entropy; inf on overflow."""
    try:
      return math.exp(self.loss)
    except OverflowError:
      return math.inf


def bits_per_byte(loss: TokenLoss, tokens_per_byte: float) -> float:
  """Converts a loss to bits per byte, comparable between tokenizers.

  `loss.loss / log(2) * tokens_per_byte`.

  Args:
    loss: Loss over tokens.
    tokens_per_byte: Number of tokens of the evaluated text, divided by its
      number of UTF-8 bytes.

  Returns:
    Cross-entropy in bits per byte.

  Raises:
    ValueError: `tokens_per_byte` is not above zero.

  References:
    Gao et al. 2020, "The Pile", section 3.1.

  Example:
    >>> bits_per_byte(TokenLoss(nats=4 * math.log(2.0), tokens=2.0), 0.25)
    0.5
  """
  if not tokens_per_byte > 0:
    raise ValueError(
        f'tokens_per_byte is {tokens_per_byte}; give the number of tokens of '
        'the text divided by its number of bytes, which is above zero.'
    )
  return loss.loss / math.log(2.0) * tokens_per_byte


@functools.partial(jax.jit, static_argnums=0)
def batch_sums(
    apply_fn: ApplyFn,
    params: Any,
    inputs_BxL: jax.Array,
    targets_BxL: jax.Array,
    weights_BxL: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Sums weighted nats and weights over one batch, in float32.

  Args:
    apply_fn: Model as in `evaluate_loss`.
    params: Parameters of the model.
    inputs_BxL: Token ids, int32.
    targets_BxL: Ids of the token after each input, int32.
    weights_BxL: Weights of the targets, float32.

  Returns:
    The weighted cross-entropy in nats and the weight, both summed.

  Example:
    >>> tokens = jnp.ones((1, 3), jnp.int32)
    >>> uniform = lambda params, tokens: jnp.zeros(tokens.shape + (16,))
    >>> sums = batch_sums(uniform, None, tokens, tokens, jnp.ones((1, 3)))
    >>> [round(float(x), 4) for x in sums]
    [8.3178, 3.0]
  """
  logits_BxLxV = apply_fn(params, inputs_BxL).astype(jnp.float32)
  chosen_BxL = jnp.take_along_axis(
      logits_BxLxV, targets_BxL[..., None], axis=-1
  )[..., 0]
  nats_BxL = jax.nn.logsumexp(logits_BxLxV, axis=-1) - chosen_BxL
  # A select, since multiplying by a weight of 0 would keep NaNs of padding.
  nats_BxL = jnp.where(weights_BxL > 0, nats_BxL * weights_BxL, 0.0)
  return jnp.sum(nats_BxL), jnp.sum(weights_BxL, dtype=jnp.float32)


def evaluate_loss(
    apply_fn: ApplyFn, params: Any, batches: Iterable[Any]
) -> TokenLoss:
  """Sums a model's cross-entropy over the target tokens of batches.

  The evaluation compiles once for each `apply_fn` and batch shape. It sums each
  batch in float32 on the device, and the batches in float64 on the host.

  Args:
    apply_fn: `(params, tokens_BxL) -> logits_BxLxV`, hashable; pass the same
      object each time to avoid recompilation.
    params: Parameters of the model.
    batches: Batches with `inputs` int32 [B, L], `targets` int32 [B, L] and
      `weights` float32 [B, L].

  Returns:
    The cross-entropy and the weights, both summed, with the mean as `.loss` and
    its exponential as `.perplexity`.

  Raises:
    ValueError: `batches` hold no target token of positive weight.

  Example:
    >>> from types import SimpleNamespace
    >>> batch = SimpleNamespace(
    ...     inputs=jnp.zeros((2, 3), jnp.int32),
    ...     targets=jnp.ones((2, 3), jnp.int32),
    ...     weights=jnp.ones((2, 3)).at[0].set(0.0))
    >>> uniform = lambda params, tokens: jnp.zeros(tokens.shape + (16,))
    >>> loss = evaluate_loss(uniform, None, [batch])
    >>> loss.tokens, round(loss.perplexity, 3)
    (3.0, 16.0)
  """
  nats = tokens = 0.0
  for batch in batches:
    sums = batch_sums(
        apply_fn, params, batch.inputs, batch.targets, batch.weights
    )
    nats += float(sums[0])
    tokens += float(sums[1])
  return total_loss(nats, tokens)


def total_loss(nats: float, tokens: float) -> TokenLoss:
  """Returns a loss, or raises ValueError without any target token."""
  if not tokens > 0:
    raise ValueError(
        f'batches hold target tokens of total weight {tokens}; give at '
        'least one batch with a positive weight.'
    )
  return TokenLoss(nats, tokens)


def loss_evaluator(
    apply_fn: ApplyFn,
    batches: Iterable[Any],
    *,
    prefix: str,
    tokens_per_byte: float | None = None,
) -> Evaluator:
  """Builds an evaluator of loss, perplexity and bits per byte.

  Args:
    apply_fn: `(params, tokens_BxL) -> logits_BxLxV`, hashable.
    batches: Batches in the format of `evaluate_loss`, iterated at each
      evaluation: a sequence, not an iterator.
    prefix: Prefix of the names, e.g. `'validation'`.
    tokens_per_byte: Number of tokens per byte of the text; None omits
      `<prefix>/bits_per_byte`.

  Returns:
    A function `evaluate(step, params)` that yields `(name, value)` pairs, of
    the names `<prefix>/loss` (nats per token), `<prefix>/perplexity` and
    `<prefix>/bits_per_byte`.

  Raises:
    ValueError: `batches` is an iterator, or `tokens_per_byte` is not above
      zero.

  Example:
    >>> from types import SimpleNamespace
    >>> ones = jnp.ones((1, 4), jnp.int32)
    >>> batch = SimpleNamespace(inputs=ones, targets=ones, weights=ones)
    >>> uniform = lambda params, tokens: jnp.zeros(tokens.shape + (2,))
    >>> evaluate = loss_evaluator(
    ...     uniform, [batch], prefix='validation', tokens_per_byte=0.5)
    >>> {name: round(value, 4) for name, value in evaluate(0, None)}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'validation/loss': 0.6931, 'validation/perplexity': 2.0,
     'validation/bits_per_byte': 0.5}
  """
  if iter(batches) is batches:
    raise ValueError(
        f'batches of the {prefix} evaluator are a {type(batches).__name__}, '
        'which is empty after one evaluation; give a list.'
    )
  if tokens_per_byte is not None:
    bits_per_byte(TokenLoss(0.0, 1.0), tokens_per_byte)

  def evaluate(step: int, params: Any) -> Iterator[tuple[str, float]]:
    del step
    loss = evaluate_loss(apply_fn, params, batches)
    yield f'{prefix}/loss', loss.loss
    yield f'{prefix}/perplexity', loss.perplexity
    if tokens_per_byte is not None:
      yield f'{prefix}/bits_per_byte', bits_per_byte(loss, tokens_per_byte)

  return evaluate

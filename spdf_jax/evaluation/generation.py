"""Greedy generation: the most likely continuation, token by token."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@functools.partial(jax.jit, static_argnums=0)
def _extend(apply_fn, params, tokens_BxL, cursors_B, stops_B, end_of_text):
  """Writes tokens at each row's cursor until every cursor is at its stop."""
  positions_L = jnp.arange(tokens_BxL.shape[1])

  def unfinished(carry):
    _, cursors_B, stops_B = carry
    return jnp.any(cursors_B < stops_B)

  def append(carry):
    tokens_BxL, cursors_B, stops_B = carry
    logits_BxLxV = apply_fn(params, tokens_BxL)
    last_BxV = jnp.take_along_axis(
        logits_BxLxV, (cursors_B - 1)[:, None, None], axis=1
    )[:, 0]
    next_B = jnp.argmax(last_BxV, axis=-1).astype(tokens_BxL.dtype)
    # An ended row stops where its cursor is: the end token is left out.
    stops_B = jnp.where(
        next_B == end_of_text, jnp.minimum(stops_B, cursors_B), stops_B
    )
    # What a stopped row writes at its cursor is never read.
    here_BxL = positions_L == cursors_B[:, None]
    tokens_BxL = jnp.where(here_BxL, next_B[:, None], tokens_BxL)
    return tokens_BxL, cursors_B + (cursors_B < stops_B), stops_B

  carry = (tokens_BxL, cursors_B, stops_B)
  tokens_BxL, cursors_B, _ = jax.lax.while_loop(unfinished, append, carry)
  return tokens_BxL, cursors_B


def _check(prompts, max_new_tokens, batch_size, length):
  """Refuses what cannot be generated, before anything is compiled."""
  for name, value in (
      ('max_new_tokens', max_new_tokens),
      ('batch_size', batch_size),
  ):
    if value < 1:
      raise ValueError(f'{name} is {value}; it must be at least 1.')
  for index, prompt in enumerate(prompts):
    if not len(prompt):
      raise ValueError(
          f'prompts[{index}] is empty; begin it with the end-of-text token.'
      )
    if len(prompt) > length - 1:
      raise ValueError(
          f'prompts[{index}] has {len(prompt)} tokens, but with length '
          f'{length} a prompt has room for {length - 1} and one new token; '
          'shorten the prompt or raise length.'
      )


def greedy_generate(
    apply_fn: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    end_of_text: int,
    batch_size: int,
    length: int,
) -> list[list[int]]:
  """Continues each prompt with the most likely token, again and again.

  Rows of a batch have their own cursors in one right-padded buffer, so the
  model must be causal: what stands right of a cursor must not change the
  logits left of it. The whole buffer is computed for each new token (there is
  no cache of keys and values). Every batch has the same shape, the last one
  filled up with idle rows, so each model compiles once.

  Args:
    apply_fn: `(params, tokens_BxL) -> logits_BxLxV`, causal and hashable.
    params: The model's parameters.
    prompts: Token ids of each prompt.
    max_new_tokens: Most tokens to generate for a prompt.
    end_of_text: Id of the token that ends a row.
    batch_size: Prompts computed together.
    length: Most tokens of prompt and continuation together, at most the
      model's positions; a row that reaches it stops.

  Returns:
    For each prompt its continuation, without the prompt and the end token.
    Of equally likely tokens the one with the lowest id is taken.

  Raises:
    ValueError: A prompt is empty or longer than `length - 1`, or a size is
      below 1.

  Example:
    >>> def count_up(params, tokens):
    ...   return jax.nn.one_hot(tokens + 1, 10)
    >>> greedy_generate(count_up, None, [[3], [0, 7]], max_new_tokens=4,
    ...                 end_of_text=9, batch_size=2, length=16)
    [[4, 5, 6, 7], [8]]
  """
  _check(prompts, max_new_tokens, batch_size, length)
  longest = max((len(prompt) for prompt in prompts), default=1)
  width = min(length, longest + max_new_tokens)
  generations = []
  for first in range(0, len(prompts), batch_size):
    rows = prompts[first : first + batch_size]
    tokens_BxL = np.full((batch_size, width), end_of_text, np.int32)
    starts_B = np.ones(batch_size, np.int32)
    stops_B = np.ones(batch_size, np.int32)  # idle rows stop at once
    for row, prompt in enumerate(rows):
      tokens_BxL[row, : len(prompt)] = prompt
      starts_B[row] = len(prompt)
      stops_B[row] = min(width, len(prompt) + max_new_tokens)
    tokens_BxL, cursors_B = jax.device_get(
        _extend(apply_fn, params, tokens_BxL, starts_B, stops_B, end_of_text)
    )
    for row in range(len(rows)):
      generations.append(
          tokens_BxL[row, starts_B[row] : cursors_B[row]].tolist()
      )
  return generations

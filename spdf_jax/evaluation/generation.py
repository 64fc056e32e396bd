"""Generation: prompts are continued token by token, in batches."""

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp

from spdf_jax.evaluation.decoders import Decoder
from spdf_jax.evaluation.decoders import fetch
from spdf_jax.evaluation.prompts import batches
from spdf_jax.evaluation.sampling import Choose
from spdf_jax.evaluation.sampling import greedy

PyTree = Any


def generate(
    decoder: Decoder,
    params: PyTree,
    prompts: Sequence[Sequence[int]],
    *,
    choose: Choose = greedy,
    key: int | jax.Array = 0,
    max_new_tokens: int,
    end_of_text: int,
    batch_size: int,
    length: int,
) -> list[list[int]]:
  """Continues each prompt, token by token.

  Rows of a batch have their own cursors in one right-padded buffer. Batches
  have few shapes, one for each doubling of the prompts' length. A continuation
  does not depend on what shares its batch.

  Args:
    decoder: The model, e.g. `CachedModel(model)`.
    params: Its parameters.
    prompts: Token ids of each prompt.
    choose: `greedy`, or from `sampler`.
    key: Seed or typed key of the tokens that are drawn.
    max_new_tokens: Most tokens to generate for a prompt.
    end_of_text: Id of the token that ends a row.
    batch_size: Prompts computed together.
    length: Most tokens of prompt and continuation together, at most the
      model's positions; a row that reaches it stops.

  Returns:
    For each prompt its continuation, without the prompt and the end token.

  Raises:
    ValueError: A prompt is empty or longer than `length - 1`, or a size is
      below 1.

  Example:
    >>> from spdf_jax import models
    >>> from spdf_jax.evaluation import CachedModel
    >>> model = models.create_model('gpt-mini', vocab_size=64)
    >>> tokens = jnp.zeros((1, 2), jnp.int32)
    >>> params = model.init(jax.random.key(0), tokens)['params']
    >>> texts = generate(CachedModel(model), params, [[3], [0, 7]],
    ...                  max_new_tokens=4, end_of_text=63, batch_size=2,
    ...                  length=16)
    >>> len(texts)
    2
  """
  key = jax.random.key(key) if isinstance(key, int) else key
  generations = [[] for _ in prompts]
  for batch in batches(prompts, max_new_tokens, batch_size, length):
    tokens_BxL, cursors_B = fetch(_extend(
        decoder, choose, batch.prompt_length, params, batch.tokens_BxL,
        batch.starts_B, batch.stops_B, end_of_text, key, batch.numbers_B,
    ))
    for row, number in enumerate(batch.numbers):
      generations[number] = (
          tokens_BxL[row, batch.starts_B[row]:cursors_B[row]].tolist()
      )
  return generations


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _extend(
    decoder: Decoder,
    choose: Choose,
    prompt_length: int,
    params: PyTree,
    tokens_BxL: jax.Array,
    starts_B: jax.Array,
    stops_B: jax.Array,
    end_of_text: jax.Array,
    key: jax.Array,
    numbers_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Writes tokens at each row's cursor until every cursor is at its stop."""
  rows_B = jnp.arange(len(tokens_BxL))
  keys_B = jax.vmap(lambda i: jax.random.fold_in(key, i))(numbers_B)
  cache = prefill(decoder, params, tokens_BxL, prompt_length)

  def unfinished(carry):
    _, _, cursors_B, stops_B = carry
    return jnp.any(cursors_B < stops_B)

  def append(carry):
    cache, tokens_BxL, cursors_B, stops_B = carry
    last_B = tokens_BxL[rows_B, cursors_B - 1]
    logits_Bx1xV, cache = decoder(
        params, cache, last_B[:, None], cursors_B[:, None] - 1
    )
    step_keys_B = jax.vmap(jax.random.fold_in)(keys_B, cursors_B)
    next_B = jax.vmap(choose)(step_keys_B, logits_Bx1xV[:, 0])
    # An ended row stops where its cursor is: the end token is left out.
    stops_B = jnp.where(
        next_B == end_of_text, jnp.minimum(stops_B, cursors_B), stops_B
    )
    # What a stopped row writes at its cursor is never read.
    tokens_BxL = tokens_BxL.at[rows_B, cursors_B].set(next_B, mode='drop')
    return cache, tokens_BxL, cursors_B + (cursors_B < stops_B), stops_B

  carry = cache, tokens_BxL, starts_B, stops_B
  _, tokens_BxL, cursors_B, _ = jax.lax.while_loop(unfinished, append, carry)
  return tokens_BxL, cursors_B


def prefill(
    decoder: Decoder, params: PyTree, tokens_BxL: jax.Array, prompt_length: int
) -> PyTree:
  """Returns a cache of `tokens_BxL`'s size, with the prompts in it.

  What stands right of a shorter prompt is written over before it is seen.
  """
  batch_size, length = tokens_BxL.shape
  positions_BxP = jnp.broadcast_to(
      jnp.arange(prompt_length), (batch_size, prompt_length)
  )
  cache = decoder.create_cache(batch_size, length)
  _, cache = decoder(
      params, cache, tokens_BxL[:, :prompt_length], positions_BxP
  )
  return cache

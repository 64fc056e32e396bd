# SPDX-License-Identifier: Apache-2.0
"""Streaming: one continuation, a token as soon as it is chosen."""

from collections.abc import Iterator
from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.evaluation.decoders import Decoder
from spdf_jax.evaluation.decoders import vocab_size_of
from spdf_jax.evaluation.generation import Choose
from spdf_jax.evaluation.generation import greedy
from spdf_jax.evaluation.generation import prefill
from spdf_jax.evaluation.prompts import batches

PyTree = Any


def stream(
    decoder: Decoder,
    params: PyTree,
    prompt: Sequence[int],
    *,
    choose: Choose = greedy,
    key: int | jax.Array = 0,
    max_new_tokens: int,
    end_of_text: int,
    length: int,
) -> Iterator[int]:
  """Continues a prompt, and yields every token when it is chosen.

  The tokens are those of `generate` for this prompt alone.

  Args:
    decoder: The model, e.g. `CachedModel(model)`.
    params: Parameters of the model.
    prompt: Token ids of the prompt.
    choose: `greedy`, or a function that `sampler` returns.
    key: Seed or typed key for sampling.
    max_new_tokens: Maximum number of tokens to generate.
    end_of_text: Id of the token that ends the continuation.
    length: Maximum total length of prompt and continuation, in tokens.

  Yields:
    Tokens of the continuation, without the end token.

  Raises:
    ValueError: The prompt is empty, longer than `length - 1` or has a token
      that the model lacks, or `max_new_tokens` is below 1.

  Example:
    >>> from spdf_jax import models
    >>> from spdf_jax.evaluation import CachedModel
    >>> model = models.create_model('gpt-mini', vocab_size=64)
    >>> tokens = jnp.zeros((1, 2), jnp.int32)
    >>> params = model.init(jax.random.key(0), tokens)['params']
    >>> len(list(stream(CachedModel(model), params, [3], max_new_tokens=2,
    ...                 end_of_text=63, length=16)))
    2
  """
  (batch,) = batches(
      [prompt], max_new_tokens, 1, length, vocab_size_of(decoder)
  )
  if isinstance(key, (int, np.integer)):
    key = jax.random.key(key)
  key = jax.random.fold_in(key, 0)  # `generate` folds in the prompt's number.
  cache = _fill(decoder, batch.prompt_length, params, batch.tokens_BxL)
  token = jnp.int32(prompt[-1])
  for cursor in range(batch.starts_B[0], batch.stops_B[0]):
    token, cache = _append(decoder, choose, cache, params, token, cursor, key)
    if int(token) == end_of_text:
      return
    yield int(token)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _fill(
    decoder: Decoder, prompt_length: int, params: PyTree, tokens_BxL: jax.Array
) -> PyTree:
  return prefill(decoder, params, tokens_BxL, prompt_length)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _append(
    decoder: Decoder,
    choose: Choose,
    cache: PyTree,
    params: PyTree,
    last: jax.Array,
    cursor: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array, PyTree]:
  """Chooses the token at the cursor; `last` is the one before it."""
  logits_1x1xV, cache = decoder(
      params, cache, last[None, None], jnp.full((1, 1), cursor - 1)
  )
  key = jax.random.fold_in(key, cursor)
  return choose(key, logits_1x1xV[0, 0]).astype(jnp.int32), cache

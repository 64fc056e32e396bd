# SPDX-License-Identifier: Apache-2.0
"""Generation: continuation of prompts, in batches or as a stream of tokens."""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.data import Tokenizer
from spdf_jax.evaluation import cached_decoding
from spdf_jax.evaluation import prompt_batches
from spdf_jax.evaluation.cached_decoding import Decoder
from spdf_jax.sparsity import masks

PyTree = Any
Choose = Callable[[jax.Array, jax.Array], jax.Array]
"""`(key, logits_V) -> token`, for one sequence."""

_UNFINISHED = '\ufffd'  # Decoded from the first bytes of a character.
_LEAST = float(jnp.finfo(jnp.float32).tiny)  # Less may be rounded to zero.


def greedy(key: jax.Array, logits_V: jax.Array) -> jax.Array:
  """Returns the most likely token; ties go to the lowest id.

  Args:
    key: Unused; functions that `sampler` returns need it.
    logits_V: Logits of the next token of one sequence.

  Returns:
    The token id, an int32 scalar.
  """
  del key
  return jnp.argmax(logits_V).astype(jnp.int32)


def sampler(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Choose:
  """Returns a function that samples tokens, by default from all of them.

  Args:
    temperature: Divisor of the logits, above 0; small values prefer likely
      tokens.
    top_k: Number of the most likely tokens to sample from, at least 1; None:
      all.
    top_p: Probability in (0, 1]. Sampling is from the smallest set of most
      likely tokens, after `top_k`, with at least this total probability; None:
      all.

  Returns:
    A function `(key, logits_V) -> token`; equal arguments give the same
    function object, so that generation compiles once.

  Raises:
    ValueError: an argument is out of its range.

  References:
    Holtzman et al., `The Curious Case of Neural Text Degeneration
    <https://arxiv.org/abs/1904.09751>`_, 2020, section 3.1

  Example:
    >>> choose = sampler(top_k=1)
    >>> int(choose(jax.random.key(0), jnp.array([0.0, 2.0, 1.0])))
    1
  """
  if not temperature > 0:
    raise ValueError(
        f'temperature is {temperature}; give more than 0, or use greedy.'
    )
  if top_k is not None and top_k < 1:
    raise ValueError(f'top_k is {top_k}; give at least 1, or None.')
  if top_p is not None and not 0 < top_p <= 1:
    raise ValueError(f'top_p is {top_p}; give a number in (0, 1], or None.')
  return _sampler(float(temperature), top_k, top_p)


@functools.cache
def _sampler(
    temperature: float, top_k: int | None, top_p: float | None
) -> Choose:
  def choose(key, logits_V):
    logits_V = logits_V.astype(jnp.float32)
    logits_V = (logits_V - logits_V.max()) / max(temperature, _LEAST)
    if top_k is not None and top_k < logits_V.size:
      logits_V = _keep_first(logits_V, jnp.arange(logits_V.size) < top_k)
    if top_p is not None and top_p < 1:
      sorted_V = jnp.sort(jax.nn.softmax(logits_V), descending=True)
      before_V = jnp.cumsum(sorted_V) - sorted_V
      logits_V = _keep_first(logits_V, before_V < max(top_p, _LEAST))
    return jax.random.categorical(key, logits_V).astype(jnp.int32)

  return choose


def _keep_first(logits_V: jax.Array, kept_V: jax.Array) -> jax.Array:
  """Keeps logits by their rank in descending order; ties go to the lower id."""
  order_V = jnp.argsort(logits_V, descending=True, stable=True)
  kept_V = jnp.zeros_like(kept_V).at[order_V].set(kept_V)
  return jnp.where(kept_V, logits_V, -jnp.inf)


def generate(
    decoder: Decoder,
    params: PyTree,
    prompts: Sequence[Sequence[int]],
    *,
    choose: Choose = greedy,
    key: int | jax.Array = 0,
    max_new_tokens: int,
    end_of_text: int | Sequence[int],
    batch_size: int,
    length: int,
) -> list[list[int]]:
  """Continues each prompt, token by token.

  Prompts are batched by length, so that few shapes are compiled, one for each
  doubling of the prompt length. A continuation does not depend on the other
  rows of its batch.

  Args:
    decoder: The model, e.g. `CachedModel(model)`.
    params: Parameters of the model.
    prompts: Token ids of each prompt.
    choose: `greedy`, or a function that `sampler` returns.
    key: Seed or typed key for sampling.
    max_new_tokens: Maximum number of tokens to generate for a prompt.
    end_of_text: Id or ids of the tokens that end a continuation.
    batch_size: Number of prompts in a batch.
    length: Maximum total length of prompt and continuation, in tokens, at most
      the model's `max_length`; a continuation that reaches it ends.

  Returns:
    Token ids of the continuation of each prompt, without the prompt and the end
    token.

  Raises:
    ValueError: a prompt is empty, longer than `length - 1` or has a token
      outside the vocabulary, `max_new_tokens` or `batch_size` is below 1, or
      more positions are needed than the model has.

  Example:
    >>> from spdf_jax import models
    >>> from spdf_jax.evaluation import CachedModel
    >>> model = models.create_model('gpt-mini', vocab_size=64)
    >>> tokens = jnp.zeros((1, 2), jnp.int32)
    >>> params = model.init(jax.random.key(0), tokens)['params']
    >>> outputs = generate(CachedModel(model), params, [[3], [0, 7]],
    ...                    max_new_tokens=4, end_of_text=63, batch_size=2,
    ...                    length=16)
    >>> [len(tokens) <= 4 for tokens in outputs]
    [True, True]
  """
  key = masks.typed_key(key)
  generations: list[list[int]] = [[] for _ in prompts]
  for batch in prompt_batches.batches(
      prompts, max_new_tokens, batch_size, length,
      cached_decoding.vocab_size_of(decoder),
  ):
    tokens_BxL, cursors_B = cached_decoding.fetch(_extend(
        decoder, choose, batch.prompt_length, params, batch.tokens_BxL,
        batch.starts_B, batch.stops_B, jnp.atleast_1d(jnp.asarray(end_of_text)),
        key, batch.numbers_B,
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
    ends_E: jax.Array,
    key: jax.Array,
    numbers_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Appends tokens at each row's cursor until all rows have stopped."""
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
    # An ended row stops at its cursor, which excludes the end token.
    stops_B = jnp.where(
        jnp.isin(next_B, ends_E), jnp.minimum(stops_B, cursors_B), stops_B
    )
    # A stopped row writes at its cursor too, but that token is never read.
    tokens_BxL = tokens_BxL.at[rows_B, cursors_B].set(next_B, mode='drop')
    return cache, tokens_BxL, cursors_B + (cursors_B < stops_B), stops_B

  carry = cache, tokens_BxL, starts_B, stops_B
  _, tokens_BxL, cursors_B, _ = jax.lax.while_loop(unfinished, append, carry)
  return tokens_BxL, cursors_B


def prefill(
    decoder: Decoder, params: PyTree, tokens_BxL: jax.Array, prompt_length: int
) -> PyTree:
  """Returns a cache for `tokens_BxL`, filled with the prompts.

  Padding of a shorter prompt is overwritten before attention reads it.
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


def stream(
    decoder: Decoder,
    params: PyTree,
    prompt: Sequence[int],
    *,
    choose: Choose = greedy,
    key: int | jax.Array = 0,
    max_new_tokens: int,
    end_of_text: int | Sequence[int],
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
    end_of_text: Id or ids of the tokens that end the continuation.
    length: Maximum total length of prompt and continuation, in tokens, at most
      the model's `max_length`.

  Yields:
    Token ids of the continuation, without the end token.

  Raises:
    ValueError: when the first token is read: the prompt is empty, longer than
      `length - 1` or has a token outside the vocabulary, `max_new_tokens` is
      below 1, or more positions are needed than the model has.

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
  (batch,) = prompt_batches.batches(
      [prompt], max_new_tokens, 1, length,
      cached_decoding.vocab_size_of(decoder),
  )
  key = masks.typed_key(key)
  key = jax.random.fold_in(key, 0)  # `generate` folds in the prompt's number.
  cache = _fill(decoder, batch.prompt_length, params, batch.tokens_BxL)
  token = jnp.int32(prompt[-1])
  ends = np.atleast_1d(end_of_text).tolist()
  for cursor in range(batch.starts_B[0], batch.stops_B[0]):
    token, cache = _append(decoder, choose, cache, params, token, cursor, key)
    if int(token) in ends:
      return
    yield int(token)


def decode_stream(
    tokenizer: Tokenizer, tokens: Iterator[int], prompt: Sequence[int] = ()
) -> Iterator[str]:
  """Decodes tokens one by one; a character is yielded when it is complete.

  Args:
    tokenizer: The tokenizer.
    tokens: Token ids, e.g. those of `stream`.
    prompt: Token ids before `tokens`; they are not yielded, but decide whether
      the first text begins with a space, which tokenizers of Llama omit at the
      beginning of a text.

  Yields:
    A text for each token, `''` while a character is incomplete, and at the end
    any rest. Their concatenation is the text of all tokens, if these are valid
    UTF-8: where tokens are bytes of an invalid run, as of Llama 2, the library
    replaces also the characters before them in the run, which are yielded.

  Example:
    >>> from spdf_jax.data import ByteTokenizer
    >>> list(decode_stream(ByteTokenizer(), iter('né'.encode())))
    ['n', '', 'é']
  """
  waiting = list(prompt)
  done = tokenizer.decode(waiting)
  for token in tokens:
    waiting.append(token)
    text = tokenizer.decode(waiting)
    if text.endswith(_UNFINISHED):
      yield ''
      continue
    yield text[len(done):]
    done = text
  rest = tokenizer.decode(waiting)[len(done):]
  if rest:
    yield rest


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

# SPDX-License-Identifier: Apache-2.0
"""Beam search: the best of many continuations, by length-normalized score."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.evaluation import cached_decoding
from spdf_jax.evaluation import generation
from spdf_jax.evaluation import prompt_batches
from spdf_jax.evaluation.cached_decoding import Decoder

PyTree = Any


@dataclasses.dataclass(frozen=True)
class BeamSearch:
  """A protocol of beam search.

  The score of a continuation of `n` tokens, the end token included, is the sum
  of their log probabilities divided by `n ** length_penalty`.

  Attributes:
    beams: Number of beams.
    length_penalty: Exponent of the length; larger values prefer longer
      continuations.
    no_repeat_ngram: Size of the n-grams that may occur only once in a
      continuation (the prompt does not count); a token that would repeat one
      is excluded before the softmax. A beam that no token may extend ends.
      0: no n-gram is excluded.
    refill: Whether the next-best candidate takes the beam of a continuation
      that has ended; otherwise the number of beams shrinks.

  Raises:
    ValueError: a number is out of its range.
  """

  beams: int = 4
  length_penalty: float = 1.0
  no_repeat_ngram: int = 0
  refill: bool = True

  def __post_init__(self):
    if self.beams < 1:
      raise ValueError(f'beams is {self.beams}; give at least 1.')
    if self.no_repeat_ngram < 0:
      raise ValueError(
          f'no_repeat_ngram is {self.no_repeat_ngram}; give 0 or more.'
      )
    if not math.isfinite(self.length_penalty):
      raise ValueError(
          f'length_penalty is {self.length_penalty}; give a finite number.'
      )


PROTOCOLS = {
    'standard': BeamSearch(),
    # The authors generate at most 64 new tokens, and end a continuation at
    # <|endoftext|> or a blank line.
    'hu2021': BeamSearch(
        beams=10, length_penalty=0.8, no_repeat_ngram=4, refill=False
    ),
}
"""Protocols by name; `hu2021` is that of Hu et al., `LoRA
<https://arxiv.org/abs/2106.09685>`_, who use a length penalty of 0.9 for
E2E."""


def beam_search(
    decoder: Decoder,
    params: PyTree,
    prompts: Sequence[Sequence[int]],
    *,
    search: BeamSearch = PROTOCOLS['standard'],
    max_new_tokens: int,
    end_of_text: int | Sequence[int],
    batch_size: int,
    length: int,
) -> list[list[int]]:
  """Continues each prompt with the best continuation that the search finds.

  The search for a prompt ends when no beam can exceed the score of the best
  continuation that has ended.

  Args:
    decoder: The model, e.g. `CachedModel(model)`.
    params: Parameters of the model.
    prompts: Token ids of each prompt.
    search: Number of beams, length penalty and other settings; `PROTOCOLS` has
      published ones by name.
    max_new_tokens: Maximum number of tokens in a continuation; a beam that
      reaches it is scored without an end token.
    end_of_text: Id or ids of the tokens that end a continuation.
    batch_size: Number of prompts in a batch, each with all its beams.
    length: Maximum total length of prompt and continuation, in tokens, at most
      the model's `max_length`.

  Returns:
    Token ids of the best continuation of each prompt, without the prompt and
    the end token.

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
    >>> best = beam_search(CachedModel(model), params, [[3], [0, 7]],
    ...                    max_new_tokens=4, end_of_text=63, batch_size=2,
    ...                    length=16)
    >>> [len(tokens) <= 4 for tokens in best]
    [True, True]
  """
  ends = tuple(np.atleast_1d(end_of_text).tolist())
  generations: list[list[int]] = [[] for _ in prompts]
  for batch in prompt_batches.batches(
      prompts, max_new_tokens, batch_size, length,
      cached_decoding.vocab_size_of(decoder),
  ):
    tokens_BxT, lengths_B = cached_decoding.fetch(_search(
        decoder, search, batch.prompt_length, max_new_tokens, ends, params,
        batch.tokens_BxL, batch.starts_B, batch.stops_B,
    ))
    for row, number in enumerate(batch.numbers):
      generations[number] = tokens_BxT[row, :lengths_B[row]].tolist()
  return generations


class _Best(NamedTuple):
  """The best continuation of every prompt so far."""

  score_B: jax.Array
  tokens_BxT: jax.Array
  length_B: jax.Array


class _Beams(NamedTuple):
  """The state of the search loop."""

  step: jax.Array
  cache: PyTree
  last_BxN: jax.Array
  tokens_BxNxT: jax.Array
  sums_BxN: jax.Array  # Sums of log probabilities; -inf: the beam is unused.
  best: _Best


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _search(
    decoder: Decoder,
    search: BeamSearch,
    prompt_length: int,
    max_new_tokens: int,
    ends: tuple[int, ...],
    params: PyTree,
    tokens_BxL: jax.Array,
    starts_B: jax.Array,
    stops_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  batch, beams = len(tokens_BxL), search.beams
  room_B = stops_B - starts_B
  candidates = beams * (1 + len(ends)) if search.refill else beams
  score = lambda sums, number: sums / number ** search.length_penalty

  def may_win(state):
    """Returns which prompts have a beam that can still become the best, [B]."""
    # Sums can only decrease, and the score is monotonic in the length for a
    # given sum, so the next or the last length gives an upper bound.
    lengths_2xB = jnp.stack([
        jnp.broadcast_to(state.step + 1, room_B.shape), jnp.maximum(room_B, 1)
    ]).astype(jnp.float32)
    limit_B = score(state.sums_BxN.max(axis=1), lengths_2xB).max(axis=0)
    return (state.step < room_B) & (limit_B > state.best.score_B)

  def follow(state):
    active_B = may_win(state)
    at_BxN = jnp.broadcast_to(
        (starts_B - 1 + state.step)[:, None], (batch, beams)
    )
    logits_Rx1xV, cache = decoder(
        params, state.cache, state.last_BxN.reshape(-1, 1),
        at_BxN.reshape(-1, 1),
    )
    logits_BxNxV = logits_Rx1xV.reshape(batch, beams, -1).astype(jnp.float32)
    sums_BxN, best = state.sums_BxN, state.best
    if search.no_repeat_ngram:
      repeats = functools.partial(
          _repeats, search.no_repeat_ngram, logits_BxNxV.shape[-1]
      )
      repeats_BxNxV = jax.vmap(jax.vmap(repeats, (0, None)), (0, None))(
          state.tokens_BxNxT, state.step
      )
      stuck_BxN = repeats_BxNxV.all(axis=-1)
      best = _better(
          best, active_B,
          jnp.where(stuck_BxN, score(sums_BxN, state.step), -jnp.inf),
          state.tokens_BxNxT, jnp.broadcast_to(state.step, stuck_BxN.shape),
      )
      sums_BxN = jnp.where(stuck_BxN, -jnp.inf, sums_BxN)
      # If all tokens were excluded, the softmax would be NaN.
      repeats_BxNxV &= ~stuck_BxN[..., None]
      logits_BxNxV = jnp.where(repeats_BxNxV, -jnp.inf, logits_BxNxV)
    sums_BxNxV = sums_BxN[..., None] + jax.nn.log_softmax(logits_BxNxV)
    vocabulary = sums_BxNxV.shape[-1]
    sums_BxC, index_BxC = jax.lax.top_k(
        sums_BxNxV.reshape(batch, -1), min(candidates, beams * vocabulary)
    )
    parent_BxC, token_BxC = index_BxC // vocabulary, index_BxC % vocabulary
    tokens_BxCxT = jnp.take_along_axis(
        state.tokens_BxNxT, parent_BxC[..., None], axis=1
    ).at[..., state.step].set(token_BxC)

    ends_BxC = jnp.isin(token_BxC, jnp.array(ends))
    # Candidates beyond the number of beams only refill: their ends are ignored.
    ended_BxC = ends_BxC & (jnp.arange(ends_BxC.shape[1]) < beams)
    full_Bx1 = (state.step + 1 == room_B)[:, None]
    over_BxC = ended_BxC | (full_Bx1 & ~ends_BxC)
    best = _better(
        best,
        active_B,
        jnp.where(over_BxC, score(sums_BxC, state.step + 1.0), -jnp.inf),
        tokens_BxCxT,
        jnp.where(ends_BxC, state.step, state.step + 1),
    )

    sums_BxC = jnp.where(ends_BxC, -jnp.inf, sums_BxC)
    sums_BxN, chosen_BxN = jax.lax.top_k(sums_BxC, beams)
    pick = lambda x: jnp.take_along_axis(x, chosen_BxN, axis=1)
    rows_R = (pick(parent_BxC) + beams * jnp.arange(batch)[:, None]).reshape(-1)
    return _Beams(
        state.step + 1,
        jax.tree.map(
            functools.partial(
                _pick_rows, decoder, rows_R, jnp.repeat(starts_B, beams),
                max_new_tokens,
            ),
            cache,
        ),
        pick(token_BxC),
        jnp.take_along_axis(tokens_BxCxT, chosen_BxN[..., None], axis=1),
        sums_BxN,
        best,
    )

  cache = generation.prefill(decoder, params, tokens_BxL, prompt_length)
  last_B = jnp.take_along_axis(tokens_BxL, starts_B[:, None] - 1, axis=1)[:, 0]
  # All beams start from the same prompt, so only the first one is used.
  only_first_N = jnp.where(jnp.arange(beams) == 0, 0.0, -jnp.inf)
  state = jax.lax.while_loop(
      lambda state: may_win(state).any(),
      follow,
      _Beams(
          jnp.int32(0),
          jax.tree.map(
              lambda x: jnp.repeat(x, beams, axis=decoder.batch_axis), cache
          ),
          jnp.repeat(last_B[:, None], beams, axis=1),
          jnp.zeros((batch, beams, max_new_tokens), jnp.int32),
          jnp.broadcast_to(only_first_N, (batch, beams)),
          _Best(
              jnp.full(batch, -jnp.inf),
              jnp.zeros((batch, max_new_tokens), jnp.int32),
              jnp.zeros(batch, jnp.int32),
          ),
      ),
  )
  return state.best.tokens_BxT, state.best.length_B


def _pick_rows(
    decoder: Decoder,
    rows_R: jax.Array,
    starts_R: jax.Array,
    size: int,
    x: jax.Array,
) -> jax.Array:
  """Reorders the rows of a cache in `size` positions after their prompts.

  Beams of one prompt, whose rows are exchanged, have the same cache before.
  """
  rows, positions = decoder.batch_axis, decoder.length_axis - 1
  own = jax.vmap(
      lambda row, start: jax.lax.dynamic_slice_in_dim(
          row, start, min(size, row.shape[positions]), positions
      ), (rows, 0), rows,
  )(x, starts_R)
  return jax.vmap(
      lambda row, own, start: jax.lax.dynamic_update_slice_in_dim(
          row, own, start, positions
      ), (rows, rows, 0), rows,
  )(x, own.take(rows_R, rows), starts_R)


def _better(
    best: _Best,
    active_B: jax.Array,
    score_BxC: jax.Array,
    tokens_BxCxT: jax.Array,
    length_BxC: jax.Array,
) -> _Best:
  """Returns the best continuations after adding the ones that ended."""
  first_Bx1 = jnp.argmax(score_BxC, axis=1)[:, None]
  pick = lambda x: jnp.take_along_axis(x, first_Bx1, axis=1)[:, 0]
  tokens_BxT = jnp.take_along_axis(
      tokens_BxCxT, first_Bx1[..., None], axis=1
  )[:, 0]
  better_B = active_B & (pick(score_BxC) > best.score_B)
  return _Best(
      jnp.where(better_B, pick(score_BxC), best.score_B),
      jnp.where(better_B[:, None], tokens_BxT, best.tokens_BxT),
      jnp.where(better_B, pick(length_BxC), best.length_B),
  )


def _repeats(
    size: int, vocabulary: int, tokens_T: jax.Array, step: jax.Array
) -> jax.Array:
  """Returns the tokens that would repeat an n-gram of `size` tokens [V]."""
  before = size - 1
  if before >= tokens_T.size:
    return jnp.zeros(vocabulary, bool)
  last = jax.lax.dynamic_slice(tokens_T, (step - before,), (before,))
  starts_S = jnp.arange(tokens_T.size - before)
  same_S = starts_S + before < step
  for i in range(before):
    same_S &= tokens_T[starts_S + i] == last[i]
  next_S = tokens_T[starts_S + before]
  return jnp.zeros(vocabulary, bool).at[next_S].max(same_S)

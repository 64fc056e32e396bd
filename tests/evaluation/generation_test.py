"""Generation with a cache, batched or streamed, equals a plain loop."""

import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax import models
from spdf_jax.data import ByteTokenizer
from spdf_jax.evaluation import CachedModel
from spdf_jax.evaluation import decode_stream
from spdf_jax.evaluation import generate as generate_with
from spdf_jax.evaluation import sampler
from spdf_jax.evaluation import stream
from tests import hf_models
from tests.recomputed import Recomputed
from tests.refusals import refuse

VOCAB_SIZE = 7
END = 0
LENGTH = 12


def make_params(seed):
  rng = np.random.default_rng(seed)
  return (
      rng.normal(size=(VOCAB_SIZE, 16)).astype(np.float32),
      rng.normal(size=(LENGTH, 16)).astype(np.float32),
      rng.normal(size=(16, VOCAB_SIZE)).astype(np.float32),
  )


def causal_model(params, tokens_BxL):
  """Returns a random function of all tokens so far and their positions."""
  embed, positions, head = params
  x_BxLxD = embed[tokens_BxL] * positions[: tokens_BxL.shape[1]]
  return jnp.sin(3 * jnp.cumsum(x_BxLxD, axis=1)) @ head


def plain_generate(params, prompt, max_new_tokens, length=LENGTH):
  """Appends one token at a time to one unpadded sequence."""
  tokens = list(prompt)
  while len(tokens) < min(length, len(prompt) + max_new_tokens):
    logits = causal_model(params, jnp.asarray([tokens]))
    token = int(np.argmax(logits[0, -1]))
    if token == END:
      break
    tokens.append(token)
  return tokens[len(prompt) :]


def generate(params, prompts, max_new_tokens=5, batch_size=3, length=LENGTH):
  return generate_with(
      Recomputed(causal_model),
      params,
      prompts,
      max_new_tokens=max_new_tokens,
      end_of_text=END,
      batch_size=batch_size,
      length=length,
  )


def random_prompts(seed, count):
  rng = np.random.default_rng(seed)
  return [
      rng.integers(VOCAB_SIZE, size=rng.integers(1, LENGTH)).tolist()
      for _ in range(count)
  ]


@pytest.mark.ci
@settings(deadline=None, max_examples=8)
@given(
    seed=st.integers(0, 2**16), max_new_tokens=st.sampled_from([1, 4, 20]),
    batch_size=st.sampled_from([1, 3, 8]),
)
def test_generations_equal_a_plain_loop(seed, max_new_tokens, batch_size):
  params = make_params(seed)
  prompts = random_prompts(seed, 7)
  expected = [plain_generate(params, p, max_new_tokens) for p in prompts]
  assert generate(params, prompts, max_new_tokens, batch_size) == expected


def count_up(params, tokens_BxL):
  """Predicts the next integer, and the end token 9 after 8."""
  del params
  return jnp.eye(10)[jnp.minimum(tokens_BxL + 1, 9)]


@pytest.mark.parametrize('prompts, length, wanted', [
    ([[4], [8], [1, 9], [3, 0]], 16, [
        [5, 6, 7, 8], [], [], [1, 2, 3, 4, 5, 6]
    ]),
    ([[0], [0, 0, 0, 0]], 5, [[1, 2, 3, 4], [1]]),
])
def test_rows_stop_before_the_end_of_text_or_where_the_buffer_is_full(
    prompts, length, wanted
):
  assert generate_with(
      Recomputed(count_up), None, prompts, max_new_tokens=6, end_of_text=9,
      batch_size=len(prompts), length=length,
  ) == wanted


def test_computation_stops_when_all_rows_have_ended():
  calls = []

  def counting(params, tokens_BxL):
    jax.debug.callback(lambda: calls.append(1), ordered=True)
    return count_up(params, tokens_BxL)

  generate_with(
      Recomputed(counting),
      None,
      [[6], [7]],
      max_new_tokens=100,
      end_of_text=9,
      batch_size=4,
      length=128,
  )
  # One call for the prompts and three for the longest row: 7, 8 and the end.
  assert len(calls) == 4


def test_model_is_traced_once_for_prompts_of_like_length():
  traces = []

  def model(params, tokens_BxL):
    traces.append(tokens_BxL.shape)
    return count_up(params, tokens_BxL)

  run = functools.partial(
      generate_with,
      Recomputed(model),
      None,
      max_new_tokens=4,
      batch_size=2,
      length=64,
  )
  run([[0, 1, 1, 1], [2, 3, 4], [5, 5, 5], [6] * 4, [7] * 3], end_of_text=9)
  run([[4, 4, 4, 4], [2]], end_of_text=8)
  assert set(traces) == {(2, 8)}
  # Traced for the shapes, for the prompts and in the loop.
  assert len(traces) <= 3
  texts = run([[1], [2] * 9, [5] * 3, [6], [7] * 16, [3] * 12], end_of_text=9)
  assert [new[0] for new in texts] == [2, 3, 6, 7, 8, 4]
  # Prompts of 1; 3 and 4; 9 to 16 tokens.
  assert set(traces) == {(2, 5), (2, 7), (2, 8), (2, 20)}


@pytest.mark.parametrize('prompts, options, message', [
    ([[1], [1] * LENGTH], {}, r'prompts\[1\] has 12 tokens'),
    ([[]], {}, r'prompts\[0\] is empty'),
    ([[1]], dict(max_new_tokens=0), 'max_new_tokens is 0'),
    ([[1]], dict(batch_size=0), 'batch_size is 0'),
])
def test_prompts_and_sizes_without_room_are_refused(prompts, options, message):
  generate(make_params(0), [[1] * (LENGTH - 1)])
  refuse(message, generate, make_params(0), prompts, **options)
  assert generate(make_params(0), []) == []


SIZES = dict(vocab_size=31, n_layers=2, n_heads=4, d_model=16, d_ff=24)
MODELS = [
    models.create_model('gpt-mini', **SIZES),
    models.create_model(
        'gpt-mini', **SIZES, scan_layers=True, remat='full',
        attention_by_layer=True,
    ),
    models.create_model('llama-1.3b', **SIZES, n_kv_heads=2, max_length=128),
    models.create_model(
        'llama-1.3b', **SIZES, scan_layers=True, tied=True, max_length=128
    ),
]


@pytest.mark.ci
@pytest.mark.parametrize('model', [MODELS[0], MODELS[1], MODELS[3]])
def test_a_cache_changes_no_logit(model):
  params = hf_models.make_params(model.config)
  tokens = np.random.default_rng(4).integers(31, size=(3, 12), dtype=np.int32)
  want = jax.jit(model.apply)({'params': params}, tokens)
  decoder = CachedModel(model)
  cache, step = decoder.create_cache(3, 14), jax.jit(decoder)
  parts = []
  for part in ([0, 1, 2, 3, 4], [5], [6], [7, 8, 9, 10, 11]):
    at = np.broadcast_to(part, (3, len(part)))
    logits, cache = step(params, cache, tokens[:, part], at)
    parts.append(logits)
  np.testing.assert_allclose(
      np.concatenate(parts, axis=1), want, rtol=2e-5, atol=2e-5
  )


@pytest.mark.ci
@pytest.mark.parametrize('model', MODELS[3:])
def test_rows_at_different_positions_share_a_batch(model):
  params = hf_models.make_params(model.config)
  run = functools.partial(
      generate_with, CachedModel(model), params, max_new_tokens=6,
      end_of_text=0, length=20,
  )
  prompts = [[5], [3, 9, 2, 8, 1, 7], [4, 4, 4], [30, 1, 2, 3]]
  together = run(prompts, batch_size=4)
  assert together == [run([p], batch_size=1)[0] for p in prompts]
  rows = [prompt + new for prompt, new in zip(prompts, together)]
  padded = np.array([row + [0] * (20 - len(row)) for row in rows])
  logits = jax.jit(model.apply)({'params': params}, padded)
  for prompt, row, scores in zip(prompts, rows, logits):
    for i in range(len(prompt), len(row)):
      assert scores[i - 1, row[i]] >= scores[i - 1].max() - 1e-4


@pytest.mark.ci
def test_draws_follow_the_seed_and_not_the_batch():
  params = make_params(3)
  prompts = random_prompts(5, 9)
  run = functools.partial(
      generate_with, Recomputed(causal_model), params, prompts,
      choose=sampler(temperature=2.0), max_new_tokens=5, end_of_text=END,
      length=LENGTH,
  )
  assert run(batch_size=9) == run(batch_size=2)
  by_int, by_numpy, by_key = (
      run(batch_size=9, key=key) for key in (1, np.int64(1), jax.random.key(1))
  )
  assert by_int == by_numpy == by_key
  assert run(batch_size=9) != run(batch_size=9, key=1)


@pytest.mark.parametrize('options, allowed', [
    (dict(), {0, 1, 2, 3}),
    (dict(top_k=2), {1, 3}),
    (dict(top_p=0.5), {3}),  # Probabilities 0.1, 0.25, 0.05, 0.6.
    (dict(top_p=0.61), {1, 3}),
    (dict(top_k=2, top_p=0.7), {3}),  # 0.6 / 0.85 is above 0.7.
    (dict(temperature=1e-50), {3}),
    (dict(top_p=1e-50), {3}),
])
def test_only_likely_tokens_are_drawn(options, allowed):
  logits = jnp.log(jnp.array([0.1, 0.25, 0.05, 0.6]))
  keys = jax.random.split(jax.random.key(0), 2000)
  draws = jax.vmap(sampler(**options), (0, None))(keys, logits)
  assert set(draws.tolist()) == allowed
  if not options:
    frequencies = np.bincount(draws) / len(draws)
    np.testing.assert_allclose(
        frequencies, [0.1, 0.25, 0.05, 0.6], atol=0.03
    )


def test_a_top_p_of_1_leaves_out_no_token(monkeypatch):
  count = lambda key, logits_V: jnp.isfinite(logits_V).sum()
  monkeypatch.setattr(jax.random, 'categorical', count)
  logits = jnp.array([0.0, -20.0, -30.0])
  assert sampler(top_p=1.0)(jax.random.key(0), logits) == 3


def test_equal_logits_fill_the_last_places_by_their_id():
  keys = jax.random.split(jax.random.key(0), 200)
  draws = jax.vmap(sampler(top_k=2), (0, None))(keys, jnp.zeros(5))
  assert set(draws.tolist()) == {0, 1}


@pytest.mark.ci
@pytest.mark.parametrize('choose', [None, sampler(0.7)])
def test_streamed_tokens_are_those_of_generate(choose):
  params = hf_models.make_params(MODELS[0].config)
  decoder = CachedModel(MODELS[0])
  rest = dict(max_new_tokens=5, end_of_text=-1, length=24)
  if choose is not None:
    rest |= dict(choose=choose, key=np.int64(3))
  streamed = list(stream(decoder, params, [7, 1, 19], **rest))
  (wanted,) = generate_with(
      decoder, params, [[7, 1, 19]], batch_size=1, **rest
  )
  assert streamed == wanted and len(streamed) == 5
  rest['end_of_text'] = wanted[2]
  until = wanted.index(wanted[2])
  assert list(stream(decoder, params, [7, 1, 19], **rest)) == wanted[:until]


def test_characters_are_decoded_when_they_are_complete():
  text = 'né\u20ac 😀.'
  tokens = list(text.encode()) + [0xe2]  # The last character is unfinished.
  texts = list(decode_stream(ByteTokenizer(), iter(tokens)))
  assert ''.join(texts) == text + '\ufffd'
  assert set(text) <= set(texts)


class Words:
  """Decodes as tokenizers of Llama do, without the space before the first."""

  def decode(self, ids):
    return ''.join(f' word{i}' for i in ids)[1:]


def test_a_continuation_begins_with_the_space_after_its_prompt():
  texts = decode_stream(Words(), iter([3, 4]), [1, 2])
  assert list(texts) == [' word3', ' word4']


generated = lambda *prompts: generate_with(
    CachedModel(MODELS[0]), None, prompts, max_new_tokens=1, end_of_text=0,
    batch_size=2, length=8,
)


@pytest.mark.parametrize('call, message', [
    (lambda: sampler(temperature=0.0), 'temperature is 0.0; give more than 0'),
    (lambda: sampler(top_k=0), 'top_k is 0; give at least 1'),
    (lambda: sampler(top_p=1.5), r'top_p is 1.5; give a number in \(0, 1\]'),
    (lambda: generated([1], [30, -1]), r'prompts\[1\] has the token -1;'),
    (lambda: generated([1], [30, 31]), r'prompts\[1\] has the token 31;'),
    (lambda: next(stream(
        CachedModel(MODELS[0]), None, [1] * 24, max_new_tokens=1,
        end_of_text=0, length=24,
    )), 'has 24 tokens'),
])
def test_impossible_sampling_and_prompts_are_refused(call, message):
  refuse(message, call)

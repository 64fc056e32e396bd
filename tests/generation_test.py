"""Batched greedy generation equals a plain loop over one prompt."""

import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.evaluation import greedy_generate

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
  """A random function of every token so far and of their positions."""
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
  return greedy_generate(
      causal_model,
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


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**16), max_new_tokens=st.sampled_from([1, 4, 20]))
def test_generations_equal_a_plain_loop(seed, max_new_tokens):
  params = make_params(seed)
  prompts = random_prompts(seed, 7)
  expected = [plain_generate(params, p, max_new_tokens) for p in prompts]
  assert generate(params, prompts, max_new_tokens) == expected


def test_batched_generations_equal_one_by_one():
  params = make_params(1)
  prompts = random_prompts(2, 8)
  batched = generate(params, prompts, batch_size=8)
  alone = [generate(params, [p], batch_size=1)[0] for p in prompts]
  assert batched == alone
  assert generate(params, prompts, batch_size=3) == batched
  assert len(set(map(tuple, batched))) > 3


def count_up(params, tokens_BxL):
  """Predicts the next integer, and the end token 9 after 8."""
  del params
  return jnp.eye(10)[jnp.minimum(tokens_BxL + 1, 9)]


def test_rows_stop_at_the_end_of_text_and_leave_it_out():
  generations = greedy_generate(
      count_up,
      None,
      [[4], [8], [1, 9], [3, 0]],
      max_new_tokens=6,
      end_of_text=9,
      batch_size=4,
      length=16,
  )
  assert generations == [[5, 6, 7, 8], [], [], [1, 2, 3, 4, 5, 6]]


def test_rows_stop_when_the_buffer_is_full():
  generations = greedy_generate(
      count_up,
      None,
      [[0], [0, 0, 0, 0]],
      max_new_tokens=6,
      end_of_text=9,
      batch_size=2,
      length=5,
  )
  assert generations == [[1, 2, 3, 4], [1]]


def test_computation_stops_when_all_rows_have_ended():
  calls = []

  def counting(params, tokens_BxL):
    jax.debug.callback(lambda: calls.append(1), ordered=True)
    return count_up(params, tokens_BxL)

  greedy_generate(
      counting,
      None,
      [[6], [7]],
      max_new_tokens=100,
      end_of_text=9,
      batch_size=4,
      length=128,
  )
  assert len(calls) == 3  # 7, 8 and the end for the row that takes longest


def test_model_is_traced_once_for_all_batches():
  traces = []

  def model(params, tokens_BxL):
    traces.append(tokens_BxL.shape)
    return count_up(params, tokens_BxL)

  run = functools.partial(
      greedy_generate,
      model,
      None,
      max_new_tokens=4,
      batch_size=2,
      length=64,
  )
  run([[1], [2, 3, 4], [5], [6], [7]], end_of_text=9)
  run([[4, 4, 4], [2]], end_of_text=8)
  assert traces == [(2, 7)]


def test_no_prompts_give_no_generations():
  assert generate(make_params(0), []) == []


def test_a_prompt_without_room_for_one_token_is_refused():
  generate(make_params(0), [[1] * (LENGTH - 1)])
  with pytest.raises(ValueError, match=r'prompts\[1\] has 12 tokens'):
    generate(make_params(0), [[1], [1] * LENGTH])


def test_an_empty_prompt_is_refused():
  with pytest.raises(ValueError, match=r'prompts\[0\] is empty'):
    generate(make_params(0), [[]])


@pytest.mark.parametrize('name', ['max_new_tokens', 'batch_size'])
def test_sizes_below_one_are_refused(name):
  with pytest.raises(ValueError, match=f'{name} is 0'):
    generate(make_params(0), [[1]], **{name: 0})

"""The bigram is a distribution with the loss of the best bigram."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from spdf_jax.evaluation import evaluate_loss
from spdf_jax.evaluation.baselines import bigram_loss
from spdf_jax.evaluation.baselines import bigram_probabilities
from spdf_jax.evaluation.baselines import count_bigrams
from spdf_jax.evaluation.baselines import fit_bigram


class Batch(NamedTuple):
  inputs: np.ndarray
  targets: np.ndarray
  weights: np.ndarray


def windows(tokens, length=50):
  count = (len(tokens) - 1) // length
  inputs = tokens[: count * length].reshape(count, length)
  targets = tokens[1 : count * length + 1].reshape(count, length)
  return Batch(inputs, targets, np.ones(inputs.shape, np.float32))


def markov_chain(seed, transitions, steps):
  rng = np.random.default_rng(seed)
  cumulative = np.cumsum(transitions, axis=1)
  uniforms = rng.random(steps)
  state, states = 0, np.zeros(steps, np.int32)
  for step in range(steps):
    states[step] = state
    state = int(np.searchsorted(cumulative[state], uniforms[step]))
  return states


def test_bigram_counts_over_several_chunks_equal_numpys_histogram():
  tokens = np.random.default_rng(0).integers(5, size=2_100_000)
  tokens = tokens.astype(np.uint16)
  expected, *_ = np.histogram2d(tokens[:-1], tokens[1:], bins=range(6))
  np.testing.assert_array_equal(count_bigrams(tokens, 5), expected)


@settings(deadline=None, max_examples=30)
@given(
    tokens=st.lists(st.integers(0, 5), min_size=20, max_size=80),
    vocab_size=st.integers(6, 9),
)
def test_bigrams_sum_to_one_in_every_context(tokens, vocab_size):
  bigram = fit_bigram(np.array(tokens), vocab_size)
  previous, following = np.indices((vocab_size, vocab_size))
  chosen = bigram_probabilities(bigram, previous, following)
  np.testing.assert_allclose(chosen.sum(axis=1), 1, rtol=1e-12)
  assert chosen.min() > 0
  singles = np.bincount(tokens, minlength=vocab_size)
  np.testing.assert_allclose(
      bigram.unigram, (singles + 1) / (len(tokens) + vocab_size)
  )


def test_loss_approaches_the_entropy_of_a_two_state_chain():
  transitions = np.array([[0.9, 0.1], [0.3, 0.7]])
  stationary = np.array([0.75, 0.25])
  entropy = -np.sum(stationary[:, None] * transitions * np.log(transitions))
  train = markov_chain(0, transitions, 40_000)
  loss = bigram_loss(train, [windows(markov_chain(1, transitions, 40_000))], 2)
  assert loss.loss == pytest.approx(entropy, abs=0.01)


def test_smoothing_of_bigrams_is_chosen_on_training_tokens_only():
  rng = np.random.default_rng(6)
  train = rng.integers(30, size=3_000)
  before = fit_bigram(train, 30)
  # The last tenth decides, and a repeated cycle needs little smoothing.
  sharp = train.copy()
  sharp[: len(sharp) * 9 // 10] = np.arange(2_700) % 30
  sharp[2_700:] = np.arange(300) % 30
  assert before.strength >= 64
  assert fit_bigram(sharp, 30).strength == 1 / 16


def test_loss_is_weighted_and_equals_a_model_with_the_same_table():
  rng = np.random.default_rng(7)
  train = rng.integers(6, size=500)
  batch = windows(rng.integers(6, size=300).astype(np.int32), length=10)
  weights = rng.choice([0.0, 0.25, 1.0], batch.inputs.shape)
  batch = batch._replace(weights=weights.astype(np.float32))
  bigram = fit_bigram(train, 6)
  table = np.log(bigram_probabilities(bigram, *np.indices((6, 6))))
  model = lambda params, tokens_BxL: params[tokens_BxL]
  expected = evaluate_loss(model, table.astype(np.float32), [batch])
  loss = bigram_loss(train, [batch], 6)
  assert loss.tokens == expected.tokens == weights.sum()
  np.testing.assert_allclose(loss.nats, expected.nats, rtol=1e-5)


def test_ids_at_zero_weight_may_be_anything():
  train = np.arange(100) % 4
  batch = Batch(np.array([[1, 0]]), np.array([[2, -1]]), np.array([[1.0, 0]]))
  assert bigram_loss(train, [batch], 4).tokens == 1


TRAIN = np.arange(100) % 4
FAR = Batch(*np.array([[[1, 9, 2]], [[1, 2, 3]], [[1, 1, 1]]]))


@pytest.mark.parametrize('call, message', [
    (lambda: fit_bigram(TRAIN, 8193), 'vocab_size is 8193'),
    (lambda: fit_bigram(np.append(TRAIN, 9), 4), 'to 9, but vocab_size is 4'),
    (lambda: fit_bigram(TRAIN[:19], 4), 'a bigram needs at least 20'),
    (lambda: bigram_loss(TRAIN, [], 4), 'total weight 0'),
    (lambda: bigram_loss(TRAIN, [FAR], 4),
     'batches holds token ids from 1 to 9'),
])
def test_tokens_that_cannot_be_counted_are_refused(call, message):
  with pytest.raises(ValueError, match=message):
    call()

"""The trigram is a distribution with the loss of the best trigram."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from experiments.pool.trigram import fit_trigram
from experiments.pool.trigram import trigram_loss
from experiments.pool.trigram import trigram_probabilities
from spdf_jax.evaluation.baselines import bigram_loss
from spdf_jax.evaluation.baselines import bigram_probabilities
from tests.evaluation.baselines_test import Batch
from tests.evaluation.baselines_test import TRAIN
from tests.evaluation.baselines_test import windows
from tests.refusals import refuse


def second_order_chain(seed, transitions, steps):
  """A source whose next token depends on the two before it."""
  rng = np.random.default_rng(seed)
  states = [0, 0]
  for _ in range(steps):
    states.append(int(rng.choice(len(transitions), p=transitions[
        states[-2], states[-1]
    ])))
  return np.array(states[2:])


def probability(tokens, vocab_size, strengths, *triple):
  """Counts and smooths in plain Python, in float64."""
  first, second, third = triple
  n = len(tokens)
  pairs = lambda a, b: sum(
      (tokens[i], tokens[i + 1]) == (a, b) for i in range(n - 1)
  )
  triples = sum(
      tuple(tokens[i : i + 3]) == triple for i in range(n - 2)
  )
  unigram = (tokens.count(third) + 1) / (n + vocab_size)
  context = sum(token == second for token in tokens[:-1])
  bigram = (pairs(second, third) + strengths[0] * unigram) / (
      context + strengths[0]
  )
  return (triples + strengths[1] * bigram) / (
      pairs(first, second) + strengths[1]
  )


TOKENS = st.lists(st.integers(0, 3), min_size=23, max_size=60)


@settings(deadline=None, max_examples=15)
@given(tokens=TOKENS, vocab_size=st.integers(4, 5))
def test_trigrams_are_those_of_plain_counts(tokens, vocab_size):
  trigram = fit_trigram(np.array(tokens, np.uint16), vocab_size)
  strengths = trigram.bigram.strength, trigram.strength
  triples = np.indices((vocab_size,) * 3)
  probabilities = trigram_probabilities(trigram, *triples)
  assert probabilities.dtype == np.float64
  assert probabilities.shape == (vocab_size,) * 3
  for triple in np.ndindex(probabilities.shape):
    expected = probability(tokens, vocab_size, strengths, *triple)
    np.testing.assert_allclose(probabilities[triple], expected, rtol=1e-12)


@settings(deadline=None, max_examples=30)
@given(tokens=TOKENS, vocab_size=st.integers(4, 7))
def test_trigrams_sum_to_one_except_after_the_last_context(
    tokens, vocab_size
):
  trigram = fit_trigram(np.array(tokens), vocab_size)
  probabilities = trigram_probabilities(trigram, *np.indices((vocab_size,) * 3))
  assert probabilities.min() > 0
  totals = probabilities.sum(axis=2)
  # The last pair of the text is counted as a context that nothing follows.
  last = tuple(tokens[-2:])
  assert totals[last] <= 1
  totals[last] = 1
  np.testing.assert_allclose(totals, 1, rtol=1e-12)


def test_the_trigram_beats_the_bigram_on_a_second_order_source():
  rng = np.random.default_rng(2)
  transitions = rng.dirichlet(np.full(8, 0.1), size=(8, 8))
  train = second_order_chain(3, transitions, 20_000)
  held_out = second_order_chain(4, transitions, 5_000)
  batch = windows(held_out)
  trigram = trigram_loss(train, [batch], 8).loss
  assert trigram < bigram_loss(train, [batch], 8).loss - 0.3
  entropy = -np.mean(np.log([
      transitions[tuple(held_out[i : i + 3])] for i in range(4_990)
  ]))
  # The first token of each window is scored by the bigram.
  assert entropy - 0.02 < trigram < entropy + 0.08


def test_trigrams_of_a_repeated_text_are_barely_smoothed():
  rng = np.random.default_rng(6)
  train = rng.integers(20, size=3_000)
  assert fit_trigram(train, 20).strength >= 16
  assert fit_trigram(np.arange(3_000) % 20, 20).strength < 1


def test_the_first_token_of_a_sequence_is_scored_by_the_bigram():
  rng = np.random.default_rng(7)
  train = rng.integers(6, size=500)
  batch = windows(rng.integers(6, size=300), length=10)
  weights = rng.choice([0.0, 0.25, 1.0], batch.inputs.shape)
  batch = batch._replace(weights=weights)
  trigram = fit_trigram(train, 6)
  nats = 0.0
  for row, targets, weight in zip(*batch):
    chosen = [bigram_probabilities(trigram.bigram, row[0], targets[0])]
    chosen += [
        trigram_probabilities(trigram, row[i - 1], row[i], targets[i])
        for i in range(1, len(row))
    ]
    nats -= float(np.sum(weight * np.log(chosen)))
  loss = trigram_loss(train, [batch], 6)
  assert loss.tokens == weights.sum()
  assert loss.nats == pytest.approx(nats, rel=1e-12)


def test_a_trigram_needs_at_least_23_tokens():
  assert fit_trigram(np.arange(23) % 2, 2).counts.sum() == 21
  refuse('at least 23', fit_trigram, np.arange(22) % 2, 2)


@pytest.mark.parametrize('tokens, vocab_size, message', [
    (TRAIN, 8193, 'vocab_size is 8193'),
    ([*TRAIN, 9], 4, 'to 9, but vocab_size is 4'),
    (TRAIN[:19], 4, 'a trigram needs at least 23'),
])
def test_tokens_that_cannot_be_counted_are_refused(
    tokens, vocab_size, message
):
  refuse(message, fit_trigram, np.array(tokens), vocab_size)


@pytest.mark.parametrize('batches, message', [
    ([], 'total weight 0'),
    ([[[[1, 9, 2]], [[1, 2, 3]], [[1, 1, 1]]]],
     'batches holds token ids from 1 to 9'),
    # The context of a target are the two tokens before it.
    ([[[[9, 1, 2]], [[1, 2, 3]], [[0, 1, 1]]]],
     'batches holds token ids from 1 to 9'),
])
def test_batches_that_cannot_be_measured_are_refused(batches, message):
  with pytest.raises(ValueError, match=message):
    trigram_loss(TRAIN, [Batch(*np.array(batch)) for batch in batches], 4)

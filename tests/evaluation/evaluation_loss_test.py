"""Losses agree with a plain sum, and scores with the texts on disk."""

import json
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax import evaluation
from spdf_jax.evaluation import bits_per_byte
from spdf_jax.evaluation import evaluate_loss
from spdf_jax.evaluation import loss_evaluator
from spdf_jax.evaluation import task_evaluator
from spdf_jax.evaluation import TokenLoss
from tests.refusals import refuse


class Batch(NamedTuple):
  inputs: np.ndarray
  targets: np.ndarray
  weights: np.ndarray


VOCAB_SIZE = 11


def table_model(params, tokens_BxL):
  return params[tokens_BxL]


def make_batch(seed, shape=(3, 5)):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(VOCAB_SIZE, size=(shape[0], shape[1] + 1))
  weights = (rng.random(shape) < 0.6) * rng.choice([1.0, 0.5], shape)
  return Batch(
      tokens[:, :-1].astype(np.int32),
      tokens[:, 1:].astype(np.int32),
      weights.astype(np.float32),
  )


def make_params(seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)


def plain_loss(params, batches):
  """Sums the loss position by position, in Python floats."""
  nats = tokens = 0.0
  for batch in batches:
    for inputs, targets, weights in zip(*batch):
      for token, target, weight in zip(inputs, targets, weights):
        row = [float(x) for x in params[token]]
        total = math.log(sum(map(math.exp, row)))
        nats += float(weight) * (total - row[target])
        tokens += float(weight)
  return nats, tokens


def test_loss_equals_a_plain_weighted_sum_over_positions():
  params = make_params()
  batches = [make_batch(1), make_batch(2), make_batch(3)]
  loss = evaluate_loss(table_model, params, batches)
  nats, tokens = plain_loss(params, batches)
  assert loss.tokens == tokens
  np.testing.assert_allclose(loss.nats, nats, rtol=1e-6)
  np.testing.assert_allclose(loss.loss, nats / tokens, rtol=1e-6)


def test_nothing_at_zero_weight_reaches_the_loss():
  params = make_params()
  batch = make_batch(4)
  params[7] = np.nan
  hidden = np.where(batch.weights > 0, batch.inputs % 7, 7)
  poisoned = batch._replace(inputs=hidden.astype(np.int32))
  clean = batch._replace(
      inputs=np.where(batch.weights > 0, hidden, 0).astype(np.int32)
  )
  loss = evaluate_loss(table_model, params, [poisoned])
  assert loss == evaluate_loss(table_model, params, [clean])
  assert math.isfinite(loss.nats)


def test_low_precision_logits_are_summed_in_float32():
  batch = make_batch(5, shape=(16, 16))
  low = lambda params, tokens: table_model(params, tokens).astype(jnp.bfloat16)
  rounded = np.asarray(jnp.asarray(make_params(), jnp.bfloat16), np.float32)
  with jax.disable_jit():  # Compiled, XLA may keep a higher precision.
    loss = evaluate_loss(low, make_params(), [batch])
  nats, _ = plain_loss(rounded, [batch])
  np.testing.assert_allclose(loss.nats, nats, rtol=1e-6)


def test_model_is_traced_once_per_batch_shape():
  traces = []

  def model(params, tokens_BxL):
    traces.append(tokens_BxL.shape)
    return params[tokens_BxL]

  batches = [make_batch(i) for i in range(3)] + [make_batch(9, (2, 5))]
  evaluate = loss_evaluator(model, batches, prefix='validation')
  list(evaluate(0, make_params(0)))
  list(evaluate(1, make_params(1)))
  assert traces == [(3, 5), (2, 5)]


def test_perplexity_that_overflows_is_infinite():
  assert TokenLoss(nats=2e4, tokens=2.0).perplexity == math.inf
  assert TokenLoss(nats=math.inf, tokens=2.0).perplexity == math.inf
  assert math.isnan(TokenLoss(nats=math.nan, tokens=2.0).perplexity)
  np.testing.assert_allclose(TokenLoss(10.0, 5.0).perplexity, math.e**2)


def test_bits_per_byte_of_a_uniform_byte_model_is_eight():
  loss = TokenLoss(nats=math.log(256) * 1000, tokens=1000.0)
  np.testing.assert_allclose(bits_per_byte(loss, 1.0), 8.0)
  np.testing.assert_allclose(bits_per_byte(loss, 0.25), 2.0)


def test_evaluator_yields_named_floats_and_can_be_called_again():
  batches = [make_batch(1), make_batch(2)]
  evaluate = loss_evaluator(
      table_model, batches, prefix='target', tokens_per_byte=0.3
  )
  params = jax.device_put(make_params())
  first = dict(evaluate(3, params))
  loss = evaluate_loss(table_model, params, batches)
  assert first == {
      'target/loss': loss.loss,
      'target/perplexity': loss.perplexity,
      'target/bits_per_byte': bits_per_byte(loss, 0.3),
  }
  assert all(type(value) is float for value in first.values())
  assert dict(evaluate(4, params)) == first
  plain = loss_evaluator(table_model, batches, prefix='target')
  assert set(dict(plain(0, params))) == {'target/loss', 'target/perplexity'}


def count_up(params, prompts):
  """Continues with up to three next letters, to the eighth."""
  del params
  return [list(range(p[-1] + 1, min(p[-1] + 4, 9))) for p in prompts]


def letters(ids):
  return ''.join(chr(ord('a') + i) for i in ids)


def make_task(directory, references=('fgh', ['i', 'ii'], 'bcxx')):
  return task_evaluator(
      count_up,
      [[4], [7], [0, 0]],
      references,
      decode=letters,
      directory=directory,
  )


def test_task_writes_its_generations_and_scores_the_same_texts(tmp_path):
  directory = tmp_path / 'generations'
  scores = dict(make_task(directory)(120, None))
  path = directory / 'step_00000120.jsonl'
  records = [json.loads(line) for line in path.read_text().splitlines()]
  assert records == [
      {'context': 'e', 'reference': 'fgh', 'generation': 'fgh'},
      {'context': 'h', 'reference': ['i', 'ii'], 'generation': 'i'},
      {'context': 'aa', 'reference': 'bcxx', 'generation': 'bcd'},
  ]
  texts = [record['generation'] for record in records]
  references = [record['reference'] for record in records]
  assert scores == {
      'task/bleu': evaluation.bleu(texts, references),
      'task/chrf': evaluation.chrf(texts, references),
  }
  assert [p.name for p in directory.iterdir()] == [path.name]


def test_a_failed_write_leaves_the_old_generations(tmp_path, monkeypatch):
  evaluate = make_task(tmp_path)
  list(evaluate(5, None))
  before = (tmp_path / 'step_00000005.jsonl').read_bytes()
  count = []

  def failing(*args, **kwargs):
    count.append(1)
    if len(count) == 2:
      raise OSError('no space left on device')
    return '{}'

  monkeypatch.setattr(json, 'dumps', failing)
  with pytest.raises(OSError, match='no space'):
    list(evaluate(5, None))
  assert (tmp_path / 'step_00000005.jsonl').read_bytes() == before
  assert len(list(tmp_path.iterdir())) == 1


BATCH = make_batch(1)
loss_of = lambda *batches: evaluate_loss(table_model, make_params(), batches)
scores_of = lambda batches, **options: loss_evaluator(
    table_model, batches, prefix='validation', **options
)


@pytest.mark.parametrize('call, message', [
    (loss_of, 'total weight 0.0'),
    (lambda: loss_of(BATCH._replace(weights=np.zeros((3, 5), np.float32))),
     'total weight 0.0'),
    (lambda: scores_of(iter([BATCH])), 'give a list'),
    (lambda: scores_of([BATCH], tokens_per_byte=0.0), 'per_byte is 0.0'),
    (lambda: scores_of([BATCH], tokens_per_byte=math.nan), 'per_byte is nan'),
    (lambda: make_task(None, references=['fgh']), 'prompts has 3 entries'),
])
def test_texts_that_cannot_be_scored_are_refused(call, message):
  refuse(message, call)

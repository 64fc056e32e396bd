"""The loss equals NumPy's, in chunks and parts too, with its gradients."""

import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import models
from spdf_jax.data import Batch
from spdf_jax.training import create_state
from spdf_jax.training import Loss
from spdf_jax.training import train_step

V = 13
SIZES = dict(
    vocab_size=V, n_layers=1, n_heads=2, d_model=8, d_ff=12, max_length=16
)


def make_batch(seed, batch_size=4, length=10):
  rng = np.random.default_rng(seed)
  shape = batch_size, length
  return Batch(
      rng.integers(V, size=shape, dtype=np.int32),
      rng.integers(V, size=shape, dtype=np.int32),
      rng.choice(np.float32([0, 0.5, 1]), size=shape),
  )


def plain_sums(logits, batch, smoothing, z_loss):
  logits = np.asarray(logits, np.float64)
  log_sum = np.log(np.exp(logits).sum(-1))
  chosen = np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
  target = (1 - smoothing) * np.eye(V)[batch.targets] + smoothing / V
  cost = log_sum - (target * logits).sum(-1) + z_loss * log_sum**2
  weights = batch.weights.astype(np.float64)
  return (cost * weights).sum(), ((log_sum - chosen) * weights).sum()


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**16), st.sampled_from([0.0, 0.1, 0.9]),
    st.sampled_from([0.0, 1e-4, 0.3]),
)
def test_sums_equal_numpys(seed, smoothing, z_loss):
  batch = make_batch(seed)
  logits = np.random.default_rng(seed).normal(0, 3, (4, 10, V))
  actual = Loss(smoothing, z_loss).sums(
      jnp.asarray(logits, jnp.float32), batch.targets, batch.weights
  )
  want = plain_sums(logits, batch, smoothing, z_loss)
  np.testing.assert_allclose(actual, want, rtol=2e-5)


@pytest.mark.parametrize('preset, chunk', [
    pytest.param('gpt-mini', 1, marks=pytest.mark.slow),
    ('gpt-mini', 3),
    pytest.param('gpt-mini', 64, marks=pytest.mark.slow),
    pytest.param('llama-1.3b', 5, marks=pytest.mark.slow),
])
def test_chunks_change_neither_loss_nor_gradient(preset, chunk):
  model = models.create_model(preset, **SIZES)
  batch = make_batch(1)
  params = model.init(jax.random.key(0), batch.inputs)['params']

  def run(loss):
    objective = lambda p: loss(model.apply, {'params': p}, batch)
    return jax.jit(jax.value_and_grad(
        lambda p: objective(p).objective
    ))(params), objective(params).cross_entropy

  whole, parts = run(Loss(0.1, 1e-3)), run(Loss(0.1, 1e-3, chunk))
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
      parts, whole,
  )


def scratch(loss, vocab_size):
  model = models.create_model(
      'gpt-mini', **SIZES | dict(vocab_size=vocab_size, max_length=256)
  )
  shape = lambda dtype: jax.ShapeDtypeStruct((4, 256), dtype)
  batch = Batch(shape(jnp.int32), shape(jnp.int32), shape(jnp.float32))
  params = jax.eval_shape(
      model.init, jax.random.key(0), batch.inputs
  )['params']
  objective = lambda p, b: loss(model.apply, {'params': p}, b).objective
  compiled = jax.jit(jax.grad(objective)).lower(params, batch).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_chunks_need_the_memory_of_a_chunk():
  logits = 4 * 256 * 4096 * 4
  cost = lambda loss: scratch(loss, 4096) - scratch(loss, 16)
  assert cost(Loss()) > logits
  assert cost(Loss(chunk=16)) < logits / 4


def make_steps(**options):
  model = models.create_model('gpt-mini', **SIZES)
  optimizer = spdf.sparsify(
      optax.adamw(1e-2), spdf.static(0.5), where=models.sparsifiable, key=0
  )
  step = jax.jit(functools.partial(
      train_step, apply_fn=model.apply, optimizer=optimizer,
      learning_rate=lambda _: 1e-2, **options,
  ))
  params = model.init(jax.random.key(0), make_batch(0).inputs)['params']
  state = create_state(params, optimizer)
  logs = []
  for i in range(3):
    state, metrics = step(state, make_batch(i))
    logs.append(metrics)
  return state, logs


@pytest.mark.parametrize('micro_batches', [2])
def test_micro_batches_give_the_step_of_the_whole_batch(micro_batches):
  whole, logs = make_steps()
  parts, other_logs = make_steps(micro_batches=micro_batches)
  # Not the mean of the parts' means: they differ in weights.
  assert len({float(make_batch(0).weights[i].sum()) for i in range(4)}) > 1
  for one, other in zip(logs, other_logs):
    np.testing.assert_allclose(
        one['train/loss'], other['train/loss'], rtol=1e-5
    )
    np.testing.assert_allclose(
        one['train/grad_norm'], other['train/grad_norm'], rtol=1e-4
    )
  assert int(parts.opt_state.count) == int(whole.opt_state.count) == 3
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
      parts.params, whole.params,
  )


def test_smoothing_is_minimized_and_cross_entropy_reported():
  _, (plain, *_) = make_steps()
  _, (smooth, *_) = make_steps(loss=Loss(label_smoothing=0.2))
  assert 'train/objective' not in plain
  np.testing.assert_allclose(
      smooth['train/loss'], plain['train/loss'], rtol=1e-6
  )
  assert smooth['train/objective'] != smooth['train/loss']

"""Training steps with native kernels agree with dense products."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spdf_jax import data
from spdf_jax import models
from spdf_jax import sparsity
from spdf_jax import training
from spdf_jax.accelerator import native
from spdf_jax.accelerator import wafer
from spdf_jax.training.own_models import OwnModel
from spdf_jax.training.step.losses import create_loss_scale
from spdf_jax.training.step.matmul import check_devices
from spdf_jax.training.step.matmul import dense_apply
from spdf_jax.training.step.matmul import mask_sparsity
from spdf_jax.training.step.matmul import SparseSteps
from spdf_jax.training.step.matmul import without_masks
from tests import tiny_run
from tests.refusals import refuse

needs_kernels = pytest.mark.skipif(
    not native.is_available(), reason='no native kernels on this machine'
)
MODEL = models.create_model(
    'gpt-mini', vocab_size=32, n_layers=1, n_heads=2, d_model=64, d_ff=96,
    max_length=16,
)
TOKENS = np.random.default_rng(0).integers(32, size=(8, 17), dtype=np.int32)
BATCH = data.Batch(
    TOKENS[:, :-1], TOKENS[:, 1:], np.ones((8, 16), np.float32)
)
TIMES = dict(update_every=3, update_until=9)


def start(algorithm, sparse_steps, model=MODEL):
  """Returns a jitted step and the first state."""
  optimizer = sparsity.sparsify(
      optax.adam(3e-3), algorithm, where=models.sparsifiable, key=0
  )
  step = jax.jit(functools.partial(
      training.train_step,
      apply_fn=model.apply,
      optimizer=optimizer,
      learning_rate=optax.constant_schedule(3e-3),
      sparse_steps=sparse_steps,
  ))
  params = model.init(jax.random.key(0), TOKENS[:, :-1])['params']
  return step, training.create_state(params, optimizer)


def losses(algorithm, sparse_steps, steps=12, model=MODEL):
  step, state = start(algorithm, sparse_steps, model)
  values = []
  for _ in range(steps):
    state, metrics = step(state, BATCH)
    values.append(float(metrics['train/loss']))
  return values, state


@needs_kernels
def test_losses_and_weights_are_those_of_dense_products():
  algorithm = sparsity.rigl(0.75, **TIMES)
  sparse = training.sparse_steps('native', MODEL, tokens=128)
  actual, state = losses(algorithm, sparse)
  wanted, reference = losses(algorithm, None)
  np.testing.assert_allclose(actual, wanted, rtol=1e-4)
  for a, b in zip(
      jax.tree.leaves(sparsity.get_mask(state.opt_state)),
      jax.tree.leaves(sparsity.get_mask(reference.opt_state)),
  ):
    # Sums in another order may break near ties differently.
    assert np.mean(a != b) < 2e-3
  assert actual[-1] < actual[0]


def test_kernels_run_sparse_steps_without_dense_gradients_only():
  # Sparse steps have constant logits, so that their losses are bitwise equal.
  marked = lambda variables, tokens: 0 * MODEL.apply(variables, tokens)
  steps = SparseSteps(marked, 0.5)
  values, _ = losses(sparsity.rigl(0.75, **TIMES), steps)
  constant = values[0]
  assert constant == pytest.approx(np.log(32), abs=1e-5)
  assert [i for i, loss in enumerate(values) if loss != constant] == [3, 6, 9]
  values, _ = losses(sparsity.static(0.25), steps)
  assert constant not in values


@pytest.mark.parametrize('sparsity_of_mask, by_kernels', [
    (0.25, False), (0.4, True), (0.6, True), (0.75, True),
])
def test_kernels_run_masks_sparser_than_the_crossover(
    sparsity_of_mask, by_kernels
):
  marked = lambda variables, tokens: 0 * MODEL.apply(variables, tokens)
  values, _ = losses(
      sparsity.static(sparsity_of_mask), SparseSteps(marked, 0.3), steps=2
  )
  assert (values[0] == values[1]) is by_kernels


@needs_kernels
def test_auto_leaves_small_work_to_dense_products():
  choose = training.sparse_steps
  assert choose('auto', MODEL, tokens=128).crossover > 0
  assert choose('auto', MODEL, tokens=32) is None
  assert choose('native', MODEL, tokens=32).crossover == 0
  narrow = models.create_model('gpt-mini', vocab_size=32, d_model=32, n_heads=2)
  assert choose('auto', narrow, tokens=128) is None
  refuse("did you mean 'native'", choose, 'nativ', MODEL, tokens=128)


def in_dtype(dtype):
  config = dataclasses.replace(MODEL.config, dtype=dtype)
  return MODEL.clone(config=config)


@pytest.mark.slow
@pytest.mark.skipif(
    not native.is_available('bfloat16'), reason='no kernels of bfloat16 here'
)
def test_a_model_in_bfloat16_trains_with_kernels_of_bfloat16():
  model = in_dtype('bfloat16')
  sparse = training.sparse_steps('native', model, tokens=128)
  step, state = start(sparsity.static(0.75), sparse, model)
  text = step.lower(state, BATCH).as_text()
  products = re.findall(r'@(spdf_\w+)(\(.*)', text)
  assert {name for name, _ in products} == {
      'spdf_sparse_matmul', 'spdf_sparse_matmul_backward'
  }
  assert all('xbf16>' in line and 'xf32>' not in line for _, line in products)
  actual, _ = losses(sparsity.static(0.75), sparse, model=model)
  wanted, _ = losses(sparsity.static(0.75), None, model=model)
  np.testing.assert_allclose(actual, wanted, rtol=1e-2)
  assert actual[-1] < 0.9 * actual[0]


def test_sparse_steps_use_native_kernels_where_a_dtype_has_some():
  for dtype in 'float32', 'bfloat16', 'float16':
    sparse = training.sparse_steps('native', in_dtype(dtype), tokens=128)
    assert (sparse is not None) == native.is_available(dtype)
  assert not native.is_available('float16')
  assert training.sparse_steps('dense', MODEL, tokens=128) is None


def test_without_kernels_products_are_dense(monkeypatch):
  monkeypatch.setenv('SPDF_NATIVE', '0')
  assert training.sparse_steps('native', MODEL, tokens=128) is None


def test_mask_sparsity_is_over_all_weights():
  mask = {'a': jnp.zeros((1, 10), bool), 'b': jnp.ones((3, 10), bool)}
  assert float(mask_sparsity(mask)) == 0.25
  assert float(mask_sparsity(mask | {'c': None})) == 0.25


def test_mask_sparsity_of_more_weights_than_int32_counts():
  mask = [jax.ShapeDtypeStruct((32, 2**13, 2**13), bool)] * 3
  jaxpr = jax.make_jaxpr(mask_sparsity)(mask)
  assert f'{3 * 2.0**31}' in str(jaxpr)
  whole = [x for x in jaxpr.eqns if str(x.outvars[0].aval) == 'int32[]']
  assert not whole


def test_without_masks_ignores_given_masks():
  variables = MODEL.init(jax.random.key(0), TOKENS[:, :-1])
  none = jax.tree_util.tree_map_with_path(
      lambda path, x: jnp.zeros(x.shape, bool)
      if models.sparsifiable('/'.join(k.key for k in path), x) else None,
      variables['params'],
  )
  masked = {**variables, 'masks': none, 'grad_masks': none}
  apply = jax.jit(without_masks(MODEL.apply))
  np.testing.assert_array_equal(
      apply(masked, TOKENS[:, :-1]), jax.jit(MODEL.apply)(
          variables, TOKENS[:, :-1]
      )
  )


def wafer_losses(dtype, matmul, sparsities):
  """Trains 4 steps per sparsity; returns losses and the recorded events."""
  config = dataclasses.replace(MODEL.config, dtype=dtype, n_layers=1)
  model = MODEL.clone(config=config)
  algorithm = sparsity.join(
      [sparsity.static(s) if s else sparsity.dense() for s in sparsities], [4]
  )
  optimizer = sparsity.sparsify(
      optax.adam(3e-3), algorithm, where=models.sparsifiable, key=0
  )
  step = jax.jit(functools.partial(
      training.train_step, apply_fn=dense_apply(matmul, model),
      optimizer=optimizer, learning_rate=optax.constant_schedule(3e-3),
  ))
  params = model.init(jax.random.key(0), TOKENS[:, :-1])['params']
  scale = create_loss_scale(dtype)
  state = training.create_state(params, optimizer, scale)
  values, events = [], []
  for _ in range(8):
    with wafer.record() as counted:
      state, metrics = jax.block_until_ready(step(state, BATCH))
    values.append(float(metrics['train/loss']))
    events.append(counted)
  return values, events


@pytest.mark.process
def test_a_model_trains_sparse_and_then_dense_on_the_emulated_wafer():
  actual, events = wafer_losses('float16', 'wafer', [0.75, 0])
  wanted, nothing = wafer_losses('float32', 'dense', [0.75, 0])
  np.testing.assert_allclose(actual, wanted, rtol=2e-2)
  assert actual != wanted and actual[-1] < 0.9 * actual[0]
  assert not any(nothing)
  layers = {f'h_0/{name}' for name in (
      'attn/wq', 'attn/wk', 'attn/wv', 'attn/wd', 'mlp/wi', 'mlp/wo'
  )}
  for step, counted in enumerate(events):
    assert {e.layer for e in counted} == layers
    kinds = [e.kind for e in counted]
    assert kinds.count('forward') == kinds.count('sampled') == len(layers)
    # Masks change after step 4, for which it has all gradients.
    kept = {'sampled': 0.25 if step < 4 else 1}
    assert all(
        e.nonzeros == e.grid.inputs * e.grid.outputs * kept.get(
            e.kind, 0.25 if step <= 4 else 1
        ) for e in counted
    )


def test_the_wafer_is_emulated_on_one_device_and_by_any_model():
  check_devices('wafer', 1)
  refuse("'wafer' and the mesh has 2 devices", check_devices, 'wafer', 2)
  own = OwnModel(MODEL.config, None, MODEL.init, MODEL.apply)
  tokens = jnp.zeros((1, 4), jnp.int32)
  params = MODEL.init(jax.random.key(0), tokens)['params']
  masks = jax.tree.map(lambda p: jnp.ones(p.shape, bool), params)
  jaxpr = jax.make_jaxpr(dense_apply('wafer', own))(
      {'params': params, 'masks': masks}, tokens
  )
  assert 'lowering=wafer' in str(jaxpr)


@needs_kernels
def test_kernels_run_the_steps_of_sparse_phases_of_a_run_only():
  run = tiny_run.run_of(tiny_run.make_config(matmul='native'))
  programs, state = run.programs, run.programs.abstract_state
  ends = run.plan.ends
  for step, has_kernels in ((0, True), (ends['pretrain'], False)):
    step_fn, _ = programs.prepare_step(state, step)
    jaxpr = jax.make_jaxpr(step_fn)(state, programs.device_batch_at(step))
    assert ('lowering=native' in str(jaxpr)) is has_kernels

"""Tracing counts the work of training steps of whole models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.wafer.training_step import training_step
from spdf_jax import models
from spdf_jax import sparsity
from spdf_jax.accelerator import skip_zeros
from spdf_jax.accelerator.wafer import report_on
from spdf_jax.accelerator.wafer import simulate
from spdf_jax.data import Batch
from spdf_jax.models import create_model
from spdf_jax.models import sparsifiable
from spdf_jax.training import create_state
from spdf_jax.training import train_step
from tests.accelerator.wafer_trace_test import DEVICE
from tests.accelerator.wafer_trace_test import product_flops
from tests.accelerator.wafer_trace_test import products


def gpt_step(lengths=(4, 32), **changes):
  sizes = dict(
      vocab_size=64, n_layers=3, n_heads=2, d_model=16, d_ff=64, max_length=32
  )
  model = create_model('gpt-mini', **sizes | changes)
  optimizer = sparsity.sparsify(
      optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
      sparsity.static(0.5), where=sparsifiable, key=0,
  )
  init = lambda: create_state(
      model.init(jax.random.key(0), jnp.zeros((1, 2), int))['params'],
      optimizer,
  )
  step = functools.partial(
      train_step, apply_fn=model.apply, optimizer=optimizer,
      learning_rate=optax.constant_schedule(1e-3),
  )
  tokens = np.zeros(lengths, np.int32)
  batch = Batch(tokens, tokens, np.ones(lengths, np.float32))
  return step, init, batch


@pytest.mark.ci
@pytest.mark.parametrize(
    'remat, scan_layers', [('none', False), ('full', True)]
)
def test_a_train_step_has_the_products_of_the_closed_form(
    scan_layers, remat
):
  step, init, batch = gpt_step(scan_layers=scan_layers, remat=remat)
  traced = simulate(step, DEVICE, sparsity=0.5)(jax.eval_shape(init), batch)
  shape = models.GPTConfig(64, 3, 2, 16, 64, 32)
  form = report_on(training_step(shape, 4, 32, 0.5), DEVICE)
  names = ('dot_general', 'sparse_matmul', 'sparse_matmul_backward')
  operations = traced.by_operation()
  flops = sum(operations[name].flops for name in names)
  expected = form.flops - form.by_operation()['elementwise'].flops
  if remat == 'full':
    again = [r for r in traced.rows if r.operation.phase == 'recompute']
    flops -= sum(
        r.cost.flops for r in again if r.operation.name in names
    )
  assert flops == pytest.approx(expected)
  assert not traced.unknown


@pytest.mark.ci
def test_a_train_step_from_arrays_is_counted_by_its_masks():
  step, init, batch = gpt_step(scan_layers=True)
  state = jax.jit(init)()
  report = simulate(step, DEVICE)(state, batch)
  mask = jax.tree.leaves(sparsity.get_mask(state.opt_state))
  kept = sum(int(m.sum()) for m in mask)
  head = 3 * 2 * 128 * 16 * 64
  assert product_flops(report) == 3 * 2 * 128 * kept + head
  assert report.by_operation()['optimizer_step'].host == (
      DEVICE.step_seconds * DEVICE.clock
  )


@pytest.mark.ci
def test_operations_have_the_names_of_their_layers():
  step, init, batch = gpt_step(scan_layers=True)
  report = simulate(step, DEVICE, sparsity=0.5)(jax.eval_shape(init), batch)
  layers = report.by_layer()
  for name in ('wq', 'wk', 'wv', 'wd'):
    assert f'GPT/h/attn/{name}' in layers
  assert 'GPT/h/mlp/wi' in layers and 'GPT/wte.attend' in layers
  assert sum(c.cycles for c in layers.values()) == pytest.approx(report.cycles)


@pytest.mark.parametrize('known', [False, True], ids=['sparsity', 'masks'])
def test_zeros_of_any_model_cost_what_those_of_our_models_do(known):
  # The model reads no masks here; its dense products are plain JAX.
  model = create_model(
      'gpt-mini', vocab_size=64, n_layers=2, d_model=64, max_length=16
  )
  tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)['params']
  tx = sparsity.sparsify(
      optax.adam(1e-3), sparsity.static(0.75), where=sparsifiable, key=0
  )
  mask = jax.eval_shape(lambda p: sparsity.get_mask(tx.init(p)), params)
  if known:
    mask = jax.tree.map(
        lambda m: np.random.default_rng(0).random(m.shape) < 0.25, mask
    )

  def cost(loss):
    step = lambda params, mask, tokens: jax.value_and_grad(loss)(
        params, mask, tokens
    )
    return simulate(step, DEVICE, sparsity=None if known else 0.75)(
        params, mask, tokens
    )

  mean = lambda logits: jnp.mean(jnp.square(logits))
  with_masks = cost(lambda p, m, t: mean(
      model.apply({'params': p, 'masks': m}, t)
  ))
  plain = skip_zeros(lambda p, t: mean(model.apply({'params': p}, t)))
  transformed = cost(lambda p, m, t: plain(p, t, mask=m))
  assert transformed.cycles == pytest.approx(with_masks.cycles, rel=1e-3)
  assert transformed.skipped_flops == with_masks.skipped_flops > 0
  costs = lambda report: [
      (row.operation.layer, row.cost) for row in products(report)
  ]
  assert costs(transformed) == costs(with_masks)

"""One jitted step for all phases, which agrees with a plain program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.accelerator import sparse_matmul
from spdf_jax.data import Batch
from spdf_jax.sparsity.state import SparsifyState
from spdf_jax.sparsity.tracking import MaskTrackingState
from spdf_jax.training import adamw
from spdf_jax.training import create_state
from spdf_jax.training import Phase
from spdf_jax.training import Plan
from spdf_jax.training import token_loss
from spdf_jax.training import train_step
from spdf_jax.training.step.state import at_step
from spdf_jax.training.step.state import step_values
from spdf_jax.training.step.state import TrainState
from tests.tiny_run import static

V, D, F = 11, 6, 8
SETTINGS = dict(b1=0.9, b2=0.95, eps=1e-8, clip_norm=1.0)
SPARSE = Phase(
    name='sparse', steps=3, data='corpus', batch_size=2, length=5,
    algorithm=static(0.75), learning_rate=optax.linear_schedule(0.05, 0.02, 3),
    weight_decay=0.1, reset_moments=False,
)
DENSE = dataclasses.replace(
    SPARSE, name='dense', algorithm={'name': 'dense'}, reset_moments=True,
    weight_decay=0.01, learning_rate=optax.constant_schedule(0.03),
)
PLAN = Plan((SPARSE, DENSE))
RIGL = dict(
    name='rigl', sparsity=0.75, update_every=1, update_until=2
)


def make_params():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32)
  return {
      'emb': {'embedding': draw(V, D)},
      'mlp': {'kernel': draw(D, F), 'bias': draw(F)},
      'out': {'kernel': draw(F, D), 'bias': draw(D)},
  }


def make_batch(step, batch_size=2, length=5):
  rng = np.random.default_rng(step)
  shape = batch_size, length
  return Batch(
      rng.integers(V, size=shape, dtype=np.int32),
      rng.integers(V, size=shape, dtype=np.int32),
      (rng.random(shape) < 0.8).astype(np.float32),
  )


def is_hidden(path, leaf):
  return path in ('mlp/kernel', 'out/kernel')


def apply_model(variables, tokens_BxL):
  """A tiny model that reads masks as the real ones do."""
  p = variables['params']

  def linear(name, x):
    kernel = p[name]['kernel']
    if 'masks' not in variables:
      return x @ kernel + p[name]['bias']
    mask, grad_mask = (
        variables[masks][name]['kernel'] for masks in ('masks', 'grad_masks')
    )
    y = sparse_matmul(x, kernel, mask, grad_mask=grad_mask)
    return y + p[name]['bias']

  x_BxLxD = p['emb']['embedding'][tokens_BxL]
  y_BxLxD = x_BxLxD + linear('out', jnp.tanh(linear('mlp', x_BxLxD)))
  return y_BxLxD @ p['emb']['embedding'].T


def make_step(plan, apply_fn=apply_model, **options):
  optimizer = adamw(
      plan, where=is_hidden, key=jax.random.key(3), **SETTINGS
  )
  step = jax.jit(
      functools.partial(
          train_step,
          apply_fn=apply_fn,
          optimizer=optimizer,
          learning_rate=plan.learning_rate,
          **options,
      ),
      donate_argnums=0,
  )
  return step, create_state(make_params(), optimizer)


def kernels(params):
  return {name: np.array(params[name]['kernel']) for name in ('mlp', 'out')}


def masks_of(state):
  mask = spdf.get_mask(state.opt_state)
  return {name: np.array(mask[name]['kernel']) for name in ('mlp', 'out')}


def test_the_loss_is_the_weighted_mean_over_tokens():
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(3, 4, V))
  targets = rng.integers(V, size=(3, 4))
  weights = rng.choice([0.0, 1.0, 0.5], size=(3, 4))
  total = 0.0
  for b in range(3):
    for t in range(4):
      log_sum = np.log(np.exp(logits[b, t]).sum())
      total += weights[b, t] * (log_sum - logits[b, t, targets[b, t]])
  loss = token_loss(jnp.asarray(logits), targets, weights)
  np.testing.assert_allclose(loss, total / weights.sum(), rtol=1e-6)


def test_a_batch_without_targets_has_no_loss_and_no_gradient():
  logits = jnp.ones((2, 3, V))
  zeros = np.zeros((2, 3))
  loss, grads = jax.value_and_grad(token_loss)(
      logits, zeros.astype(int), zeros
  )
  assert loss == 0
  assert (grads == 0).all()


def test_the_step_compiles_once_per_batch_shape_and_never_per_phase():
  traces = []

  def counting(variables, tokens_BxL):
    traces.append(tokens_BxL.shape)
    return apply_model(variables, tokens_BxL)

  moving = dataclasses.replace(SPARSE, algorithm=RIGL)
  other = dataclasses.replace(DENSE, name='tune', batch_size=4, length=3)
  step, state = make_step(Plan((moving, DENSE, other)), counting)
  for i in range(6):
    state, _ = step(state, make_batch(i))
  assert traces == [(2, 5)]
  for i in range(3):
    state, _ = step(state, make_batch(i, 4, 3))
  assert traces == [(2, 5), (4, 3)]


def test_revived_weights_learn_from_the_first_dense_step_on():
  step, state = make_step(PLAN)
  for i in range(3):
    state, _ = step(state, make_batch(i))
  pruned = {k: ~m for k, m in masks_of(state).items()}
  before = kernels(state.params)
  assert all((before[k][pruned[k]] == 0).all() for k in before)
  assert [int(p.sum()) for p in pruned.values()] == [36, 36]
  # A unit that lost all its outputs passes no gradient to its inputs.
  loss = lambda params, batch: token_loss(
      apply_model({'params': params}, batch.inputs), *batch[1:]
  )
  grads = kernels(jax.grad(loss)(state.params, make_batch(3)))
  state, _ = step(state, make_batch(3))
  after = kernels(state.params)
  for k in after:
    moved = after[k][pruned[k]] != 0
    np.testing.assert_array_equal(moved, grads[k][pruned[k]] != 0)
    assert moved.mean() > 0.5
  assert all(m.all() for m in masks_of(state).values())


def test_gradients_of_pruned_weights_are_made_only_where_requested():
  step, state = make_step(PLAN)
  requested = []
  for i in range(PLAN.total_steps):
    requested.append(bool(state.opt_state.dense_grads))
    state, _ = step(state, make_batch(i))
  assert requested == [False, False, False, True, False, False]


def test_the_state_starts_masked_and_leaves_the_parameters_it_came_from():
  optimizer = adamw(PLAN, where=is_hidden, key=jax.random.key(3), **SETTINGS)
  params = make_params()
  before = kernels(params)
  state = create_state(params, optimizer)
  assert int(state.step) == 0
  for name, mask in masks_of(state).items():
    np.testing.assert_array_equal(
        kernels(state.params)[name], np.where(mask, before[name], 0)
    )
  step, _ = make_step(PLAN)
  step(state, make_batch(0))  # Donates the state.
  for name, kernel in kernels(params).items():
    np.testing.assert_array_equal(kernel, before[name])


def test_metrics_are_those_of_the_step():
  step, state = make_step(PLAN)
  variables = {'params': jax.tree.map(np.array, state.params)}
  rates = []
  for i in range(PLAN.total_steps):
    batch = make_batch(i)
    state, metrics = step(state, batch)
    rates.append(float(metrics['train/learning_rate']))
    if i == 0:
      logits = apply_model(variables, batch.inputs)
      want = token_loss(logits, batch.targets, batch.weights)
      np.testing.assert_allclose(metrics['train/loss'], want, rtol=1e-6)
  np.testing.assert_allclose(
      rates, [float(PLAN.learning_rate(i)) for i in range(6)], rtol=1e-6
  )
  assert metrics['train/grad_norm'] > 0
  assert int(state.step) == 6


def test_masks_are_tracked_where_they_move_and_nowhere_else():
  moving = Plan((dataclasses.replace(SPARSE, algorithm=RIGL), DENSE))
  states = [make_step(plan)[1].opt_state for plan in (PLAN, moving)]
  assert isinstance(states[0], SparsifyState)
  assert isinstance(states[1], MaskTrackingState)
  assert isinstance(states[1].inner_state, SparsifyState)


def test_statistics_are_logged_under_the_name_of_sparsity():
  step, state = make_step(
      PLAN, statistics=lambda opt_state: {'steps': opt_state.count}
  )
  _, metrics = step(state, make_batch(0))
  assert set(metrics) == {
      'train/loss', 'train/grad_norm', 'train/learning_rate', 'sparsity/steps'
  }
  assert int(metrics['sparsity/steps']) == 1


def oracle(masks, restarts):
  """Trains SPDF with plain optax: explicit masks around AdamW, then none."""
  params = make_params()
  ones = jax.tree.map(lambda x: np.ones(x.shape, bool), params)
  mask = ones | {
      name: ones[name] | {'kernel': kept} for name, kept in masks.items()
  }
  times = lambda tree, m: jax.tree.map(lambda x, k: x * k, tree, m)

  def loss_fn(params, batch):
    logits = apply_model({'params': params}, batch.inputs)
    return token_loss(logits, batch.targets, batch.weights)

  grad = jax.jit(jax.grad(loss_fn))
  params = times(params, mask)
  adam = optax.scale_by_adam(0.9, 0.95, 1e-8)
  state = adam.init(params)
  for i in range(PLAN.total_steps):
    if i == 3:
      mask = ones
      state = adam.init(params) if restarts else state
    grads = times(grad(params, make_batch(i)), mask)
    norm = optax.tree.norm(grads)
    grads = jax.tree.map(lambda g, n=norm: g / jnp.maximum(n, 1.0), grads)
    directions, state = adam.update(grads, state)
    rate = float(PLAN.learning_rate(i))
    decay = 0.1 if i < 3 else 0.01
    params = jax.tree_util.tree_map_with_path(
        lambda path, p, u, r=rate, d=decay: p - r * (
            u + d * p * ('bias' not in str(path))
        ),
        params, directions,
    )
    params = times(params, mask)
  return params


@pytest.mark.parametrize('restarts', [True, False])
def test_spdf_is_what_explicit_masks_around_plain_adamw_give(restarts):
  plan = Plan((SPARSE, dataclasses.replace(DENSE, reset_moments=restarts)))
  step, state = make_step(plan)
  masks = masks_of(state)
  for i in range(plan.total_steps):
    state, _ = step(state, make_batch(i))
  want = oracle(masks, restarts)
  for actual, expected in zip(
      jax.tree.leaves(state.params), jax.tree.leaves(want)
  ):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-6)


def test_the_ages_of_best_weights_have_their_own_count():
  tx = spdf.sparsify(
      spdf.with_age(optax.scale_by_adam(), warmup=9), spdf.static(0.5), key=0
  )
  params = {'w': jnp.ones((4, 4))}
  states = [TrainState(jnp.int32(0), params, tx.init(params), None)]
  for step in range(1, 6):
    _, opt_state = tx.update(params, states[-1].opt_state, params)
    states.append(TrainState(jnp.int32(step), params, opt_state, None))
  best, later = states[2], states[5]
  restored = at_step(best, step_values(later))
  assert restored.step == 5
  want, got = (
      tx.update(params, state.opt_state, params)[0]
      for state in (best, restored)
  )
  np.testing.assert_array_equal(got['w'], want['w'])


def test_a_skipped_step_leaves_adapters_as_the_weights():
  params = make_params()
  tx = spdf.sparsify(
      spdf.lora(optax.adam(0.1), 2, key=0, where=is_hidden), spdf.dense(),
      where=is_hidden, key=0,
  )
  state = TrainState(jnp.int32(0), params, tx.init(params), None)
  for i, weight in enumerate((1, np.nan, 1)):
    batch = make_batch(i)
    state, _ = train_step(
        state, batch._replace(weights=weight * batch.weights),
        apply_fn=apply_model, optimizer=tx,
        learning_rate=optax.constant_schedule(0.1), skip_not_finite=True,
    )
  adapters = state.opt_state.inner_state.adapters
  want = spdf.merge_adapters(params, adapters, where=is_hidden)
  for got, wanted in zip(*map(jax.tree.leaves, (state.params, want))):
    np.testing.assert_allclose(got, wanted, atol=1e-5)

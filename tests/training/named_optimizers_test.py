"""Optimizers by name: rate, decay, restarts and masks are those of AdamW."""

import dataclasses
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import models
from spdf_jax.training import MismatchError
from spdf_jax.training import parse
from spdf_jax.training import Phase
from spdf_jax.training import Plan
from spdf_jax.training import Run
from spdf_jax.training.checkpoints.identity import read_config
from spdf_jax.training.checkpoints.identity import run_identity
from spdf_jax.training.step.optimizers import check_optimizer
from spdf_jax.training.step.optimizers import create_optimizer
from spdf_jax.training.step.optimizers import OPTIMIZERS
from spdf_jax.training.step.optimizers import read_optimizer
from tests.refusals import refuse
from tests.sparse_loop import trajectory
from tests.tiers import slow_except
from tests.tiny_run import CONFIG
from tests.tiny_run import DENSE
from tests.tiny_run import make_config

# Optimizers of optax that warn of their own arguments.
pytestmark = [pytest.mark.ci, pytest.mark.filterwarnings(
    'ignore:Specifying a key', 'ignore:"seed" is', 'ignore:`optimistic_adam`'
)]

FALL = optax.linear_schedule(0.1, 0.0, 10)
PHASE = Phase(
    name='a', steps=3, data='corpus', batch_size=1, length=1, algorithm=DENSE,
    learning_rate=FALL, weight_decay=0.1, reset_moments=False,
)
RESTARTED = dict(
    learning_rate=lambda step: FALL(step + 3), weight_decay=0.3,
    reset_moments=True,
)
HUGE = 1e9  # A norm that clips nothing.
UNFIT = {'dpsgd', 'galore', 'lbfgs', 'momo', 'momo_adam', 'sophia'}


def make_plan(*changes):
  return Plan(tuple(
      dataclasses.replace(PHASE, name=str(i), **change)
      for i, change in enumerate(changes)
  ))


def make_params():
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return {
      'h_0': {'mlp': {
          'wi': {'kernel': draw(8, 12), 'bias': draw(12)},
          'wo': {'kernel': draw(12, 8)},
      }},
      'ln_f': {'scale': draw(8)},
      'wte': {'embedding': draw(9, 8)},
  }


def make_grads(step, size=1.0):
  rng = np.random.default_rng(step + 1)
  draw = lambda x: jnp.asarray(size * rng.normal(size=x.shape), jnp.float32)
  return jax.tree.map(draw, make_params())


def run(*args, **kwargs):
  """Returns parameters and state after some steps of a named optimizer."""
  return list(run_all(*args, **kwargs))[-1]


def run_all(plan, steps, params=None, sizes=None, **fields):
  """Yields parameters and state: the first, and those after each step."""
  tx = create_optimizer(
      read_optimizer(fields, 'optimizer'), plan, where=models.sparsifiable,
      key=jax.random.key(0),
  )

  def gradients(step, params):
    grads = make_grads(step, sizes[step] if sizes else 1.0)
    return jax.tree.map(lambda p, g: g.reshape(p.shape), params, grads)

  return trajectory(tx, params or make_params(), gradients, steps)


def assert_close(actual, want, **tolerance):
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, want
  )


def decays(path):
  return path[-1].key in ('kernel', 'embedding')


@pytest.mark.parametrize('fields', [
    dict(name='lion', b1=0.8, b2=0.9), dict(name='sgd'),
], ids=['lion', 'sgd, which has no decay of its own'])
def test_steps_are_those_of_the_optimizer_written_out(fields):
  actual, _ = run(make_plan({}, RESTARTED), 5, clip_norm=HUGE, **fields)

  def written_out(path, p, *grads):
    moment = 0
    for step, g in enumerate(grads):
      if step == 3:
        moment = 0  # Restarted; the learning rate is not.
      decay = (0.1 if step < 3 else 0.3) * decays(path)
      lion = np.sign(0.8 * moment + 0.2 * g)
      direction = lion if fields['name'] == 'lion' else g
      moment = 0.9 * moment + 0.1 * g
      p = p - 0.1 * (1 - step / 10) * (direction + decay * p)
    return p

  want = jax.tree_util.tree_map_with_path(
      written_out, make_params(), *map(make_grads, range(5))
  )
  assert_close(actual, want, rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_by_their_global_norm():
  plan = make_plan({'weight_decay': 0.0})
  params, _ = run(plan, 1, name='sgd', clip_norm=0.5)
  moved = jax.tree.map(jnp.subtract, make_params(), params)
  np.testing.assert_allclose(optax.tree.norm(moved), 0.1 * 0.5, rtol=1e-4)


def test_optax_adamw_by_its_module_is_adamw():
  plan = make_plan({}, RESTARTED)
  fields = dict(b1=0.9, b2=0.95, eps=1e-8, clip_norm=1.0)
  ours, _ = run(plan, 5, **fields)
  theirs, _ = run(plan, 5, name='optax:adamw', **fields)
  assert_close(theirs, ours, rtol=1e-5, atol=1e-6)


def test_muon_orthogonalizes_hidden_matrices_and_adamw_has_the_rest():
  plan = make_plan({'weight_decay': 0.0})
  params, _ = run(plan, 1, name='muon', clip_norm=HUGE, consistent_rms=0.2)
  adam, _ = run(
      plan, 1, name='nadamw', b1=0.9, b2=0.999, eps=1e-8, clip_norm=HUGE
  )
  for name in ('ln_f', 'wte'):
    assert_close(params[name], adam[name], rtol=1e-5)
  before = make_params()['h_0']['mlp']
  for name in ('wi', 'wo'):
    moved = before[name]['kernel'] - params['h_0']['mlp'][name]['kernel']
    values = np.linalg.svd(moved / (0.1 * 0.2 * 12 ** 0.5), compute_uv=False)
    assert ((0.6 < values) & (values < 1.3)).all(), values


def test_muon_decays_the_embedding_and_no_norm():
  still = {'learning_rate': optax.constant_schedule(0.5)}
  with_decay, _ = run(make_plan(still), 1, name='muon', clip_norm=1.0)
  without, _ = run(
      make_plan(still | {'weight_decay': 0.0}), 1, name='muon', clip_norm=1.0
  )
  removed = jax.tree.map(jnp.subtract, without, with_decay)
  want = jax.tree_util.tree_map_with_path(
      lambda path, p: 0.5 * 0.1 * p * decays(path), make_params()
  )
  assert_close(removed, want, rtol=1e-4, atol=1e-6)


def test_muon_treats_stacked_layers_as_separate_matrices():
  def stack(params):
    stacked = jax.tree.map(lambda x: x[None], params['h_0'])
    return params | {'h_0': stacked}

  plan = make_plan({})
  fields = dict(name='muon', clip_norm=1.0)
  flat, _ = run(plan, 3, **fields)
  stacked, _ = run(plan, 3, stack(make_params()), **fields)
  assert_close(stacked, stack(flat), rtol=1e-5, atol=1e-6)


def test_schedule_free_gets_the_rate_and_the_decay_of_the_plan():
  rate = {'learning_rate': optax.constant_schedule(0.05)}
  actual, _ = run(
      make_plan(rate), 4, name='schedule_free_adamw', b1=0.8, clip_norm=HUGE
  )
  tx = optax.contrib.schedule_free_adamw(0.05, b1=0.8, weight_decay=0.1)
  want = make_params()
  state = tx.init(want)
  for step in range(4):
    updates, state = tx.update(make_grads(step), state, want)
    want = optax.apply_updates(want, updates)
  assert_close(actual, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', slow_except(['lion', 'adafactor'], [
    'lion', 'muon', 'adafactor', 'schedule_free_adamw', 'prodigy', 'noisy_sgd',
]))
def test_pruned_weights_stay_exactly_zero_and_states_keep_their_types(name):
  rigl = dict(
      name='rigl', sparsity=0.5, update_every=1, update_until=3
  )
  plan = make_plan({'algorithm': rigl, 'steps': 4}, RESTARTED)
  more = {'seed': 1} if name == 'noisy_sgd' else {}
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  trained = list(run_all(plan, 6, name=name, clip_norm=1.0, **more))
  _, first = trained[0]
  for params, state in trained:
    spdf.check_zeros(params, state)
    assert shapes(state) == shapes(first)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(params))


def test_optimizers_of_optax_are_known_by_name():
  named = {'adafactor', 'lamb', 'lion', 'muon', 'nadamw', 'prodigy', 'sgd',
           'schedule_free_adamw', 'schedule_free_sgd', 'sign_sgd'}
  assert named <= OPTIMIZERS.keys()
  assert not {'scale_by_rprop', 'chain', 'schedule_free'} & OPTIMIZERS.keys()


@pytest.mark.parametrize('name', sorted(OPTIMIZERS.keys() - UNFIT - {'adamw'}))
def test_all_but_six_optimizers_of_optax_suit_a_model_with_defaults(name):
  config = read_optimizer(dict(name=name, clip_norm=1.0), 'optimizer')
  params = jax.eval_shape(make_params)
  check_optimizer(config, params, models.sparsifiable)


def test_states_with_empty_arrays_are_refused_before_training():
  config = read_optimizer(dict(name='galore', clip_norm=1.0), 'optimizer')
  with pytest.raises(ValueError, match="'galore' has empty arrays in its"):
    check_optimizer(config, jax.eval_shape(make_params), models.sparsifiable)


@pytest.mark.parametrize('fields, message', [
    (dict(name='lyon'), "optimizer 'lyon' is unknown; did you mean 'lion'"),
    (dict(name='lion', eps=1e-8), "'lion': got an unexpected .* 'eps'; its"),
    (dict(name='dpsgd'), "'dpsgd': missing a required argument: 'l2_norm_cl"),
    (dict(name='lion', learning_rate=1.0), 'learning_rate is 1.0, but fields '
     'of the phases set this argument; remove it'),
    (dict(name='muon', adam_weight_decay=0.1), 'fields of the phases set'),
    (dict(name='lion', mask=True), 'mask is True, but parameters of the m'),
    (dict(name='lion', b1=float('nan')), 'optimizer.b1 is nan; it must be'),
    (dict(name='lion', clip_norm=0.0), 'clip_norm is 0.0; give a positive'),
    (dict(name='lion', clip_norm='1'), "clip_norm' is '1'; it must be a num"),
    (dict(name='lion', clip_norm=None), "clip_norm' is None; it must be a nu"),
    (dict(name=3), "'optimizer.name' is 3; it must be text"),
    (dict(name='adamw', b3=0.9), "config field 'optimizer.b3' is unknown"),
])
def test_what_is_not_an_optimizer_is_refused_by_parse(fields, message):
  refuse(message, parse, CONFIG | {'optimizer': dict(clip_norm=1.0) | fields})


def own(learning_rate, strength=1.0):
  return optax.sgd(strength * learning_rate)


@pytest.fixture
def own_module(monkeypatch):
  module = types.ModuleType('own_optimizers')
  module.own, module.none, module.number = own, lambda learning_rate: None, 3
  module.fixed = lambda strength=1.0: optax.sgd(strength)
  monkeypatch.setitem(sys.modules, 'own_optimizers', module)


def test_an_own_optimizer_is_used_by_its_name(own_module):
  plan = make_plan({}, RESTARTED)
  fields = dict(name='own_optimizers:own', strength=1.0, clip_norm=1.0)
  actual, _ = run(plan, 5, **fields)
  want, _ = run(plan, 5, name='sgd', clip_norm=1.0)
  assert_close(actual, want, rtol=0, atol=0)


@pytest.mark.parametrize('fields, message', [
    (dict(name='no_such_module:f'), "optimizer 'no_such_module:f' cannot be i"),
    (dict(name='own_optimizers:owm'), "name 'owm' is unknown; did you mean"),
    (dict(name='own_optimizers:number'), 'is 3; give the name of'),
    (dict(name='own_optimizers:own', b1=0.9), "unexpected keyword .* 'b1'"),
    (dict(name='own_optimizers:fixed'), "unexpected .*'learning_rate'"),
    (dict(name='own_optimizers:none'), r'\(TypeError: it returned None, not'),
    (dict(name='lion', b1='high'), r"'lion' fails on this model \(TypeError: "),
    (dict(name='momo'), "'momo' fails on this model .*'value'.*another optimi"),
])
def test_optimizers_are_checked_before_data_is_read(
    own_module, fields, message
):
  config = CONFIG | {'optimizer': dict(clip_norm=1.0) | fields}
  refuse(message, Run.create, config)


def test_a_named_optimizer_is_stored_with_its_arguments():
  fields = dict(name='prodigy', clip_norm=1.0, betas=(0.9, 0.95))
  config = make_config(optimizer=fields)
  stored = json.loads(json.dumps(config.as_dict()))
  assert parse(stored) == config
  assert read_config(stored, 'a file').optimizer == config.optimizer
  assert run_identity(parse(stored)) == run_identity(config)
  assert run_identity(config)['optimizer.betas'] == [0.9, 0.95]


def test_adamw_by_its_name_is_the_same_run_as_without():
  config = make_config()
  named = make_config(optimizer=dict(name='adamw', **CONFIG['optimizer']))
  assert named == config


def test_a_stored_optimizer_that_is_not_known_any_more_is_a_mismatch():
  stored = make_config().as_dict()
  stored['optimizer'] = dict(name='lyon', clip_norm=1.0)
  with pytest.raises(MismatchError, match="another config.*'lyon' is unknown"):
    read_config(stored, 'a file')

"""Dropout is a function of the seed and the step, in training only."""

import dataclasses
import functools
import itertools
import math

from flax import linen as nn
import flax.serialization
import jax
import numpy as np
import optax
import pytest

from spdf_jax import data
from spdf_jax import models
from spdf_jax import sparsity
from spdf_jax import training
from spdf_jax.interop.configs import read_config
from spdf_jax.interop.configs import write_config
from spdf_jax.models.attention import Attention
from spdf_jax.models.gpt import MLP
from spdf_jax.models.llama import GatedMLP
from tests.hf_models import make_params
from tests.refusals import refuse
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import CONFIG
from tests.tiny_run import make_run
from tests.tiny_run import with_programs

RATE = 0.25
V, L, D = 16, 8, 64
KEY = jax.random.key(7)
TOKENS = np.random.default_rng(0).integers(V, size=(4, L), dtype=np.int32)
BATCH = data.Batch(TOKENS, np.roll(TOKENS, 1), np.ones((4, L), np.float32))


@functools.cache
def make_model(preset='gpt-mini', **changes):
  sizes = dict(
      vocab_size=V, n_layers=1, n_heads=2, d_model=D, d_ff=96, max_length=L,
      dropout=RATE,
  )
  return models.create_model(preset, **sizes | changes)


@functools.partial(jax.jit, static_argnums=(0, 1))
def calls_of(name, model, params, tokens, key):
  """Returns inputs and outputs of modules by name, and the logits."""
  calls = []

  def record(function, args, kwargs, context):
    y = function(*args, **kwargs)
    if (context.module.name or '').startswith(name):
      calls.append((args[0], y))
    return y

  with nn.intercept_methods(record):
    logits = model.apply({'params': params}, tokens, rngs={'dropout': key})
  return calls, logits


@functools.partial(jax.jit, static_argnums=0)
def by_hand(config, params, factors):
  """Computes the logits of one layer with given factors at each dropout."""
  p = params['h_0']
  x = params['wte']['embedding'][TOKENS]
  if isinstance(config, models.GPTConfig):
    norm = nn.LayerNorm(epsilon=1e-5)
    attention, mlp = Attention(config), MLP(config)
    x += params['wpe']['embedding'][:L]
    head = params['wte']['embedding'].T
  else:
    norm = nn.RMSNorm(epsilon=config.norm_eps)
    attention = Attention(config, use_bias=False, rotary=config.rotary)
    mlp = GatedMLP(config)
    head = params['head']['kernel']
  call = lambda module, p, x: module.apply({'params': p}, x)
  x *= factors[0]
  x += factors[1] * call(attention, p['attn'], call(norm, p['ln_1'], x))
  x += factors[2] * call(mlp, p['mlp'], call(norm, p['ln_2'], x))
  return call(norm, params['ln_f'], x) @ head


@pytest.mark.parametrize('preset', [
    'gpt-mini', pytest.param('llama-1.3b', marks=pytest.mark.slow),
])
def test_embeddings_and_outputs_of_layers_are_dropped(preset):
  model = make_model(preset)
  params = make_params(model.config)
  calls, logits = calls_of('Dropout', model, params, TOKENS, KEY)
  assert len(calls) == 3
  factors = []
  for x, y in calls:
    kept = np.asarray(y != 0)
    assert abs(kept.mean() - 1 + RATE) < 0.04  # Four standard deviations.
    factors.append(kept / (1 - RATE))
    np.testing.assert_allclose(y, x * factors[-1], rtol=1e-6)
  assert all((a != b).any() for a, b in itertools.combinations(factors, 2))
  wanted = by_hand(model.config, params, factors)
  np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)


def test_layers_draw_masks_of_their_own_and_stay_causal():
  model = make_model(n_layers=2, scan_layers=True, remat='full')
  params = make_params(model.config)
  run = functools.partial(calls_of, 'ln_f', model)
  logits_of = lambda tokens, key: run(params, tokens, key)[1]
  changed = TOKENS.copy()
  changed[:, 5:] = (changed[:, 5:] + 1) % V
  before, after = logits_of(TOKENS, KEY), logits_of(changed, KEY)
  np.testing.assert_array_equal(before[:, :5], after[:, :5])
  assert (before[:, 5:] != after[:, 5:]).any()
  assert (before != logits_of(TOKENS, jax.random.key(8))).any()
  # Outputs of 1 add up to the number of masks that keep an element.
  ones = jax.tree_util.tree_map_with_path(
      lambda path, x: np.full_like(x, path[-1].key == 'bias')
      if path[-2].key in ('wo', 'wd', 'wte', 'wpe') else x, params,
  )
  (stream_BxLxD, _), = run(ones, TOKENS, KEY)[0]
  kept = np.rint((1 - RATE) * stream_BxLxD).astype(int)
  shares = np.bincount(kept.ravel()) / kept.size
  wanted = [
      math.comb(4, k) * (1 - RATE)**k * RATE**(4 - k) for k in range(5)
  ]
  np.testing.assert_allclose(shares, wanted, atol=0.04)


def test_steps_and_micro_batches_have_keys_of_their_own():
  parts = 2
  draw = jax.jit(lambda key: jax.random.normal(key, (4 // parts, L, V)))
  optimizer = sparsity.sparsify(optax.sgd(0.1), sparsity.dense(), key=0)
  step = jax.jit(functools.partial(
      training.train_step, optimizer=optimizer, learning_rate=lambda _: 0.1,
      apply_fn=lambda variables, tokens, rngs: (
          draw(rngs['dropout']) @ variables['params']['kernel']
      ), micro_batches=parts, dropout_key=KEY,
  ))
  first = jax.jit(functools.partial(
      training.create_state, optimizer=optimizer
  ))({'kernel': 2 * np.eye(V, dtype=np.float32)})
  state, stored = first, []
  for i in range(3):
    losses = []
    keys = jax.random.split(jax.random.fold_in(KEY, i), parts)
    for j, key in enumerate(keys):
      logits = np.asarray(draw(key) @ state.params['kernel'])
      targets = BATCH.targets[j::parts, :, None]
      log_sum = np.log(np.exp(logits).sum(-1, keepdims=True))
      losses.append(log_sum - np.take_along_axis(logits, targets, -1))
    stored.append(flax.serialization.to_bytes(state))
    state, metrics = step(state, BATCH)
    np.testing.assert_allclose(metrics['train/loss'], np.mean(losses), 1e-5)
  # A restored state draws the same.
  for data_of_state in stored[1:]:
    again = flax.serialization.from_bytes(first, data_of_state)
    for _ in range(int(again.step), 3):
      again, _ = step(again, BATCH)
    assert_same_arrays(again, state)


def dropping_run(**changes):
  """The tiny run with dropout, without its last phase."""
  run = make_run(model__dropout=RATE, **changes)
  plan = dataclasses.replace(run.plan, phases=run.plan.phases[:2])
  model = models.model_of(run.config.model.sizes)
  return with_programs(run, model=model, plan=plan)


def test_the_key_is_that_of_the_seed_and_nothing_is_stored():
  run, plain = dropping_run(), make_run()
  assert plain.programs.dropout_key is None
  bits = lambda run: jax.random.key_data(run.programs.dropout_key).tolist()
  assert bits(dropping_run()) == bits(run)
  assert bits(dropping_run(seed=1)) != bits(run)
  same = jax.tree.map(
      lambda x, y: x == y, run.programs.abstract_state,
      plain.programs.abstract_state,
  )
  assert jax.tree.all(same)


def test_models_are_evaluated_without_dropout():
  dropping, plain = make_model(), make_model(dropout=0.0)
  params = make_params(plain.config)
  cache = models.create_cache(plain, 4, L)
  for method in (
      lambda model: model.apply({'params': params}, TOKENS),
      lambda model: model.apply(
          {'params': params, 'cache': cache}, TOKENS, TOKENS, mutable=['cache']
      ),
  ):
    programs = [
        str(jax.make_jaxpr(method, static_argnums=0)(model))
        for model in (dropping, plain)
    ]
    assert programs[0] == programs[1]


@pytest.mark.parametrize('rate', [1, float('nan'), 'high'])
def test_a_dropout_rate_of_one_or_more_is_refused(rate):
  config = CONFIG | {'model': CONFIG['model'] | dict(dropout=rate)}
  refuse('dropout.* is .*; ', training.parse, config)


def test_exports_have_no_dropout():
  fields = write_config(make_model().config, 'float32')
  assert fields['resid_pdrop'] == fields['embd_pdrop'] == 0
  plain = make_model(dropout=0.0).config
  assert read_config(fields | dict(resid_pdrop=0.1)) == plain

"""A user's own model trains as ours do, and is refused in a sentence."""

import functools
import json
import sys
import types

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import data
from spdf_jax import models
from spdf_jax.accelerator import crossovers
from spdf_jax.accelerator import native
from spdf_jax.sparsity.selection import select
from spdf_jax.sparsity.selection import to_layers
from spdf_jax.training import parse
from spdf_jax.training import Run
from spdf_jax.training.checkpoints.identity import read_config
from spdf_jax.training.checkpoints.identity import run_identity
from spdf_jax.training.own_models import create_own_model
from spdf_jax.training.own_models import OwnSizes
from spdf_jax.training.step.matmul import sparse_steps
from spdf_jax.training.step.matmul import without_masks
from spdf_jax.training.step.state import create_state
from spdf_jax.training.step.step import train_step
from tests.experiments.guides_test import GUIDES
from tests.experiments.guides_test import scripts
from tests.refusals import refuse
from tests.tiny_run import CONFIG

pytestmark = pytest.mark.ci

SIZES = dict(vocab_size=17, d_model=64, n_layers=2, max_length=16)
OWN = dict(preset='own_model:make_model', **SIZES)
TOKENS = np.random.default_rng(0).integers(17, size=(4, 16), dtype=np.int32)


class Small(nnx.Module):
  """An NNX model of one hidden matrix."""

  def __init__(self, vocab_size, d_model, rngs):
    self.embed = nnx.Embed(vocab_size, d_model, rngs=rngs)
    self.hidden = nnx.Linear(d_model, d_model, rngs=rngs)
    self.head = nnx.Linear(d_model, vocab_size, rngs=rngs)

  def __call__(self, tokens):
    return self.head(jax.nn.gelu(self.hidden(self.embed(tokens))))


def make_nnx(vocab_size, d_model, n_layers, max_length, rngs):
  del n_layers, max_length
  return Small(vocab_size, d_model, rngs), {'hidden': True}


class Dropping(nnx.Module):

  def __init__(self, rngs):
    self.drop = nnx.Dropout(0.1, rngs=rngs)
    self.hidden = nnx.Linear(8, 8, rngs=rngs)

  def __call__(self, tokens):
    return self.drop(self.hidden(jnp.ones((*tokens.shape, 8))))


@pytest.fixture(autouse=True)
def module(monkeypatch):
  """The module of the guide, and wrong ones."""
  guide, = (path for path in GUIDES if path.stem == 'own_model')
  text = dict(scripts(guide))['my_model.py']
  assert len(text.strip().splitlines()) <= 35
  module = types.ModuleType('own_model')
  monkeypatch.setitem(sys.modules, 'own_model', module)
  exec(text, module.__dict__)
  module.make_nnx = make_nnx
  module.alone = lambda **sizes: module.Mixer(**sizes)
  module.number = lambda **sizes: (3, True)
  module.nothing = lambda **sizes: (module.Mixer(**sizes), {'no_such': True})
  module.wide = lambda vocab_size, **sizes: (
      module.Mixer(vocab_size + 1, **sizes), {'Dense_*': True}
  )
  module.normed = lambda **sizes: (
      nn.Sequential([nn.Embed(17, 17), nn.BatchNorm(False), nn.Dense(17)]),
      {'layers_2': True},
  )
  module.dropping = lambda rngs, **sizes: (Dropping(rngs), {'hidden': True})
  return module


def train(name, matmul, steps=12):
  """Returns losses and state of a run with masks of 50 %."""
  model = create_own_model(f'own_model:{name}', OwnSizes(SIZES))
  tx = spdf.sparsify(
      optax.adam(1e-2), spdf.static(0.5),
      where=model.where, key=0,
  )
  state = create_state(
      model.init(jax.random.key(0), TOKENS)['params'], tx, None
  )
  batch = data.Batch(TOKENS, TOKENS, np.ones(TOKENS.shape, np.float32))
  losses = []
  step = jax.jit(functools.partial(
      train_step, apply_fn=without_masks(model.apply), optimizer=tx,
      learning_rate=lambda step: 1e-2,
      sparse_steps=sparse_steps(matmul, model, tokens=64),
  ))
  for _ in range(steps):
    state, metrics = step(state, batch)
    losses.append(float(metrics['train/loss']))
  return losses, state


@pytest.mark.parametrize('name', ['make_model', 'make_nnx'])
def test_a_sparse_model_learns_and_keeps_exact_zeros(name):
  losses, state = train(name, 'dense')
  spdf.check_zeros(state.params, state.opt_state)
  assert spdf.summarize(spdf.get_mask(state.opt_state), state.params
                        ).sparsity == pytest.approx(0.5, abs=1e-3)
  assert losses[-1] < 0.8 * losses[0]


@pytest.mark.skipif(not native.is_available(), reason='no native kernels here')
@pytest.mark.parametrize('name', ['make_model', 'make_nnx'])
def test_native_kernels_compute_the_products_of_an_own_model(name):
  model = create_own_model(f'own_model:{name}', OwnSizes(SIZES))
  assert sparse_steps('auto', model, tokens=64).crossover == (
      crossovers.crossover('float32', SIZES['d_model'], 64)
  )
  assert sparse_steps('dense', model, tokens=64) is None
  losses, state = train(name, 'native')
  spdf.check_zeros(state.params, state.opt_state)
  np.testing.assert_allclose(losses, train(name, 'dense')[0], rtol=1e-4)


def protocol_members(protocol):
  return [name for name in vars(protocol) if not name.startswith('_')]


@pytest.mark.parametrize('make', [
    lambda: models.create_model('gpt-mini', n_layers=1, vocab_size=17),
    lambda: models.create_model('llama-1.3b', **SIZES, n_heads=2, d_ff=64),
    lambda: create_own_model('own_model:make_model', OwnSizes(SIZES)),
    lambda: create_own_model('own_model:make_nnx', OwnSizes(SIZES)),
])
def test_all_models_follow_one_protocol(make):
  model = make()
  for name in protocol_members(models.Model):
    assert hasattr(model, name), name
  for name in protocol_members(models.Sizes):
    assert hasattr(model.config, name), name
  variables = model.init(jax.random.key(0), TOKENS)
  logits = model.apply(variables, TOKENS)
  assert logits.shape == (*TOKENS.shape, model.config.vocab_size)
  params = variables['params']
  layers = to_layers(params, params, select(model.where, params))
  hidden = sum(x.size for x in jax.tree.leaves(layers))
  assert hidden == model.config.n_layers * model.config.hidden_weights
  other = model.with_lowering('native')
  np.testing.assert_array_equal(other.apply(variables, TOKENS), logits)
  masks = jax.tree.map(lambda p: jnp.ones(p.shape, bool), params)
  jaxpr = jax.make_jaxpr(other.apply)(variables | {'masks': masks}, TOKENS)
  assert 'lowering=native' in str(jaxpr)


own = lambda **fields: dict(model=OWN | fields)


@pytest.mark.parametrize('changes, message', [
    (own(preset='no_such:f'), "model 'no_such:f' cannot be imported"),
    (own(preset='own_model:makemodel'), "'makemodel' is unknown; did you mea"),
    (own(n_leyers=2), r"'own_model:make_model' fails \(TypeError: .*n_leyers"),
    (own(preset='own_model:alone'), 'returned Mixer, not the pair'),
    (own(preset='own_model:number'), 'the module is int, not a flax'),
    (own(preset='own_model:nothing'), "fails .ValueError: .*no_such"),
    (own(preset='own_model:wide'), r'returns \(1, 2, 18\) for tokens'),
    (own(preset='own_model:normed'), 'than parameters, .*batch_stats'),
    (own(preset='own_model:dropping'), 'than parameters, .*other'),
    (own(preset='own_model:make_nnx', dropout=0.1),
     "model.dropout is 0.1, but model 'own_model:make_nnx' is of NNX"),
    (own(d_model=None), 'model.d_model is None; a model of your own needs'),
    (own(vocab_size=0), 'model.vocab_size is 0; a model of your own needs'),
    (own(max_length=4), 'length 8, .* model.max_length is 4'),
    (dict(storage='compact'), "storage is 'compact' and the model"),
    (dict(loss=CONFIG['loss'] | dict(chunk=4)), 'loss.chunk is 4, which'),
    (dict(data=CONFIG['data'] | dict(task='e2e'),
          evaluation=CONFIG['evaluation'] | dict(generations=4)),
     'evaluation.generations is 4, which the model'),
])
def test_models_are_checked_before_data_is_read(changes, message):
  refuse(message, Run.create, CONFIG | own() | changes)


def test_a_model_with_a_dropout_argument_gets_a_key_in_training():
  assert not OwnSizes(SIZES).dropout
  assert OwnSizes(SIZES | dict(dropout=0.1)).dropout == 0.1


def test_the_arguments_are_stored_and_nothing_is_imported():
  config = parse(CONFIG | {'model': OWN | dict(preset='no_such:f')})
  stored = json.loads(json.dumps(config.as_dict()))
  assert parse(stored) == config
  assert read_config(stored, 'a file').model == config.model
  assert run_identity(config)['model.d_model'] == 64

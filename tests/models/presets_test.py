"""Presets have the parameters of the papers, counted from shapes alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax import models
from spdf_jax.sparsity import selection
from spdf_jax.sparsity.selection import to_layers
from spdf_jax.sparsity.trees import path_name
from tests.tiers import slow_except

# Layers, width, feed-forward, vocabulary, positions, and the printed number.
GPTS = {
    'gpt-mini': (3, 128, 512, 1024, 128, 0.74e6),
    'gpt2-small': (12, 768, 3072, 50257, 2048, 125e6),
    'gpt3-xl': (24, 2048, 8192, 50257, 2048, 1.3e9),
    'gpt3-175b': (96, 12288, 49152, 50257, 2048, 175e9),
    'gpt3-1.3b': (24, 2048, 8192, 50267, 2048, 1.3e9),
    'cerebras-gpt-111m': (10, 768, 3072, 50257, 2048, 111e6),
    'cerebras-gpt-256m': (14, 1088, 4352, 50257, 2048, 256e6),
    'cerebras-gpt-590m': (18, 1536, 6144, 50257, 2048, 590e6),
    'cerebras-gpt-1.3b': (24, 2048, 8192, 50257, 2048, 1.3e9),
    'cerebras-gpt-2.7b': (32, 2560, 10240, 50257, 2048, 2.7e9),
    'cerebras-gpt-6.7b': (32, 4096, 16384, 50257, 2048, 6.7e9),
    'cerebras-gpt-13b': (40, 5120, 20480, 50257, 2048, 13e9),
}
LLAMAS = {
    'llama-1.3b': (24, 2048, 5504, 32000, 1.3e9),
    'llama2-7b': (32, 4096, 11008, 32000, 6_738_415_616),
}


def gpt_parameters(layers, d, ff, vocabulary, positions):
  attention = 4 * (d * d + d)
  feed_forward = d * ff + ff + ff * d + d
  norms = 2 * 2 * d
  return (
      layers * (attention + feed_forward + norms)
      + (vocabulary + positions) * d  # The head is the embedding, transposed.
      + 2 * d
  )


def llama_parameters(layers, d, ff, vocabulary):
  return layers * (4 * d * d + 3 * d * ff + 2 * d) + 2 * vocabulary * d + d


def abstract_params(model):
  tokens = jnp.zeros((1, 2), jnp.int32)
  return jax.eval_shape(model.init, jax.random.key(0), tokens)['params']


def count(params):
  return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))


def test_parameters_of_every_preset_are_counted():
  assert set(models.PRESETS) == set(GPTS) | set(LLAMAS)


@pytest.mark.parametrize('scan_layers, preset', slow_except(
    [(True, preset) for preset in models.PRESETS] + [(False, 'gpt-mini')],
    itertools.product((False, True), models.PRESETS),
))
def test_presets_have_the_parameters_of_the_papers(preset, scan_layers):
  *sizes, printed = GPTS.get(preset) or LLAMAS[preset]
  formula = gpt_parameters if preset in GPTS else llama_parameters
  params = abstract_params(models.create_model(preset, scan_layers=scan_layers))
  assert count(params) == formula(*sizes)
  assert abs(count(params) / printed - 1) < 0.04


@pytest.mark.parametrize('preset', models.PRESETS)
def test_hidden_matrices_are_sparsified_and_nothing_else(preset):
  model = models.create_model(preset, scan_layers=True)
  params = abstract_params(model)
  axes = selection.select(models.sparsifiable, params)
  chosen = {
      path_name(path).removesuffix('/kernel')
      for (path, _), a in zip(jax.tree_util.tree_leaves_with_path(params), axes)
      if a is not None
  }
  want = {f'h/attn/{w}' for w in ('wq', 'wk', 'wv', 'wd')}
  want |= {'h/mlp/wi', 'h/mlp/wo'}
  if isinstance(model.config, models.LlamaConfig):
    want |= {'h/mlp/wg'}
  assert chosen == want
  layers = to_layers(params, params, axes)
  shape = model.config
  assert count(layers) == shape.n_layers * shape.hidden_weights


def test_fields_of_a_llama_can_be_overridden():
  model = models.create_model('llama-1.3b', n_kv_heads=4, rope_theta=5e5)
  config = model.config
  assert (config.kv_heads, config.head_size) == (4, 128)
  weights = sum(
      x.size for path, x in jax.tree_util.tree_leaves_with_path(
          abstract_params(model)['h_0']
      ) if 'kernel' in path_name(path)
  )
  assert weights == config.hidden_weights


@pytest.mark.parametrize('arguments, message', [
    (dict(name='gpt2_small'), "preset 'gpt2_small'.*'gpt2-small'"),
    (dict(name='gpt-mini', n_layer=2), "field 'n_layer' .*'n_layers'"),
    (dict(name='llama-1.3b', activation='gelu'),
     "model field 'activation' is unknown"),
])
def test_unknown_names_are_refused_with_the_nearest(arguments, message):
  with pytest.raises(ValueError, match=message):
    models.create_model(arguments.pop('name'), **arguments)

"""Small models, masks and Hugging Face directories of tests of interop."""

import json

import jax
import numpy as np
import pytest

from spdf_jax import interop
from spdf_jax.models import GPTConfig
from spdf_jax.models import LlamaConfig
from spdf_jax.models import model_of
from spdf_jax.models import sparsifiable
from spdf_jax.sparsity import trees

CONFIGS = {
    'gpt': GPTConfig(23, 2, 2, 16, 24, 8),
    'gpt exact': GPTConfig(
        23, 1, 2, 16, 64, 8, activation='gelu', attention_by_layer=True
    ),
    'llama': LlamaConfig(23, 2, 4, 16, 24, 8),
    'llama grouped': LlamaConfig(23, 2, 4, 16, 24, 8, n_kv_heads=2),
    'llama tied': LlamaConfig(23, 2, 4, 16, 24, 8, tied=True, norm_eps=1e-6),
    'llama heads': LlamaConfig(23, 1, 4, 16, 24, 8, n_kv_heads=1, head_dim=6),
    'llama linear': LlamaConfig(
        23, 1, 4, 16, 24, 8, rope_scaling='linear', rope_factor=4.0,
        rope_theta=500.0,
    ),
    'llama 3': LlamaConfig(
        23, 1, 4, 16, 24, 8, rope_scaling='llama3', rope_factor=8.0,
        rope_low_freq_factor=1.0, rope_high_freq_factor=3.0,
        rope_original_length=4, rope_theta=5e5,
    ),
    'qwen2': LlamaConfig(23, 1, 4, 16, 24, 8, n_kv_heads=2, qkv_bias=True),
    'qwen3': LlamaConfig(23, 1, 4, 16, 24, 8, head_dim=6, qk_norm=True),
}
GPT, LLAMA = CONFIGS['gpt'], CONFIGS['llama grouped']


def make_params(config):
  """Parameters of which none is zero."""
  tokens = np.zeros((1, 2), np.int32)
  shapes = jax.eval_shape(model_of(config).init, jax.random.key(0), tokens)
  rng = np.random.default_rng(1)
  return jax.tree.map(
      lambda x: rng.normal(0.1, 0.3, x.shape).astype(x.dtype), shapes['params']
  )


def make_mask(params, sparsity=0.75):
  rng = np.random.default_rng(2)
  return jax.tree_util.tree_map_with_path(
      lambda path, x: rng.random(x.shape) >= sparsity if sparsifiable(
          trees.path_name(path), x
      ) else None,
      params,
  )


def masked(params, mask):
  return jax.tree.map(
      lambda m, x: x if m is None else np.where(m, x, np.float32(0)),
      mask, params, is_leaf=lambda x: x is None,
  )


def save(directory, config, **options):
  """Saves a model of random weights and masks; returns both."""
  params = make_params(config)
  mask = make_mask(params)
  interop.save_hf(directory, config, params, mask, **options)
  return params, mask


def assert_same_bits(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for (path, x), y in zip(trees.by_name(one).items(), jax.tree.leaves(other)):
    assert x.dtype == y.dtype and x.shape == y.shape, path
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


def change_config(directory, **changes):
  """Changes fields of a config.json; returns its path."""
  path = directory / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))
  return path


def change_weights(directory, change, name='model.safetensors'):
  """Applies a function to the dict of a file's tensors; returns the path."""
  safetensors = pytest.importorskip('safetensors.numpy')
  path = directory / name
  tensors = {k: np.array(x) for k, x in safetensors.load_file(path).items()}
  change(tensors)
  safetensors.save_file(tensors, path, {'format': 'pt'})
  return path

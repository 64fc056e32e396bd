"""Models of other repositories, as they are, under `skip_zeros`.

`SPDF_CLONES` names a folder of clones of google-deepmind/nanodo, google/flax
and surgeglobal/nanoJAXGPT, by the last part of their names.
"""

import importlib
import sys

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import pytest

import spdf_jax as spdf
from spdf_jax import extras
from tests.accelerator.skip_zeros_models_test import check_twenty_steps
from tests.accelerator.skip_zeros_test import needs_kernels
from tests.real_data import clone_path

pytestmark = [pytest.mark.slow, needs_kernels]
VOCABULARY, LENGTH, WIDTH = 64, 32, 64
TOKENS = jnp.zeros((1, LENGTH), jnp.int32)


@pytest.fixture
def import_from(monkeypatch):
  """Returns a function that imports a module from a folder, for one test."""
  before = {*sys.modules}

  def import_module(path, name):
    monkeypatch.syspath_prepend(path)
    return importlib.import_module(name)

  yield import_module
  for name in {*sys.modules} - before:
    del sys.modules[name]  # Clones have modules of equal names.


def nanodo(import_from, **options):
  model = import_from(clone_path('nanodo'), 'nanodo.model')
  module = model.TransformerDo(model.DoConfig(
      D=WIDTH, H=2, L=LENGTH, N=2, V=VOCABULARY, F=2 * WIDTH, **options
  ))
  params = module.init(jax.random.key(0), TOKENS)['params']
  logits = lambda params, x: module.apply({'params': params}, x)
  return params, logits, spdf.where.per_head


def lm1b(import_from):
  models = import_from(clone_path('flax', 'examples', 'lm1b'), 'models')
  module = models.TransformerLM(models.TransformerConfig(
      vocab_size=VOCABULARY, output_vocab_size=VOCABULARY, emb_dim=WIDTH,
      num_heads=2, num_layers=2, qkv_dim=WIDTH, mlp_dim=2 * WIDTH,
      max_len=LENGTH, deterministic=True,
  ))
  params = nn.unbox(module.init(jax.random.key(0), TOKENS)['params'])
  logits = lambda params, x: module.apply({'params': params}, x)
  return params, logits, spdf.where.per_head


def gemma(import_from, kv_heads):
  folder = clone_path('flax', 'examples', 'gemma')
  transformer = import_from(folder, 'transformer')
  kinds = import_from(folder, 'transformer_cfg').AttentionType
  config = transformer.TransformerConfig(
      num_layers=2, num_embed=VOCABULARY, embed_dim=WIDTH,
      hidden_dim=2 * WIDTH, num_heads=4, head_dim=16, num_kv_heads=kv_heads,
      final_logit_softcap=30.0, use_post_attn_norm=True,
      use_post_ffw_norm=True, use_qk_norm=True, sliding_window_size=8,
      attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL),
  )
  model = transformer.Transformer(config, rngs=nnx.Rngs(0))
  graph, params, rest = nnx.split(model, nnx.Param, ...)

  def logits(params, x):
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape)
    mask = transformer.make_causal_attn_mask(jnp.ones(x.shape, bool))
    model = nnx.merge(graph, params, rest)
    return model(x, positions, None, mask)[0]

  of_heads = {
      '*/qkv_einsum': spdf.MatrixAxes(2, (0, 1, 3)),
  } if kv_heads == 4 else {
      '*/q_einsum': spdf.MatrixAxes(1, (0, 2)),
      '*/kv_einsum': spdf.MatrixAxes(2, (0, 1, 3)),
  }
  return params, logits, of_heads | {
      '*/attn_vec_einsum': spdf.MatrixAxes((0, 1), 2),
      '*': spdf.where.hidden_matrices,
  }


def nanojaxgpt(import_from):
  eqx = extras.require('equinox', 'notebooks')
  module = import_from(clone_path('nanoJAXGPT'), 'executables.model')
  model = module.GPT.create_instance(
      module.GPTConfig(
          block_size=LENGTH, vocab_size=VOCABULARY, n_layer=2, n_head=2,
          n_embd=WIDTH,
      ), jax.random.key(0),
  )
  params, static = eqx.partition(model, eqx.is_inexact_array)

  def logits(params, x):
    model = eqx.combine(params, static)
    return jax.vmap(lambda row: model(row, train_mode=True))(x)

  return params, logits, {
      '*/swiglu/[WV]': spdf.MatrixAxes(0, 1),
      '*/h/*/weight': lambda path, leaf: (
          spdf.MatrixAxes(1, 0) if leaf.ndim == 2 else False
      ),
  }


MODELS = {
    'nanodo': lambda load: nanodo(load, fsdp_enabled=False),
    'nanodo, partitioned and rematted': lambda load: nanodo(load, remat=True),
    "Flax's lm1b": lm1b,
    "NNX's gemma, multi-query": lambda load: gemma(load, kv_heads=1),
    "NNX's gemma, grouped": lambda load: gemma(load, kv_heads=2),
    "NNX's gemma": lambda load: gemma(load, kv_heads=4),
    'nanoJAXGPT, Equinox': nanojaxgpt,
}


@pytest.mark.parametrize('name', MODELS)
def test_models_of_other_libraries_train_as_with_masked_dense_products(
    name, import_from
):
  params, logits, where = MODELS[name](import_from)
  table = check_twenty_steps(params, logits, where, VOCABULARY)
  assert table.dense == {} and len(table.weights) >= 8

"""Models of listed matrices generate what dense models do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sparse_params import make_sparse_params

from spdf_jax import interop
from spdf_jax import models
from spdf_jax.accelerator import list_params
from spdf_jax.accelerator import ListedMatrix
from spdf_jax.accelerator import native
from spdf_jax.evaluation import beam_search
from spdf_jax.evaluation import BeamSearch
from spdf_jax.evaluation import CachedModel
from spdf_jax.evaluation import generate

SIZES = dict(
    vocab_size=23, n_layers=2, n_heads=2, d_model=16, d_ff=24, max_length=16
)
GPT, LLAMA = models.GPTConfig(**SIZES), models.LlamaConfig(**SIZES)
PROMPTS = [[3], [7, 1, 19], [2, 2]]
SEARCH = dict(max_new_tokens=6, end_of_text=0, batch_size=3, length=16)


def native_model(config):
  return models.model_of(dataclasses.replace(config, lowering='native'))


def dense_and_sparse(config):
  params, mask = make_sparse_params(config, 0.7)
  return (
      (CachedModel(models.model_of(config)), params),
      (CachedModel(native_model(config)), list_params(params, mask)),
  )


@pytest.mark.parametrize('config', [
    dataclasses.replace(GPT, n_layers=1),
    pytest.param(LLAMA, marks=pytest.mark.slow),
    pytest.param(
        dataclasses.replace(GPT, scan_layers=True), marks=pytest.mark.slow
    ),
])
def test_greedy_texts_are_those_of_the_dense_model(config):
  found, wanted = (
      generate(*model, PROMPTS, **SEARCH) for model in dense_and_sparse(config)
  )
  assert found == wanted and any(found)


@pytest.mark.slow
def test_200_greedy_texts_are_those_of_the_dense_model():
  config = dataclasses.replace(
      GPT, vocab_size=257, n_layers=4, d_model=64, d_ff=256, max_length=48
  )
  rng = np.random.default_rng(0)
  prompts = [
      rng.integers(1, 257, rng.integers(1, 17)).tolist() for _ in range(200)
  ]
  found, wanted = (
      generate(
          *model, prompts, max_new_tokens=32, end_of_text=0, batch_size=20,
          length=48,
      ) for model in dense_and_sparse(config)
  )
  assert found == wanted and len({*map(tuple, found)}) > 50


@pytest.mark.slow
def test_the_best_beams_are_those_of_the_dense_model():
  found, wanted = (
      beam_search(*model, PROMPTS, search=BeamSearch(beams=3), **SEARCH)
      for model in dense_and_sparse(GPT)
  )
  assert found == wanted and any(found)


@pytest.mark.skipif(
    not native.is_available(), reason='there are no native kernels here'
)
def test_a_listed_model_multiplies_by_no_hidden_matrix():
  params, mask = make_sparse_params(GPT, 0.7)
  tokens = np.array([[3, 1]])
  apply = lambda params: native_model(GPT).apply({'params': params}, tokens)
  text = jax.jit(apply).lower(list_params(params, mask)).compile().as_text()
  assert text.count('custom_call_target="spdf_listed_matmul"') == 12
  assert 'f32[16,24]' not in text and 'f32[24,16]' not in text


@pytest.mark.parametrize('config', [GPT, LLAMA])
def test_a_compact_export_is_listed_as_its_dense_weights_are(config, tmp_path):
  params, mask = make_sparse_params(config, 0.7)
  interop.save_hf(tmp_path, config, params, mask, format='compact')
  loaded = interop.load_listed(tmp_path)
  assert loaded.config == dataclasses.replace(config, lowering='native')
  wanted = list_params(params, mask)
  assert jax.tree.structure(loaded.params) == jax.tree.structure(wanted)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, wanted)
  assert isinstance(loaded.params['h_0']['attn']['wk']['kernel'], ListedMatrix)


@pytest.mark.parametrize('stored, asked, found', [
    ('float16', None, 'float32'), ('bfloat16', None, 'bfloat16'),
    ('float32', 'bfloat16', 'bfloat16'),
])
def test_values_have_the_dtype_of_the_file_or_the_one_given(
    stored, asked, found, tmp_path
):
  params, mask = make_sparse_params(GPT, 0.7)
  interop.save_hf(
      tmp_path, GPT, params, mask, format='compact', dtype=stored
  )
  loaded = interop.load_listed(tmp_path, dtype=asked)
  kernel = loaded.params['h_1']['mlp']['wo']['kernel']
  assert kernel.values.dtype == found
  wanted = params['h_1']['mlp']['wo']['kernel'].T[
      mask['h_1']['mlp']['wo']['kernel'].T
  ].astype(jnp.dtype(stored)).astype(jnp.dtype(found))
  np.testing.assert_array_equal(kernel.values, np.pad(wanted, (0, 8)))
  assert loaded.params['wte']['embedding'].dtype == np.float32


@pytest.mark.parametrize('path', [
    ('wte', 'embedding'), ('head', 'kernel'), ('ln_f', 'scale'),
])
def test_only_matrices_that_models_take_as_lists_are_listed(path, tmp_path):
  params, mask = make_sparse_params(LLAMA, 0.7)
  group, leaf = path
  mask[group][leaf] = np.ones(params[group][leaf].shape, bool)
  interop.save_hf(tmp_path, LLAMA, params, mask, format='compact')
  loaded = interop.load_listed(tmp_path).params
  assert isinstance(loaded[group][leaf], np.ndarray)
  np.testing.assert_array_equal(loaded[group][leaf], params[group][leaf])
  tokens = np.array([[3, 1]])
  native_model(LLAMA).apply({'params': loaded}, tokens)


def change_compact(directory, change):
  safetensors = pytest.importorskip('safetensors.numpy')
  params, mask = make_sparse_params(GPT, 0.7)
  interop.save_hf(directory, GPT, params, mask, format='compact')
  path = directory / 'model.compact.safetensors'
  tensors = safetensors.load_file(path)
  change(tensors)
  safetensors.save_file(tensors, path)
  return params


def change_dtype(name, dtype):
  def change(tensors):
    tensors[name] = tensors[name].astype(dtype)
  return change


def add(name, like):
  def change(tensors):
    tensors[name] = tensors[like].copy()
  return change


WI = 'transformer.h.0.mlp.c_fc.weight'


@pytest.mark.parametrize('change, message', [
    (change_dtype(f'{WI}.values', 'float64'), 'is of type float64; only'),
    (change_dtype(f'{WI}.values', 'int32'), 'is of type int32; only'),
    (add(WI, 'transformer.wte.weight'), 'is stored whole and as kept values'),
    (add('h.0.mlp.c_fc.weight.values', f'{WI}.values'),
     "has both 'h.0.mlp.c_fc.weight.values' and 'transformer.h.0.mlp"),
    (add('lm_head.weight', 'transformer.wpe.weight'), 'lm_head.* differs from'),
])
@pytest.mark.parametrize('load', [
    interop.load_hf, functools.partial(interop.load_listed, dtype='float32'),
])
def test_both_readers_refuse_the_same_files(load, change, message, tmp_path):
  change_compact(tmp_path, change)
  with pytest.raises(ValueError, match=message):
    load(tmp_path)


def test_a_tied_head_may_be_stored_beside_its_equal_embedding(tmp_path):
  params = change_compact(
      tmp_path, add('lm_head.weight', 'transformer.wte.weight')
  )
  for load in (interop.load_hf, interop.load_listed):
    found = load(tmp_path).params['wte']['embedding']
    np.testing.assert_array_equal(found, params['wte']['embedding'])


@pytest.mark.parametrize('end', ['values', 'bits'])
def test_a_file_whose_bits_and_values_disagree_is_refused(end, tmp_path):
  def shorten(tensors):
    tensors[f'{WI}.{end}'] = tensors[f'{WI}.{end}'][1:].copy()

  change_compact(tmp_path, shorten)
  with pytest.raises(ValueError, match="values of '.*c_fc.weight' do not fit"):
    interop.load_listed(tmp_path)


def test_dense_weights_are_not_listed_by_the_reader(tmp_path):
  params, mask = make_sparse_params(GPT, 0.7)
  interop.save_hf(tmp_path, GPT, params, mask)
  with pytest.raises(ValueError, match='model.safetensors is not compact'):
    interop.load_listed(tmp_path)


def test_another_width_and_a_changing_mask_are_refused():
  params, mask = make_sparse_params(GPT, 0.7)
  listed = list_params(params, mask)
  tokens = np.array([[3, 1]])
  model = native_model(GPT)
  apply = lambda model, **variables: jax.eval_shape(
      model.apply, variables, tokens
  )
  with pytest.raises(ValueError, match='h_0/attn/wq/kernel .* mask is const'):
    apply(model, params=listed, masks=mask)
  wide = native_model(dataclasses.replace(GPT, d_ff=32))
  listed['h_0']['mlp']['wi']['bias'] = np.zeros(32, np.float32)
  with pytest.raises(ValueError, match=r'wi/kernel is a listed .*\[16, 24\]'):
    apply(wide, params=listed)

"""Masks go to Hugging Face files and back, as masks or as kept values alone."""

import dataclasses
import functools
import shutil

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax import interop
from spdf_jax import packing
from spdf_jax.accelerator import list_params
from spdf_jax.interop import tensors as files
from spdf_jax.sparsity.trees import by_name
from tests.hf_models import assert_same_bits
from tests.hf_models import change_weights
from tests.hf_models import GPT
from tests.hf_models import LLAMA
from tests.hf_models import make_mask
from tests.hf_models import make_params
from tests.hf_models import masked
from tests.hf_models import save
from tests.refusals import refuse

pytestmark = pytest.mark.ci

safetensors = pytest.importorskip('safetensors.numpy')
pytest.importorskip('ml_dtypes')


def test_a_compact_model_holds_kept_values_and_a_bit_per_weight(tmp_path):
  params, mask = save(tmp_path, LLAMA, format='compact')
  assert sorted(p.name for p in tmp_path.iterdir()) == [
      'config.json', 'model.compact.safetensors'
  ]
  tensors = safetensors.load_file(tmp_path / 'model.compact.safetensors')
  name = 'model.layers.1.mlp.down_proj.weight'
  weight, kept = (
      tree['h_1']['mlp']['wo']['kernel'].T for tree in (params, mask)
  )
  np.testing.assert_array_equal(tensors[f'{name}.values'], weight[kept])
  # The format of training and of the kernels: rows of bytes, low bits first.
  bits = packing.pack_mask(jnp.asarray(kept)).bits
  np.testing.assert_array_equal(tensors[f'{name}.bits'], bits)
  for row, byte in zip(kept, tensors[f'{name}.bits'][:, 0]):
    assert [byte >> i & 1 for i in range(8)] == row[:8].tolist()
  assert name not in tensors


def test_a_mask_of_one_attention_projection_prunes_no_other(tmp_path):
  params = make_params(GPT)
  only = make_mask(params)['h_0']['attn']['wk']['kernel']
  mask = jax.tree.map(lambda x: None, params)
  mask['h_0']['attn']['wk']['kernel'] = only
  for format in ('dense', 'compact'):
    interop.save_hf(tmp_path, GPT, params, mask, format=format)
    loaded = interop.load_hf(tmp_path)
    assert_same_bits(loaded.params, masked(params, mask))
    masks = by_name(loaded.mask)
    assert set(masks) == {f'h_0/attn/w{part}/kernel' for part in 'qkv'}
    np.testing.assert_array_equal(masks['h_0/attn/wk/kernel'], only)
    assert masks['h_0/attn/wq/kernel'].all()


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_packing_loses_nothing(data):
  shape = tuple(data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
  mask = rng.random(shape) < data.draw(st.floats(0, 1))
  tensors = {
      'a': np.where(mask, rng.integers(1, 9, shape), 0).astype(np.float16),
      'b': np.arange(3.0),
  }
  packed = files.pack_tensors(tensors, {'a': mask})
  assert packed['a.values'].size == mask.sum()
  unpacked, masks = files.unpack_tensors(packed, {'a': shape, 'b': (3,)})
  assert_same_bits(unpacked, tensors)
  assert_same_bits(masks, {'a': mask})


def test_damaged_masks_are_refused(tmp_path):
  save(tmp_path, GPT)
  path = tmp_path / 'masks.safetensors'
  masks = safetensors.load_file(path)
  name = 'transformer.h.0.mlp.c_fc.weight'
  for bad, message in (
      ({name: masks[name].T.copy()}, r'a mask bool\[24, 16\]; it must be'),
      ({name: masks[name].astype(np.uint8)}, r'a mask uint8\[16, 24\]'),
      ({'other': masks[name]}, "for 'other' a mask"),
  ):
    safetensors.save_file(bad, path)
    refuse(message, interop.load_hf, tmp_path)


@pytest.mark.parametrize('config', [GPT, LLAMA])
def test_a_compact_export_is_listed_as_its_dense_weights_are(config, tmp_path):
  params, mask = save(tmp_path, config, format='compact')
  loaded = interop.load_listed(tmp_path)
  assert loaded.config == dataclasses.replace(config, lowering='native')
  wanted = list_params(masked(params, mask), mask)
  assert jax.tree.structure(loaded.params) == jax.tree.structure(wanted)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, wanted)


@pytest.mark.parametrize('stored, dtype, expected', [
    ('float16', None, 'float32'), ('bfloat16', None, 'bfloat16'),
    ('float32', 'bfloat16', 'bfloat16'),
])
def test_listed_values_have_the_dtype_of_the_file_or_the_one_given(
    stored, dtype, expected, tmp_path
):
  params, mask = save(tmp_path, GPT, format='compact', dtype=stored)
  loaded = interop.load_listed(tmp_path, dtype=dtype)
  kernel = loaded.params['h_1']['mlp']['wo']['kernel']
  assert kernel.values.dtype == expected
  wanted = params['h_1']['mlp']['wo']['kernel'].T[
      mask['h_1']['mlp']['wo']['kernel'].T
  ].astype(jnp.dtype(stored)).astype(jnp.dtype(expected))
  np.testing.assert_array_equal(kernel.values, np.pad(wanted, (0, 8)))
  assert loaded.params['wte']['embedding'].dtype == np.float32


def test_only_matrices_that_models_take_as_lists_are_listed(tmp_path):
  params = make_params(LLAMA)
  mask = make_mask(params)
  mask['head']['kernel'] = np.ones(params['head']['kernel'].shape, bool)
  interop.save_hf(tmp_path, LLAMA, params, mask, format='compact')
  kernel = interop.load_listed(tmp_path).params['head']['kernel']
  assert isinstance(kernel, np.ndarray)
  np.testing.assert_array_equal(kernel, params['head']['kernel'])


def change_dtype(name, dtype):
  def change(tensors):
    tensors[name] = tensors[name].astype(dtype)
  return change


def add(name, like):
  def change(tensors):
    tensors[name] = tensors[like].copy()
  return change


def shorten(name):
  def change(tensors):
    tensors[name] = tensors[name][1:].copy()
  return change


WI = 'transformer.h.0.mlp.c_fc.weight'
READERS = [
    interop.load_hf, functools.partial(interop.load_listed, dtype='float32'),
]


@pytest.mark.parametrize('change, message', [
    (change_dtype(f'{WI}.values', 'float64'), 'of dtype float64; save it'),
    (add(WI, 'transformer.wte.weight'), 'is stored whole and as kept values'),
    (add('h.0.mlp.c_fc.weight.values', f'{WI}.values'),
     "has both 'h.0.mlp.c_fc.weight.values' and 'transformer.h.0.mlp"),
    (add('lm_head.weight', 'transformer.wpe.weight'), 'lm_head.* differs from'),
    (shorten(f'{WI}.values'), "c_fc.weight.values' is missing, or they do not"),
    (lambda tensors: np.invert(tensors[f'{WI}.bits'], tensors[f'{WI}.bits']),
     'bits.* or they do not fit'),
])
def test_both_readers_refuse_the_same_compact_files(change, message, tmp_path):
  save(tmp_path, GPT, format='compact')
  change_weights(tmp_path, change, 'model.compact.safetensors')
  for load in READERS:
    refuse(message, load, tmp_path)


def test_a_tied_head_may_be_stored_beside_its_equal_embedding(tmp_path):
  params, _ = save(tmp_path, GPT, format='compact')
  change_weights(
      tmp_path, add('lm_head.weight', 'transformer.wte.weight'),
      'model.compact.safetensors',
  )
  embedding = interop.load_hf(tmp_path).params['wte']['embedding']
  np.testing.assert_array_equal(embedding, params['wte']['embedding'])


@pytest.mark.parametrize('form', ['torch', 'buffer', 'nan'])
@pytest.mark.parametrize('name', ['gpt', 'llama'])
def test_masks_of_other_programs_are_read(form, name, tmp_path):
  config = {'gpt': GPT, 'llama': LLAMA}[name]
  params = make_params(config)
  mask = make_mask(params)
  interop.save_hf(tmp_path / 'ours', config, masked(params, mask), mask)
  want = interop.load_hf(tmp_path / 'ours')
  weights = safetensors.load_file(tmp_path / 'ours/model.safetensors')
  kept = safetensors.load_file(tmp_path / 'ours/masks.safetensors')
  theirs = {}
  for key, w in weights.items():
    m = kept.get(key)
    if m is None:
      theirs[key] = w
    elif form == 'nan':
      theirs[key] = np.where(m, w, np.float32(np.nan))
    else:
      theirs[key + ('_orig' if form == 'torch' else '')] = (
          np.where(m, w, np.float32(7)) if form == 'torch' else w
      )
      theirs[key + '_mask'] = m.astype(np.float32)
  (tmp_path / 'theirs').mkdir()
  shutil.copy(tmp_path / 'ours/config.json', tmp_path / 'theirs')
  safetensors.save_file(theirs, tmp_path / 'theirs/model.safetensors')
  loaded = interop.load_hf(tmp_path / 'theirs')
  assert_same_bits(loaded.params, want.params)
  assert_same_bits(loaded.mask, want.mask)

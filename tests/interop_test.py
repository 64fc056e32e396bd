"""Weights are converted to Hugging Face's layout and back, bit for bit."""

import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import slow_except
from tiny_run import make_config
from tiny_run import make_dynamic_recipe
from tiny_run import make_recipe

from experiments import convert
import spdf_jax as spdf
from spdf_jax import interop
from spdf_jax import packing
from spdf_jax.data import ByteTokenizer
from spdf_jax.data import open_tokenizer
from spdf_jax.data import save_tokenizer
from spdf_jax.data import train_bpe
from spdf_jax.interop import configs
from spdf_jax.interop import tensors as tensor_files
from spdf_jax.models import create_model
from spdf_jax.models import GPTConfig
from spdf_jax.models import LlamaConfig
from spdf_jax.models import model_of
from spdf_jax.models import sparsifiable
from spdf_jax.sparsity.paths import by_name
from spdf_jax.sparsity.paths import path_name
from spdf_jax.training import find_checkpoint
from spdf_jax.training import MismatchError
from spdf_jax.training import open_session
from spdf_jax.training import read_params
from spdf_jax.training import train
from spdf_jax.training.checkpoint_files import read_checkpoint
from spdf_jax.training.checkpoint_files import write_params
from spdf_jax.training.settings import ModelConfig

pytestmark = pytest.mark.ci

safetensors = pytest.importorskip('safetensors.numpy')
ml_dtypes = pytest.importorskip('ml_dtypes')

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
}
ROOT = pathlib.Path(__file__).parent.parent
GPT, LLAMA = CONFIGS['gpt'], CONFIGS['llama grouped']
QKV = ('attn/wq', 'attn/wk', 'attn/wv')


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
          path_name(path), x
      ) else None,
      params,
  )


def masked(params, mask):
  return jax.tree.map(
      lambda m, x: x if m is None else np.where(m, x, np.float32(0)),
      mask, params, is_leaf=lambda x: x is None,
  )


def assert_same_bits(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for (path, x), y in zip(by_name(one).items(), jax.tree.leaves(other)):
    assert x.dtype == y.dtype and x.shape == y.shape, path
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), path


def refuse(message, function, *arguments, **options):
  with pytest.raises(ValueError, match=message) as caught:
    function(*arguments, **options)
  text = str(caught.value)
  assert '\n' not in text and text.endswith('.')


def read(path):
  return safetensors.load_file(path)


def change_config(directory, **changes):
  path = directory / 'config.json'
  path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(directory, change):
  path = directory / 'model.safetensors'
  tensors = read(path)
  change(tensors)
  safetensors.save_file(tensors, path, {'format': 'pt'})


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A directory for each kind of model; not to be changed."""
  root = tmp_path_factory.mktemp('saved')
  for name, config in (('gpt', GPT), ('llama', LLAMA)):
    interop.save_hf(root / name, config, make_params(config))
  return root


@pytest.fixture
def gpt_dir(saved, tmp_path):
  """A copy of a GPT's directory, to be changed."""
  return shutil.copytree(saved / 'gpt', tmp_path / 'gpt')


@pytest.fixture
def llama_dir(saved, tmp_path):
  """A copy of a Llama's directory, to be changed."""
  return shutil.copytree(saved / 'llama', tmp_path / 'llama')


@pytest.mark.parametrize('name', CONFIGS)
def test_a_dense_model_comes_back_bit_for_bit(name, tmp_path):
  config = CONFIGS[name]
  params = make_params(config)
  interop.save_hf(tmp_path, config, params)
  loaded = interop.load_hf(tmp_path)
  assert loaded.config == config and loaded.mask is None
  assert_same_bits(loaded.params, params)
  assert sorted(p.name for p in tmp_path.iterdir()) == [
      'config.json', 'model.safetensors'
  ]


@pytest.mark.parametrize('format', ['dense', 'compact'])
@pytest.mark.parametrize('name', CONFIGS)
def test_a_sparse_model_comes_back_bit_for_bit(name, format, tmp_path):
  config = CONFIGS[name]
  params = make_params(config)
  mask = make_mask(params)
  interop.save_hf(tmp_path, config, params, mask, format=format)
  loaded = interop.load_hf(tmp_path)
  assert loaded.config == config
  assert_same_bits(loaded.params, masked(params, mask))
  assert_same_bits(loaded.mask, mask)


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
@pytest.mark.parametrize('format', ['dense', 'compact'])
def test_smaller_types_round_once_and_come_back_as_float32(
    dtype, format, tmp_path
):
  params = make_params(LLAMA)
  mask = make_mask(params)
  interop.save_hf(tmp_path, LLAMA, params, mask, dtype=dtype, format=format)
  small = np.dtype(getattr(ml_dtypes, dtype, dtype))
  rounded = jax.tree.map(
      lambda x: x.astype(small).astype(np.float32), masked(params, mask)
  )
  assert_same_bits(interop.load_hf(tmp_path).params, rounded)
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['torch_dtype'] == dtype


@pytest.mark.parametrize('config', [GPT, LLAMA])
def test_a_scanned_model_is_written_as_its_loop(config, tmp_path):
  params = make_params(config)
  mask = make_mask(params)
  scanned = dataclasses.replace(config, scan_layers=True)
  stacked = interop.stack_layers(params)
  assert jax.tree.map(np.shape, stacked) == jax.tree.map(
      np.shape, make_params(scanned)
  )
  interop.save_hf(
      tmp_path, scanned, jax.tree.map(jax.numpy.asarray, stacked),
      interop.stack_layers(mask),
  )
  loaded = interop.load_hf(tmp_path)
  assert loaded.config == config
  assert_same_bits(loaded.params, masked(params, mask))
  assert_same_bits(loaded.mask, mask)


def test_negative_zeros_and_odd_bits_come_back(tmp_path):
  params = make_params(GPT)
  odd = np.array([-0.0, np.nan, np.inf, -np.inf, 1e-45], np.float32)
  params['h_0']['mlp']['wi']['kernel'][0, :5] = odd
  mask = make_mask(params, sparsity=0.0)
  for format in ('dense', 'compact'):
    interop.save_hf(tmp_path, GPT, params, mask, format=format)
    loaded = interop.load_hf(tmp_path, allow_non_finite=True)
    assert_same_bits(loaded.params, params)


def test_files_are_equal_and_readable_as_the_umask_allows(tmp_path):
  params = make_params(LLAMA)
  mask = make_mask(params)
  umask = os.umask(0o027)
  try:
    for name in ('a', 'b'):
      interop.save_hf(tmp_path / name, LLAMA, params, mask, end_of_text=3)
  finally:
    os.umask(umask)
  files = {p.name: p for p in (tmp_path / 'a').iterdir()}
  assert sorted(files) == [
      'config.json', 'generation_config.json', 'masks.safetensors',
      'model.safetensors',
  ]
  for name, path in files.items():
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_bytes() == (tmp_path / 'b' / name).read_bytes()


@pytest.mark.parametrize('dtype', [
    bool, np.uint8, np.float16, ml_dtypes.bfloat16, np.float32
])
def test_tensors_are_written_as_the_library_writes_them(dtype, tmp_path):
  rng = np.random.default_rng(3)
  tensors = {
      'b': rng.integers(2, size=(3, 5)).astype(dtype).T,
      'a': rng.integers(2, size=7).astype(np.float32),
      'c': np.zeros((0, 2), dtype),
  }
  tensor_files.write_tensors(tmp_path / 'ours', tensors)
  safetensors.save_file(
      {k: np.ascontiguousarray(x) for k, x in tensors.items()},
      tmp_path / 'theirs', {'format': 'pt', 'writer': 'spdf_jax'},
  )
  assert_same_bits(read(tmp_path / 'ours'), read(tmp_path / 'theirs'))
  sizes = {(tmp_path / name).stat().st_size for name in ('ours', 'theirs')}
  assert len(sizes) == 1


def test_gpt_matrices_are_written_in_out_and_attention_in_one(saved):
  params, found = make_params(GPT), read(saved / 'gpt/model.safetensors')
  layer = params['h_1']
  joined = np.concatenate(
      [layer['attn'][w]['kernel'] for w in ('wq', 'wk', 'wv')], axis=1
  )
  name = 'transformer.h.1.{}.weight'.format
  np.testing.assert_array_equal(found[name('attn.c_attn')], joined)
  np.testing.assert_array_equal(
      found[name('mlp.c_fc')], layer['mlp']['wi']['kernel']
  )
  assert found[name('mlp.c_proj')].shape == (24, 16)
  assert 'lm_head.weight' not in found


def test_llama_matrices_are_written_out_in(saved):
  params, found = make_params(LLAMA), read(saved / 'llama/model.safetensors')
  attention, mlp = params['h_1']['attn'], params['h_1']['mlp']
  name = 'model.layers.1.{}_proj.weight'.format
  for tensor, kernel in (
      (name('self_attn.q'), attention['wq']),
      (name('self_attn.k'), attention['wk']),
      (name('self_attn.v'), attention['wv']),
      (name('self_attn.o'), attention['wd']),
      (name('mlp.gate'), mlp['wg']),
      (name('mlp.up'), mlp['wi']),
      (name('mlp.down'), mlp['wo']),
      ('lm_head.weight', params['head']),
  ):
    for (i, j), value in np.ndenumerate(kernel['kernel']):
      assert found[tensor][j, i] == value
  np.testing.assert_array_equal(
      found['model.embed_tokens.weight'], params['wte']['embedding']
  )


def test_an_exported_sparse_model_is_sparse(tmp_path):
  params = make_params(LLAMA)
  mask = make_mask(params)
  interop.save_hf(tmp_path, LLAMA, params, mask)
  weights = read(tmp_path / 'model.safetensors')
  masks = read(tmp_path / 'masks.safetensors')
  name = 'model.layers.0.mlp.up_proj.weight'
  np.testing.assert_array_equal(
      masks[name], mask['h_0']['mlp']['wi']['kernel'].T
  )
  assert len(masks) == 14
  for name, kept in masks.items():
    np.testing.assert_array_equal(weights[name] != 0, kept)


def test_a_compact_model_holds_kept_values_and_a_bit_per_weight(tmp_path):
  params = make_params(LLAMA)
  mask = make_mask(params)
  interop.save_hf(tmp_path, LLAMA, params, mask, format='compact')
  assert sorted(p.name for p in tmp_path.iterdir()) == [
      'config.json', 'model.compact.safetensors'
  ]
  found = read(tmp_path / 'model.compact.safetensors')
  name = 'model.layers.1.mlp.down_proj.weight'
  weight, kept = (
      tree['h_1']['mlp']['wo']['kernel'].T for tree in (params, mask)
  )
  np.testing.assert_array_equal(found[f'{name}.values'], weight[kept])
  # The format of training and of the kernels: rows of bytes, low bits first.
  bits = packing.pack_mask(jnp.asarray(kept)).bits
  np.testing.assert_array_equal(found[f'{name}.bits'], bits)
  for row, byte in zip(kept, found[f'{name}.bits'][:, 0]):
    assert [byte >> i & 1 for i in range(8)] == row[:8].tolist()
  assert name not in found


def test_a_mask_of_one_projection_leaves_the_others_whole(tmp_path):
  params = make_params(GPT)
  only = make_mask(params)['h_0']['attn']['wk']['kernel']
  mask = jax.tree.map(lambda x: None, params)
  mask['h_0']['attn']['wk']['kernel'] = only
  for format in ('dense', 'compact'):
    interop.save_hf(tmp_path, GPT, params, mask, format=format)
    loaded = interop.load_hf(tmp_path)
    assert_same_bits(loaded.params, masked(params, mask))
    found = by_name(loaded.mask)
    assert set(found) == {f'h_0/{part}/kernel' for part in QKV}
    np.testing.assert_array_equal(found['h_0/attn/wk/kernel'], only)
    assert found['h_0/attn/wq/kernel'].all()


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
  packed = tensor_files.pack_tensors(tensors, {'a': mask})
  assert packed['a.values'].size == mask.sum()
  found, masks = tensor_files.unpack_tensors(packed, {'a': shape, 'b': (3,)})
  assert_same_bits(found, tensors)
  assert_same_bits(masks, {'a': mask})


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.tuples(*[st.integers(1, 9)] * 4),
    groups=st.integers(1, 4),
    scaling=st.sampled_from(['none', 'linear', 'llama3']),
    theta=st.floats(1, 1e7),
    tied=st.booleans(),
    eps=st.floats(1e-9, 1e-3),
)
def test_llama_configs_come_back(sizes, groups, scaling, theta, tied, eps):
  vocabulary, layers, d_ff, length = sizes
  stretch = {} if scaling == 'none' else dict(rope_factor=3.5)
  if scaling == 'llama3':
    stretch |= dict(rope_low_freq_factor=0.5, rope_original_length=77)
  config = LlamaConfig(
      vocabulary, layers, 4 * groups, 8 * groups, d_ff, length,
      n_kv_heads=groups, tied=tied, norm_eps=eps, rope_theta=theta,
      rope_scaling=scaling, **stretch,
  )
  fields = json.loads(json.dumps(configs.write_config(config, 'float32')))
  assert configs.read_config(fields) == config


LLAMA_FIELDS = dict(
    model_type='llama', vocab_size=23, num_hidden_layers=1, hidden_size=16,
    num_attention_heads=4, intermediate_size=24, max_position_embeddings=8,
)
LLAMA3 = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=3.0,
    original_max_position_embeddings=4,
)


@pytest.mark.parametrize('name, fields', [
    ('llama', {}),
    ('llama', dict(rope_theta=10000.0, rope_scaling=None)),
    ('llama', dict(rope_parameters=dict(rope_theta=1e4, rope_type='default'))),
    ('llama linear', dict(
        rope_theta=500.0, rope_scaling=dict(type='linear', factor=4.0)
    )),
    ('llama linear', dict(rope_parameters=dict(
        rope_theta=500.0, rope_type='linear', factor=4.0
    ))),
    ('llama 3', dict(
        rope_theta=5e5, rope_scaling=LLAMA3 | dict(rope_type='llama3')
    )),
    ('llama 3', dict(
        rope_parameters=LLAMA3 | dict(rope_type='llama3', rope_theta=5e5)
    )),
])
def test_both_spellings_of_rotary_positions_are_read(name, fields):
  want = dataclasses.replace(CONFIGS[name], n_layers=1, norm_eps=1e-6)
  assert configs.read_config(LLAMA_FIELDS | fields) == want


def test_the_hubs_gpt2_is_read_without_prefix_with_buffers_and_head(gpt_dir):
  def as_on_the_hub(tensors):
    for name in list(tensors):
      tensors[name.removeprefix('transformer.')] = tensors.pop(name)
    for i in range(2):
      tensors[f'h.{i}.attn.bias'] = np.tril(np.ones((1, 1, 8, 8), np.uint8))
      tensors[f'h.{i}.attn.masked_bias'] = np.array(-1e4, np.float32)
    tensors['lm_head.weight'] = tensors['wte.weight'].copy()

  change_weights(gpt_dir, as_on_the_hub)
  change_config(gpt_dir, transformers_version='2.0', n_ctx=8)
  assert_same_bits(interop.load_hf(gpt_dir).params, make_params(GPT))


def test_old_llama_files_may_hold_wavelengths(llama_dir):
  name = 'model.layers.0.self_attn.rotary_emb.inv_freq'
  change_weights(
      llama_dir, lambda tensors: tensors.update({name: np.ones(2, np.float32)})
  )
  assert_same_bits(interop.load_hf(llama_dir).params, make_params(LLAMA))


def test_a_width_that_is_not_given_is_four_times_the_models():
  fields = configs.write_config(GPT, 'float32') | dict(n_inner=None)
  assert configs.read_config(fields).d_ff == 64


@pytest.mark.parametrize('dtype', [np.float32, np.float16, ml_dtypes.bfloat16])
def test_shards_of_any_type_are_read(dtype, llama_dir):
  tensors = read(llama_dir / 'model.safetensors')
  (llama_dir / 'model.safetensors').unlink()
  tensors = {name: x.astype(dtype) for name, x in tensors.items()}
  shards = [f'model-{i}-of-3.safetensors' for i in (1, 2, 3)]
  weight_map = {name: shards[i % 3] for i, name in enumerate(tensors)}
  for shard in shards:
    safetensors.save_file(
        {k: x for k, x in tensors.items() if weight_map[k] == shard},
        llama_dir / shard,
    )
  index = llama_dir / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': weight_map}))
  want = jax.tree.map(
      lambda x: x.astype(dtype).astype(np.float32), make_params(LLAMA)
  )
  assert_same_bits(interop.load_hf(llama_dir).params, want)
  (llama_dir / shards[1]).unlink()
  refuse("shard 'model-2-of-3.*not beside", interop.load_hf, llama_dir)
  index.write_text(json.dumps({'weight_map': {'a': '../gpt/m.safetensors'}}))
  refuse(r"names the shard '\.\./gpt", interop.load_hf, llama_dir)


@pytest.mark.parametrize('config', [GPT, LLAMA])
def test_padding_of_the_vocabulary_is_cut(config, tmp_path):
  params = make_params(config)
  interop.save_hf(tmp_path, config, params, vocab_size=20)
  params['wte']['embedding'] = params['wte']['embedding'][:20]
  if 'head' in params:
    params['head']['kernel'] = params['head']['kernel'][:, :20]
  loaded = interop.load_hf(tmp_path)
  assert loaded.config == dataclasses.replace(config, vocab_size=20)
  assert_same_bits(loaded.params, params)


def test_what_was_exported_before_is_replaced_whole(tmp_path):
  params = make_params(GPT)
  mask = make_mask(params)
  (tmp_path / 'tokenizer.json').write_text('{}')
  for format, names in (
      ('dense', {'model.safetensors', 'masks.safetensors'}),
      ('compact', {'model.compact.safetensors'}),
      ('dense', {'model.safetensors', 'masks.safetensors'}),
  ):
    interop.save_hf(tmp_path, GPT, params, mask, format=format)
    assert {p.name for p in tmp_path.iterdir()} == names | {
        'config.json', 'tokenizer.json'
    }
  interop.save_hf(tmp_path, LLAMA, make_params(LLAMA))
  assert not (tmp_path / 'masks.safetensors').exists()
  assert interop.load_hf(tmp_path).config == LLAMA


@pytest.mark.parametrize('name', [
    'model.safetensors', 'pytorch_model.bin', 'config.json',
    'model.safetensors.index.json', 'adapter.safetensors',
])
def test_models_of_others_are_not_replaced(name, tmp_path):
  if name.endswith('.safetensors'):
    safetensors.save_file({'a': np.ones(1)}, tmp_path / name, {'format': 'pt'})
  else:
    (tmp_path / name).write_text('{}')
  before = (tmp_path / name).read_bytes()
  refuse(
      f'holds {name}, which spdf_jax did not export; give another directory',
      interop.save_hf, tmp_path, GPT, make_params(GPT),
  )
  assert [p.name for p in tmp_path.iterdir()] == [name]
  assert (tmp_path / name).read_bytes() == before


def test_a_failed_export_leaves_the_one_before(gpt_dir, monkeypatch):
  before = {p.name: p.read_bytes() for p in gpt_dir.iterdir()}

  def fail(*arguments, **options):
    raise OSError('No space left on device')

  monkeypatch.setattr(tensor_files, 'write_tensors', fail)
  with pytest.raises(OSError, match='No space'):
    interop.save_hf(gpt_dir, GPT, make_params(GPT))
  assert {p.name: p.read_bytes() for p in gpt_dir.iterdir()} == before


@pytest.mark.parametrize('changes, message', [
    (dict(model_type='mamba'), "model_type is 'mamba'; it must be 'gpt2' or"),
    (dict(activation_function='relu'), "activation_function is 'relu'"),
    (dict(n_head=None), 'config.json: n_head is missing; add it'),
    (dict(n_head=3), 'n_heads is 3, which does not divide d_model 16'),
    (dict(reorder_and_upcast_attn=True), 'reorder_and_upcast_attn is True'),
    (dict(add_cross_attention=True), 'add_cross_attention is True'),
    (dict(scale_attn_weights=False), 'scale_attn_weights is False; it must'),
    (dict(layer_norm_epsilon=1e-6), 'layer_norm_epsilon is 1e-06'),
    (dict(n_layer=1), r"has 'transformer.h.1.attn.c_attn.bias' too many \(and"),
    (dict(n_layer=3), r"lacks 'transformer.h.2.attn.c_attn.bias' \(and 11"),
    (dict(n_inner=32), r"'.*c_fc.bias' in another shape, \(24,\) and not \(32"),
])
def test_a_gpt2_that_we_do_not_compute_is_refused(changes, message, gpt_dir):
  change_config(gpt_dir, **changes)
  refuse(message, interop.load_hf, gpt_dir)


@pytest.mark.parametrize('changes, message', [
    (dict(attention_bias=True), 'attention_bias is True; it must be False'),
    (dict(mlp_bias=True), 'mlp_bias is True'),
    (dict(hidden_act='gelu'), "hidden_act is 'gelu'"),
    (dict(hidden_size=None), 'hidden_size is missing'),
    (dict(rope_scaling=dict(rope_type='yarn', factor=2.0)), "type is 'yarn'"),
    (dict(rope_scaling=dict(type='dynamic', factor=2.0)), "type is 'dynamic'"),
    (dict(rope_parameters=dict(rope_type='longrope')), "type is 'longrope'"),
    (dict(rope_scaling=dict(rope_type='linear')), 'factor is missing'),
    (dict(rope_parameters=dict(partial_rotary_factor=0.5)), 'factor is 0.5; '),
    (dict(num_key_value_heads=3), 'n_kv_heads is 3, which does not divide'),
    (dict(tie_word_embeddings=True), 'lm_head.weight differs from model.embed'),
    (dict(num_key_value_heads=4), r'k_proj.*, \(8, 16\) and not \(16, 16\)'),
])
def test_a_llama_that_we_do_not_compute_is_refused(
    changes, message, llama_dir
):
  change_config(llama_dir, **changes)
  refuse(message, interop.load_hf, llama_dir)


@pytest.mark.parametrize('change, message', [
    (lambda t: t.pop('transformer.wpe.weight'), "lacks 'transformer.wpe"),
    (lambda t: t.update(extra=np.ones(1)), "has 'transformer.extra' too many;"),
    (lambda t: t.update({'lm_head.weight': np.ones((23, 16), np.float32)}),
     'lm_head.weight differs from transformer.wte.weight; only models th'),
    (lambda t: t.update({'transformer.ln_f.bias': np.ones(16, np.int8)}),
     "'transformer.ln_f.bias' is of type int8; only float32, bfloat16, fl"),
])
def test_other_tensors_are_refused(change, message, gpt_dir):
  change_weights(gpt_dir, change)
  refuse(message, interop.load_hf, gpt_dir)


def test_a_directory_without_a_model_is_refused(gpt_dir, tmp_path):
  refuse('none has no config.json; give', interop.load_hf, tmp_path / 'none')
  (gpt_dir / 'model.safetensors').write_bytes(b'not tensors at all')
  refuse('cannot be read as safetensors', interop.load_hf, gpt_dir)
  (gpt_dir / 'model.safetensors').unlink()
  refuse('has no weights; it must hold', interop.load_hf, gpt_dir)
  (gpt_dir / 'config.json').write_text('{')
  refuse('config.json is not JSON', interop.load_hf, gpt_dir)
  (gpt_dir / 'config.json').write_text('[]')
  refuse('holds no JSON object', interop.load_hf, gpt_dir)


def test_libraries_that_are_missing_are_named(gpt_dir, monkeypatch):
  for module in ('torch', 'safetensors'):
    monkeypatch.setitem(sys.modules, module, None)
  with pytest.raises(ImportError, match='torch is not installed, and no extra'):
    interop.check_hf(gpt_dir)
  with pytest.raises(ImportError, match=r'safetensors is .*\[hf\]'):
    interop.load_hf(gpt_dir)
  (gpt_dir / 'model.safetensors').rename(gpt_dir / 'pytorch_model.bin')
  with pytest.raises(ImportError, match='`pip install torch`'):
    interop.load_hf(gpt_dir)


def test_damaged_masks_are_refused(tmp_path):
  params = make_params(GPT)
  mask = make_mask(params)
  interop.save_hf(tmp_path, GPT, params, mask)
  path = tmp_path / 'masks.safetensors'
  masks = read(path)
  name = 'transformer.h.0.mlp.c_fc.weight'
  for bad, message in (
      ({name: masks[name].T.copy()}, r'a mask bool\[24, 16\]; it must be'),
      ({name: masks[name].astype(np.uint8)}, r'a mask uint8\[16, 24\]'),
      ({'other': masks[name]}, "for 'other' a mask"),
  ):
    safetensors.save_file(bad, path)
    refuse(message, interop.load_hf, tmp_path)


@pytest.mark.parametrize('end, change', [
    ('values', lambda x: x[1:]), ('bits', lambda x: x[1:]),
    ('values', None), ('bits', None), ('bits', lambda x: ~x),
])
def test_a_damaged_compact_model_is_refused(end, change, tmp_path):
  params = make_params(GPT)
  interop.save_hf(tmp_path, GPT, params, make_mask(params), format='compact')
  path = tmp_path / 'model.compact.safetensors'
  tensors = read(path)
  name = f'transformer.h.0.mlp.c_fc.weight.{end}'
  old = tensors.pop(name)
  if change is not None:
    tensors[name] = change(old).copy()
  safetensors.save_file(tensors, path)
  refuse(
      "bits and values of '.*c_fc.weight' do not fit", interop.load_hf,
      tmp_path,
  )


@pytest.mark.parametrize('changes, message', [
    (dict(embeddings_scale=2.0), 'embeddings_scale is 2.0, a multiplier of mu'),
    (dict(logits_scale=0.5), 'logits_scale is 0.5, .* models where it is'),
    (dict(attention_by_size=True), 'attention_by_size is True'),
    (dict(n_layers=3), r"params lacks 'h_2/attn/wd/bias' \(and 15 more\)"),
    (dict(n_layers=1), "params has 'h_1/attn/wd/bias' too many"),
    (dict(d_ff=32), r"'h_0/mlp/wi/bias' in another shape, \(24,\) and"),
])
def test_a_model_that_gpt2_is_not_is_not_written(changes, message, tmp_path):
  config = dataclasses.replace(GPT, **changes)
  directory = tmp_path / 'new'
  refuse(message, interop.save_hf, directory, config, make_params(GPT))
  assert not directory.exists()


@pytest.mark.parametrize('options, message', [
    (dict(dtype='float64'), "dtype is 'float64'; use one of float32, bfloat16"),
    (dict(format='compact'), "format is 'compact' and the model has no mask"),
    (dict(format='compct'), "format 'compct' is unknown; did you mean 'comp"),
    (dict(vocab_size=24), 'vocab_size is 24; give 1 to 23'),
    (dict(vocab_size=0), 'vocab_size is 0; give 1 to 23'),
    (dict(mask={'wte': {'embedding': np.ones((2, 2), bool)}}),
     r"mask has for 'wte/embedding' a mask bool\[2, 2\]; it must be boolean"),
])
def test_impossible_options_are_refused(options, message, tmp_path):
  with pytest.raises(ValueError, match=message) as caught:
    interop.save_hf(tmp_path / 'new', GPT, make_params(GPT), **options)
  assert '\n' not in str(caught.value) and str(caught.value)[-1] in '.?'
  assert not (tmp_path / 'new').exists()


def test_weights_too_large_for_a_type_are_refused(tmp_path):
  params = make_params(GPT)
  params['wte']['embedding'][3, 3] = 1e5
  refuse(
      "'wte/embedding' holds weights too large for float16; use bfloat16",
      interop.save_hf, tmp_path, GPT, params, dtype='float16',
  )
  interop.save_hf(tmp_path, GPT, params, dtype='bfloat16')


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  refuse(
      'file is a file; give a directory', interop.save_hf, tmp_path / 'file',
      GPT, make_params(GPT),
  )


TINY = GPTConfig(16, 1, 2, 16, 16, 8)  # The model of tiny_run.
AS_IT_IS = dict(format='dense', dtype='float32', vocab_size=None)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A finished run, sparse and then dense; not to be changed."""
  workdir = tmp_path_factory.mktemp('run')
  recipe = make_recipe(
      model={'preset': 'gpt-mini'} | dataclasses.asdict(TINY)
  )
  return recipe, workdir, train(open_session(recipe, workdir))


def run_convert(*arguments):
  return subprocess.run(
      [sys.executable, '-m', 'experiments.convert', *map(str, arguments)],
      cwd=ROOT, env=os.environ | {'PYTHONPATH': str(ROOT)},
      capture_output=True, text=True, timeout=300, check=False,
  )


@pytest.mark.parametrize('name, scan_layers', slow_except(
    [('gpt', True), ('llama', False)],
    itertools.product(CONFIGS, (False, True)),
))
def test_a_converted_model_is_read_by_the_config_that_is_printed(
    name, scan_layers, tmp_path
):
  config = CONFIGS[name]
  params = make_params(config)
  interop.save_hf(tmp_path / 'hf', config, params)
  said = convert.import_model(
      tmp_path / 'hf', tmp_path / 'run', scan_layers=scan_layers
  )
  model = create_model(**json.loads(said.partition('config.model is ')[2]))
  assert model.config == dataclasses.replace(config, scan_layers=scan_layers)
  want = interop.stack_layers(params) if scan_layers else params
  found = read_params(find_checkpoint(str(tmp_path / 'run')), want)
  assert_same_bits(found, want)
  convert.export_model(
      str(tmp_path / 'run'), tmp_path / 'back', **AS_IT_IS
  )
  assert_same_bits(interop.load_hf(tmp_path / 'back').params, params)


def test_training_starts_from_a_converted_model(tmp_path):
  params = make_params(TINY)
  interop.save_hf(tmp_path / 'hf', TINY, params)
  convert.import_model(tmp_path / 'hf', tmp_path / 'a', scan_layers=False)
  recipe = make_recipe(init_from=str(tmp_path / 'a'))
  state = open_session(recipe, tmp_path / 'b').state
  mask = spdf.get_mask(state.opt_state)
  assert_same_bits(state.params, masked(params, mask))


def test_training_in_the_workdir_of_a_converted_model_is_refused(tmp_path):
  checkpoint = write_params(tmp_path, make_params(TINY), {'model': {}})
  with pytest.raises(MismatchError, match='of another config'):
    open_session(make_recipe(), tmp_path)
  assert checkpoint.is_dir()
  refuse(
      'holds checkpoints already; give another', write_params, tmp_path, {}, {}
  )


@pytest.mark.parametrize('format', ['dense', 'compact'])
def test_an_exported_run_has_the_mask_it_was_trained_with(
    format, trained, tmp_path
):
  recipe, workdir, _ = trained
  convert.export_model(
      f'{workdir}@pretrain', tmp_path, **AS_IT_IS | dict(format=format)
  )
  state = read_checkpoint(
      find_checkpoint(f'{workdir}@pretrain'), recipe.abstract_state,
      config=recipe.config, fingerprints=recipe.fingerprints,
  )
  loaded = interop.load_hf(tmp_path)
  assert loaded.config == TINY
  assert_same_bits(loaded.params, state.params)
  assert_same_bits(loaded.mask, spdf.get_mask(state.opt_state))


@pytest.mark.slow
def test_a_kept_weight_that_is_zero_is_exported_as_kept(tmp_path):
  # RigL has just let some weights grow, from zero.
  moving = make_dynamic_recipe()
  recipe = dataclasses.replace(moving, config=dataclasses.replace(
      moving.config, model=ModelConfig('gpt-mini', TINY)
  ))
  session = open_session(recipe, tmp_path)
  state = session.state
  for step in range(3):
    state, _ = recipe.step(state, recipe.batch_at(step))
  kernel = state.params['h_0']['mlp']['wi']['kernel']
  mask = spdf.get_mask(state.opt_state)
  kept = mask['h_0']['mlp']['wi']['kernel']
  row, column = np.argwhere(kept)[0]
  state.params['h_0']['mlp']['wi']['kernel'] = kernel.at[row, column].set(0)
  session.checkpoints.save(state)
  session.checkpoints.close()
  convert.export_model(str(tmp_path), tmp_path / 'hf', **AS_IT_IS)
  assert_same_bits(interop.load_hf(tmp_path / 'hf').mask, mask)


def test_a_dense_phase_is_exported_without_a_mask(trained, tmp_path):
  convert.export_model(str(trained[1]), tmp_path, **AS_IT_IS)
  assert interop.load_hf(tmp_path).mask is None


@pytest.mark.parametrize('format, dtype, config, scan_layers', [
    ('dense', 'float32', GPT, False), ('compact', 'float16', GPT, True),
    ('dense', 'bfloat16', LLAMA, True),
])
def test_export_import_and_export_give_the_same_files(
    format, dtype, config, scan_layers, tmp_path
):
  params = make_params(config)
  mask = make_mask(params)
  # Kept weights that are zero, and a layer with fewer masks than the other.
  params['h_0']['mlp']['wo']['kernel'][:4] = 0
  mask['h_1']['attn']['wd']['kernel'] = None
  interop.save_hf(
      tmp_path / 'a', config, params, mask, format=format, dtype=dtype,
      end_of_text=7,
  )
  for source, target in (('a', 'b'), ('b', 'c')):
    workdir = tmp_path / f'{source}_run'
    convert.import_model(
        tmp_path / source, workdir, scan_layers=scan_layers
    )
    convert.export_model(
        str(workdir), tmp_path / target, format=format, dtype=dtype,
        vocab_size=None,
    )
  files = [
      {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
      for name in 'abc'
  ]
  assert files[0] == files[1] == files[2]


def test_an_imported_mask_of_other_weights_is_refused(tmp_path):
  params = make_params(TINY)
  interop.save_hf(tmp_path / 'hf', TINY, params, make_mask(params))
  convert.import_model(
      tmp_path / 'hf', tmp_path / 'run', scan_layers=False
  )
  path = tmp_path / 'run' / 'imported_masks.safetensors'
  masks = read(path)
  tensor_files.write_tensors(path, {k: ~x for k, x in masks.items()})
  refuse(
      'imported_masks.safetensors prunes weights in ', convert.export_model,
      str(tmp_path / 'run'), tmp_path / 'back', **AS_IT_IS,
  )


def test_an_import_into_the_folder_of_an_export_keeps_its_files(tmp_path):
  params = make_params(TINY)
  interop.save_hf(tmp_path, TINY, params, make_mask(params))
  before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
  convert.import_model(tmp_path, tmp_path, scan_layers=False)
  for name, data in before.items():
    assert (tmp_path / name).read_bytes() == data


@pytest.mark.parametrize('config, end, bos', [
    (GPT, 5, 5), (GPT, [5, 6], None), (LLAMA, 5, None), (LLAMA, [5], None),
])
def test_an_export_names_the_end_of_text(config, end, bos, tmp_path):
  interop.save_hf(tmp_path, config, make_params(config), end_of_text=end)
  for name in ('config.json', 'generation_config.json'):
    fields = json.loads((tmp_path / name).read_text())
    assert fields['eos_token_id'] == end and fields['bos_token_id'] == bos
  interop.save_hf(tmp_path, config, make_params(config))
  assert not (tmp_path / 'generation_config.json').exists()
  assert configs.read_end_of_text(
      json.loads((tmp_path / 'config.json').read_text())
  ) is None


@pytest.mark.parametrize('end', [-1, 23, '5', 5.0, True, [], [5, 23], [None]])
def test_an_end_of_text_outside_the_vocabulary_is_refused(end, tmp_path):
  refuse(
      'end_of_text is .*; give ids from 0 to 22', interop.save_hf,
      tmp_path / 'new', GPT, make_params(GPT), end_of_text=end,
  )
  fields = {'vocab_size': 23, 'eos_token_id': end}
  assert configs.read_end_of_text(fields) is None


def test_an_export_has_the_tokenizer_of_the_corpus_and_its_end(
    tmp_path, caplog
):
  tokenizer = train_bpe(['to be or not to be'] * 2, vocab_size=258)
  folder = tmp_path / 'corpus'
  folder.mkdir()
  save_tokenizer(folder / 'tokenizer.json', tokenizer)
  config = make_config()
  sizes = dataclasses.replace(TINY, vocab_size=258)
  stored = dataclasses.replace(
      config,
      model=ModelConfig('gpt-mini', sizes),
      data=dataclasses.replace(
          config.data, corpus=f'{folder}=1,{folder}=2', tokenizer=''
      ),
  ).as_dict()
  write_params(tmp_path / 'run', make_params(sizes), stored)
  convert.export_model(
      str(tmp_path / 'run'), tmp_path / 'hf', **AS_IT_IS
  )
  fields = json.loads((tmp_path / 'hf/generation_config.json').read_text())
  assert fields['eos_token_id'] == tokenizer.end_of_text
  found = open_tokenizer(tmp_path / 'hf')
  assert found.fingerprint == tokenizer.fingerprint
  exported = json.loads((tmp_path / 'hf/tokenizer.json').read_text())
  assert exported['model']['type'] == 'BPE'  # As transformers reads it.
  save_tokenizer(folder / 'tokenizer.json', ByteTokenizer())
  convert.export_model(
      str(tmp_path / 'run'), tmp_path / 'bytes', **AS_IT_IS
  )
  assert open_tokenizer(tmp_path / 'bytes') == ByteTokenizer()
  shutil.rmtree(folder)
  convert.export_model(
      str(tmp_path / 'run'), tmp_path / 'hf', **AS_IT_IS
  )
  assert not (tmp_path / 'hf/generation_config.json').exists()
  assert 'the export has no tokenizer and names no end of text' in caplog.text
  assert not folder.exists()


def test_zeros_are_the_mask_of_parameters_alone(tmp_path, caplog):
  params = make_params(TINY)
  params['h_0']['mlp']['wi']['kernel'][3, 3] = 0
  model = {'preset': 'gpt-mini'} | dataclasses.asdict(TINY)
  write_params(tmp_path, params, {'model': model})
  convert.export_model(str(tmp_path), tmp_path / 'hf', **AS_IT_IS)
  mask = interop.load_hf(tmp_path / 'hf').mask['h_0']['mlp']['wi']['kernel']
  assert np.argwhere(~mask).tolist() == [[3, 3]]
  assert 'the mask is derived from their zeros' in caplog.text


def test_the_latest_checkpoint_is_exported_without_a_phase(trained, tmp_path):
  _, workdir, state = trained
  convert.export_model(str(workdir), tmp_path, **AS_IT_IS)
  assert_same_bits(interop.load_hf(tmp_path).params, state.params)


def test_a_run_that_does_not_name_its_model_is_refused(tmp_path):
  write_params(tmp_path, make_params(TINY), {})
  refuse(
      'does not record its model; give one', convert.export_model,
      str(tmp_path), tmp_path / 'hf', **AS_IT_IS,
  )


@pytest.mark.process
def test_the_command_converts_there_and_back(saved, tmp_path):
  done = run_convert(
      f'--from_hf={saved / "llama"}', f'--to={tmp_path / "a"}', '--scan_layers'
  )
  assert done.returncode == 0, done.stderr
  assert 'its config.model is {"preset": "llama2-7b"' in done.stdout
  done = run_convert(
      f'--checkpoint={tmp_path / "a"}', f'--to_hf={tmp_path / "b"}',
      '--vocab_size=20', '--dtype=bfloat16',
  )
  assert done.returncode == 0, done.stderr
  assert 'is written; no sparse matrices' in done.stdout
  assert interop.load_hf(tmp_path / 'b').config == dataclasses.replace(
      LLAMA, vocab_size=20
  )


@pytest.mark.process
@pytest.mark.parametrize('arguments, message', [
    (('--from_hf=none', '--to=a'), 'none has no config.json; give the direc'),
    (('--checkpoint=none', '--to_hf=a'), "'none' names no checkpoint: "),
    (('--checkpoint=none', '--to_hf=a', '--format=compact', '--check'),
     "format is 'compact', which transformers cannot read; leave --check"),
])
def test_bad_input_is_one_sentence_and_exit_status_one(arguments, message):
  done = run_convert(*arguments)
  assert done.returncode == 1
  assert len(done.stderr.splitlines()) == 1 and message in done.stderr
  assert not (ROOT / 'a').exists()


@pytest.mark.process
def test_half_a_command_is_answered_with_what_is_missing():
  done = run_convert('--from_hf=none')
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  assert 'give --from_hf and --to, or --checkpoint and' in done.stderr

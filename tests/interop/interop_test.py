"""Models come back from Hugging Face files bit for bit, or are refused."""

import dataclasses
import json
import os
import shutil
import stat
import sys

import jax
import numpy as np
import pytest

from spdf_jax import interop
from spdf_jax.interop import configs
from spdf_jax.interop import tensors as files
from tests.hf_models import assert_same_bits
from tests.hf_models import change_config
from tests.hf_models import change_weights
from tests.hf_models import CONFIGS
from tests.hf_models import GPT
from tests.hf_models import LLAMA
from tests.hf_models import make_mask
from tests.hf_models import make_params
from tests.hf_models import masked
from tests.hf_models import save
from tests.refusals import refuse
from tests.tiers import ci_except

safetensors = pytest.importorskip('safetensors.numpy')
ml_dtypes = pytest.importorskip('ml_dtypes')


def read(path):
  return safetensors.load_file(path)


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


@pytest.mark.parametrize('name', ci_except(['gpt', 'llama'], CONFIGS))
@pytest.mark.parametrize(
    'format', ci_except([None], [None, 'dense', 'compact'])
)
def test_a_model_is_restored_bit_for_bit(name, format, tmp_path):
  config = CONFIGS[name]
  params, mask = make_params(config), None
  if format is not None:
    mask = make_mask(params)
    params = masked(params, mask)
  interop.save_hf(tmp_path, config, params, mask, format=format or 'dense')
  loaded = interop.load_hf(tmp_path)
  assert loaded.config == config
  assert_same_bits(loaded.params, params)
  assert_same_bits(loaded.mask, mask)


@pytest.mark.parametrize('dtype, format', [
    ('float16', 'compact'), ('bfloat16', 'dense'),
])
def test_smaller_types_round_once_and_are_restored_as_float32(
    dtype, format, tmp_path
):
  params, mask = save(tmp_path, LLAMA, dtype=dtype, format=format)
  small = np.dtype(getattr(ml_dtypes, dtype, dtype))
  rounded = jax.tree.map(
      lambda x: x.astype(small).astype(np.float32), masked(params, mask)
  )
  assert_same_bits(interop.load_hf(tmp_path).params, rounded)
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['torch_dtype'] == dtype


@pytest.mark.ci
@pytest.mark.parametrize('config', [GPT, LLAMA])
def test_a_scanned_model_is_written_like_an_unscanned_one(config, tmp_path):
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


def test_negative_zeros_and_odd_bits_are_restored(tmp_path):
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


def test_data_begin_at_a_multiple_of_eight_bytes(tmp_path):
  for length in range(1, 10):
    path = tmp_path / str(length)
    files.write_tensors(path, {'w' * length: np.ones(3, np.float32)})
    assert int.from_bytes(path.read_bytes()[:8], 'little') % 8 == 0
    assert read(path)['w' * length].tolist() == [1, 1, 1]


def test_tensors_are_written_as_the_library_writes_them(tmp_path):
  rng = np.random.default_rng(3)
  tensors = {'empty': np.zeros((0, 2), np.float16)}
  for dtype in (bool, np.uint8, np.float16, ml_dtypes.bfloat16, np.float32):
    x = rng.integers(2, size=(3, 5)).astype(dtype)
    tensors |= {np.dtype(dtype).name: x, f'{np.dtype(dtype).name}.T': x.T}
  files.write_tensors(tmp_path / 'ours', tensors)
  safetensors.save_file(
      {k: np.ascontiguousarray(x) for k, x in tensors.items()},
      tmp_path / 'theirs', {'format': 'pt', 'writer': 'spdf_jax'},
  )
  assert_same_bits(read(tmp_path / 'ours'), read(tmp_path / 'theirs'))
  sizes = {(tmp_path / name).stat().st_size for name in ('ours', 'theirs')}
  assert len(sizes) == 1


def test_gpt_matrices_are_written_as_inputs_by_outputs_with_one_for_qkv(saved):
  params, tensors = make_params(GPT), read(saved / 'gpt/model.safetensors')
  layer = params['h_1']
  joined = np.concatenate(
      [layer['attn'][w]['kernel'] for w in ('wq', 'wk', 'wv')], axis=1
  )
  name = 'transformer.h.1.{}.weight'.format
  np.testing.assert_array_equal(tensors[name('attn.c_attn')], joined)
  np.testing.assert_array_equal(
      tensors[name('mlp.c_fc')], layer['mlp']['wi']['kernel']
  )
  assert tensors[name('mlp.c_proj')].shape == (24, 16)
  assert 'lm_head.weight' not in tensors


def test_llama_matrices_are_written_as_outputs_by_inputs(saved):
  params, tensors = make_params(LLAMA), read(saved / 'llama/model.safetensors')
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
      assert tensors[tensor][j, i] == value
  np.testing.assert_array_equal(
      tensors['model.embed_tokens.weight'], params['wte']['embedding']
  )


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


@pytest.mark.ci
@pytest.mark.parametrize('name', ['gpt', 'llama'])
@pytest.mark.parametrize('wrapped', [
    'module.{}', '_orig_mod.{}', '_orig_mod.module.{}', 'module._orig_mod.{}',
    '_fsdp_wrapped_module.{}',
])
def test_names_of_wrapped_models_are_read(wrapped, name, saved, tmp_path):
  folder = shutil.copytree(saved / name, tmp_path / name)
  want = interop.load_hf(folder).params

  def wrap(tensors):
    for key in list(tensors):
      value = tensors.pop(key)
      # FSDP and a compiled layer add to the middle of names, too.
      key = key.replace('.0.', '.0._orig_mod.').replace(
          '.1.', '.1._fsdp_wrapped_module.'
      )
      tensors[wrapped.format(key)] = value

  change_weights(folder, wrap)
  assert_same_bits(interop.load_hf(folder).params, want)
  change_weights(folder, lambda t: t.update({
      key.removeprefix(wrapped.format('')): x for key, x in list(t.items())[:1]
  }))
  refuse('which are names of one tensor', interop.load_hf, folder)


def test_shards_are_read(llama_dir):
  dtype = ml_dtypes.bfloat16
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
  refuse("shard 'model-2-of-3.*no such", interop.load_hf, llama_dir)
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


def test_an_export_replaces_the_previous_one_completely(tmp_path):
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
    'pytorch_model.bin', 'adapter.safetensors',
])
def test_models_of_other_programs_are_not_replaced(name, tmp_path):
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

  monkeypatch.setattr(files, 'write_tensors', fail)
  with pytest.raises(OSError, match='No space'):
    interop.save_hf(gpt_dir, GPT, make_params(GPT))
  assert {p.name: p.read_bytes() for p in gpt_dir.iterdir()} == before


@pytest.mark.parametrize('name, changes, message', [
    ('gpt', dict(model_type='mamba'), "model_type is 'mamba'; it must be 'gpt"),
    ('gpt', dict(activation_function='relu'), "activation_function is 'relu'"),
    ('gpt', dict(n_head=None), 'config.json: n_head is missing; add it'),
    ('gpt', dict(n_head=3), 'n_heads is 3, which does not divide d_model 16'),
    ('gpt', dict(n_inner=32),
     r"'.*c_fc.bias' of shape \(24,\) instead of \(32"),
    ('llama', dict(attention_bias=True),
     'attention_bias is True; it must be False'),
    ('llama', dict(rope_scaling=dict(rope_type='yarn', factor=2.0)),
     "type is 'yarn'"),
    ('llama', dict(rope_parameters=dict(partial_rotary_factor=0.5)),
     'factor is 0.5; '),
    ('llama', dict(num_key_value_heads=3), 'n_kv_heads is 3, which does not'),
    ('llama', dict(model_type='mistral', sliding_window=4),
     'sliding_window is 4; it must be null or 8, max_position_emb'),
    ('llama', dict(model_type='qwen2', use_sliding_window=True),
     'use_sliding_window is True; it must be False'),
    ('llama', dict(model_type='qwen3', attention_bias=True),
     'attention_bias is True; it must be False'),
    ('llama', dict(model_type='qwen2'), "lacks 'model.layers.0.self_attn.k_pr"),
    ('llama', dict(tie_word_embeddings=True),
     'lm_head.weight differs from model.embed'),
    ('gpt', dict(tie_word_embeddings=False),
     'tie_word_embeddings is False; it must be True'),
    ('gpt', lambda t: t.pop('transformer.wpe.weight'), "lacks 'transformer.w"),
    ('gpt', lambda t: t.update(extra=np.ones(1)), "unexpected 'transformer.e"),
    ('gpt', lambda t: t.update({'transformer.ln_f.bias': np.ones(16, np.int8)}),
     "'transformer.ln_f.bias' is of dtype int8; save it in one of float32, b"),
])
def test_a_model_that_we_do_not_compute_is_refused(
    name, changes, message, saved, tmp_path
):
  folder = shutil.copytree(saved / name, tmp_path / name)
  if callable(changes):
    change_weights(folder, changes)
  else:
    change_config(folder, **changes)
  refuse(message, interop.load_hf, folder)


def test_a_mistral_is_imported_as_a_llama(saved, tmp_path):
  folder = shutil.copytree(saved / 'llama', tmp_path / 'a')
  for window in (None, 8, 4096):
    change_config(folder, model_type='mistral', sliding_window=window)
    assert interop.load_hf(folder).config == CONFIGS['llama grouped']


def test_a_directory_without_a_model_is_refused(gpt_dir, tmp_path):
  refuse('none has no config.json; give', interop.load_hf, tmp_path / 'none')
  refuse('model.safetensors is not compact', interop.load_listed, gpt_dir)
  (gpt_dir / 'model.safetensors').write_bytes(b'not tensors at all')
  refuse('cannot be read .*Safetensor', interop.load_hf, gpt_dir)
  (gpt_dir / 'model.safetensors').unlink()
  refuse('has no weights; it must hold', interop.load_hf, gpt_dir)
  (gpt_dir / 'config.json').write_text('{')
  refuse('config.json cannot be read', interop.load_hf, gpt_dir)
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
  refuse('`pip install torch`', interop.load_hf, gpt_dir, error=ImportError)


@pytest.mark.parametrize('changes, message', [
    (dict(embeddings_scale=2.0), 'embeddings_scale is 2.0, a multiplier of mu'),
    (dict(attention_by_size=True), 'attention_by_size is True'),
    (dict(n_layers=3), r"params lacks 'h_2/attn/wd/bias' \(and 15 more\)"),
    (dict(d_ff=32), r"'h_0/mlp/wi/bias' of shape \(24,\) instead of"),
])
def test_a_gpt_that_gpt2_cannot_express_is_not_exported(
    changes, message, tmp_path
):
  config = dataclasses.replace(GPT, **changes)
  directory = tmp_path / 'new'
  refuse(message, interop.save_hf, directory, config, make_params(GPT))
  assert not directory.exists()


@pytest.mark.parametrize('options, message', [
    (dict(dtype='float64'), "dtype is 'float64'; use one of float32, bfloat16"),
    (dict(format='compact'), "format is 'compact', but no mask is given"),
    (dict(format='compct'), "format 'compct' is unknown; did you mean 'comp"),
    (dict(vocab_size=24), 'vocab_size is 24; give 1 to 23'),
    (dict(mask={'wte': {'embedding': np.ones((2, 2), bool)}}),
     r"mask has for 'wte/embedding' a mask bool\[2, 2\]; it must be bool\["),
])
def test_impossible_options_are_refused(options, message, tmp_path):
  directory = tmp_path / 'new'
  refuse(
      message, interop.save_hf, directory, GPT, make_params(GPT), **options
  )
  assert not (tmp_path / 'new').exists()


def test_weights_or_folders_that_cannot_be_written_are_refused(tmp_path):
  params = make_params(GPT)
  (tmp_path / 'file').write_text('')
  refuse(
      'file is a file; give a directory', interop.save_hf, tmp_path / 'file',
      GPT, params,
  )
  params['wte']['embedding'][3, 3] = 1e5
  refuse(
      "'wte/embedding' holds weights too large for float16; use float32",
      interop.save_hf, tmp_path, GPT, params, dtype='float16',
  )
  interop.save_hf(tmp_path, GPT, params, dtype='bfloat16')


@pytest.mark.parametrize('config, end, bos', [
    (GPT, 5, 5), (LLAMA, [5, 6], None),
])
def test_an_export_states_the_end_of_text(config, end, bos, tmp_path):
  interop.save_hf(tmp_path, config, make_params(config), end_of_text=end)
  for name in ('config.json', 'generation_config.json'):
    fields = json.loads((tmp_path / name).read_text())
    assert fields['eos_token_id'] == end and fields['bos_token_id'] == bos
  interop.save_hf(tmp_path, config, make_params(config))
  assert not (tmp_path / 'generation_config.json').exists()
  assert configs.read_end_of_text(
      json.loads((tmp_path / 'config.json').read_text())
  ) is None


@pytest.mark.parametrize('end', [-1, 23, '5', True, []])
def test_an_end_of_text_outside_the_vocabulary_is_refused(end, tmp_path):
  refuse(
      'end_of_text is .*; give an int .* from 0 to 22', interop.save_hf,
      tmp_path / 'new', GPT, make_params(GPT), end_of_text=end,
  )
  fields = {'vocab_size': 23, 'eos_token_id': end}
  assert configs.read_end_of_text(fields) is None

"""Hostile and damaged model files are refused in one sentence, and at once."""

import dataclasses
import json
import os
import shutil

import jax
import numpy as np
import pytest

from spdf_jax import interop
from spdf_jax.interop import layouts
from tests import hf_models

safetensors = pytest.importorskip('safetensors.numpy')

DEEP = '[' * 100_000


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A directory for each kind of model; not to be changed."""
  root = tmp_path_factory.mktemp('saved')
  for name, config in (('gpt2', hf_models.GPT), ('llama', hf_models.LLAMA)):
    params = hf_models.make_params(config)
    mask = jax.tree.map(lambda x: None, params)
    mask['h_0']['mlp']['wi']['kernel'] = np.ones((16, 24), bool)
    interop.save_hf(root / name, config, params, mask)
  return root


@pytest.fixture
def gpt_dir(saved, tmp_path):
  """A copy of a GPT's directory, to be changed."""
  return shutil.copytree(saved / 'gpt2', tmp_path / 'gpt2')


def refuse(directory, path, message):
  """Asserts that loading raises one sentence that names a file."""
  with pytest.raises(ValueError, match=message) as caught:
    interop.load_hf(directory)
  text = str(caught.value)
  assert str(path) in text and '\n' not in text and text.endswith('.')
  assert len(text) < 400


@pytest.fixture
def untraced(monkeypatch):
  """Fails the test where a model would be built."""
  def fail(config):
    raise AssertionError('a model is built')

  monkeypatch.setattr(layouts, 'abstract_params', fail)


@pytest.mark.parametrize('name, field, values', [
    ('gpt2', 'n_layer', ['2', 2.0, True, [2], {}, 0, 2**40, DEEP]),
    ('gpt2', 'vocab_size', [None, '23', 23.5]),
    ('gpt2', 'activation_function', [['gelu'], {}, 1]),
    ('gpt2', 'scale_attn_by_inverse_layer_idx', ['yes', 1]),
    ('gpt2', 'model_type', [['gpt2'], None]),
    ('llama', 'head_dim', ['4', 2**40]),
    ('llama', 'rms_norm_eps', ['1e-5', float('nan'), -1, True]),
    ('llama', 'rope_theta', ['1', float('inf'), 10**300]),
    ('llama', 'rope_scaling', ['linear', [1]]),
])
def test_fields_of_other_types_are_refused(
    name, field, values, saved, tmp_path, untraced
):
  directory = shutil.copytree(saved / name, tmp_path / name)
  for value in values:
    path = hf_models.change_config(directory, **{field: value})
    refuse(directory, path, field)


@pytest.mark.parametrize('rope, message', [
    ({'rope_type': ['linear']}, 'rope_type is'),
    ({'rope_type': 'linear', 'factor': '4'}, "factor is '4'"),
])
def test_rotary_fields_of_other_types_are_refused(
    rope, message, saved, tmp_path, untraced
):
  directory = shutil.copytree(saved / 'llama', tmp_path / 'llama')
  path = hf_models.change_config(directory, rope_scaling=rope)
  refuse(directory, path, message)


@pytest.mark.parametrize('text', [DEEP, '1' * 10_000])
def test_json_that_python_cannot_parse_is_refused(text, gpt_dir, untraced):
  (gpt_dir / 'config.json').write_text(text)
  refuse(gpt_dir, gpt_dir / 'config.json', 'cannot be read')


def test_a_folder_in_the_place_of_a_file_is_refused(gpt_dir):
  (gpt_dir / 'config.json').unlink()
  (gpt_dir / 'config.json').mkdir()
  refuse(gpt_dir, gpt_dir / 'config.json', 'is not a regular file')


@pytest.mark.parametrize('name, message', [
    ('config.json', 'is not a regular file'),
    ('model.safetensors', 'has no weights'),
])
def test_a_pipe_in_the_place_of_a_file_is_refused(gpt_dir, name, message):
  (gpt_dir / name).unlink()
  os.mkfifo(gpt_dir / name)
  place = gpt_dir / name if name == 'config.json' else gpt_dir
  refuse(gpt_dir, place, message)


@pytest.mark.parametrize('weight_map', [
    None, [], {'a': 3}, {'a': 'x' * 300}, {'a': 'b\0c'}, {'a': '\ud800'},
    {'a': 'model.safetensors.index.json'},
])
def test_an_index_of_another_type_is_refused(weight_map, gpt_dir, untraced):
  (gpt_dir / 'model.safetensors').unlink()
  index = gpt_dir / 'model.safetensors.index.json'
  index.write_text(json.dumps({'weight_map': weight_map}))
  with pytest.raises(ValueError) as caught:
    interop.load_hf(gpt_dir)
  assert str(index) in str(caught.value)
  index.write_text(DEEP)
  refuse(gpt_dir, index, 'cannot be read')


@pytest.mark.parametrize('layers, message', [
    (3_000, 'holds 28 tensors, and the config.json .* describes 3000 layers'),
    (5, r"lacks 'transformer.h.2.attn.c_attn.bias' \(and 35 more\)"),
    (1, "has an unexpected 'transformer.h.1.attn.c_attn.bias'"),
])
def test_other_names_are_refused_before_a_model_is_built(
    layers, message, gpt_dir, untraced
):
  hf_models.change_config(gpt_dir, n_layer=layers)
  refuse(gpt_dir, gpt_dir / 'model.safetensors', message)


def test_the_shapes_of_3000_layers_are_computed_without_tracing_each():
  config = dataclasses.replace(hf_models.GPT, n_layers=3_000)
  params = layouts.abstract_params(config)
  assert params['h_2999']['mlp']['wi']['kernel'].shape == (16, 24)
  assert len(params) == 3_003


@pytest.mark.parametrize('value', [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_refused_unless_allowed(
    value, gpt_dir
):
  name = 'transformer.h.1.mlp.c_proj.weight'
  path = hf_models.change_weights(
      gpt_dir, lambda tensors: tensors[name].__setitem__((3, 2), value)
  )
  refuse(gpt_dir, path, f"weights in '{name}' that are not finite")
  loaded = interop.load_hf(gpt_dir, allow_non_finite=True)
  weight = loaded.params['h_1']['mlp']['wo']['kernel'][3, 2]
  np.testing.assert_equal(weight, np.float32(value))


def test_a_dtype_that_numpy_lacks_is_refused(gpt_dir):
  path = gpt_dir / 'model.safetensors'
  data = path.read_bytes()
  size = int.from_bytes(data[:8], 'little')
  header = json.loads(data[8:8 + size])
  entry = header['transformer.ln_f.bias']
  entry['dtype'], entry['shape'] = 'F8_E4M3', [64]
  text = json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, 'little') + text + data[8 + size:])
  refuse(gpt_dir, path, "'transformer.ln_f.bias' cannot be read")


def test_a_mask_of_other_weights_is_refused(gpt_dir):
  path = gpt_dir / 'masks.safetensors'
  name = 'transformer.h.0.mlp.c_fc.weight'
  mask = np.ones((16, 24), bool)
  mask[2, 3] = False
  safetensors.save_file({name: mask}, path)
  refuse(gpt_dir, path, f"prunes weights in '{name}' that are not zero")
  hf_models.change_weights(gpt_dir, lambda t: t[name].__setitem__((2, 3), 0))
  loaded = interop.load_hf(gpt_dir)
  np.testing.assert_array_equal(
      loaded.mask['h_0']['mlp']['wi']['kernel'], mask
  )


def test_files_of_very_many_tensors_are_refused_by_their_number(gpt_dir):
  header = {
      f'x{i}': dict(dtype='F32', shape=[0], data_offsets=[0, 0])
      for i in range(100_001)
  }
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)
  (gpt_dir / 'model.safetensors').write_bytes(
      len(text).to_bytes(8, 'little') + text
  )
  refuse(gpt_dir, gpt_dir / 'model.safetensors', 'holds 100,001 tensors, and')

"""Checkpoints are converted from and to Hugging Face directories."""

import ast
import dataclasses
import itertools
import json
import re
import shutil

import numpy as np
import pytest

from experiments import convert
import spdf_jax as spdf
from spdf_jax import interop
from spdf_jax.data import ByteTokenizer
from spdf_jax.data import open_tokenizer
from spdf_jax.data import tokenizer_paths
from spdf_jax.data import train_bpe
from spdf_jax.data.tokenizer_files import save_tokenizer
from spdf_jax.interop import tensors
from spdf_jax.models import create_model
from spdf_jax.models import GPTConfig
from spdf_jax.training import find_checkpoint
from spdf_jax.training import MismatchError
from spdf_jax.training import read_params
from spdf_jax.training import train
from spdf_jax.training.checkpoints import workdir
from spdf_jax.training.checkpoints.files import read_checkpoint
from spdf_jax.training.checkpoints.files import write_params
from spdf_jax.training.configs.settings import ModelConfig
from tests import command
from tests.hf_models import assert_same_bits
from tests.hf_models import CONFIGS
from tests.hf_models import GPT
from tests.hf_models import LLAMA
from tests.hf_models import make_mask
from tests.hf_models import make_params
from tests.hf_models import masked
from tests.refusals import refuse
from tests.tiers import slow_except
from tests.tiny_run import make_config
from tests.tiny_run import make_dynamic_run
from tests.tiny_run import make_run

pytestmark = pytest.mark.ci

pytest.importorskip('safetensors.numpy')

TINY = GPTConfig(16, 1, 2, 16, 16, 8)  # The model of tiny_run.
AS_IT_IS = dict(format='dense', dtype='float32', vocab_size=None)


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """A finished run, sparse and then dense; not to be changed."""
  workdir = tmp_path_factory.mktemp('run')
  run = make_run(
      model={'preset': 'gpt-mini'} | dataclasses.asdict(TINY)
  )
  return run, workdir, train(run.open(workdir))


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
  done = command.run(
      'convert', f'--model={tmp_path / "hf"}', f'--to={tmp_path / "run"}',
      f'--scan_layers={scan_layers}',
  )
  assert done.status == 0, done.log
  said = done.output
  fields = dict(re.findall(r'--config.model.(\w+)=(\w[\w-]*)', said))
  preset = fields.pop('preset')
  others = re.search(r'model.update\((.*?)\)', said)
  model = create_model(preset, **{
      name: ast.literal_eval(value) for name, value in fields.items()
  } | (ast.literal_eval(others[1]) if others else {}))
  assert model.config == dataclasses.replace(config, scan_layers=scan_layers)
  want = interop.stack_layers(params) if scan_layers else params
  restored = read_params(find_checkpoint(str(tmp_path / 'run')), want)
  assert_same_bits(restored, want)
  done = command.run(
      'convert', f'--model={tmp_path / "run"}',
      f'--to_hf={tmp_path / "back"}',
  )
  assert f'{tmp_path / "back"} is written; no sparse matrices' in done.output
  assert_same_bits(interop.load_hf(tmp_path / 'back').params, params)


def test_training_starts_from_a_converted_model(tmp_path):
  params = make_params(TINY)
  interop.save_hf(tmp_path / 'hf', TINY, params)
  convert.import_model(tmp_path / 'hf', tmp_path / 'a', scan_layers=False)
  run = make_run(init_from=str(tmp_path / 'a'))
  state = run.open(tmp_path / 'b').state
  mask = spdf.get_mask(state.opt_state)
  assert_same_bits(state.params, masked(params, mask))


def test_training_in_the_workdir_of_a_converted_model_is_refused(tmp_path):
  checkpoint = write_params(tmp_path, make_params(TINY), {'model': {}})
  refuse('of another config', make_run().open, tmp_path, error=MismatchError)
  assert checkpoint.is_dir()
  refuse(
      'holds checkpoints already; give another', write_params, tmp_path, {}, {}
  )


@pytest.mark.parametrize('format', ['dense', 'compact'])
def test_an_exported_run_has_the_mask_it_was_trained_with(
    format, trained, tmp_path
):
  run, workdir, _ = trained
  convert.export_model(
      f'{workdir}@pretrain', tmp_path, **AS_IT_IS | dict(format=format)
  )
  state = read_checkpoint(
      find_checkpoint(f'{workdir}@pretrain'), run.programs.abstract_state,
      config=run.config, fingerprints=run.fingerprints,
  )
  loaded = interop.load_hf(tmp_path)
  assert loaded.config == TINY
  assert_same_bits(loaded.params, state.params)
  assert_same_bits(loaded.mask, spdf.get_mask(state.opt_state))


@pytest.mark.slow
def test_a_kept_weight_that_is_zero_is_exported_as_kept(tmp_path):
  # RigL has just let some weights grow, from zero.
  moving = make_dynamic_run()
  run = dataclasses.replace(moving, config=dataclasses.replace(
      moving.config, model=ModelConfig('gpt-mini', TINY)
  ))
  run = run.open(tmp_path)
  state = run.state
  for step in range(3):
    state, _ = run.programs.step(state, run.programs.batch_at(step))
  kernel = state.params['h_0']['mlp']['wi']['kernel']
  mask = spdf.get_mask(state.opt_state)
  kept = mask['h_0']['mlp']['wi']['kernel']
  row, column = np.argwhere(kept)[0]
  state.params['h_0']['mlp']['wi']['kernel'] = kernel.at[row, column].set(0)
  run.checkpoints.save(state)
  run.close()
  convert.export_model(str(tmp_path), tmp_path / 'hf', **AS_IT_IS)
  assert_same_bits(interop.load_hf(tmp_path / 'hf').mask, mask)


def test_the_latest_checkpoint_of_a_dense_phase_has_no_mask(trained, tmp_path):
  _, workdir, state = trained
  convert.export_model(str(workdir), tmp_path, **AS_IT_IS)
  loaded = interop.load_hf(tmp_path)
  assert loaded.mask is None
  assert_same_bits(loaded.params, state.params)


@pytest.mark.parametrize('format, dtype, config, scan_layers', [
    ('dense', 'float32', GPT, False), ('compact', 'float16', GPT, True),
    ('dense', 'bfloat16', LLAMA, True),
])
def test_export_import_and_export_give_the_same_files(
    format, dtype, config, scan_layers, tmp_path
):
  params = make_params(config)
  mask = make_mask(params)
  # Some kept weights are zero, and one layer has fewer masks than the other.
  params['h_0']['mlp']['wo']['kernel'][:4] = 0
  mask['h_1']['attn']['wd']['kernel'] = None
  interop.save_hf(
      tmp_path / 'a', config, params, mask, format=format, dtype=dtype,
      end_of_text=7, generation={'temperature': 0.6, 'top_p': 0.9},
  )
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    (tmp_path / 'a' / name).write_text(f'{{"file": "{name}"}}')
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
  convert.rewrite_model(
      tmp_path / 'a', tmp_path / 'd', format=format, dtype=dtype,
      vocab_size=None,
  )
  for name in ('generation_config.json', 'tokenizer_config.json'):
    assert (tmp_path / 'd' / name).read_bytes() == files[0][name]
  assert b'"top_p": 0.9' in files[0]['generation_config.json']


def test_an_imported_mask_of_other_weights_is_refused(tmp_path):
  params = make_params(TINY)
  interop.save_hf(tmp_path / 'hf', TINY, params, make_mask(params))
  convert.import_model(
      tmp_path / 'hf', tmp_path / 'run', scan_layers=False
  )
  path = tmp_path / 'run' / 'imported_masks.safetensors'
  masks = tensors.read_tensors(path)
  path.unlink()
  tensors.write_tensors(path, {k: ~x for k, x in masks.items()})
  refuse(
      'imported_masks.safetensors prunes weights in ', convert.export_model,
      str(tmp_path / 'run'), tmp_path / 'back', **AS_IT_IS,
  )


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
  opened = open_tokenizer(tmp_path / 'hf')
  assert opened.fingerprint == tokenizer.fingerprint
  exported = json.loads((tmp_path / 'hf/tokenizer.json').read_text())
  # The format that transformers reads.
  assert exported['model']['type'] == 'BPE'
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
  # The tokenizer of the previous export is removed.
  assert not tokenizer_paths(tmp_path / 'hf')


def test_a_checkpoint_of_parameters_alone_has_the_mask_of_its_zeros(
    tmp_path, caplog
):
  params = make_params(TINY)
  params['h_0']['mlp']['wi']['kernel'][3, 3] = 0
  model = {'preset': 'gpt-mini'} | dataclasses.asdict(TINY)
  write_params(tmp_path, params, {'model': model})
  convert.export_model(str(tmp_path), tmp_path / 'hf', **AS_IT_IS)
  mask = interop.load_hf(tmp_path / 'hf').mask['h_0']['mlp']['wi']['kernel']
  assert np.argwhere(~mask).tolist() == [[3, 3]]
  assert 'the mask is derived from their zeros' in caplog.text


def test_imported_weights_of_another_size_are_refused_by_its_fields(tmp_path):
  params = make_params(TINY)
  interop.save_hf(tmp_path / 'hf', TINY, params, None)
  convert.import_model(tmp_path / 'hf', tmp_path / 'run', scan_layers=True)
  run = make_run()
  refuse(
      'model.scan_layers was True and is False; restore', workdir.check_workdir,
      tmp_path / 'new',
      dataclasses.replace(run.config, init_from=str(tmp_path / 'run')),
      run.programs.abstract_state.params, error=MismatchError,
  )

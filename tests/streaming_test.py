"""Streamed texts are those of `generate`; sources of models are equal."""

import dataclasses
import io
import os
import pathlib
import re
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest
from sparse_params import make_sparse_params

from spdf_jax import data
from spdf_jax import interop
from spdf_jax import models
from spdf_jax.accelerator import ListedMatrix
from spdf_jax.evaluation import CachedModel
from spdf_jax.evaluation import generate
from spdf_jax.evaluation import sampler
from spdf_jax.evaluation import stream
from spdf_jax.runs import continuation
from spdf_jax.runs import open_models

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = models.GPTConfig(
    vocab_size=300, n_layers=1, n_heads=2, d_model=16, d_ff=24, max_length=24
)


def save(folder, **kwargs):
  params, mask = make_sparse_params(CONFIG, kwargs.pop('sparsity', 0.75))
  interop.save_hf(folder, CONFIG, params, mask, **kwargs)
  data.save_tokenizer(folder / 'tokenizer.json', data.ByteTokenizer())
  return params


@pytest.mark.parametrize('choose', [
    None, pytest.param(sampler(0.7), marks=pytest.mark.slow)
])
def test_streamed_tokens_are_those_of_generate(choose):
  params, _ = make_sparse_params(CONFIG, 0.75)
  decoder = CachedModel(models.model_of(CONFIG))
  rest = dict(max_new_tokens=5, end_of_text=256, length=24)
  if choose is not None:
    rest |= dict(choose=choose, key=np.int64(3))
  found = list(stream(decoder, params, [7, 1, 19], **rest))
  (wanted,) = generate(decoder, params, [[7, 1, 19]], batch_size=1, **rest)
  assert found == wanted and len(found) == 5
  rest['end_of_text'] = wanted[2]
  until = wanted.index(wanted[2])
  assert list(stream(decoder, params, [7, 1, 19], **rest)) == wanted[:until]


def test_a_prompt_beyond_the_model_is_refused():
  decoder = CachedModel(models.model_of(CONFIG))
  with pytest.raises(ValueError, match='has 24 tokens'):
    next(stream(decoder, None, [1] * 24, max_new_tokens=1, end_of_text=0,
                length=24))


@pytest.mark.parametrize('format', [
    pytest.param('dense', marks=pytest.mark.slow), 'compact'
])
def test_an_export_is_opened_with_lists_and_its_text_is_written(
    format, tmp_path
):
  params = save(tmp_path, format=format)
  candidate = open_models.open_listed(str(tmp_path))
  assert isinstance(
      candidate.params['h_0']['mlp']['wi']['kernel'], ListedMatrix
  )
  out, log = io.StringIO(), io.StringIO()
  continuation.write_continuation(
      candidate, 'ab', max_new_tokens=6, out=out, log=log
  )
  (wanted,) = generate(
      CachedModel(models.model_of(CONFIG)), params, [[97, 98]],
      max_new_tokens=6, end_of_text=256, batch_size=1, length=24,
  )
  assert out.getvalue() == 'ab' + data.ByteTokenizer().decode(wanted) + '\n'
  assert re.fullmatch(
      r'6 tokens, [0-9.,]+ tokens/s; parameters 0 MiB, peak memory [0-9,]+ MiB'
      r'\n', log.getvalue(),
  )


def test_matrices_with_few_pruned_weights_stay_dense(tmp_path):
  save(tmp_path, sparsity=0.6)
  kernel_of = lambda candidate: candidate.params['h_0']['mlp']['wi']['kernel']
  opened = open_models.open_listed(str(tmp_path))
  assert kernel_of(opened).ndim == 2
  opened = open_models.open_listed(str(tmp_path), least_sparsity=0.5)
  assert isinstance(kernel_of(opened), ListedMatrix)


def test_characters_are_decoded_when_they_are_complete():
  text = 'né\u20ac 😀.'
  tokens = list(text.encode()) + [0xe2]  # The last character is unfinished.
  pieces = list(continuation.decode_pieces(data.ByteTokenizer(), iter(tokens)))
  assert ''.join(pieces) == text + '\ufffd'
  assert set(text) <= set(pieces)


class Words:
  """Decodes as tokenizers of Llama do, without the space before the first."""

  def decode(self, ids):
    return ''.join(f' word{i}' for i in ids)[1:]


def test_a_continuation_begins_with_the_space_after_its_prompt():
  pieces = continuation.decode_pieces(Words(), iter([3, 4]), [1, 2])
  assert list(pieces) == [' word3', ' word4']


def test_a_model_in_float16_is_listed_in_float32(tmp_path, monkeypatch):
  save(tmp_path)
  found = interop.load_hf(tmp_path)
  config = dataclasses.replace(found.config, dtype='float16')
  monkeypatch.setattr(
      interop, 'load_hf', lambda _: found._replace(config=config)
  )
  candidate = open_models.open_listed(str(tmp_path))
  assert candidate.model.config.dtype == 'float32'
  logits = candidate.subject.apply_fn(candidate.params, jnp.arange(4)[None])
  assert jnp.isfinite(logits).all()


def test_the_tokenizer_of_a_run_needs_no_tokens_of_its_corpus(
    tmp_path, monkeypatch
):
  config = types.SimpleNamespace(
      corpus='python-stdlib', tokenizer='bytes', cache_dir=tmp_path
  )
  monkeypatch.setattr(data, 'prepare_corpus', None)
  assert open_models._tokenizer(config) == data.ByteTokenizer()
  config.tokenizer = 'bpe-300'  # Not prepared yet.
  prepared = types.SimpleNamespace(tokenizer='prepared')
  monkeypatch.setattr(data, 'prepare_corpus', lambda *_, **__: prepared)
  assert open_models._tokenizer(config) == 'prepared'


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path):
  left = tmp_path / '.writing_abc'
  left.mkdir()
  (left / 'model.safetensors').write_bytes(b'')
  save(tmp_path)
  assert not list(tmp_path.glob('.writing_*'))
  assert (tmp_path / 'model.safetensors').exists()


@pytest.mark.process
@pytest.mark.parametrize('seed', [-1, 2**63])
def test_a_seed_beyond_64_bits_is_refused(seed):
  child = subprocess.run(
      [
          sys.executable, '-m', 'experiments.generate', '--model=none',
          f'--seed={seed}',
      ],
      cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
      env=os.environ | {'PYTHONPATH': str(ROOT)},
  )
  assert child.returncode == 1
  assert f'flag --seed={seed}: {seed} is not' in child.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    'scan_layers', [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_the_command_continues_with_a_run(scan_layers, tmp_path):
  from quickstart_runs import small_config

  from spdf_jax import runs

  config = small_config(
      model__scan_layers=scan_layers, data__task='',
      phases__order=('pretrain',), phases__pretrain__duration='5 steps',
  )
  runs.launch(config, tmp_path / 'run')
  child = subprocess.run(
      [
          sys.executable, '-m', 'experiments.generate',
          f'--model={tmp_path / "run"}', '--prompt=def f', '--temperature=1',
          '--max_new_tokens=4',
      ],
      cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
      env=os.environ | {'PYTHONPATH': str(ROOT)},
  )
  assert child.returncode == 0, child.stderr
  assert child.stdout.startswith('def f')
  assert '4 tokens, ' in child.stderr and 'peak memory' in child.stderr
  opened = open_models.open_listed(str(tmp_path / 'run'))
  kernel = opened.params['h_0']['mlp']['wi']['kernel']
  assert isinstance(kernel, ListedMatrix)
  assert not opened.model.config.scan_layers

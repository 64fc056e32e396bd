"""Compact exports are evaluated as lists, with the scores of dense models."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tracemalloc

import jax
import numpy as np
import pytest
from sparse_params import make_sparse_params

from spdf_jax import data
from spdf_jax import interop
from spdf_jax import models
from spdf_jax.accelerator import ListedMatrix
from spdf_jax.evaluation import scorecard
from spdf_jax.interop.compact_files import names_of
from spdf_jax.interop.tensor_files import COMPACT
from spdf_jax.interop.tensor_files import MASKS
from spdf_jax.interop.tensor_files import open_tensors
from spdf_jax.runs import conversion
from spdf_jax.runs import open_models

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = models.GPTConfig(
    vocab_size=260, n_layers=2, n_heads=2, d_model=16, d_ff=64, max_length=32
)
OPTIONS = dict(
    checkpoint=None, densify=None, scan_layers=False, moments='keep',
    vocab_size=None, check=False, allow_non_finite=False, trust_code=False,
    to=None, format='compact', dtype='float32',
)
TEXT = 'Sparse models read nothing of their pruned weights. ' * 3


def save(folder, config=CONFIG, scale=1.0):
  """Writes a GPT-2 directory of which 84 % of the hidden weights are zero."""
  params, mask = make_sparse_params(config, 0.84)
  params = jax.tree.map(lambda x: scale * x, params)
  interop.save_hf(folder, config, params, mask, end_of_text=256)
  data.save_tokenizer(folder / 'tokenizer.json', data.ByteTokenizer())


def convert(source, target, **options):
  return list(conversion.convert(
      **OPTIONS | dict(from_hf=str(source), to_hf=str(target)) | options
  ))


def score_text(candidate, folder):
  path = folder / 'text.tokens'
  path.write_text(TEXT)
  settings = scorecard.Settings(batch_size=2, search='greedy')
  scores = scorecard.score_task(candidate, 'wikitext', str(path), settings)
  return {score.metric: score.value for score in scores}


@pytest.mark.parametrize('masks', [True, False])
def test_a_hugging_face_directory_is_converted_with_its_zeros(masks, tmp_path):
  save(tmp_path / 'hf')
  if not masks:
    (tmp_path / 'hf' / MASKS).unlink()
  (text,) = convert(tmp_path / 'hf', tmp_path / 'compact')
  assert 'is written; sparsity 8' in text and 'in 12 matrices' in text
  old, new = map(interop.load_hf, (tmp_path / 'hf', tmp_path / 'compact'))
  jax.tree.map(np.testing.assert_array_equal, old.params, new.params)
  assert old.config == new.config
  tokenizer = data.open_tokenizer(tmp_path / 'compact')
  assert tokenizer.fingerprint == data.ByteTokenizer().fingerprint


def test_a_directory_is_not_converted_into_itself(tmp_path):
  save(tmp_path)
  with pytest.raises(ValueError, match='from_hf and to_hf are both'):
    convert(tmp_path, tmp_path)


def test_a_conversion_replaces_the_tokenizer_of_the_one_before(tmp_path):
  save(tmp_path / 'bytes')
  bpe = tmp_path / 'bpe'
  save(bpe)
  (bpe / 'tokenizer.json').unlink()
  tokenizer = data.train_bpe(['to be or not'] * 2, vocab_size=258)
  model = json.loads(tokenizer.model.to_str())['model']
  (bpe / 'vocab.json').write_text(json.dumps(model['vocab']))
  merges = (x if isinstance(x, str) else ' '.join(x) for x in model['merges'])
  (bpe / 'merges.txt').write_text('\n'.join(merges))
  for source in ('bytes', 'bpe', 'bytes'):
    convert(tmp_path / source, tmp_path / 'out')
    found, wanted = map(data.tokenizer_paths, (
        tmp_path / 'out', tmp_path / source
    ))
    assert [x.name for x in found] == [x.name for x in wanted]
    opened = map(data.open_tokenizer, (tmp_path / 'out', tmp_path / source))
    assert len({x.fingerprint for x in opened}) == 1


def test_a_conversion_that_fails_at_the_tokenizer_writes_no_model(
    tmp_path, monkeypatch
):
  save(tmp_path / 'hf')
  def fail(*arguments, **options):
    raise OSError('No space left on device')

  monkeypatch.setattr(shutil, 'copyfile', fail)
  with pytest.raises(OSError, match='No space'):
    convert(tmp_path / 'hf', tmp_path / 'out')
  assert not list((tmp_path / 'out').iterdir())


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_compact_export_is_scored_as_its_dense_weights(dtype, tmp_path):
  save(tmp_path / 'hf')
  convert(tmp_path / 'hf', tmp_path / 'dense', dtype=dtype, format='dense')
  convert(tmp_path / 'dense', tmp_path / 'compact', dtype=dtype)
  dense = open_models.open_hf(str(tmp_path / 'dense'))
  compact = open_models.open_hf(str(tmp_path / 'compact'))
  kernel = compact.params['h_1']['mlp']['wo']['kernel']
  assert isinstance(kernel, ListedMatrix) and kernel.values.dtype == dtype
  wanted, found = (score_text(x, tmp_path) for x in (dense, compact))
  assert wanted and found == pytest.approx(wanted, rel=1e-5)


def test_no_matrix_of_a_compact_export_is_built(tmp_path):
  config = models.GPTConfig(
      vocab_size=257, n_layers=8, n_heads=2, d_model=64, d_ff=256,
      max_length=16,
  )
  save(tmp_path / 'hf', config)
  convert(tmp_path / 'hf', tmp_path / 'compact', dtype='bfloat16')
  hidden = 4 * 12 * config.n_layers * config.d_model**2  # Bytes.

  def peak(load):
    tracemalloc.start()
    load(tmp_path / 'compact')
    try:
      return tracemalloc.get_traced_memory()[1]
    finally:
      tracemalloc.stop()

  assert peak(interop.load_listed) < hidden / 2
  assert peak(interop.load_hf) > hidden  # NumPy's arrays are counted.


_PEAK = """
import sys
from spdf_jax.evaluation import generate
from spdf_jax.runs import open_models
candidate = open_models.open_hf(sys.argv[1])
generate(
    candidate.subject.decoder, candidate.params, [[72, 105]],
    max_new_tokens=2, end_of_text=256, batch_size=1, length=16,
)
lines = open('/proc/self/status').read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith('VmHWM')))
"""


@pytest.mark.slow
def test_a_process_that_generates_needs_less_than_the_dense_weights(tmp_path):
  def peak(folder):
    child = subprocess.run(
        [sys.executable, '-c', _PEAK, str(folder)], cwd=ROOT, check=False,
        capture_output=True, text=True, timeout=600,
    )
    assert child.returncode == 0, child.stderr
    return 1024 * int(child.stdout)

  config = models.GPTConfig(
      vocab_size=257, n_layers=6, n_heads=8, d_model=64, d_ff=256,
      max_length=16,
  )
  wide = dataclasses.replace(config, d_model=1024, d_ff=4096)
  hidden = 4 * 12 * wide.n_layers * wide.d_model**2
  for folder, sizes in (('small', config), ('wide', wide)):
    save(tmp_path / folder, sizes)
    convert(
        tmp_path / folder, tmp_path / f'{folder}_compact', dtype='bfloat16'
    )
  # The small model needs the same programs.
  rest = peak(tmp_path / 'small_compact')
  assert peak(tmp_path / 'wide_compact') - rest < hidden / 2
  assert peak(tmp_path / 'wide') - rest > hidden


@pytest.mark.process
def test_the_commands_convert_generate_and_evaluate(tmp_path):
  save(tmp_path / 'hf')
  (tmp_path / 'text.tokens').write_text(TEXT)

  def run(name, *flags):
    child = subprocess.run(
        [sys.executable, '-m', f'experiments.{name}', *flags], cwd=ROOT,
        env=os.environ | {'PYTHONPATH': str(ROOT)}, check=False,
        capture_output=True, text=True, timeout=300,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout

  compact = tmp_path / 'compact'
  run('convert', f'--from_hf={tmp_path / "hf"}', f'--to_hf={compact}',
      '--format=compact')
  assert names_of(open_tensors(compact / COMPACT)) == set(
      open_tensors(tmp_path / 'hf' / 'model.safetensors')
  )
  assert run(
      'generate', f'--model={compact}', '--prompt=ab', '--max_new_tokens=4'
  ).startswith('ab')
  task = f'--tasks=wikitext={tmp_path / "text.tokens"}'
  tables = [
      run('evaluate', f'--hf={source}', task, *flags)
      for source, *flags in (
          (tmp_path / 'hf',), (tmp_path / 'hf', '--listed'), (compact,)
      )
  ]
  assert 'wikitext' in tables[0] and tables[0] == tables[1] == tables[2]

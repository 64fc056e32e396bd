"""Models of runs and exports are opened; sparse ones with listed matrices."""

import dataclasses
import json
import re
import shutil
import tracemalloc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import convert
from experiments import preparation
from experiments.scores import language_models
from experiments.scores import sheets
from experiments.scores import task_scores
from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import interop
from spdf_jax import models
from spdf_jax import runs
from spdf_jax.accelerator import ListedMatrix
from spdf_jax.data import tokenizer_files
from spdf_jax.interop.tensors import COMPACT
from spdf_jax.interop.tensors import MASKS
from spdf_jax.interop.tensors import names_of
from spdf_jax.interop.tensors import open_tensors
from spdf_jax.training import Run
from tests import command
from tests.quickstart_runs import small_config
from tests.refusals import refuse
from tests.sparse_params import make_sparse_params

CONFIG = models.GPTConfig(
    vocab_size=260, n_layers=2, n_heads=2, d_model=16, d_ff=64, max_length=32
)
TEXT = 'Sparse models read nothing of their pruned weights. ' * 3


def save(folder, config=CONFIG, sparsity=0.84):
  """Writes a GPT-2 directory with zeros in its hidden weights."""
  params, mask = make_sparse_params(config, sparsity)
  interop.save_hf(folder, config, params, mask, end_of_text=256)
  tokenizer_files.save_tokenizer(
      folder / 'tokenizer.json', data.ByteTokenizer()
  )
  return params


def rewrite(source, target, format='compact', dtype='float32'):
  return convert.rewrite_model(
      source, target, format=format, dtype=dtype, vocab_size=None
  )


def score_text(model, folder):
  path = folder / 'text.tokens'
  path.write_text(TEXT)
  settings = sheets.Settings(batch_size=2, search='greedy')
  scores = task_scores.score_task(model, 'wikitext', str(path), settings)
  return {score.metric: score.value for score in scores}


@pytest.mark.parametrize('masks', [True, False])
def test_a_hugging_face_directory_is_converted_with_its_zeros(masks, tmp_path):
  save(tmp_path / 'hf')
  if not masks:
    (tmp_path / 'hf' / MASKS).unlink()
  text = rewrite(tmp_path / 'hf', tmp_path / 'compact')
  assert 'is written; sparsity 8' in text and 'in 12 matrices' in text
  old, new = map(interop.load_hf, (tmp_path / 'hf', tmp_path / 'compact'))
  jax.tree.map(np.testing.assert_array_equal, old.params, new.params)
  assert old.config == new.config
  tokenizer = data.open_tokenizer(tmp_path / 'compact')
  assert tokenizer.fingerprint == data.ByteTokenizer().fingerprint


def test_a_run_is_read_with_the_tokenizer_it_was_trained_with(tmp_path, caplog):
  texts, folder = tmp_path / 'texts', tmp_path / 'corpus'
  texts.mkdir()
  for i in range(12):
    (texts / f'{i}.txt').write_text(f'{TEXT}{i}')
  preparation.prepare_files(
      texts, tokenizer='bpe-270', output=folder, validation=0.2, test=0.2
  )
  run = Run.create(small_config(
      data__corpus=str(folder), data__tokenizer='', data__task='',
      phases__order=('pretrain',), model__vocab_size=270,
      data__max_epochs__corpus=9,
  )).open(tmp_path / 'run')
  run.checkpoints.save(run.state)
  run.close()
  source = str(tmp_path / 'run')
  wanted = data.open_tokenizer(folder).fingerprint
  assert language_models.open_run(source).tokenizer.fingerprint == wanted
  other = data.train_bpe(['other words of others'] * 9, vocab_size=262)
  tokenizer_files.save_tokenizer(folder / 'tokenizer.json', other)
  refuse('was trained with another tokenizer', language_models.open_run, source)
  convert.export_model(
      source, tmp_path / 'hf', format='dense', dtype='float32', vocab_size=None
  )
  assert 'the export has no tokenizer' in caplog.text
  assert not data.tokenizer_paths(tmp_path / 'hf')


def test_a_directory_is_not_converted_into_itself(tmp_path):
  save(tmp_path)
  refuse('model and to_hf are both', rewrite, tmp_path, tmp_path)


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
    rewrite(tmp_path / source, tmp_path / 'out')
    actual, wanted = map(data.tokenizer_paths, (
        tmp_path / 'out', tmp_path / source
    ))
    assert [x.name for x in actual] == [x.name for x in wanted]
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
    rewrite(tmp_path / 'hf', tmp_path / 'out')
  assert not list((tmp_path / 'out').iterdir())


def test_a_compact_export_is_scored_as_its_dense_weights(tmp_path):
  dtype = 'bfloat16'
  save(tmp_path / 'hf')
  rewrite(tmp_path / 'hf', tmp_path / 'dense', dtype=dtype, format='dense')
  rewrite(tmp_path / 'dense', tmp_path / 'compact', dtype=dtype)
  dense = language_models.open_hf(str(tmp_path / 'dense'))
  compact = language_models.open_hf(str(tmp_path / 'compact'))
  kernel = compact.params['h_1']['mlp']['wo']['kernel']
  assert isinstance(kernel, ListedMatrix) and kernel.values.dtype == dtype
  wanted, actual = (score_text(x, tmp_path) for x in (dense, compact))
  assert wanted and actual == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize('format', ['dense', 'compact'])
def test_texts_of_a_hugging_face_directory_are_encoded_as_transformers_does(
    format, tmp_path
):
  save(tmp_path / 'hf')
  rewrite(tmp_path / 'hf', tmp_path / 'model', format=format)
  folder = tmp_path / 'model'
  learned = data.train_bpe(['to or'] * 3, 260)
  data.export_tokenizer(folder / 'tokenizer.json', learned)
  config = json.loads((folder / 'tokenizer_config.json').read_text())
  config['unk_token'] = 'to'
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  for model in (
      language_models.open_hf(str(folder)),
      language_models.open_listed(str(folder)),
  ):
    assert learned.model.token_to_id('to') in model.tokenizer.encode('torn')
    assert model.tokenizer.encode('<|endoftext|>') == [learned.end_of_text]
  assert learned.model.token_to_id('to') not in learned.encode('torn')
  (folder / 'text.tokens').write_text(TEXT)
  score, = task_scores.score_task(
      model, 'wikitext', str(folder / 'text.tokens'), sheets.Settings()
  )
  assert score.note.endswith('special tokens')


def test_no_matrix_of_a_compact_export_is_built(tmp_path):
  config = models.GPTConfig(
      vocab_size=257, n_layers=8, n_heads=2, d_model=64, d_ff=256,
      max_length=16,
  )
  save(tmp_path / 'hf', config)
  rewrite(tmp_path / 'hf', tmp_path / 'compact', dtype='bfloat16')
  # Bytes of the hidden matrices in float32.
  hidden = 4 * 12 * config.n_layers * config.d_model**2

  def peak(load):
    tracemalloc.start()
    load(tmp_path / 'compact')
    try:
      return tracemalloc.get_traced_memory()[1]
    finally:
      tracemalloc.stop()

  assert peak(interop.load_listed) < hidden / 2
  assert peak(interop.load_hf) > hidden  # NumPy's arrays are counted.


def run_command(name, *flags):
  """Returns what a command writes to its output and to its log."""
  done = command.run(name, *flags)
  assert done.status == 0, done.log
  return done.output, done.log


def test_the_commands_convert_generate_and_evaluate(tmp_path):
  params = save(tmp_path / 'hf')
  (tmp_path / 'text.tokens').write_text(TEXT)
  compact = tmp_path / 'compact'
  run_command(
      'convert', f'--model={tmp_path / "hf"}', f'--to_hf={compact}',
      '--format=compact',
  )
  assert names_of(open_tensors(compact / COMPACT)) == set(
      open_tensors(tmp_path / 'hf' / 'model.safetensors')
  )
  text, log = run_command(
      'generate', f'--model={compact}', '--prompt=ab', '--max_new_tokens=4'
  )
  (wanted,) = evaluation.generate(
      evaluation.CachedModel(models.model_of(CONFIG)), params, [[97, 98]],
      max_new_tokens=4, end_of_text=256, batch_size=1, length=32,
  )
  assert text == 'ab' + data.ByteTokenizer().decode(wanted) + '\n'
  assert re.search(
      r'^4 tokens, [0-9.,]+ tokens/s; parameters 0\.[0-9] MiB, peak memory '
      r'[0-9,]+ MiB$', log, re.M,
  )
  task = f'--tasks=wikitext={tmp_path / "text.tokens"}'
  tables = [
      run_command('evaluate', f'--hf={source}', task, *flags)[0]
      for source, *flags in (
          (tmp_path / 'hf',), (tmp_path / 'hf', '--listed'), (compact,)
      )
  ]
  assert 'wikitext' in tables[0] and tables[0] == tables[1] == tables[2]


@pytest.mark.parametrize('format', ['dense', 'compact'])
def test_on_gpus_matrices_stay_dense_and_layers_are_scanned(
    format, tmp_path, monkeypatch
):
  params = save(tmp_path / 'hf')
  rewrite(tmp_path / 'hf', tmp_path / 'new', format=format)
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  opened = language_models.open_listed(str(tmp_path / 'new'), dtype='bfloat16')
  monkeypatch.undo()
  stacked = opened.params['h']['mlp']['wo']['kernel']
  assert opened.module.config.scan_layers and stacked.dtype == jnp.bfloat16
  for layer in range(CONFIG.n_layers):
    kernel = params[f'h_{layer}']['mlp']['wo']['kernel']
    np.testing.assert_array_equal(stacked[layer], kernel.astype(jnp.bfloat16))
  assert opened.params['wte']['embedding'].dtype == jnp.float32
  assert jnp.isfinite(
      opened.subject.apply_fn(opened.params, jnp.arange(4)[None])
  ).all()


def test_matrices_with_few_pruned_weights_stay_dense(tmp_path):
  save(tmp_path, sparsity=0.6)
  kernel_of = lambda model: model.params['h_0']['mlp']['wi']['kernel']
  opened = language_models.open_listed(str(tmp_path))
  assert kernel_of(opened).ndim == 2
  opened = language_models.open_listed(str(tmp_path), least_sparsity=0.5)
  assert isinstance(kernel_of(opened), ListedMatrix)


def test_a_model_in_float16_is_listed_in_float32(tmp_path, monkeypatch):
  save(tmp_path)
  loaded = interop.load_hf(tmp_path)
  config = dataclasses.replace(loaded.config, dtype='float16')
  monkeypatch.setattr(
      interop, 'load_hf', lambda _: loaded._replace(config=config)
  )
  opened = language_models.open_listed(str(tmp_path))
  assert opened.module.config.dtype == 'float32'
  logits = opened.subject.apply_fn(opened.params, jnp.arange(4)[None])
  assert jnp.isfinite(logits).all()


def test_a_tokenizer_of_another_model_is_refused():
  module = models.create_model('gpt-mini', vocab_size=256)
  with pytest.raises(ValueError, match='vocabulary of 256 and its tokenizer'):
    language_models.LanguageModel('tiny', module, None, data.ByteTokenizer())


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path):
  left = tmp_path / '.writing_abc'
  left.mkdir()
  (left / 'model.safetensors').write_bytes(b'')
  save(tmp_path)
  assert not list(tmp_path.glob('.writing_*'))
  assert (tmp_path / 'model.safetensors').exists()


@pytest.fixture(scope='module', params=[
    pytest.param(False, marks=pytest.mark.slow), True
])
def workdir(request, tmp_path_factory):
  config = small_config(
      model__scan_layers=request.param, data__task='',
      phases__order=('pretrain',), phases__pretrain__duration='5 steps',
  )
  folder = tmp_path_factory.mktemp('run')
  runs.launch(config, folder)
  return str(folder)


@pytest.mark.ci
def test_the_command_continues_with_a_run(workdir):
  text, log = run_command(
      'generate', f'--model={workdir}', '--prompt=def f', '--temperature=1',
      '--max_new_tokens=4',
  )
  assert text.startswith('def f')
  assert '4 tokens, ' in log and 'peak memory' in log
  opened = language_models.open_listed(workdir)
  kernel = opened.params['h_0']['mlp']['wi']['kernel']
  assert isinstance(kernel, ListedMatrix)
  assert not opened.module.config.scan_layers


@pytest.mark.ci
def test_the_tokenizer_of_a_run_needs_no_tokens_of_its_corpus(
    workdir, monkeypatch
):
  monkeypatch.setattr(data, 'prepare_corpus', None)
  tokenizer = language_models.open_run(workdir).tokenizer

  def missing(*arguments, **options):
    raise FileNotFoundError

  prepared = types.SimpleNamespace(tokenizer=tokenizer)
  monkeypatch.setattr(data, 'read_tokenizer', missing)
  monkeypatch.setattr(data, 'prepare_corpus', lambda *_, **__: prepared)
  assert language_models.open_run(workdir).tokenizer is tokenizer

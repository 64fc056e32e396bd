"""Decoders are pruned block by block, as with the inputs of whole models."""

import dataclasses
import re

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import one_shot as study
from experiments.papers import json_files
from experiments.prune import read_sequences
from experiments.scores import language_models
import spdf_jax as spdf
from spdf_jax import data
from spdf_jax import interop
from spdf_jax import models
from spdf_jax import training
from spdf_jax.data import tokenizer_files
from spdf_jax.sparsity import one_shot
from spdf_jax.sparsity import trees
from tests import command
from tests.hf_models import assert_same_bits
from tests.hf_models import CONFIGS
from tests.hf_models import make_params
from tests.quickstart_runs import small_config
from tests.tiers import slow_except
from tests.tiny_run import make_run

pytestmark = pytest.mark.ci

TOKENS = np.random.default_rng(3).integers(23, size=(5, 8))


def prune(config, params, pruner, sparsity, tokens=TOKENS):
  params, mask = dict(params), jax.tree.map(lambda _: None, params)
  for block in models.prune_blocks(config, params, tokens, pruner, sparsity):
    params[block.name], mask[block.name] = block.params, block.mask
  return params, mask


def inputs_of(config, params, name):
  """The inputs of a layer, from the whole model."""
  inputs = []

  def keep(call, args, kwargs, context):
    if isinstance(context.module, models.MaskedDense) and '/'.join(
        context.module.path
    ) == name:
      inputs.append(np.asarray(args[0], np.float64))
    return call(*args, **kwargs)

  with nn.intercept_methods(keep):
    models.model_of(config).apply({'params': params}, TOKENS)
  return inputs[0].reshape(-1, inputs[0].shape[-1])


@pytest.mark.parametrize('name', slow_except(
    ['gpt exact', 'llama grouped', 'qwen3'], CONFIGS
))
def test_each_layer_is_pruned_by_its_inputs_after_pruned_blocks(name):
  config = dataclasses.replace(CONFIGS[name], n_layers=2)
  params = make_params(config)
  pruned, mask = prune(config, params, one_shot.wanda(), 0.5)
  kept = {k: np.asarray(m) for k, m in trees.by_name(mask).items()}
  hidden = [k for k in trees.by_name(params) if models.sparsifiable(k, None)]
  assert kept.keys() == set(hidden)
  # The inputs of a block are those of the model whose earlier blocks are
  # pruned.
  current = dict(params)
  for i in range(config.n_layers):
    for path in hidden:
      if not path.startswith(f'h_{i}/'):
        continue
      x = inputs_of(config, current, path.removesuffix('/kernel'))
      w = trees.by_name(params)[path]
      scores = np.abs(w) * np.linalg.norm(x, axis=0)[:, None]
      # 50 % of each output; inputs are even numbers.
      expected = scores > np.sort(scores, axis=0)[len(w) // 2 - 1]
      assert (kept[path] == expected).mean() >= 0.999, path
      np.testing.assert_array_equal(
          trees.by_name(pruned)[path], np.where(kept[path], w, 0)
      )
    current[f'h_{i}'] = pruned[f'h_{i}']
  for path, x in trees.by_name(params).items():
    if path not in hidden:
      np.testing.assert_array_equal(trees.by_name(pruned)[path], x)


def test_the_weights_of_sparsegpt_are_those_of_whole_models():
  config = CONFIGS['llama grouped']
  params = make_params(config)
  pruner = one_shot.sparsegpt(block_size=8)
  pruned, mask = prune(config, params, pruner, '2:4')
  x = inputs_of(config, pruned | {'h_1': params['h_1']}, 'h_1/mlp/wo')
  x = jnp.asarray(x, jnp.float32)
  w, kept = pruner.prune(
      jnp.asarray(params['h_1']['mlp']['wo']['kernel']), x.T @ x, '2:4'
  )
  np.testing.assert_array_equal(mask['h_1']['mlp']['wo']['kernel'], kept)
  np.testing.assert_allclose(
      pruned['h_1']['mlp']['wo']['kernel'], w, atol=1e-5
  )


def test_layers_have_the_sparsities_of_patterns():
  config = CONFIGS['gpt']
  params = make_params(config)
  sparsities = {'*/attn/*': 0.25, 'h_1/mlp/*': 0.5}
  _, mask = prune(config, params, one_shot.magnitude(), sparsities)
  assert {k: 1 - m.mean() for k, m in trees.by_name(mask).items()} == {
      f'h_{i}/attn/w{k}/kernel': 0.25 for i in range(2) for k in 'qkvd'
  } | {f'h_1/mlp/w{k}/kernel': 0.5 for k in 'io'}


@pytest.mark.parametrize('change, tokens, message', [
    (dict(scan_layers=True), TOKENS, 'scan_layers is True; prune the param'),
    ({}, TOKENS + 23, 'tokens have ids up to 4., and the model has 23; encode'),
    ({}, np.zeros((1, 9), int), 'the sequence has 9 tokens and the model 8'),
])
def test_other_arguments_are_refused(change, tokens, message):
  config = dataclasses.replace(CONFIGS['gpt'], **change)
  with pytest.raises(ValueError, match=message):
    prune(config, make_params(CONFIGS['gpt']), one_shot.wanda(), 0.5, tokens)


def test_weights_that_are_not_finite_are_named_by_their_layer():
  params = make_params(CONFIGS['gpt'])
  params['h_1']['ln_1']['scale'][0] = np.nan
  with pytest.raises(ValueError, match='^h_1/mlp/wo/kernel: the stati'):
    prune(CONFIGS['gpt'], params, one_shot.wanda(), 0.5)


@pytest.fixture
def directory(tmp_path):
  """A Hugging Face directory with a tokenizer of bytes, and a text."""
  config = dataclasses.replace(CONFIGS['llama'], vocab_size=257)
  tokenizer_files.save_tokenizer(
      tmp_path / 'tokenizer.json', data.ByteTokenizer()
  )
  interop.save_hf(
      tmp_path / 'hf', config, make_params(config),
      tokenizer=[tmp_path / 'tokenizer.json'],
  )
  (tmp_path / 'text').write_text('to be, or not to be: that is the question. ')
  return tmp_path


def run_prune(directory, *arguments):
  return command.run(
      'prune', f'--model={directory / "hf"}', f'--to={directory / "pruned"}',
      f'--calibration={directory / "text"}', '--sequences=3', *arguments
  )


def test_masks_of_pruned_imports_travel_with_the_weights(directory):
  done = run_prune(directory, '--method=sparsegpt:0.6')
  assert done.status == 0, done.log
  assert re.match(
      r'the perplexity of 2 sequences of 8 tokens after the calibration text '
      r'is [\d.]+ before and [\d.]+ after sparsegpt:0.6. ', done.output
  )
  assert 'is written; sparsity 60.' in done.output
  done = command.run(
      'convert', f'--model={directory / "pruned"}',
      f'--to={directory / "run"}',
  )
  assert done.status == 0, done.log
  config = dataclasses.replace(CONFIGS['llama'], vocab_size=257)
  zeros = lambda path: trees.by_name(jax.tree.map(
      lambda m: np.asarray(m), interop.mask_of_zeros(path)
  ))
  exported = command.run(
      'convert', f'--model={directory / "run"}',
      f'--to_hf={directory / "back"}',
  )
  assert 'sparsity 60.' in exported.output, exported.log
  pruned = interop.load_hf(directory / 'back')
  for algorithm in (
      dict(name='static', sparsity=0.6, init='nonzero'),
      dict(name='rigl', sparsity=0.6, init='nonzero', drop_fraction=0.3,
           update_every=2, update_until=4),
  ):
    run = make_run(
        model={'preset': 'llama2-7b'} | dataclasses.asdict(config),
        init_from=str(directory / 'run'),
        phases__pretrain__algorithm=algorithm,
    )
    state = run.open(directory / algorithm['name']).state
    run.close()
    mask = trees.by_name(spdf.get_mask(state.opt_state))
    for path, kept in zeros(pruned.params).items():
      np.testing.assert_array_equal(mask[path], kept, err_msg=path)
    assert_same_bits(jax.tree.map(np.asarray, state.params), pruned.params)


def test_a_byte_order_mark_is_no_part_of_a_calibration_text(tmp_path):
  text = 'to be, or not to be:\nthat is the question. '
  (tmp_path / 'a').write_bytes(text.encode('utf-8'))
  (tmp_path / 'b').write_bytes(text.replace('\n', '\r\n').encode('utf-8-sig'))
  first, second = (
      read_sequences(tmp_path / name, data.ByteTokenizer(), 8, 3)
      for name in 'ab'
  )
  jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize('arguments, message', [
    (('--method=wanda:0.5', '--sequences=5'),
     r"text' has 43 tokens, and --sequences=5 of 8 and one to evaluate with "
     'take 49; give more text'),
    (('--method=wanda:half',), "method is 'wanda:half'; write METHOD:0.5, MET"),
    (('--method=wonda:0.5',), "method 'wonda' is unknown; did you mean 'wa"),
    (('--method=wanda:wte/*=0.5',), "the pattern 'wte/.', which matches none"),
    (('--method=wanda:0.5', '--calibration=none'), "calibration is 'none', wh"),
])
def test_bad_input_is_one_sentence_and_writes_nothing(
    arguments, message, directory
):
  done = run_prune(directory, *arguments)
  assert done.status == 1
  assert len(done.log.splitlines()) == 1
  assert re.search(message, done.log), done.log
  assert not (directory / 'pruned').exists()


def test_a_model_is_not_pruned_in_its_own_directory(directory):
  before = {p.name: p.read_bytes() for p in (directory / 'hf').iterdir()}
  done = run_prune(
      directory, '--method=wanda:0.5', f'--to={directory / "hf"}'
  )
  assert done.status == 1 and 'model and to are both ' in done.log
  assert before == {
      p.name: p.read_bytes() for p in (directory / 'hf').iterdir()
  }


FLAGS = dict(model='runs/dense', steps=200, rate=1e-3, sequences=128)


@pytest.mark.parametrize('recorded, message', [
    (FLAGS | dict(model='runs/a'), 'with model runs/a, not runs/dense; give'),
    (FLAGS | dict(steps=100), 'has runs with steps 100, not 200; give another'),
    (FLAGS | dict(rate=0.1), 'has runs with rate 0.1, not 0.001; give another'),
    (FLAGS | dict(sequences=9), 'with sequences 9, not 128; give another'),
    ({}, 'has runs with model unknown, not runs/dense; give another folder.'),
])
def test_results_of_other_flags_are_refused(tmp_path, recorded, message):
  path = tmp_path / 'results.json'
  rows = [dict(method='dense', sparsity=0.0, pruned=2.0) | recorded]
  json_files.write_json(path, rows, 2)
  done = command.run('one_shot', '--model=runs/dense', f'--workdir={tmp_path}')
  assert done.status == 1 and not done.output and message in done.log
  assert [p.name for p in tmp_path.iterdir()] == [path.name]
  assert json_files.read_json(path) == rows


def dense_config():
  return small_config(
      'algorithm=dense', phases__order=('pretrain',), data__task='',
      evaluation__generations=0,
  )


def test_more_sequences_than_the_corpus_has_are_refused(tmp_path):
  training.train(training.Run.create(dense_config(), tmp_path / 'dense').open())
  done = command.run(
      'one_shot', f'--model={tmp_path / "dense"}', '--sequences=100000000',
      f'--workdir={tmp_path / "results"}',
  )
  assert done.status == 1 and not done.output
  assert 'sequences is 100000000, and the corpus has ' in done.log
  assert not (tmp_path / 'results').exists()


def test_results_are_drawn_by_sparsity_also_those_without_flags():
  path = study.__file__.replace('one_shot.py', 'results/one_shot/results.json')
  rows = json_files.read_json(path)
  assert study.table(rows, 200).count('| sparsegpt |') == 3
  for ax in study.plot(rows[::-1], 200).axes:
    for line in ax.lines:
      assert line.get_xdata().tolist() == [0, 50, 60, 75]


@pytest.mark.slow
def test_methods_are_compared_before_and_after_training(tmp_path):
  training.train(training.Run.create(dense_config(), tmp_path / 'dense').open())
  arguments = (
      'one_shot', f'--model={tmp_path / "dense"}', '--sparsities=0.75',
      f'--workdir={tmp_path / "results"}', '--steps=3', '--sequences=4',
  )
  done = command.run(*arguments)
  assert done.status == 0, done.log
  assert re.search(
      r'^wanda, sparsity 0\.75, pruned \S+, trained \S+, distilled \S+$',
      done.output, re.M,
  )
  results = json_files.read_json(tmp_path / 'results' / 'results.json')
  flags = dict(
      model=str(tmp_path / 'dense'), steps=3, rate=1e-3, sequences=4
  )
  assert all(flags.items() <= row.items() for row in results)
  assert [(r['method'], r['sparsity']) for r in results] == [
      ('dense', 0), *((method, 0.75) for method in one_shot.PRUNERS)
  ]
  assert all(r[stage] > 1 for r in results for stage in (
      'pruned', 'trained', 'distilled'
  ))
  # Each run keeps the mask of its pruned model.
  for row in results[1:]:
    name = f'{row["method"]}-0.75'
    before, after = (
        language_models.model_at(training.find_checkpoint(
            str(tmp_path / 'results' / folder)
        ))[1] for folder in (name, f'{name}-distilled')
    )
    for path, x in trees.by_name(after).items():
      if models.sparsifiable(path, None):
        np.testing.assert_array_equal(x == 0, trees.by_name(before)[path] == 0)
        assert (np.asarray(x) == 0).mean() == 0.75
  table = (tmp_path / 'results' / 'table.md').read_text()
  assert len(table.splitlines()) == 6 and '| 75% | wanda | ' in table
  assert (tmp_path / 'results' / 'perplexity.png').stat().st_size > 10_000
  # A second call reads the results of the first.
  assert 'wanda' not in command.run(*arguments).output

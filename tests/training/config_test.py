"""The config is parsed once; values are checked, and there are no defaults."""

import ast
import copy
import dataclasses
import json
import pathlib
import re
import sys

import pytest

from configs import books
from configs import claims
from configs import finetune
from configs import iterative_pruning
from configs import llama_dst
from configs import planned
from configs import quickstart
from configs import spdf
from configs import variable_spdf
import spdf_jax
from spdf_jax.models import PRESETS
from spdf_jax.training import MismatchError
from spdf_jax.training.checkpoints.identity import read_config
from spdf_jax.training.checkpoints.identity import run_identity
from spdf_jax.training.checkpoints.workdir import read_workdir_config
from spdf_jax.training.configs.config import parse
from spdf_jax.training.configs.fields import plain
from tests.refusals import refuse
from tests.tiny_run import CONFIG
from tests.tiny_run import make_config
from tests.tiny_run import make_run

PACKAGE = pathlib.Path(spdf_jax.__file__).parent
ABSENT = object()


def changed(changes):
  """The tiny run's config with changes by dotted names; `ABSENT` removes."""
  config = copy.deepcopy(CONFIG)
  for path, value in changes.items():
    *groups, name = path.split('.')
    group = config
    for key in groups:
      group = group[key]
    if value is ABSENT:
      del group[name]
    else:
      group[name] = value
  return config


@pytest.mark.parametrize('config', [
    pytest.param(file.get_config(arg), id=f'{file.__name__}:{arg}')
    for file, arg in [
        (quickstart, ''), (quickstart, 'algorithm=granet'),
        (quickstart, 'algorithm=iterative'), (books, 'task=e2e'), (claims, ''),
        (finetune, 'task=dart,algorithm=static'),
        (iterative_pruning, 'stop_at=2.1'),
        (iterative_pruning, 'distribution=model_wide'), (llama_dst, ''),
        (planned, ''),
        (spdf, ''), (variable_spdf, ''),
    ]
])
def test_a_config_is_parsed_and_written_back(config):
  parsed = parse(config)
  stored = json.loads(json.dumps(parsed.as_dict()))
  assert parse(stored) == parsed
  assert stored['phases']['order'] == list(config.phases.order)
  assert stored['model'].keys() >= {'preset', 'd_model', 'dtype'}
  given = plain(config)
  del given['phase_defaults']
  assert not differing(given, stored)


def differing(given, stored, path=''):
  """Names of fields that are not stored as they were given."""
  names = []
  for name, value in given.items():
    if path == 'phases.' and name not in ('order', *given['order']):
      continue
    if name not in stored:
      names.append(path + name)
    elif isinstance(value, dict) and isinstance(stored[name], dict):
      names += differing(value, stored[name], f'{path}{name}.')
    elif value is not None and stored[name] is not None:
      names += [path + name] if value != stored[name] else []
  return names


def test_a_preset_is_resolved_where_the_config_leaves_it():
  config = parse(quickstart.get_config())
  sizes = dataclasses.replace(
      PRESETS['gpt-mini'], vocab_size=1024, max_length=128
  )
  assert config.model.sizes == sizes
  assert config.as_dict()['model'] == {
      'preset': 'gpt-mini', **dataclasses.asdict(sizes)
  }


def test_fields_that_a_phase_lacks_are_those_of_its_defaults():
  config = changed({'phases.pretrain.learning_rate.peak': ABSENT})
  del config['phases']['pretrain']['batch_size']
  config['phase_defaults'] = dict(batch_size=7, learning_rate=dict(peak=0.5))
  first, second, _ = parse(config).phases
  assert (first.batch_size, first.learning_rate.peak) == (7, 0.5)
  assert (second.batch_size, first.learning_rate.warmup) == (2, '2 steps')


@pytest.mark.parametrize('path, meant', [
    ('eval_evry', 'eval_every'),
    ('mesh.fsdpp', 'mesh.fsdp'),
    ('data.max_epochs.corps', 'data.max_epochs.corpus'),
    ('data.planned.token', 'data.planned.tokens'),
    ('loss.label_smooth', 'loss.label_smoothing'),
    ('optimizer.clip', 'optimizer.clip_norm'),
    ('checkpoints.evry', 'checkpoints.every'),
    ('phases.pretrain.batchsize', 'phases.pretrain.batch_size'),
    ('phases.pretrain.learning_rate.peek',
     'phases.pretrain.learning_rate.peak'),
])
def test_an_unknown_field_is_named_with_the_nearest(path, meant):
  message = f"config field '{path}' is unknown; did you mean .*'{meant}'"
  refuse(message, parse, changed({path: 1}))


@pytest.mark.parametrize('path', [
    'seed', 'matmul', 'storage', 'loss', 'loss.chunk', 'micro_batches',
    'mesh.tensor', 'data.task_dir', 'data.planned', 'evaluation.generations',
    'log_every', 'phases.pretrain.reset_moments', 'phases.finetune.duration',
    'resume',
])
def test_a_field_without_a_value_is_refused(path):
  refuse(f"'{path}' (is missing|is None)", parse, changed({path: ABSENT}))


@pytest.mark.parametrize('path, value, message', [
    ('seed', 'zero', "'seed' is 'zero'; it must be a whole number"),
    ('seed', True, 'it must be a whole number'),
    ('optimizer.b1', '0.9', "'optimizer.b1' is '0.9'; it must be a number"),
    ('optimizer.b2', 1.0, r'optimizer.b2 is 1.0; give a number in \[0, 1\)'),
    ('optimizer.eps', -1.0, 'optimizer.eps is -1.0; give 0 or more'),
    ('optimizer.clip_norm', 0, 'optimizer.clip_norm is 0; it must be positive'),
    ('optimizer', dict(name='lion'), "'optimizer.clip_norm' is missing"),
    ('model.d_model', 'wide', "'model.d_model' is 'wide'; it must be a whole"),
    ('model.d_mdel', 1, "'d_mdel' is unknown; .*'d_model'"),
    ('model.n_heads', 3, 'n_heads is 3, which does not divide d_model 16'),
    ('model.dtype', 'float64x', "dtype is 'float64x'; use one of"),
    ('model', 'gpt-mini', "field 'model' has no preset; set model.preset to"),
    ('model.preset', 'gpt-min', "preset 'gpt-min' is unknown; did you mean"),
    ('data', 'pile', "'pile'; give a mapping with its fields, corpus, tok"),
    ('data.max_epochs.task', 0, 'data.max_epochs.task is 0; it must be at le'),
    ('evaluation.generations', -1, 'evaluation.generations is -1; give 0 or'),
    ('matmul', 'fast', "matmul 'fast' is unknown"),
    ('mesh.fsdp', -1, "mesh is .*'fsdp': -1.* at most one of them -1"),
    ('phases.order', 'pretrain', 'set phases.order to a list'),
    ('storage', 'small', "storage 'small' is unknown"),
    ('micro_batches', 0, 'micro_batches is 0; it must be at least 1'),
    ('micro_batches', 2, "does not divide the batch_size of phase 'finetune'"),
    ('loss.z_loss', -1.0, 'loss.z_loss is -1.0; give 0 or more'),
    ('loss.label_smoothing', 1.0, 'loss.label_smoothing is 1.0; give a number'),
    ('loss.chunk', -5, 'loss.chunk is -5; give 0 or more'),
    ('eval_every', 0, 'eval_every is 0; it must be at least 1'),
    ('checkpoints.keep', 0, 'checkpoints.keep is 0'),
    ('phases', {}, 'set phases.order'),
    ('phases.order', ['continuation'], "first and has the schedule 'contin"),
    ('phases.pretrain', 3, "'phases.pretrain' is 3; give a mapping with its"),
    ('phases.pretrain.reset_moments', 1, 'moments. is 1; it must be True or F'),
    ('phases.pretrain.duration', 9, 'duration. is 9; it must be text'),
    ('phases.pretrain.algorithm', None, 'it must be a mapping'),
    ('phases.pretrain.sparsity', 0.5, "'phases.pretrain.sparsity' is unknown"),
    ('phase_defaults', 3, "'phase_defaults' is 3; give a mapping with its"),
    ('phase_defaults', {'batchsize': 3}, "did you mean .*defaults.batch_size'"),
    ('phases.pretrain.data', 'task', "data of phase 'pretrain': 'task' is un"),
    ('phases.pretrain.length', 9, 'length 9, .*, and model.max_length is 8'),
    ('phases.pretrain.learning_rate.warmup', None,
     "rate of phase 'pretrain': schedule 'cosine' needs 'warmup'"),
    ('phases.pretrain.early_stop', dict(metric='task/bleu', patience=1),
     "metric of phase 'pretrain' is 'task/bleu', but the config has no task"),
    ('phases.pretrain.early_stop', dict(metric='target/loss', patience=1),
     "metric of phase 'pretrain' is 'target/loss', but the config has no task"),
    ('phases.pretrain.early_stop', dict(metric='loss', patience=2),
     "phase 'pretrain'.*metric of early_stop 'loss' is unknown"),
    ('phases.pretrain.early_stop', dict(metric='validation/loss', patience=0),
     "phase 'pretrain'.*patience of early_stop is 0"),
    ('phases.pretrain.early_stop', dict(metric='validation/loss', patiens=2),
     "'pretrain': .*patiens.*patience'"),
    ('phases.pretrain.early_stop', dict(metric='', patiens=2),
     "'pretrain': .*patiens.*patience'"),
])
def test_invalid_input_is_one_sentence(path, value, message):
  refuse(message, parse, changed({path: value}))


def test_fields_that_a_schedule_ignores_make_no_difference():
  other = parse(changed({'phases.continuation.learning_rate.peak': 0.5}))
  assert other == parse(CONFIG)


def test_a_workdir_that_cannot_be_read_is_refused_with_the_fix(tmp_path):
  stored = changed({'colour': 'red'})
  (tmp_path / 'config.json').write_text(json.dumps(stored))
  message = "workdir .*'colour' is unknown.*; use the version that wrote it, or"
  refuse(message, make_run().open, tmp_path, error=MismatchError)
  with pytest.raises(FileNotFoundError, match='has no config.json; give'):
    read_workdir_config(tmp_path / 'none')


def test_paths_and_plans_do_not_count_when_runs_are_compared():
  same = make_config(
      data__cache_dir='b', data__planned__tokens=9, mesh__data=1, init_from='c'
  )
  assert run_identity(same) == run_identity(make_config())
  assert run_identity(make_config(seed=1)) != run_identity(make_config())


def test_reading_a_config_imports_nothing_that_it_names(tmp_path, monkeypatch):
  (tmp_path / 'named_by_a_config.py').write_text('raise SystemExit\n')
  monkeypatch.syspath_prepend(tmp_path)
  spec = dict(name='named_by_a_config:make')
  stored = changed({'phases.pretrain.algorithm': spec})
  assert read_config(stored, 'a.json').phases[0].algorithm == spec
  assert 'named_by_a_config' not in sys.modules


def test_no_value_of_a_config_is_filled_in_where_it_is_used():
  of_configs = re.compile(r'config|spec|setting|given|stored|rate\b')
  calls = []
  for path in sorted((PACKAGE / 'training').rglob('*.py')):
    for node in ast.walk(ast.parse(path.read_text())):
      if not isinstance(node, ast.Call):
        continue
      function = node.func
      if not isinstance(function, ast.Attribute) or function.attr != 'get':
        continue
      receiver = ast.unparse(function.value)
      if len(node.args) > 1 and of_configs.search(receiver):
        calls.append(f'{path.name}:{node.lineno} {receiver}.get')
  assert not calls


def test_the_config_is_a_mapping_in_one_module_alone():
  subscripts = re.compile(r"\bconfig\[['\"]|\bconfig\.get\(")
  assert not [
      path for path in (PACKAGE / 'training').rglob('*.py')
      if subscripts.search(path.read_text())
  ]

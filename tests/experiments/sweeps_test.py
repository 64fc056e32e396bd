"""Sweeps: grids, rankings, executors, and the command killed and resumed."""

import concurrent.futures
import dataclasses
import fcntl
import json
import math
import random
import time
from unittest import mock

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from configs import common
from configs import quickstart
from experiments import sweep
from experiments.launch import grid as grids
from experiments.launch.grid import Result
from experiments.scores.sheets import Settings
from spdf_jax import training
from spdf_jax.files import FolderInUse
from tests.quickstart_runs import CACHE
from tests.quickstart_runs import small_config
from tests.quickstart_runs import start_command
from tests.quickstart_runs import wait_for
from tests.refusals import refuse

RATE = 'phases.pretrain.learning_rate.peak'


@given(st.dictionaries(
    st.sampled_from('abc'),
    st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
))
@settings(deadline=None)
def test_the_points_of_a_grid_are_all_combinations_once(grid):
  points = grids.points(grid)
  assert len(points) == math.prod(map(len, grid.values()))
  assert len({json.dumps(p) for p in points}) == len(points)
  assert len({grids.run_name(p, 0) for p in points}) == len(points)


@given(st.lists(st.floats(1, 9), min_size=2, max_size=2), st.integers(2, 4))
@settings(deadline=None)
def test_means_and_deviations_are_those_of_numpy(means, seeds):
  rng = np.random.default_rng(0)
  values = {a: rng.normal(mean, 0.1, seeds) for a, mean in enumerate(means)}
  results = [
      Result({'a': a}, s, '', {'task/bleu': v, 'target/loss': v})
      for a, group in values.items() for s, v in enumerate(group)
  ]
  for metric, sign in (('task/bleu', -1), ('target/loss', 1)):
    choices = grids.rank(results, metric)
    assert [c.mean * sign for c in choices] == sorted(
        c.mean * sign for c in choices
    )
    for choice in choices:
      group = values[choice.fields['a']]
      assert choice.mean == pytest.approx(group.mean())
      assert choice.deviation == pytest.approx(group.std(ddof=1))


@pytest.mark.parametrize('field, values', [
    ('learning_rate.peak', (1e-3, 6e-3)), ('weight_decay', (0.1, 0.2)),
    ('algorithm.structure', ('1:2', '2:4')), ('batch_size', (2, 8)),
])
def test_a_grid_over_defaults_of_phases_reaches_every_phase(field, values):
  name = f'phase_defaults.{field}'
  config = sparse_config()
  runs = grids.plan_runs(
      config, [f'{name}={",".join(map(str, values))}'], 1, 'validation/loss'
  )
  parsed = [training.parse(changed) for _, changed in runs]
  for value, by_grid in zip(values, parsed, strict=True):
    by_flag = sparse_config()
    by_flag.update_from_flattened_dict({name: value})
    assert by_grid == training.parse(by_flag)
  assert parsed[0] != parsed[1]
  assert config.to_json() == sparse_config().to_json()


@pytest.fixture
def made_up(monkeypatch):
  """Replaces training; runs end in another order than they started."""
  trained = []

  def train(config, workdir):
    time.sleep(random.random() / 100)
    trained.append(workdir.name)
    return {'validation/loss': config.eval_every + config.seed / 10}

  monkeypatch.setattr(grids, 'train', train)
  monkeypatch.setattr(grids.training.Run, 'create', lambda config: None)
  return trained


def sparse_config():
  config = quickstart.get_config('algorithm=static')
  config.data.update(tokenizer='bytes', task='', cache_dir=str(CACHE))
  config.model.vocab_size = 257
  common.set_phases(config, pretrain=dict(
      duration='9 steps', algorithm=dict(name='static', sparsity=0.5)
  ))
  return config


def replace_training(monkeypatch):
  monkeypatch.setattr(grids.training.Run, 'create', mock.Mock())
  monkeypatch.setattr(grids.training, 'train', mock.Mock())
  monkeypatch.setattr(grids.lifecycle, 'begin', lambda *_: {})


def open_sweep(folder, grid='eval_every=1,2,3,4', index=None, **arguments):
  config = small_config(data__task='', phases__order=('pretrain',))
  how = dict(seeds=3, metric='validation/loss') | arguments
  if index is not None:
    return sweep.train_one(config, folder, [grid], index, **how)
  return sweep.run_sweep(config, folder, [grid], settings=Settings(), **how)


@pytest.mark.parametrize('grid, arguments, message', [
    ('eval_every=', {}, 'give every field once, as field=value,value'),
    ('seed=5,6', {}, "has the run 'seed=5,seed=5' twice; give every value"),
    (f'{RATE}=1e-3,0.001', {}, 'peak=0.001,seed=0. twice'),
    ('phases.other.length=1', {}, "field 'phases.other.length' is unknown"),
    (
        'phases.finetune.batch_size=2,4', {},
        'batch_size=2,seed=0. and .*batch_size=4,seed=0., which train alike',
    ),
    ('phases.pretrain.algorithm.update_every=7%,8%', {}, 'train alike'),
    (f'{RATE}=1,1.0', {}, 'train alike'),
    ('phases.pretrain.batch_size=0', {}, 'has batch_size 0'),
    (f'{RATE}=1e-3', {'metric': 'target/loss'}, 'ranks by .* has no task'),
    (f'{RATE}=1e-3', {'metric': 'loss'}, "metric 'loss' is unknown"),
    (f'{RATE}=1e-3', {'test_tasks': ['lambada=no/file']}, 'does not exist'),
    (f'{RATE}=1e-3', {'index': 4}, 'index is 4 and .* 3 runs; give .* 1 to 3'),
])
def test_an_impossible_sweep_starts_no_run(
    tmp_path, grid, arguments, message
):
  refuse(message, list, open_sweep(tmp_path / 'runs', grid, **arguments))
  assert not (tmp_path / 'runs').exists()


def test_a_metric_that_is_not_finite_ranks_last(tmp_path, monkeypatch):
  rows = '{"step": 1, "validation/perplexity": null, "task/bleu": null}\n'
  (tmp_path / 'metrics.jsonl').write_text(rows)
  replace_training(monkeypatch)
  assert grids.train(None, tmp_path) == {
      'validation/perplexity': math.inf, 'task/bleu': -math.inf
  }


def test_a_run_that_another_process_trains_is_not_prepared(tmp_path):
  with (tmp_path / '.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(FolderInUse, match='is in use'):
      grids.train('no config, which would be refused', tmp_path)


def test_scores_of_other_tasks_or_settings_are_not_returned(tmp_path):
  how = dict(tasks=['validation'], settings=dataclasses.asdict(Settings()))
  entry = dict(model='elsewhere/x', scores=[], **how)
  (tmp_path / 'test.json').write_text(json.dumps([entry]))
  best = [Result({}, 0, 'x', {})]
  score = lambda tasks, **changed: sweep.score(
      tmp_path, best, tasks, Settings(**changed)
  )
  assert score(['validation']) == (tmp_path / 'test.md').read_text()[:-1]
  for changed in (
      dict(tasks=['validation'], limit=10), dict(tasks=['python-docstrings']),
      dict(tasks=['validation=elsewhere']),
  ):
    refuse('scores of other runs, tasks or set', score, **changed)


def test_a_sweep_with_an_executor_writes_what_one_without_does(
    tmp_path, made_up
):
  local = list(open_sweep(tmp_path / 'local'))
  with concurrent.futures.ThreadPoolExecutor(3) as executor:
    distributed = list(open_sweep(tmp_path / 'other', executor=executor))
  assert distributed[-1] == local[-1]
  assert distributed[-2].startswith('12 of 12 runs are done: eval_every=')
  for name in ('sweep.md', 'sweep.jsonl'):
    texts = [(tmp_path / f / name).read_text() for f in ('local', 'other')]
    assert texts[0] == texts[1]


def test_a_sweep_with_an_index_trains_one_run_only(tmp_path, made_up):
  text, = open_sweep(tmp_path, index=5)
  assert text == 'run 5 of 12: eval_every=2,seed=1'
  assert made_up == ['eval_every=2,seed=1']
  assert not list(tmp_path.iterdir())
  assert text in list(open_sweep(tmp_path))  # Numbered as in a whole sweep.


def test_a_metric_that_a_run_has_not_measured_is_named_with_the_run_once(
    tmp_path, made_up
):
  with pytest.raises(ValueError, match="^run 'eval_every=1,seed=0' has not"):
    list(open_sweep(tmp_path, metric='validation/perplexity'))


def test_runs_of_another_grid_in_the_folder_keep_their_lines(
    tmp_path, made_up
):
  one_seed = list(open_sweep(tmp_path, seeds=1))
  assert '| 4 | 4 ± – | 1 |' in one_seed[-1]
  *_, table = open_sweep(tmp_path, 'eval_every=2')
  assert table.splitlines()[2:] == ['| 2 | 2.1 ± 0.1 | 3 |']
  lines = (tmp_path / 'sweep.jsonl').read_text().splitlines()
  assert [json.loads(line)['workdir'] for line in lines] == [
      *(f'eval_every={n},seed=0' for n in (1, 3, 4)),
      *(f'eval_every=2,seed={n}' for n in range(3)),
  ]


def test_an_error_of_a_run_names_the_run(tmp_path, monkeypatch):
  def fail(config, workdir):
    raise OSError('the disk is full.')

  monkeypatch.setattr(grids, 'train', fail)
  monkeypatch.setattr(grids.training.Run, 'create', lambda config: None)
  with concurrent.futures.ThreadPoolExecutor(1) as executor:
    with pytest.raises(ValueError, match='eval_every=1,seed=0: the disk is'):
      list(open_sweep(tmp_path, executor=executor))


@pytest.mark.process
def test_a_sweep_that_was_killed_continues_and_trains_no_run_twice(
    tmp_path, caplog
):
  grid = f'{RATE}=1e-3,1e30'
  child = start_command(
      'experiments.sweep', '--config=configs/quickstart.py',
      f'--workdir={tmp_path}', f'--grid={grid}', data__task='',
      phases__order=('pretrain',),
  )
  lines = tmp_path / 'sweep.jsonl'
  wait_for(lines.exists, child)
  child.kill()
  child.communicate()
  first, = lines.read_text().splitlines()
  caplog.set_level('INFO', 'spdf_jax')
  list(open_sweep(tmp_path, grid, index=2, seeds=1))  # As a job of an array.
  assert 'peak=1e+30,seed=0: train/loss of step' in caplog.text
  *_, table, scores = open_sweep(
      tmp_path, grid, seeds=1, test_tasks=['validation']
  )
  assert 'step 15: validation/' not in caplog.text
  assert lines.read_text().splitlines()[0] == first
  # The run that diverged ranks last, and the sweep goes on.
  best, last = table.splitlines()[2:]
  assert best.startswith('| 0.001 |') and last == '| 1e+30 | inf ± – | 1 |'
  scored, = json.loads((tmp_path / 'test.json').read_text())
  assert 'peak=0.001,' in scored['model']
  assert '| validation | mean over tokens | loss |' in scores
  for name, text in (('test.md', scores), ('sweep.md', table)):
    assert (tmp_path / name).read_text() == text + '\n'

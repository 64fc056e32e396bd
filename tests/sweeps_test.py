"""Sweeps: grids, rankings, and the command killed and resumed."""

import dataclasses
import fcntl
import itertools
import json
import math
import time

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
from quickstart_runs import small_config
from quickstart_runs import start_command

from spdf_jax.evaluation.scorecard import Settings
from spdf_jax.files import FolderInUse
from spdf_jax.runs import swept_runs
from spdf_jax.runs.sweeps import parse_grid
from spdf_jax.runs.sweeps import points
from spdf_jax.runs.sweeps import rank
from spdf_jax.runs.sweeps import Result
from spdf_jax.runs.sweeps import run_name

RATE = 'phases.pretrain.learning_rate.peak'
SECONDS = 300  # of patience with a child process.


@pytest.mark.parametrize('text, values', [
    ('a.b=1,2.5', [1, 2.5]), ('a.b=e2e', ['e2e']), ('a.b=1e-3', [1e-3]),
    ("a.b='5 steps',6steps", ['5 steps', '6steps']), ('a.b=True', [True]),
])
def test_values_are_numbers_where_they_can_be(text, values):
  assert parse_grid([text]) == {'a.b': values}


@pytest.mark.parametrize('texts', [['a'], ['=1'], ['a='], ['a=1', 'a=2']])
def test_a_grid_that_says_nothing_is_refused(texts):
  with pytest.raises(ValueError, match='give every field once'):
    parse_grid(texts)


@given(st.dictionaries(
    st.sampled_from('abc'),
    st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
))
@settings(deadline=None)
def test_points_are_all_choices_once(grid):
  found = points(grid)
  assert len(found) == math.prod(map(len, grid.values()))
  assert len({json.dumps(p) for p in found}) == len(found)
  assert len({run_name(p, 0) for p in found}) == len(found)


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
    choices = rank(results, metric)
    assert [c.mean * sign for c in choices] == sorted(
        c.mean * sign for c in choices
    )
    for choice in choices:
      group = values[choice.fields['a']]
      assert choice.mean == pytest.approx(group.mean())
      assert choice.deviation == pytest.approx(group.std(ddof=1))


def test_a_metric_that_was_not_measured_is_named():
  with pytest.raises(ValueError, match="has not measured 'task/bleu'"):
    rank([Result({}, 0, 'x', {'target/loss': 1.0})], 'task/bleu')


def test_a_diverged_point_ranks_last_and_the_sweep_goes_on(tmp_path, caplog):
  config = small_config(data__task='', phases__order=('pretrain',))
  table, = itertools.islice(swept_runs.run_sweep(
      config, tmp_path, [f'{RATE}=1e30,1e-3'], seeds=1,
      metric='validation/loss', settings=Settings(),
  ), 2, 3)
  first, last = table.splitlines()[2:]
  assert first.startswith('| 0.001 |') and last == '| 1e+30 | inf ± – | 1 |'
  assert 'peak=1e+30,seed=0: train/loss of step' in caplog.text


def test_a_metric_that_is_not_finite_ranks_last(tmp_path, monkeypatch):
  rows = '{"step": 1, "validation/perplexity": null, "task/bleu": null}\n'
  (tmp_path / 'metrics.jsonl').write_text(rows)
  monkeypatch.setattr(swept_runs.training, 'open_session', lambda *_: None)
  monkeypatch.setattr(swept_runs.training, 'create_recipe', lambda _: None)
  monkeypatch.setattr(swept_runs.lifecycle, 'run', lambda *_: None)
  assert swept_runs.train(None, tmp_path) == {
      'validation/perplexity': math.inf, 'task/bleu': -math.inf
  }


def test_a_run_that_another_process_trains_is_not_prepared(tmp_path):
  with (tmp_path / '.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(FolderInUse, match='is in use'):
      swept_runs.train('no config, which would be refused', tmp_path)


@pytest.mark.parametrize('grid, metric, message', [
    ('seed=5,6', 'validation/loss', "has the run 'seed=5,seed=5' twice"),
    (f'{RATE}=1e-3,0.001', 'validation/loss', 'peak=0.001,seed=0. twice'),
    (f'{RATE}=1e-3', 'target/loss', 'ranks by .target/loss. and .* no task'),
])
def test_runs_given_twice_and_metrics_never_measured_are_refused(
    grid, metric, message
):
  config = small_config(data__task='', phases__order=('pretrain',))
  with pytest.raises(ValueError, match=message):
    swept_runs.plan_runs(config, [grid], 2, metric)


def test_test_scores_of_other_tasks_or_settings_are_not_returned(tmp_path):
  how = dict(tasks=['validation'], settings=dataclasses.asdict(Settings()))
  entry = dict(model='elsewhere/x', scores=[], **how)
  (tmp_path / 'test.json').write_text(json.dumps([entry]))
  best = [Result({}, 0, 'x', {})]
  score = lambda tasks, **changed: swept_runs.score(
      tmp_path, best, tasks, Settings(**changed)
  )
  assert score(['validation']) == (tmp_path / 'test.md').read_text()[:-1]
  for changed in (
      dict(tasks=['validation'], limit=10), dict(tasks=['python-docstrings']),
      dict(tasks=['validation=elsewhere']),
  ):
    with pytest.raises(ValueError, match='scores of other runs, tasks or set'):
      score(**changed)


def sweep(workdir, *flags):
  return start_command(
      'experiments.sweep', '--config=configs/quickstart.py',
      f'--workdir={workdir}', f'--grid={RATE}=1e-3,1e-2',
      '--test_tasks=validation', *flags,
      data__task='', phases__order=('pretrain',),
  )


@pytest.mark.process
def test_a_sweep_that_was_killed_goes_on(tmp_path):
  child = sweep(tmp_path)
  lines = tmp_path / 'sweep.jsonl'
  while not lines.exists() and child.poll() is None:
    time.sleep(0.05)
  child.kill()
  child.communicate()
  first = lines.read_text().splitlines()[0]
  child = sweep(tmp_path)
  output, _ = child.communicate(timeout=SECONDS)
  assert child.returncode == 0, output
  rows = [json.loads(line) for line in lines.read_text().splitlines()]
  assert lines.read_text().splitlines()[0] == first
  assert [(row['fields'][RATE], row['seed']) for row in rows] == [
      (1e-3, 0), (1e-2, 0),
  ]
  best = min((1e-3, 1e-2), key=lambda peak: sum(
      row['metrics']['validation/loss'] for row in rows
      if row['fields'][RATE] == peak
  ))
  scored = json.loads((tmp_path / 'test.json').read_text())
  assert len(scored) == 1
  assert all(f'peak={best},' in run['model'] for run in scored)
  table = (tmp_path / 'test.md').read_text()
  assert '| validation | mean over tokens | loss |' in table
  assert table in output and (tmp_path / 'sweep.md').read_text() in output


@pytest.mark.process
@pytest.mark.parametrize('flags, message', [
    (['--grid=phases.other.length=1'], 'name fields of the config'),
    (['--grid=phases.pretrain.batch_size=0'], 'has batch_size 0'),
    (['--metric=loss'], "metric 'loss' is unknown"),
    (['--metric=loss', '--executor=slurm'], "metric 'loss' is unknown"),
    (['--test_tasks=lambada=no/file'], "'no/file' does not exist"),
])
def test_a_sweep_that_cannot_be_starts_no_run(tmp_path, flags, message):
  child = sweep(tmp_path / 'runs', *flags)
  output, _ = child.communicate(timeout=SECONDS)
  assert child.returncode == 1 and message in output
  assert not (tmp_path / 'runs').exists()

"""experiments.reproduce: a smoke run, killed and resumed; bad input."""

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from experiments import reproduce
from experiments.papers import json_files
from experiments.papers.scales import SCALES
from experiments.pool import data as pool_data
from experiments.pool import identity as pool_identity
from experiments.pool import worker as pool_worker
from experiments.pool.identity import identify
from experiments.pool.results import read_results
from spdf_jax import data
from tests.made_up_results import Runner
from tests.quickstart_runs import finish
from tests.quickstart_runs import ROOT
from tests.quickstart_runs import wait_for
from tests.refusals import refuse

pytestmark = pytest.mark.papers

SMOKE, FAIR = SCALES['smoke'], SCALES['fair']
DATA = {'corpus': 'abc', 'task': 'def'}


def command(folder, *flags):
  path = [str(ROOT), os.environ.get('PYTHONPATH')]
  environment = os.environ | {
      'PYTHONPATH': os.pathsep.join(filter(None, path))
  }
  environment.pop('SPDF_DATA', None)
  return subprocess.Popen(
      [
          sys.executable, '-m', 'experiments.reproduce',
          f'--workdir={folder / "runs"}', f'--output={folder / "out"}', *flags,
      ],
      cwd=ROOT, env=environment, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
  )


def outcomes(folder):
  return sorted((folder / 'runs' / 'runs').glob('*/*/outcome.json'))


def names_of(paths):
  return {f'{p.parent.parent.name}/{p.parent.name}' for p in paths}


def times_of(paths):
  return {path: path.stat().st_mtime_ns for path in paths}


def results_of(folder):
  return json.loads((folder / 'out' / 'results.json').read_text())


@pytest.mark.slow
def test_a_stopped_smoke_run_writes_its_results(tmp_path):
  child = command(tmp_path, '--scale=smoke', '--workers=1')
  wait_for(lambda: len(outcomes(tmp_path)) > 1, child)
  child.send_signal(signal.SIGTERM)
  output, _ = child.communicate(timeout=60)
  assert child.returncode in (1, 128 + signal.SIGTERM), output
  assert 'Traceback' not in output
  assert set(results_of(tmp_path)['runs']) == names_of(outcomes(tmp_path))


@pytest.mark.slow
def test_a_smoke_run_that_was_killed_continues(tmp_path):
  child = command(tmp_path, '--scale=smoke', '--workers=1')
  wait_for(lambda: outcomes(tmp_path), child)
  child.send_signal(signal.SIGKILL)
  child.communicate()
  time.sleep(2)  # Waits until the worker has noticed.
  before = times_of(outcomes(tmp_path))
  child = command(tmp_path, '--scale=smoke')
  output = finish(child)
  assert f'{len(before)} of ' in output and '; 0 left, about 0:00' in output
  assert times_of(before) == before
  assert '**no verdict** (1 of at least 5 seeds; ' in output

  table = (tmp_path / 'out' / 'table.md').read_text()
  assert table in output and (tmp_path / 'out' / 'claims.png').stat().st_size
  results = results_of(tmp_path)
  assert results['identity']['tokens_per_parameter'] == 1.5
  assert {'processor', 'jax', 'optax'} <= results['machine'].keys()
  assert [c['claim'] for c in results['claims']] == list(SMOKE.claims)
  assert {c['verdict'] for c in results['claims']} == {'no verdict'}
  assert all('G4' in c['reason'] for c in results['claims'])
  assert set(results['runs']) == names_of(outcomes(tmp_path))
  dense, sparse = (
      results['runs'][f'static-75+{task}/rate=0.01,seed=1']
      for task in ('task', 'task-sparse')
  )
  comparison, = results['claims'][0]['comparisons']
  assert comparison['differences'] == [
      dense['target/loss'] - sparse['target/loss']
  ]


@pytest.mark.parametrize('name, claims, message', [
    ('fairr', (), "scale 'fairr' is unknown; did you mean 'fair'?"),
    ('smoke', ('a', 'h-sise'), "claim 'h-sise' is unknown"),
    ('fair', (), "has no folder 'books'; give the folder that contains books, "
     'e2e, webnlg17'),
])
def test_invalid_arguments_start_no_run(tmp_path, name, claims, message):
  refuse(re.escape(message), lambda: list(reproduce.check_claims(
      name, claims, '', tmp_path / 'runs', tmp_path / 'out', False, 1
  )))
  assert not list(tmp_path.iterdir())


def test_a_pool_continues_with_its_own_scale_protocol_and_data_only(tmp_path):
  path = tmp_path / 'scale.json'
  check_same = pool_identity.check_same
  identity = identify(SMOKE, DATA)
  check_same(path, identity)
  fewer = dataclasses.replace(SMOKE, claims=('a',), blocks=SMOKE.blocks[:3])
  check_same(path, identify(fewer, DATA))
  for other, name in (
      (identify(dataclasses.replace(SMOKE, tune_steps=13), DATA), 'tune_steps'),
      (identify(SMOKE, DATA | {'corpus': 'abd'}), 'data'),
  ):
    refuse(f': {name} differ; give anot', check_same, path, other)
  text = (pool_identity.RESULTS / SMOKE.protocol).read_bytes()
  assert identity['protocol'] == hashlib.sha256(text).hexdigest()


def test_results_of_another_protocol_scale_or_data_are_refused(tmp_path):
  path = tmp_path / 'results.json'
  identity = identify(FAIR, DATA)
  assert read_results(tmp_path, identity) == {}
  runs = {'init/seed=1': {'parameters': 3}}
  path.write_text(json.dumps({'identity': identity, 'runs': runs}))
  assert read_results(tmp_path, identify(FAIR, DATA)) == runs
  other = identity | {'protocol': '0'}
  refuse('has results of another sc', read_results, tmp_path, other)


def test_a_corpus_is_identified_by_its_tokens_not_its_files(tmp_path):
  def fingerprints(name, suffix, text):
    source = tmp_path / name
    (source / 'books').mkdir(parents=True)
    for i in range(8):
      (source / 'books' / f'{i}{suffix}').write_text(f'{text} {i} ' * 200)
    scale = dataclasses.replace(FAIR, tasks={})
    return pool_data.prepare(
        scale, str(source), tmp_path / f'{name}-out'
    ).fingerprints

  first = fingerprints('a', '.txt', 'word')
  assert fingerprints('b', '.md', 'word') == first
  assert fingerprints('c', '.txt', 'ward') != first


def prepared(scale, source, directory):
  """Replaces `pool_data.prepare`: reads no data."""
  directory.mkdir(parents=True, exist_ok=True)
  task = data.Task('jsonl', (data.Pair('a', source),), (), ())
  return pool_data.Prepared(
      'corpus', {'task': task}, {}, DATA | {'corpus': source or 'abc'}
  )


@pytest.fixture
def made_up(monkeypatch, tmp_path):
  """Replaces runs by simulated ones in threads; returns their names."""
  ran = []

  def runner(scale, directory, *_):
    made = Runner(directory)

    class Recorded:
      is_there = made.is_there

      def __call__(self, job):
        ran.append(job.name)
        return made(job)

    return Recorded()

  monkeypatch.setattr(pool_data, 'prepare', prepared)
  monkeypatch.setattr(pool_worker, 'Runner', runner)
  monkeypatch.setattr(
      concurrent.futures, 'ProcessPoolExecutor',
      lambda workers, *_: concurrent.futures.ThreadPoolExecutor(workers),
  )
  return ran


def reproduction_of(folder, scale=SMOKE, name='smoke', **changes):
  scale = dataclasses.replace(scale, **changes)
  return reproduce.Reproduction(name, scale, folder / 'runs', folder / 'out')


def test_a_report_on_simulated_outcomes_has_all_verdicts(
    made_up, tmp_path, capsys
):
  here = reproduction_of(tmp_path, FAIR, 'fair', claims=('b2', 'd-ft'))
  report = reproduce.run_scale(here, '', 2, False)
  assert report == (tmp_path / 'out' / 'table.md').read_text()
  assert '**holds**' in report and '**no verdict**' not in report
  assert len(made_up) == len(set(made_up)) == len(outcomes(tmp_path))
  results = results_of(tmp_path)
  assert {c['verdict'] for c in results['claims']} == {'holds'}
  assert all(gate['passed'] for gate in results['gates'])
  assert set(results['runs']) == set(made_up)
  assert '; 0 left, about 0:00' in capsys.readouterr().out
  assert reproduce.run_scale(here, '', 2, False) == report
  assert len(made_up) == len(set(made_up))  # No job ran twice.


def test_refused_data_replace_no_files_of_a_pool(made_up, tmp_path):
  here = reproduction_of(tmp_path, claims=('b2',))
  reproduce.run_scale(here, '', 2, False)
  path = tmp_path / 'runs' / 'tasks' / 'task' / 'train.jsonl'
  before = path.read_bytes()
  for report_only in (False, True):
    refuse('data differ', reproduce.run_scale, here, 'others', 2, report_only)
    assert path.read_bytes() == before


def test_results_with_a_run_that_diverged_are_strict_json(
    made_up, tmp_path, monkeypatch
):
  diverged = 'dense/rate=0.01,seed=1'
  made = Runner.__call__

  def run(self, job):
    outcome = made(self, job)
    if job.name == diverged:
      outcome |= {'validation/loss': math.nan, 'curve': [[1, 0.5, math.nan]]}
      folder = tmp_path / 'runs' / 'runs' / job.name
      json_files.write_json(folder / pool_worker.OUTCOME, outcome, 2)
    return outcome

  monkeypatch.setattr(Runner, '__call__', run)
  here = reproduction_of(tmp_path, claims=('b2',))
  report = reproduce.run_scale(here, '', 2, False)
  path = tmp_path / 'out' / 'results.json'
  stored = json.loads(path.read_text(), parse_constant=pytest.fail)
  assert stored['runs'][diverged]['validation/loss'] == 'NaN'
  restored = read_results(tmp_path / 'out', stored['identity'])[diverged]
  assert math.isnan(restored['validation/loss'])
  assert math.isnan(restored['curve'][0][2])
  made_up.clear()
  assert reproduce.run_scale(here, '', 2, False) == report and made_up == []
  shutil.rmtree(tmp_path / 'runs')
  assert reproduce.run_scale(here, '', 2, True) == report


def test_a_report_has_what_has_finished_and_runs_nothing(made_up, tmp_path):
  whole = reproduction_of(tmp_path, FAIR, 'fair')
  # Blocks of the small and main sizes before fine-tuning.
  part = dataclasses.replace(FAIR, claims=('b2', 'd-pre'))
  reproduce.run_scale(whole._replace(scale=part), '', 2, False)
  count = len(made_up)
  report = reproduce.run_scale(whole, '', 2, True)
  assert len(made_up) == count
  results = results_of(tmp_path)
  verdicts = {c['claim']: c['verdict'] for c in results['claims']}
  assert {k for k, v in verdicts.items() if v == 'holds'} == {'b2', 'd-pre'}
  assert {verdicts[k] for k in set(FAIR.claims) - {'b2', 'd-pre'}} == {
      'no verdict'
  }
  assert f'* runs: {count} of ' in report
  assert report.count('| – | not yet run |') > 3


def test_results_stand_in_for_runs_that_are_not_on_disk(made_up, tmp_path):
  here = reproduction_of(tmp_path, claims=('a',))
  nothing = reproduce.run_scale(here, '', 2, True)
  assert made_up == [] and '**no verdict** (0 of at least 5 seeds' in nothing
  first = reproduce.run_scale(here, '', 2, False)
  shutil.rmtree(tmp_path / 'runs')
  assert reproduce.run_scale(here, '', 2, True) == first
  made_up.clear()
  assert reproduce.run_scale(here, '', 2, False) == first and made_up == []
  # A child that is missing is run after the runs it starts from, once each.
  path = tmp_path / 'out' / 'results.json'
  results = json.loads(path.read_text())
  child = 'static-75+task/rate=0.01,seed=1'
  del results['runs'][child]
  path.write_text(json.dumps(results))
  assert reproduce.run_scale(here, '', 2, False) == first
  parent = 'static-75/rate=0.01,seed=1'
  assert made_up == ['init/seed=1', parent, child]
  # A parent that ends with another loss on this machine is a repeat.
  recorded = results['runs'][parent]
  loss = recorded['validation/loss']
  recorded['validation/loss'] += 0.25
  path.write_text(json.dumps(results))
  for _ in range(2):
    report = reproduce.run_scale(here, '', 2, False)
    assert 'for their weights: 1, with losses that differ by up to 0.250' in (
        report
    )
    assert results_of(tmp_path)['runs'][parent] == recorded | {
        'repeats': [loss]
    }


def test_some_claims_alone_are_judged_within_their_whole_family(
    made_up, tmp_path
):
  whole = reproduction_of(tmp_path, FAIR, 'fair')
  reproduce.run_scale(whole._replace(claims=('b2',)), '', 2, False)
  assert not any('+task' in name for name in made_up)
  claims = {c['claim']: c for c in results_of(tmp_path)['claims']}
  assert list(claims) == list(FAIR.claims)
  assert claims['b2']['verdict'] == 'holds'
  assert claims['b2']['p_holm'] > claims['b2']['p']


def test_a_workdir_of_another_scale_is_refused_and_stays_as_it_is(
    made_up, tmp_path, monkeypatch
):
  reproduce.run_scale(reproduction_of(tmp_path), '', 2, True)
  before = (tmp_path / 'runs' / 'scale.json').read_bytes()
  # Its data would be replaced while its runs may read them.
  monkeypatch.setattr(
      pool_data, 'prepare', lambda *_: pytest.fail('prepared')
  )
  other = reproduction_of(tmp_path, FAIR, 'fair')
  refuse('runs of another scale', reproduce.run_scale, other, '', 2, False)
  assert (tmp_path / 'runs' / 'scale.json').read_bytes() == before
  assert made_up == []


def test_a_worker_that_is_killed_ends_the_pool_and_keeps_finished_runs(
    tmp_path, monkeypatch
):
  monkeypatch.setattr(sys, 'argv', ['reproduce'])  # Workers parse sys.argv.
  monkeypatch.setattr(pool_data, 'prepare', prepared)
  killed_at = 'static-75/rate=0.01,seed=0'
  monkeypatch.setattr(
      pool_worker, 'Runner',
      lambda scale, directory, *_: Runner(directory, killed_at),
  )
  here = reproduction_of(tmp_path, claims=('a',))
  refuse(
      'a worker process was killed', reproduce.run_scale, here, '', 1, False,
      error=OSError,
  )
  before = times_of(outcomes(tmp_path))
  # Jobs before it had finished, and are in the results.
  assert {'init/seed=0', 'dense/rate=0.01,seed=0'} <= names_of(before)
  assert set(results_of(tmp_path)['runs']) == names_of(before)
  reproduce.run_scale(here, '', 1, False)
  assert len(outcomes(tmp_path)) == 12 and times_of(before) == before

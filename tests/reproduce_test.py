"""experiments.reproduce: a smoke run, killed and given again; bad input."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from quickstart_runs import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / 'experiments').is_dir(), reason='needs the checkout'
)
SECONDS = 500  # of patience with a child process.


def reproduce(folder, *flags):
  path = [str(ROOT), os.environ.get('PYTHONPATH')]
  environment = os.environ | {
      'PYTHONPATH': os.pathsep.join(filter(None, path)),
      'PYTHONDONTWRITEBYTECODE': '1',
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


def wait_for(condition, child):
  end = time.monotonic() + SECONDS
  while not condition():
    assert child.poll() is None and time.monotonic() < end
    time.sleep(0.05)


def test_a_smoke_run_that_was_killed_goes_on(tmp_path):
  child = reproduce(tmp_path, '--scale=smoke', '--claims=a', '--workers=1')
  wait_for(lambda: outcomes(tmp_path), child)
  child.send_signal(signal.SIGKILL)
  child.communicate()
  time.sleep(2)  # Its worker sees it.
  before = {path: path.stat().st_mtime_ns for path in outcomes(tmp_path)}
  child = reproduce(tmp_path, '--scale=smoke', '--claims=a')
  output, _ = child.communicate(timeout=SECONDS)
  assert child.returncode == 0, output
  assert f'{len(before)} of 8 runs are done' in output
  assert '8/8 ' in output and '; 0 left, about 0:00' in output
  assert all(path.stat().st_mtime_ns == t for path, t in before.items())
  assert '**no verdict**' in output and 'too few seeds' in output

  table = (tmp_path / 'out' / 'table.md').read_text()
  assert table in output and (tmp_path / 'out' / 'claims.png').stat().st_size
  results = json.loads((tmp_path / 'out' / 'results.json').read_text())
  assert results['config']['steps'] == 60 and results['seeds'] == [1]
  assert {'processor', 'jax', 'optax'} <= results['machine'].keys()
  runs = results['runs']
  assert set(runs) == {
      f'{p.parent.parent.name}/{p.parent.name}' for p in outcomes(tmp_path)
  }
  dense, sparse = (
      runs[f'static-75+{task}/rate=0.01,seed=1']
      for task in ('task', 'task-sparse')
  )
  comparison, = results['claims'][0]['comparisons']
  assert comparison['differences'] == [
      dense['target/loss'] - sparse['target/loss']
  ]
  assert dense['flops'] > sparse['flops'] and dense['distance/wd'] > 0

  again = reproduce(tmp_path, '--scale=tiny', f'--data={tmp_path}')
  output, _ = again.communicate(timeout=SECONDS)
  assert again.returncode == 1 and "no folder 'books'" in output


@pytest.mark.slow
def test_a_whole_smoke_run_trains_every_kind_of_arm(tmp_path):
  child = reproduce(tmp_path, '--scale=smoke')
  output, _ = child.communicate(timeout=SECONDS)
  assert child.returncode == 0, output
  results = json.loads((tmp_path / 'out' / 'results.json').read_text())
  assert [c['claim'] for c in results['claims']] == ['a', 'd', 'e', 'g', 'h']
  assert {c['verdict'] for c in results['claims']} == {'no verdict'}


@pytest.mark.parametrize('flags, message', [
    (['--scale=tinny'], "scale 'tinny' is unknown; did you mean 'tiny'?"),
    (['--scale=smoke', '--claims=a,h-sise'], "did you mean 'h-size'"),
    (['--scale=tiny'], 'give the folder that holds books, e2e'),
])
def test_what_cannot_be_starts_no_run(tmp_path, flags, message):
  child = reproduce(tmp_path, *flags)
  output, _ = child.communicate(timeout=SECONDS)
  assert child.returncode == 1 and message in output
  assert not pathlib.Path(tmp_path, 'runs', 'runs').exists()

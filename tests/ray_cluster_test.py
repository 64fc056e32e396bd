"""Runs on two nodes of a Ray cluster, one of which is killed."""

import json
import os
import subprocess
import sys
import time

import pytest
from quickstart_runs import ROOT
from quickstart_runs import start_command

pytestmark = pytest.mark.slow

RATE = 'phases.pretrain.learning_rate.peak'
SECONDS = 1500  # of patience with a child process.
MEMORY = 100_000_000  # Bytes of a node's object store.


@pytest.fixture
def cluster(monkeypatch):
  """Starts two nodes of one core each; returns (cluster, second node)."""
  pytest.importorskip('ray')
  from ray.cluster_utils import Cluster
  monkeypatch.setenv('RAY_USAGE_STATS_ENABLED', '0')
  monkeypatch.setenv('RAY_worker_niceness', '0')
  node = dict(num_cpus=1, object_store_memory=MEMORY)
  found = Cluster(initialize_head=True, head_node_args=node)
  second = found.add_node(**node)
  found.wait_for_nodes()
  monkeypatch.setenv('RAY_ADDRESS', found.address)
  yield found, second
  found.shutdown()


def wait(condition, child):
  end = time.monotonic() + SECONDS
  while not condition():
    assert child.poll() is None, child.communicate()[0]
    assert time.monotonic() < end
    time.sleep(0.1)


def sweep(workdir, *flags):
  return start_command(
      'experiments.sweep', '--config=configs/quickstart.py',
      f'--workdir={workdir}', f'--grid={RATE}=1e-3,3e-3,1e-2,3e-2',
      '--seeds=3', *flags, data__task='', phases__order=('pretrain',),
  )


def reproduce(folder, *flags):
  return subprocess.Popen(
      [
          sys.executable, '-m', 'experiments.reproduce', '--scale=smoke',
          '--claims=a', f'--workdir={folder / "runs"}',
          f'--output={folder / "out"}', *flags,
      ],
      cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
      env=os.environ | {'PYTHONPATH': str(ROOT)},
  )


def finish(child):
  output, _ = child.communicate(timeout=SECONDS)
  assert child.returncode == 0, output
  return output


def on_one_core():
  """Limits the next children of this process to one core."""
  cores = os.sched_getaffinity(0)
  os.sched_setaffinity(0, {min(cores)})
  return cores


def test_a_sweep_that_loses_a_node_equals_the_local_one(cluster, tmp_path):
  nodes, second = cluster
  lines = tmp_path / 'ray' / 'sweep.jsonl'
  child = sweep(tmp_path / 'ray', '--executor=ray')
  count = lambda: lines.exists() and len(lines.read_text().splitlines())
  wait(lambda: count() >= 3, child)
  nodes.remove_node(second, allow_graceful=False)
  assert count() < 12
  output = finish(child)
  assert '12 of 12 runs are done: ' in output
  cores = on_one_core()
  try:
    finish(sweep(tmp_path / 'local'))
  finally:
    os.sched_setaffinity(0, cores)
  for name in ('sweep.jsonl', 'sweep.md'):
    texts = [(tmp_path / f / name).read_bytes() for f in ('ray', 'local')]
    assert texts[0] == texts[1]
  assert '12 of 12' in finish(sweep(tmp_path / 'ray', '--executor=ray'))


def measured(folder):
  """Outcomes of all runs but their times."""
  runs = json.loads((folder / 'out' / 'results.json').read_text())['runs']
  return {
      name: {k: v for k, v in outcome.items() if not k.endswith('seconds')}
      for name, outcome in runs.items()
  }


def test_a_pool_that_loses_a_node_equals_the_local_one(cluster, tmp_path):
  nodes, second = cluster
  child = reproduce(tmp_path / 'ray', '--executor=ray')
  runs = tmp_path / 'ray' / 'runs' / 'runs'
  wait(lambda: len(list(runs.glob('*/*/outcome.json'))) >= 4, child)
  nodes.remove_node(second, allow_graceful=False)
  assert '12 of 12: ' in finish(child)
  finish(reproduce(tmp_path / 'local', '--workers=1'))
  assert measured(tmp_path / 'ray') == measured(tmp_path / 'local')
  tables = [(tmp_path / f / 'out' / 'table.md').read_text()
            for f in ('ray', 'local')]
  assert tables[0] == tables[1]


def test_what_the_cluster_lacks_gets_one_sentence(
    cluster, tmp_path, monkeypatch
):
  child = sweep(tmp_path / 'a', '--executor=ray', '--cpus_per_run=64')
  output, _ = child.communicate(timeout=SECONDS)
  assert child.returncode == 1 and 'Traceback' not in output
  assert 'cpus_per_run=64 with gpus_per_run=0 fits no node of the' in output
  monkeypatch.setenv('RAY_ADDRESS', '127.0.0.1:1')
  child = sweep(tmp_path / 'b', '--executor=ray')
  output, _ = child.communicate(timeout=SECONDS)
  assert child.returncode == 1 and 'Traceback' not in output
  assert "no Ray cluster is found at '127.0.0.1:1'; start one" in output

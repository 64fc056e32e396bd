"""Runs on a Ray cluster: failures, cores, and nodes that are lost."""

import concurrent.futures
import os
import sys
import tempfile
import threading
import types

import pytest

from experiments.launch import executors
from tests.quickstart_runs import finish
from tests.quickstart_runs import start_command
from tests.quickstart_runs import wait_for
from tests.refusals import refuse

RATE = 'phases.pretrain.learning_rate.peak'
MEMORY = 100_000_000  # Bytes of a node's object store.


class Exceptions:
  """Exceptions with the names of those of Ray."""

  class RayTaskError(Exception):
    cause = ValueError('of the run')

  class WorkerCrashedError(Exception):
    pass

  class NodeDiedError(Exception):
    pass

  class OutOfMemoryError(Exception):
    pass


@pytest.fixture
def ray(monkeypatch):
  """Replaces Ray by threads of this process."""
  threads = concurrent.futures.ThreadPoolExecutor()

  def task(call):
    future = lambda *args: threads.submit(call, *args)
    return types.SimpleNamespace(
        remote=lambda *args: types.SimpleNamespace(future=lambda: future(*args))
    )

  module = types.SimpleNamespace(
      exceptions=Exceptions, init=lambda **_: None, shutdown=lambda: None,
      nodes=lambda: [{'Resources': {'CPU': 8.0}}, {'Resources': {}}],
      remote=lambda **_: task,
  )
  monkeypatch.setitem(sys.modules, 'ray', module)
  monkeypatch.delenv('RAY_ADDRESS', raising=False)
  monkeypatch.setattr(executors.workers, 'start', lambda argv: None)
  monkeypatch.setattr(os, 'sched_setaffinity', lambda pid, cores: None)
  return module


def open_executor(cpus=1, gpus=0):
  return executors.RayExecutor(executors.Resources(cpus, gpus))


def test_results_of_calls_are_returned(ray):
  with open_executor(cpus=3) as executor:
    assert executor.submit(divmod, 7, 2).result() == (3, 1)


def test_cores_are_claimed_once_and_their_number_is_kept(
    ray, tmp_path, monkeypatch
):
  monkeypatch.setattr(tempfile, 'gettempdir', lambda: str(tmp_path))
  monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0, 1, 2})
  pinned = []
  monkeypatch.setattr(
      os, 'sched_setaffinity', lambda pid, cores: pinned.append(cores)
  )

  def hold(cpus):
    """Starts a call that holds its cores until it is released."""
    started, end = threading.Event(), threading.Event()
    call = open_executor(cpus).submit(lambda: started.set() or end.wait(60))
    assert started.wait(60)
    return lambda: end.set() or call.result()

  releases = [hold(cpus) for cpus in (2, 1, 2)]
  assert pinned[:2] == [{0, 1}, {2}] and len(pinned[2]) == 2
  releases[0]()
  releases[0] = hold(1)
  assert pinned[3] == {0}
  for release in releases:
    release()


@pytest.mark.parametrize('name, expected, message', [
    ('RayTaskError', ValueError, '^of the run$'),
    ('WorkerCrashedError', OSError, 'lost its node or process 21 times .Worke'),
    ('NodeDiedError', OSError, 'lost its node or process 21 times .NodeDied'),
    ('OutOfMemoryError', OSError,
     '^a run failed on the cluster .OutOfMemoryError: 9 GB are used.; finish'),
])
def test_a_failure_on_the_cluster_keeps_its_type_and_message(
    ray, name, expected, message
):
  def fail():
    raise getattr(Exceptions, name)('9 GB are used\nby it')

  with open_executor() as executor:
    with pytest.raises(expected, match=message):
      executor.submit(fail).result()


def test_without_ray_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'ray', None)
  refuse(r'ray is not .*\[cluster\]', open_executor, error=ImportError)


def test_resources_that_no_node_has_are_refused(ray):
  refuse('cpus_per_run=64 with gpus_per_run=0 ', open_executor, cpus=64)


def test_a_cluster_that_does_not_answer_is_refused(ray, monkeypatch):
  monkeypatch.setenv('RAY_ADDRESS', '127.0.0.1:1')
  with pytest.raises(OSError, match="no Ray cluster is found at '127.0.0.1:1'"):
    open_executor()


@pytest.fixture
def cluster(monkeypatch):
  """Starts two nodes of one core each; returns (cluster, second node)."""
  pytest.importorskip('ray')
  from ray.cluster_utils import Cluster
  monkeypatch.setenv('RAY_USAGE_STATS_ENABLED', '0')
  monkeypatch.setenv('RAY_worker_niceness', '0')
  node = dict(num_cpus=1, object_store_memory=MEMORY)
  started = Cluster(initialize_head=True, head_node_args=node)
  second = started.add_node(**node)
  started.wait_for_nodes()
  monkeypatch.setenv('RAY_ADDRESS', started.address)
  yield started, second
  started.shutdown()


def sweep(workdir, *flags):
  return start_command(
      'experiments.sweep', '--config=configs/quickstart.py',
      f'--workdir={workdir}', f'--grid={RATE}=1e-3,3e-3,1e-2,3e-2',
      '--seeds=3', *flags, data__task='', phases__order=('pretrain',),
  )


def on_one_core():
  """Limits the next children of this process to one core."""
  cores = os.sched_getaffinity(0)
  os.sched_setaffinity(0, {min(cores)})
  return cores


@pytest.mark.slow
def test_a_sweep_that_loses_a_node_equals_the_local_one(cluster, tmp_path):
  nodes, second = cluster
  lines = tmp_path / 'ray' / 'sweep.jsonl'
  child = sweep(tmp_path / 'ray', '--executor=ray')
  count = lambda: lines.exists() and len(lines.read_text().splitlines())
  wait_for(lambda: count() >= 3, child)
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

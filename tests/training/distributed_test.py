"""Two processes train one model; one is killed, and others resume the run."""

import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from spdf_jax import training
from spdf_jax.sparsity import get_mask
from spdf_jax.sparsity.trees import path_name
from spdf_jax.training.checkpoints.files import read_checkpoint
from spdf_jax.training.checkpoints.files import verify_checkpoint
from spdf_jax.training.checkpoints.workdir import find_checkpoint
from tests.tiny_run import make_run
from tests.tiny_run import rows_in

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parents[2]


def run_local(*words):
  return subprocess.run(
      [sys.executable, '-m', 'experiments.launch.local', *words], cwd=ROOT,
      timeout=280, capture_output=True, text=True, check=False,
  )


def launch(workdir, *, mesh, killed_at=None):
  return run_local(
      '--processes=2', '--grace=3', '--', sys.executable, '-m',
      'tests.two_processes', str(workdir), json.dumps(mesh),
      *([str(killed_at)] if killed_at else []),
  )


def test_a_launcher_refuses_a_program_that_does_not_exist():
  done = run_local('--', 'no-program')
  assert done.returncode == 1 and "'no-program' is no program" in done.stderr
  assert 'Traceback' not in done.stderr


def state_of(workdir, phase=''):
  run = make_run()
  return read_checkpoint(
      find_checkpoint(f'{workdir}{phase}'), run.programs.abstract_state,
      config=run.config, fingerprints=run.fingerprints,
  )


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  """The run in one process, on one device."""
  workdir = tmp_path_factory.mktemp('alone')
  training.train(make_run().open(workdir))
  return workdir


@pytest.fixture(scope='module')
def together(tmp_path_factory):
  """Two processes; the second is killed at step 7, then both start again."""
  workdir = tmp_path_factory.mktemp('together')
  lost = launch(workdir, mesh=dict(fsdp=2), killed_at=7)
  assert lost.returncode > 128, lost.stdout
  # The save of step 6 may not have been done.
  assert training.find_checkpoint(str(workdir)).name in ('5', '6')
  again = launch(workdir, mesh=dict(fsdp=2))
  assert again.returncode == 0, again.stdout
  return workdir


def assert_same_training(one, other):
  for a, b in zip(rows_in(one), rows_in(other), strict=True):
    assert a.keys() == b.keys()
    for name, value in a.items():
      same = value == b[name] or np.isclose(value, b[name], rtol=1e-4)
      assert same, (a['step'], name, value, b[name])
  first, second = state_of(one), state_of(other)
  for (path, a), b in zip(
      jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second)
  ):
    if 'wk/bias' in path_name(path):
      # A bias of keys does not change the softmax: its gradient is a rounding
      # error.
      continue
    if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
      a, b = jax.random.key_data(a), jax.random.key_data(b)
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_two_processes_train_what_one_trains(alone, together):
  assert_same_training(alone, together)


def test_one_process_verifies_what_two_have_saved(together):
  assert verify_checkpoint(find_checkpoint(str(together))) > 0


def test_random_masks_are_the_same_in_two_processes(alone, together):
  first = [
      get_mask(state_of(workdir, '@pretrain').opt_state)
      for workdir in (alone, together)
  ]
  assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), *first))
  kept = sum(int(m.sum()) for m in jax.tree.leaves(first[0]))
  total = sum(m.size for m in jax.tree.leaves(first[0]))
  assert kept == total // 4


@pytest.mark.slow
def test_one_process_continues_where_two_stopped(alone, tmp_path):
  lost = launch(tmp_path, mesh=dict(fsdp=2), killed_at=9)
  assert lost.returncode > 128, lost.stdout
  run = make_run().open(tmp_path)
  assert int(run.state.step) in (6, 8)
  training.train(run)
  assert_same_training(alone, tmp_path)

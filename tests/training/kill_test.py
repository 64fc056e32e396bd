"""A run that is killed at random moments ends as an uninterrupted one."""

import json
import random
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from spdf_jax.data import prepare_corpus
from spdf_jax.files import unseal
from spdf_jax.training.checkpoints.workdir import saved_steps
from spdf_jax.training.loop.metrics import read_rows
from tests.quickstart_runs import CACHE
from tests.quickstart_runs import finish
from tests.quickstart_runs import start_command
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import rows_in

pytestmark = pytest.mark.process

ENDS = (15, 30, 45)
SECONDS = 300  # Timeout of a process on a busy machine.


def start(workdir, dtype):
  return start_command(
      'experiments.train', '--config=configs/quickstart.py',
      f'--workdir={workdir}', f'--config.model.dtype={dtype}',
      data__task='jsonl', data__task_dir=str(workdir.parent),
  )


def last_step(workdir):
  path = workdir / 'metrics.jsonl'
  rows = read_rows(path) if path.exists() else []
  return rows[-1]['step'] if rows else 0


def kill_after(child, workdir, step, delay):
  """Kills a run soon after it has logged a step; returns its last step."""
  deadline = time.monotonic() + SECONDS
  while child.poll() is None and time.monotonic() < deadline:
    if last_step(workdir) >= step:
      time.sleep(delay)
      break
    time.sleep(0.005)
  child.kill()
  finish(child, -signal.SIGKILL)
  return last_step(workdir)


def restore(checkpoint):
  """Reads the arrays of a checkpoint without the code of the library."""
  def read(path):
    # Numpy arrays, on whatever devices they were.
    return checkpointer.restore(path, jax.tree.map(
        lambda x: np.empty(x.shape, x.dtype),
        checkpointer.metadata(path).item_metadata.tree,
    ))

  with ocp.StandardCheckpointer() as checkpointer:
    return {item: read(checkpoint / item) for item in ('params', 'opt_state')}


def assert_same_runs(one, other, steps):
  """Asserts that two runs have the same rows, and arrays of these steps."""
  for step in steps:
    assert_same_arrays(*(
        restore(run / 'checkpoints' / str(step)) for run in (one, other)
    ))
  assert rows_in(one) == rows_in(other)
  assert not (other / 'damaged_checkpoints').exists()


def files_in(folder):
  return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.filterwarnings('ignore:Sharding info not provided')
@pytest.mark.parametrize(
    'dtype', ['float32', pytest.param('bfloat16', marks=pytest.mark.slow)]
)
def test_a_run_killed_in_every_phase_ends_bit_for_bit_the_same(tmp_path, dtype):
  pytest.importorskip('sacrebleu')
  prepare_corpus('python-stdlib', tokenizer='bytes', cache_dir=CACHE)
  for split in ('train', 'validation', 'test'):
    (tmp_path / f'{split}.jsonl').write_text(''.join(
        f'{{"context": "{i}", "target": "{split} {i}"}}\n' for i in range(96)
    ))
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  uninterrupted = start(whole, dtype)
  rng = random.Random(2)
  moments = [rng.randint(4, 12), 17, 32]
  reached = [
      kill_after(start(killed, dtype), killed, step, rng.uniform(0.0, 0.15))
      for step in moments
  ]
  print(f'killed when the log held steps {reached}')
  last = start(killed, dtype)
  for child in (last, uninterrupted):
    assert 'Traceback' not in finish(child)

  assert saved_steps(whole) == saved_steps(killed) == list(ENDS)
  assert_same_runs(whole, killed, ENDS)
  trained = [row['step'] for row in rows_in(whole) if 'train/loss' in row]
  assert trained == list(range(1, 46))
  generations = [files_in(run / 'generations') for run in (whole, killed)]
  assert generations[0] == generations[1]
  assert len(generations[0]) == len(ENDS)
  configs, plans = (
      [json.loads((run / name).read_bytes()) for run in (whole, killed)]
      for name in ('config.json', 'plan.json')
  )
  assert configs[0] == configs[1]
  plans = [unseal(plan, 'plan.json') for plan in plans]
  assert plans[0] | {'name': 'killed'} == plans[1]

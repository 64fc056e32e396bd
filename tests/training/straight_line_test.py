"""From a config to the jitted step: one line, few frames, every check once."""

import json
import os
import subprocess
import sys

import pytest

from tests.quickstart_runs import ROOT
from tests.quickstart_runs import SMALL

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not (ROOT / 'experiments').is_dir(), reason='needs the checkout'
    ),
]

# Launches experiments.train; its last line has the functions between main and
# the jitted step, and the numbers of calls of parse and of all checks.
LAUNCH = '''
import collections, functools, inspect, json, sys
from experiments import train
from experiments.launch import console
from spdf_jax.training.configs import config
from spdf_jax.training import initial_mask
from spdf_jax.training import inputs
from spdf_jax.training.step import matmul
from spdf_jax.training.step import optimizers
from spdf_jax.training import plan
from spdf_jax.training.step import storage
from spdf_jax.training.checkpoints import workdir
from spdf_jax.training import Run
from spdf_jax.training.programs import Programs

calls, stack = collections.Counter(), []

def counted(function):
  @functools.wraps(function)
  def call(*args, **kwargs):
    calls[function.__name__] += 1
    return function(*args, **kwargs)
  return call

for module in (
    config, initial_mask, inputs, matmul, optimizers, plan, storage, workdir
):
  for name, value in list(vars(module).items()):
    own = getattr(value, '__module__', '') == module.__name__
    if own and (name in ('parse', 'create_plan') or name.startswith('check_')):
      setattr(module, name, counted(value))

prepare = Programs.prepare_step

def prepare_step(self, state, step):
  step_fn, state = prepare(self, state, step)
  def noting(*args):
    stack[:] = [frame.function for frame in inspect.stack()]
    return step_fn(*args)
  return noting, state

Programs.prepare_step = prepare_step

def main(argv):
  status = train.main(argv)
  below = stack[1:stack.index('main')]
  print(json.dumps([below[::-1], calls]))
  return status

console.start(main, train.FLAGS)
'''


@pytest.fixture(scope='module')
def launch(tmp_path_factory):
  """Names of frames below `main` at a step, and numbers of calls."""
  workdir = tmp_path_factory.mktemp('line') / 'run'
  fields = SMALL | {'phases.order': "('pretrain',)", 'data.task': ''}
  done = subprocess.run(
      [
          sys.executable, '-c', LAUNCH, f'--workdir={workdir}',
          '--config=configs/quickstart.py',
          *(f'--config.{name}={value}' for name, value in fields.items()),
      ],
      cwd=ROOT, env=os.environ | {'PYTHONPATH': str(ROOT)}, timeout=300,
      capture_output=True, text=True, check=False,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def test_the_jitted_step_is_called_four_frames_below_main(launch):
  assert launch[0] == ['run', 'finish', 'train', 'take_step']


def test_a_launch_parses_once_and_checks_everything_once(launch):
  calls = launch[1]
  assert calls['parse'] == calls['create_plan'] == 1
  checks = {name for name in calls if name.startswith('check_')}
  assert checks >= {
      'check_devices', 'check_first_mask', 'check_optimizer', 'check_storage',
      'check_validation', 'check_workdir',
  }
  assert {name: calls[name] for name in checks} == dict.fromkeys(checks, 1)

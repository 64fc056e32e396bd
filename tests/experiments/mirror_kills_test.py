"""Killed and suspended writers of a mirror lose no checkpoint that it had.

A writer is a process that saves the checkpoints of a finished run one after
another, keeping two, into a workdir with a slow mirror. It notes the newest
step after each update of the mirror.
"""

import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip('etils.epath')

from experiments.launch import mirror
from spdf_jax import training
from tests.fuzz.damage import bits_of
from tests.quickstart_runs import ROOT
from tests.tiny_run import make_run

pytestmark = [pytest.mark.slow, pytest.mark.process]

WRITER = '''
import pathlib, shutil, sys, time
from experiments.launch import mirror
from spdf_jax import files
from spdf_jax.training.checkpoints import workdir as workdirs

sound, workdir, bucket, log = map(pathlib.Path, sys.argv[1:])
mirror.SECONDS = 0.02
push = mirror.Mirror.push

def slow(source, target):
  while chunk := source.read(1 << 12):
    target.write(chunk)
    time.sleep(0.001)

def noted(self):
  push(self)
  with log.open('a') as file:
    file.writelines(f'{step}\\n' for step in self._copy.steps[-1:])

mirror.shutil.copyfileobj = slow
mirror.Mirror.push = noted
with mirror.mirrored(workdir, str(bucket)):
  workdir.mkdir(exist_ok=True)
  saved = workdirs.saved_steps(workdir)
  for step in workdirs.saved_steps(sound):
    if not saved or step > saved[-1]:
      shutil.copytree(sound / f'checkpoints/{step}', workdir / '.part')
      (workdir / 'checkpoints').mkdir(exist_ok=True)
      (workdir / '.part').rename(workdir / f'checkpoints/{step}')
      for name in ('config.json', 'metrics.jsonl'):
        with files.replacing(workdir / name) as whole:
          shutil.copy(sound / name, whole)
      for old in workdirs.saved_steps(workdir)[:-2]:
        shutil.rmtree(workdir / f'checkpoints/{old}')
      print(step, flush=True)
      time.sleep(0.2)
  time.sleep(60)
'''
CHANGES = dict(phases__pretrain__duration='80 steps', checkpoints__every=1)


class Writers:
  """Writers of one mirror, and the states that it may hold."""

  def __init__(self, sound, folder):
    self.sound, self.folder, self.count = sound, folder, 0
    self.bucket, self.log = folder / 'bucket', folder / 'log'
    self.log.touch()

  def start(self):
    """Starts a writer in a new workdir, which has begun to save."""
    self.count += 1
    process = subprocess.Popen(
        [
            sys.executable, '-c', WRITER, self.sound,
            self.folder / f'workdir{self.count}', self.bucket, self.log,
        ],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    if not process.stdout.readline():
      raise AssertionError(process.stderr.read())
    return process

  def newest(self):
    """Returns the newest step that the mirror was noted to have."""
    return max(map(int, self.log.read_text().split()), default=0)

  def check(self):
    """Restores the mirror elsewhere; returns the step of its run."""
    noted = self.newest()
    target = self.folder / 'restored'
    shutil.rmtree(target, ignore_errors=True)
    copy = shutil.copytree(self.bucket, self.folder / 'copy')
    with mirror.mirrored(target, str(copy)):
      run = make_run(**CHANGES, checkpoints__keep=100).open(target)
      run.close()
    shutil.rmtree(copy)
    step = int(run.state.step)
    assert step >= noted
    source = self.sound / f'checkpoints/{step}'
    sound = training.read_params(source, run.programs.abstract_state.params)
    assert bits_of(run.state.params) == bits_of(sound)
    return step


@pytest.fixture(scope='module')
def sound(tmp_path_factory):
  """The workdir of a finished run with a checkpoint of every step."""
  workdir = tmp_path_factory.mktemp('sound')
  training.train(make_run(**CHANGES, checkpoints__keep=100).open(workdir))
  return workdir


@pytest.fixture
def writers(sound, tmp_path):
  return Writers(sound, tmp_path)


def end(process):
  process.kill()
  process.communicate()


def test_twenty_kills_of_a_writer_lose_no_checkpoint(writers):
  rng = random.Random(0)
  steps = []
  for _ in range(20):
    process = writers.start()
    time.sleep(rng.uniform(0, 0.6))
    end(process)
    steps.append(writers.check())
  assert steps == sorted(steps) and len(set(steps)) > 5, steps
  print('steps after kills', steps)


def test_ten_suspensions_of_a_writer_lose_no_checkpoint(writers):
  rng = random.Random(1)
  steps = []
  for _ in range(10):
    suspended = writers.start()
    time.sleep(rng.uniform(0, 0.6))
    suspended.send_signal(signal.SIGSTOP)
    successor = writers.start()
    time.sleep(rng.uniform(0, 0.4))
    suspended.send_signal(signal.SIGCONT)
    time.sleep(1)
    end(successor)
    suspended.send_signal(signal.SIGCONT)
    steps.append(writers.check())
    end(suspended)
  assert steps == sorted(steps), steps
  print('steps after suspensions', steps)

"""Kills of runs, preparations, exports and sweeps."""

import dataclasses
import functools
import json
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from spdf_jax import data
from spdf_jax import interop
from spdf_jax.data import prepare_corpus
from spdf_jax.training.checkpoints.workdir import saved_steps
from spdf_jax.training.loop.metrics import read_rows
from tests.hf_models import LLAMA
from tests.hf_models import make_params
from tests.quickstart_runs import CACHE
from tests.quickstart_runs import ROOT
from tests.quickstart_runs import start_command
from tests.training import kill_test

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings('ignore:Sharding info not provided'),
]

SECONDS = 600
UPDATES = dict(
    phases__pretrain__algorithm__update_every='2 steps',
    phases__pretrain__algorithm__update_until='12 steps',
)
ALGORITHMS = {
    'static': {},
    'rigl': UPDATES,
    'granet': UPDATES,
}
RATE = 'phases.pretrain.learning_rate.peak'
KILLED = '''
import os, runpy, signal, sys

folder, left, module = sys.argv[1], int(sys.argv[2]), sys.argv[3]
CHANGES = 'os.mkdir', 'os.remove', 'os.rename'

def kill(event, args):
  global left
  writes = event == 'open' and isinstance(args[2], int) and args[2] & os.O_CREAT
  if (writes or event in CHANGES) and str(args[0]).startswith(folder):
    if not left:
      os.kill(os.getpid(), signal.SIGKILL)
    left -= 1

sys.argv[:4] = [module]
if left >= 0:
  sys.addaudithook(kill)
runpy.run_module(module, run_name='__main__')
'''
EXPORTS = {
    'prune': [(
        'experiments.prune', '--model={0}/hf', '--to={1}', '--sequences=2',
        '--method=magnitude:0.5', '--calibration={0}/a.jsonl',
    )],
    'shards': [
        ('experiments.prepare', '--input={0}/a.jsonl', '--tokenizer=bytes',
         '--output={1}', f'--shard={number}/2', '--workers=1')
        for number in (1, 2)
    ] + [('experiments.prepare', '--join', '--output={1}')],
}
"""Commands that read a folder `{0}` and write a folder `{1}`, one by one."""


@pytest.fixture(scope='module', autouse=True)
def corpus():
  return prepare_corpus('python-stdlib', tokenizer='bytes', cache_dir=CACHE)


def start_python(*arguments):
  return subprocess.Popen(
      [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT, text=True,
  )


def start_training(workdir, algorithm='static'):
  return start_command(
      'experiments.train',
      f'--config=configs/quickstart.py:algorithm={algorithm}',
      f'--workdir={workdir}', data__task='', checkpoints__every=1,
      phases__order=('pretrain', 'continuation'), **ALGORITHMS[algorithm],
  )


def start_sweep(workdir):
  return start_command(
      'experiments.sweep', '--config=configs/quickstart.py',
      f'--workdir={workdir}', f'--grid={RATE}=1e-3,3e-3,1e-2', data__task='',
      phases__order=('pretrain',),
  )


@pytest.fixture(scope='module')
def text(tmp_path_factory):
  """Lines that take a few seconds to prepare."""
  folder = tmp_path_factory.mktemp('text')
  rng = random.Random(0)
  words = [''.join(rng.choices('etaoinshrdlu', k=6)) for _ in range(5000)]
  with (folder / 'a.jsonl').open('w') as file:
    for _ in range(60_000):
      line = ' '.join(rng.choices(words, k=60))
      file.write(json.dumps({'text': line}) + '\n')
  return folder


def start_preparation(text, output):
  return start_python(
      '-m', 'experiments.prepare', f'--input={text}', '--tokenizer=bpe-2048',
      f'--output={output}', '--workers=2',
  )


def start_killed(command, source, output, changes=-1):
  """Starts a command that is killed after some changes of its output."""
  module, *arguments = (word.format(source, output) for word in command)
  return start_python(
      '-c', KILLED, str(output), str(changes), module, *arguments
  )


def end(child):
  output, _ = child.communicate(timeout=SECONDS)
  assert 'Traceback' not in output, output
  return child.returncode, output


def finish(child):
  code, output = end(child)
  assert code == 0, output


def kill_when(child, is_time):
  """Kills a process once a condition holds; it must not have ended before."""
  deadline = time.monotonic() + SECONDS
  while not is_time() and time.monotonic() < deadline:
    assert child.poll() is None, child.communicate()[0]
    time.sleep(0.002)
  child.kill()
  child.communicate()
  assert child.returncode == -signal.SIGKILL


def paths_of(folder, pattern):
  """Lists paths in the workdir of a run, or in those of a sweep."""
  return [*folder.glob(pattern), *folder.glob(f'*/{pattern}')]


def steps_in(folder):
  """Returns the number of steps in the logs of all runs in a folder."""
  logs = [read_rows(path) for path in paths_of(folder, 'metrics.jsonl')]
  return sum(rows[-1]['step'] for rows in logs if rows)


def has_reached(folder, step):
  return lambda: steps_in(folder) >= step


def is_saving(folder, step):
  """Returns whether a checkpoint of that step or a later one is incomplete."""
  return lambda: steps_in(folder) >= step and any(
      int(path.name.split('.')[0]) >= step % 15
      for path in paths_of(folder, 'checkpoints/*.orbax-checkpoint-tmp')
  )


def assert_same_runs(one, other):
  assert saved_steps(one) == saved_steps(other)
  kill_test.assert_same_runs(one, other, saved_steps(one))


def files_in(folder):
  return {
      path.name: path.read_bytes() for path in folder.iterdir()
      if path.is_file() and not path.name.startswith('.')
  }


def run_with_kills(start, folder, steps):
  """Runs twice, once with kills in turn at a step and while one is saved."""
  whole, killed = folder / 'whole', folder / 'killed'
  finish(start(whole))
  for step, moment in zip(steps, 3 * (has_reached, is_saving)):
    kill_when(start(killed), moment(killed, step))
  finish(start(killed))
  return whole, killed


@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_a_run_killed_six_times_ends_the_same(algorithm, tmp_path):
  start = functools.partial(start_training, algorithm=algorithm)
  assert_same_runs(*run_with_kills(start, tmp_path, (1, 6, 11, 16, 22, 26)))


def test_a_preparation_killed_six_times_ends_the_same(text, tmp_path):
  whole, killed = tmp_path / 'a' / 'x', tmp_path / 'b' / 'x'
  finish(start_preparation(text, whole))
  size = (whole / 'train.bin').stat().st_size
  ids = killed / 'partial' / 'train.ids'
  for share in (0, 0.2, 0.4, 0.6, 0.8, 0.95):
    kill_when(
        start_preparation(text, killed),
        lambda share=share: (
            ids.exists() and ids.stat().st_size >= share * size
        ),
    )
  finish(start_preparation(text, killed))
  assert files_in(whole) == files_in(killed)


def test_a_sweep_killed_six_times_ends_the_same(tmp_path):
  whole, killed = run_with_kills(
      start_sweep, tmp_path, (1, 8, 17, 23, 32, 38)
  )
  runs = sorted(path.name for path in whole.iterdir() if path.is_dir())
  assert len(runs) == 3
  for name in runs:
    assert_same_runs(whole / name, killed / name)


@pytest.mark.parametrize('name', EXPORTS)
def test_an_export_killed_between_its_changes_ends_the_same(name, tmp_path):
  hf = tmp_path / 'hf'
  data.export_tokenizer(tmp_path / 'tokenizer.json', data.ByteTokenizer())
  config = dataclasses.replace(LLAMA, vocab_size=257)
  interop.save_hf(
      hf, config, make_params(config), tokenizer=[tmp_path / 'tokenizer.json']
  )
  rng = random.Random(0)
  (tmp_path / 'a.jsonl').write_text(''.join(
      json.dumps({'text': f'{rng.random()} ' * 9}) + '\n' for _ in range(400)
  ))
  sources = files_in(hf), files_in(tmp_path)
  whole, killed = tmp_path / 'whole' / 'x', tmp_path / 'killed' / 'x'
  if name != 'shards':  # An earlier export is replaced.
    shutil.copytree(hf, killed)
  for command in EXPORTS[name]:
    finish(start_killed(command, tmp_path, whole))
    for changes in (1, 2, 5, 8, 11, 14):
      child = start_killed(command, tmp_path, killed, changes)
      if end(child)[0] == 0:
        break  # All of its changes are done.
      assert child.returncode == -signal.SIGKILL
    finish(start_killed(command, tmp_path, killed))
  assert files_in(whole) == files_in(killed)
  assert (files_in(hf), files_in(tmp_path)) == sources

"""Executors: what is trained elsewhere gives the same files, once each."""

import concurrent.futures
import json
import os
import pathlib
import random
import shlex
import stat
import subprocess
import sys
import tempfile
import time
import types

import jax
import pytest
from quickstart_runs import ROOT
from quickstart_runs import small_config
from quickstart_runs import start_command

from experiments.launch import ray_executor
from experiments.launch import shared_executor
from experiments.launch import slurm_array
from spdf_jax.files import lock_folder
from spdf_jax.runs import swept_runs

ONE_CPU = ray_executor.Resources(cpus=1, gpus=0)


def made_up_metrics(config, workdir):
  """Replaces a training; runs end in another order than they started."""
  time.sleep(random.random() / 100)
  return {'validation/loss': config.eval_every + config.seed / 10}


def open_sweep(folder, grid='eval_every=1,2,3,4', **arguments):
  config = small_config()
  defaults = dict(seeds=3, metric='validation/loss', settings=None)
  return swept_runs.run_sweep(config, folder, [grid], **defaults | arguments)


def run_sweep(folder, executor=None):
  return list(open_sweep(folder, executor=executor))


def test_a_sweep_with_an_executor_writes_what_one_without_does(
    tmp_path, monkeypatch
):
  monkeypatch.setattr(swept_runs, 'train', made_up_metrics)
  monkeypatch.setattr(swept_runs.training, 'create_recipe', lambda config: None)
  local = run_sweep(tmp_path / 'local')
  with concurrent.futures.ThreadPoolExecutor(3) as executor:
    found = run_sweep(tmp_path / 'other', executor)
  assert found[-1] == local[-1]
  assert found[-2].startswith('12 of 12 runs are done: eval_every=')
  for name in ('sweep.md', 'sweep.jsonl'):
    texts = [(tmp_path / f / name).read_text() for f in ('local', 'other')]
    assert texts[0] == texts[1]


def test_a_training_of_a_sweep_releases_its_compiled_programs(
    tmp_path, monkeypatch
):
  cleared = []
  monkeypatch.setattr(jax, 'clear_caches', lambda: cleared.append(None))
  for module, name in (
      (swept_runs.training, 'create_recipe'), (swept_runs.lifecycle, 'run'),
      (swept_runs.training, 'open_session'),
  ):
    monkeypatch.setattr(module, name, lambda *args: None)
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1, "target/loss": 2.0}\n')
  assert swept_runs.train(None, tmp_path) == {'target/loss': 2.0}
  assert len(cleared) == 1


def test_a_machine_that_shares_a_sweep_writes_only_complete_results(
    tmp_path, monkeypatch
):
  monkeypatch.setattr(swept_runs, 'train', made_up_metrics)
  monkeypatch.setattr(swept_runs.training, 'create_recipe', lambda config: None)
  lines = tmp_path / 'sweep.jsonl'
  lines.write_text('of another machine')
  for text in open_sweep(tmp_path, is_shared=True):
    if text.startswith('run '):
      assert lines.read_text() == 'of another machine'
  assert len(lines.read_text().splitlines()) == 12


def test_a_metric_that_a_run_has_not_measured_is_named_with_the_run_once(
    tmp_path, monkeypatch
):
  monkeypatch.setattr(swept_runs, 'train', made_up_metrics)
  monkeypatch.setattr(swept_runs.training, 'create_recipe', lambda config: None)
  with pytest.raises(ValueError, match="^run 'eval_every=1,seed=0' has not"):
    list(open_sweep(tmp_path, metric='task/bleu'))


def test_runs_of_another_grid_in_the_folder_keep_their_lines(
    tmp_path, monkeypatch
):
  monkeypatch.setattr(swept_runs, 'train', made_up_metrics)
  monkeypatch.setattr(swept_runs.training, 'create_recipe', lambda config: None)
  one_seed = list(open_sweep(tmp_path, seeds=1))
  assert '| 4 | 4 ± – | 1 |' in one_seed[-1]
  *_, table = open_sweep(tmp_path, 'eval_every=2')
  assert table.splitlines()[2:] == ['| 2 | 2.1 ± 0.1 | 3 |']
  lines = (tmp_path / 'sweep.jsonl').read_text().splitlines()
  assert [json.loads(line)['workdir'] for line in lines] == [
      *(f'eval_every={n},seed=0' for n in (1, 3, 4)),
      *(f'eval_every=2,seed={n}' for n in range(3)),
  ]


def test_an_error_of_a_run_names_the_run(tmp_path, monkeypatch):
  def fail(config, workdir):
    raise OSError('the disk is full.')

  monkeypatch.setattr(swept_runs, 'train', fail)
  monkeypatch.setattr(swept_runs.training, 'create_recipe', lambda config: None)
  with concurrent.futures.ThreadPoolExecutor(1) as executor:
    with pytest.raises(ValueError, match='eval_every=1,seed=0: the disk is'):
      run_sweep(tmp_path, executor)


def write_array(folder, jobs=2):
  argv = ['--workdir=a b', '--executor=slurm']
  return slurm_array.submit(
      folder, 'experiments.sweep', argv, jobs,
      ray_executor.Resources(cpus=2, gpus=1),
  )


def test_without_a_scheduler_the_script_is_written_and_named(
    tmp_path, monkeypatch
):
  monkeypatch.setenv('PATH', str(tmp_path))
  script = tmp_path / 'runs' / 'array.sbatch'
  with pytest.raises(OSError, match='sbatch is not found on this') as caught:
    write_array(tmp_path / 'runs')
  assert str(caught.value).endswith(f'run `sbatch {script}`.')
  lines = script.read_text().splitlines()
  assert {
      '#SBATCH --array=1-2', '#SBATCH --cpus-per-task=2',
      '#SBATCH --gpus-per-task=1',
  } <= set(lines)
  assert lines[-1] == (
      f"exec {sys.executable} -m experiments.sweep '--workdir=a b' "
      '--executor=slurm --executor=shared'
  )
  subprocess.run(['/bin/bash', '-n', script], check=True)


def test_directives_of_a_folder_with_a_space_are_quoted(tmp_path, monkeypatch):
  monkeypatch.setenv('PATH', str(tmp_path))
  folder = tmp_path / 'my runs'
  with pytest.raises(OSError, match='sbatch is not found on this'):
    write_array(folder)
  directives = [
      shlex.split(line)
      for line in (folder / 'array.sbatch').read_text().splitlines()
      if line.startswith('#SBATCH')
  ]
  assert all(len(words) == 2 for words in directives)
  options = [option for _, option in directives]
  assert '--job-name=sweep-my runs' in options
  assert f'--output={folder}/slurm-%A_%a.out' in options


def fake_sbatch(folder, body):
  folder.mkdir()
  path = folder / 'sbatch'
  path.write_text(f'#!/bin/bash\n{body}\n')
  path.chmod(path.stat().st_mode | stat.S_IXUSR)
  return f'{folder}:{os.environ["PATH"]}'


def test_the_script_is_submitted_or_the_refusal_is_told(tmp_path, monkeypatch):
  path = fake_sbatch(tmp_path / 'good', 'echo "Submitted batch job 7"')
  monkeypatch.setenv('PATH', path)
  assert write_array(tmp_path).startswith('Submitted batch job 7: ')
  path = fake_sbatch(tmp_path / 'bad', 'echo "no account" >&2; exit 1')
  monkeypatch.setenv('PATH', path)
  with pytest.raises(OSError, match=r'refuses .*\(no account\); give its opt'):
    write_array(tmp_path)


def take_turn(folder, name):
  """Makes a file once; a call of the other machine takes a while."""
  workdir = pathlib.Path(folder, name)
  workdir.mkdir(exist_ok=True)
  release = lock_folder(workdir, 'workdir')
  try:
    time.sleep(0.5)
    with (workdir / 'calls').open('a') as file:
      if file.tell() == 0:
        file.write(f'{os.getppid()}\n')
    return (workdir / 'calls').read_text()
  finally:
    release()


def meet(folder):
  """Waits until the processes of two machines have started."""
  pathlib.Path(folder, f'started-{os.getppid()}').touch()
  while len(list(pathlib.Path(folder).glob('started-*'))) < 2:
    time.sleep(0.02)


SHARE = '''
import sys
sys.path.insert(0, {tests!r})
from experiments.launch import shared_executor
import executors_test
shared_executor._SECONDS = 0.2
if __name__ == '__main__':
  sys.argv = ['share']
  with shared_executor.SharedExecutor(2) as executor:
    executor.submit(executors_test.meet, {folder!r}).result()
    calls = [executor.submit(executors_test.take_turn, {folder!r}, name)
             for name in 'abcdefgh']
    print(''.join(call.result() for call in calls), end='')
'''


@pytest.mark.process
def test_two_machines_share_calls_and_get_all_results(tmp_path):
  script = tmp_path / 'share.py'
  folder = tmp_path / 'calls'
  folder.mkdir()
  script.write_text(SHARE.format(
      tests=str(pathlib.Path(__file__).parent), folder=str(folder)
  ))
  children = [
      subprocess.Popen(
          [sys.executable, script], stdout=subprocess.PIPE, text=True,
          env=os.environ | {'PYTHONPATH': str(ROOT)},
      ) for _ in range(2)
  ]
  first, second = (child.communicate(timeout=300)[0] for child in children)
  assert [child.returncode for child in children] == [0, 0]
  assert first == second and len(first.splitlines()) == 8
  # While one machine makes a call, the other makes the next one.
  assert {int(line) for line in first.splitlines()} == {
      child.pid for child in children
  }


def record(folder, name):
  """Records a call; fails if it is the first."""
  time.sleep(0.5)
  path = pathlib.Path(folder, 'calls')
  is_first = not path.exists()
  with path.open('a') as file:
    file.write(f'{name}\n')
  if is_first:
    raise OSError('the disk is full.')


@pytest.mark.process
def test_after_an_error_the_calls_that_wait_are_not_made(
    tmp_path, monkeypatch
):
  monkeypatch.setattr(sys, 'argv', ['test'])
  with pytest.raises(OSError, match='the disk is full'):
    with shared_executor.SharedExecutor(1) as executor:
      calls = [executor.submit(record, tmp_path, name) for name in 'abcdef']
      calls[0].result()
  made = (tmp_path / 'calls').read_text().splitlines()
  assert made[0] == 'a' and len(made) <= 2  # The next one may have begun.
  assert all(call.done() for call in calls)
  assert calls[-1].cancelled()
  with pytest.raises(RuntimeError, match='submit calls to a new one'):
    executor.submit(record, tmp_path, 'g')


@pytest.mark.process
def test_a_call_whose_folder_stays_in_use_is_cancelled_at_the_end(
    tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(sys, 'argv', ['test'])
  monkeypatch.setattr(shared_executor, '_SECONDS', 0.1)
  release = lock_folder(tmp_path, 'workdir')
  with shared_executor.SharedExecutor(1) as executor:
    call = executor.submit(take_turn, tmp_path.parent, tmp_path.name)
    assert executor.submit(os.getpid).result() != os.getpid()
    time.sleep(0.5)
    assert not call.done()
  assert call.cancelled()
  release()
  assert 'Traceback' not in capsys.readouterr().err


@pytest.mark.process
def test_sigterm_to_the_command_saves_the_run_that_its_process_trains(
    tmp_path
):
  child = start_command(
      'experiments.sweep', '--config=configs/quickstart.py',
      f'--workdir={tmp_path}', '--seeds=2', '--executor=shared',
      data__task='', phases__order=('pretrain',), log_every=1,
      phases__pretrain__duration='50000 steps', eval_every=50_000,
      checkpoints__every=50_000,
  )
  run = tmp_path / 'seed=0'
  log = run / 'metrics.jsonl'
  while not (log.exists() and log.stat().st_size) and child.poll() is None:
    time.sleep(0.1)
  child.terminate()
  output, _ = child.communicate(timeout=300)
  assert child.returncode == 130, output
  assert 'stopped; the same command continues' in output
  assert 'Traceback' not in output
  (saved,) = (run / 'checkpoints').glob('[0-9]*')
  assert int(saved.name) > 0
  assert not (tmp_path / 'seed=1').exists()


@pytest.mark.process
def test_a_call_whose_process_is_killed_raises(monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['test'])
  with shared_executor.SharedExecutor(1) as executor:
    calls = [executor.submit(os._exit, 1), executor.submit(os.getpid)]
    for call in calls:
      with pytest.raises(OSError, match='was killed; finished runs are kept'):
        call.result()


def test_cores_are_claimed_once_and_their_number_is_kept(
    tmp_path, monkeypatch
):
  monkeypatch.setattr(tempfile, 'gettempdir', lambda: str(tmp_path))
  monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {0, 1, 2})
  pinned = []
  monkeypatch.setattr(
      os, 'sched_setaffinity', lambda pid, cores: pinned.append(cores)
  )
  claims = [ray_executor._pin(count) for count in (2, 1, 2)]
  assert pinned[:2] == [{0, 1}, {2}] and len(pinned[2]) == 2
  for descriptor in claims[0]:
    os.close(descriptor)
  claims[0] = ray_executor._pin(1)
  assert pinned[3] == {0}
  for descriptor in sum(claims, []):
    os.close(descriptor)


class MadeUpExceptions:
  """Exceptions with the names of those of Ray."""

  class RayTaskError(Exception):
    cause = ValueError('of the run')

  class WorkerCrashedError(Exception):
    pass

  class NodeDiedError(Exception):
    pass

  class OutOfMemoryError(Exception):
    pass


@pytest.mark.parametrize('name, expected, message', [
    ('RayTaskError', ValueError, '^of the run$'),
    ('WorkerCrashedError', OSError, 'lost its node or process 21 times .Worke'),
    ('NodeDiedError', OSError, 'lost its node or process 21 times .NodeDied'),
    ('OutOfMemoryError', OSError,
     '^a run failed on the cluster .OutOfMemoryError: 9 GB are used.; finish'),
])
def test_a_failure_on_the_cluster_is_named_for_what_it_is(
    name, expected, message
):
  executor = object.__new__(ray_executor.RayExecutor)
  executor._ray = types.SimpleNamespace(exceptions=MadeUpExceptions)
  done, result = concurrent.futures.Future(), concurrent.futures.Future()
  done.set_exception(getattr(MadeUpExceptions, name)('9 GB are used\nby it'))
  executor._pass_on(done, result)
  with pytest.raises(expected, match=message):
    result.result()


def test_without_ray_the_extra_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'ray', None)
  with pytest.raises(ImportError, match=r'ray is not .*\[cluster\]'):
    ray_executor.RayExecutor(ONE_CPU)




@pytest.mark.slow
def test_an_array_of_jobs_shares_a_sweep(tmp_path, monkeypatch):
  def sweep(folder, *flags):
    child = start_command(
        'experiments.sweep', '--config=configs/quickstart.py',
        f'--workdir={tmp_path / folder}', '--seeds=2', *flags,
        '--grid=phases.pretrain.learning_rate.peak=1e-3,1e-2',
        data__task='', phases__order=('pretrain',),
    )
    output, _ = child.communicate(timeout=1500)
    assert child.returncode == 0, output
    return output

  monkeypatch.setenv('PATH', fake_sbatch(tmp_path / 'bin', (
      'for i in 1 2; do bash "$1" > "$1.$i.out" 2>&1 & done; wait'
  )))
  sweep('array', '--executor=slurm', '--jobs=2')
  sweep('local')
  for name in ('sweep.jsonl', 'sweep.md'):
    texts = [(tmp_path / f / name).read_text() for f in ('array', 'local')]
    assert texts[0] == texts[1]
  logs = [path.read_text() for path in (tmp_path / 'array').glob('*.out')]
  assert len(logs) == 2 and all(texts[0] in log for log in logs)
  trained = 'step 15: validation/perplexity'
  assert sum(log.count(trained) for log in logs) == 4

"""A run that is stopped and continued ends as an uninterrupted one."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from spdf_jax.training import Evaluators
from spdf_jax.training import Interrupted
from spdf_jax.training import NotFinite
from spdf_jax.training import train
from spdf_jax.training.loop import progress
from spdf_jax.training.loop.metrics import read_rows
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import damage_batches
from tests.tiny_run import make_dynamic_run
from tests.tiny_run import make_run
from tests.tiny_run import rows_in
from tests.tiny_run import Stopped
from tests.tiny_run import stopping_at
from tests.tiny_run import total

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = 120  # Timeout of a child process.

CHILD = '''
import sys
import time
from tests.tiny_run import make_run
from spdf_jax.training import Evaluators, Interrupted, train

def evaluate(step, params):
  print('evaluated', step, flush=True)
  time.sleep(float(sys.argv[2]))
  return [('validation/loss', float(params['wte']['embedding'].sum()))]

try:
  train(make_run().open(sys.argv[1]), evaluators=Evaluators([evaluate]))
except Interrupted as interrupted:
  print(interrupted)
  sys.exit(128 + interrupted.signal)
'''


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """Returns the workdir and final state of an uninterrupted run."""
  workdir = tmp_path_factory.mktemp('whole') / 'run'
  state = train(make_run().open(workdir), evaluators=Evaluators([total]))
  return workdir, state


def test_a_loss_that_is_not_finite_stops_before_anything_is_saved(tmp_path):
  run = make_run(checkpoints__every=1, log_every=5)
  step_fn = run.programs.step

  def poisoned(state, batch):
    state, metrics = step_fn(state, batch)
    if int(state.step) == 8:
      params = jax.tree.map(lambda x: x * jnp.nan, state.params)
      state = state.replace(params=params)
      metrics |= {'train/grad_norm': jnp.nan}
    return state, metrics

  vars(run.programs)['step'] = poisoned
  with pytest.raises(NotFinite, match='train/grad_norm of step 8, .* is nan'):
    train(run.open(tmp_path / 'run'))
  assert 'NaN' not in (tmp_path / 'run' / 'metrics.jsonl').read_text()
  run = make_run(checkpoints__every=1, log_every=5)
  resumed = run.open(tmp_path / 'run')
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(
      resumed.state.params
  ))
  assert int(resumed.state.step) == 7


def test_a_resumed_run_counts_the_steps_skipped_before(tmp_path):
  stopped = pytest.raises(Stopped)
  for stop, end in (6, stopped), (None, contextlib.nullcontext()):
    run = damage_batches(make_run(max_skipped_steps=1), (3, 9))
    with end:
      train(run.open(tmp_path), evaluators=stopping_at(stop))
  skipped = [row['train/skipped_steps'] for row in rows_in(tmp_path)
             if 'train/loss' in row]
  assert skipped == [0] * 2 + [1] * 6 + [2] * 6


@pytest.mark.parametrize('name, make, stops', [
    # Evaluations are at 3, 5, 6, 9, 10, 12, 14; phases end at 5, 10, 14.
    ('whole', make_run, (3, 5, 9, 10, 14)),
    pytest.param('moved', make_dynamic_run, (3, 5, 6), marks=pytest.mark.ci),
])
def test_a_run_that_fails_anywhere_continues_bit_for_bit(
    name, make, stops, request, tmp_path
):
  workdir, last = request.getfixturevalue(name)
  for stop in stops:
    run = make().open(tmp_path)
    assert int(run.state.step) <= stop
    with pytest.raises(Stopped):
      train(run, evaluators=stopping_at(stop))
    run.close()
  state = train(make().open(tmp_path), evaluators=Evaluators([total]))
  assert_same_arrays(state, last)
  assert rows_in(tmp_path) == rows_in(workdir)


@pytest.mark.ci
@pytest.mark.parametrize('stops', [
    (1, 5, 6), pytest.param((4, 13), marks=pytest.mark.slow),
])
def test_a_run_stopped_by_signals_continues_bit_for_bit(whole, tmp_path, stops):
  for stop in stops:
    run = make_run()
    batch_at = run.programs.batch_at

    def signalling(step, rows, stop=stop, batch_at=batch_at):
      if step == stop - 1:
        os.kill(os.getpid(), signal.SIGTERM)
      return batch_at(step, rows)

    vars(run.programs)['batch_at'] = signalling
    run = run.open(tmp_path)
    message = f'stopped by signal 15 after step {stop}; everything is saved'
    with pytest.raises(Interrupted, match=message) as caught:
      train(run, evaluators=Evaluators([total]))
    assert caught.value.signal == signal.SIGTERM
    again = make_run().open(tmp_path)
    assert int(again.state.step) == stop
    again.checkpoints.close()
  state = train(make_run().open(tmp_path), evaluators=Evaluators([total]))
  assert_same_arrays(state, whole[1])
  assert rows_in(tmp_path) == rows_in(whole[0])


def test_a_signal_at_the_last_step_does_not_interrupt_the_run(tmp_path, whole):
  def late(step, params):
    if step == 14:
      os.kill(os.getpid(), signal.SIGTERM)
    yield from total(step, params)

  state = train(make_run().open(tmp_path), evaluators=Evaluators([late]))
  assert_same_arrays(state, whole[1])


def test_a_finished_run_does_not_train_again(whole):
  before = (whole[0] / 'metrics.jsonl').read_bytes()
  state = train(make_run().open(whole[0]), evaluators=Evaluators([total]))
  assert_same_arrays(state, whole[1])
  assert (whole[0] / 'metrics.jsonl').read_bytes() == before


def test_every_step_is_logged_once_and_in_order(whole):
  rows = rows_in(whole[0])
  trained = [row['step'] for row in rows if 'train/loss' in row]
  evaluated = [row['step'] for row in rows if 'validation/loss' in row]
  assert trained == list(range(1, 15))
  assert evaluated == [3, 5, 6, 9, 10, 12, 14]
  assert [row['step'] for row in rows] == sorted(row['step'] for row in rows)
  phases = [row['phase'] for row in rows if 'train/loss' in row]
  assert phases == ['pretrain'] * 5 + ['continuation'] * 5 + ['finetune'] * 4


def test_the_log_of_a_step_is_on_disk_before_its_checkpoint(tmp_path):
  run = make_run().open(tmp_path)
  save, logged = run.checkpoints.save, {}

  def noting(state, best):
    logged[int(state.step)] = rows_in(tmp_path)[-1]['step']
    save(state, best)

  run.checkpoints.save = noting
  train(run)
  assert logged == {step: step for step in (2, 4, 5, 6, 8, 10, 12, 14)}


def test_the_sparsity_that_is_logged_is_the_one_that_was_trained_with(whole):
  sparsities = {
      row['step']: row['sparsity/sparsified'] for row in rows_in(whole[0])
      if 'sparsity/sparsified' in row
  }
  assert sparsities == {3: 0.75, 5: 0.75, 6: 0, 9: 0, 10: 0, 12: 0, 14: 0}


@pytest.fixture(scope='module')
def moved(tmp_path_factory):
  """Returns the workdir and final state of a run with mask updates."""
  workdir = tmp_path_factory.mktemp('moved') / 'run'
  state = train(
      make_dynamic_run().open(workdir), evaluators=Evaluators([total])
  )
  return workdir, state


def test_planned_and_measured_sparsity_of_each_layer_are_logged(moved):
  rows = [r for r in rows_in(moved[0]) if 'sparsity/all' in r]
  layers = [k for k in rows[0] if k.startswith('sparsity_planned/')]
  assert len(layers) == 6
  for row in rows:
    for key in layers:
      assert row[key] == row[key.replace('_planned', '')]
  planned = {row['step']: row[layers[0]] for row in rows}
  assert 0.25 < planned[3] < planned[5] == 0.75 and planned[6] == 0


def test_steps_log_how_masks_moved(moved):
  rows = {r['step']: r for r in rows_in(moved[0]) if 'train/loss' in r}
  size = 4 * 16 * 16 + 2 * 16 * 16
  for step, row in rows.items():
    kept = row['sparsity/grown'] + row['sparsity/surviving']
    evaluated = [
        r for r in rows_in(moved[0])
        if r['step'] == step and 'sparsity/sparsified' in r
    ]
    for other in evaluated:
      assert kept == pytest.approx(size * (1 - other['sparsity/sparsified']))
  assert rows[1]['sparsity/overlap'] == 1.0
  assert rows[1]['sparsity/exploration'] == 0.75
  dropped = [rows[step]['sparsity/dropped'] for step in (2, 3, 4, 5)]
  assert min(dropped) > 0
  # The dense phase revives all and drops none.
  assert rows[6]['sparsity/dropped'] == 0
  assert rows[6]['sparsity/exploration'] == 1.0


def test_a_run_whose_masks_stay_logs_no_movement(whole):
  assert not any('sparsity/grown' in row for row in rows_in(whole[0]))


def test_evaluators_of_phase_ends_are_called_at_phase_ends_only(tmp_path):
  steps = []

  def note(step, params):
    steps.append(step)
    return ()

  train(make_run().open(tmp_path), evaluators=Evaluators(at_phase_ends=[note]))
  assert steps == [5, 10, 14]


def test_rows_are_written_every_so_often_and_at_phase_ends(tmp_path):
  train(make_run(log_every=4).open(tmp_path))
  trained = [row['step'] for row in rows_in(tmp_path) if 'train/loss' in row]
  assert trained == [4, 5, 8, 10, 12, 14]


def start(workdir, seconds_per_evaluation):
  path = [str(ROOT), os.environ.get('PYTHONPATH')]
  return subprocess.Popen(
      [sys.executable, '-c', CHILD, str(workdir), str(seconds_per_evaluation)],
      env=os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, path))},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
  )


@pytest.mark.process
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_receives_sigterm_saves_and_exits(number, tmp_path):
  child = start(tmp_path, 1.0)
  assert child.stdout.readline() == 'evaluated 3\n'
  child.send_signal(number)
  out, err = child.communicate(timeout=SECONDS)
  assert child.returncode == 128 + number, err
  assert f'stopped by signal {int(number)} after step 4' in out
  assert 'Traceback' not in err
  if number == signal.SIGINT:
    return
  second = start(tmp_path, 0.0)
  out, err = second.communicate(timeout=SECONDS)
  assert second.returncode == 0, err
  assert out.splitlines()[0] == 'evaluated 5'
  rows = read_rows(tmp_path / 'metrics.jsonl')
  assert [r['step'] for r in rows if 'train/loss' in r] == list(range(1, 15))


def test_the_first_step_of_a_phase_is_not_in_the_seconds(tmp_path, monkeypatch):
  restarted = []
  restart = progress.Progress.restart
  monkeypatch.setattr(
      progress.Progress, 'restart',
      lambda self, step: (restarted.append(step), restart(self, step)),
  )
  run = make_run(eval_every=100, checkpoints__every=100)
  train(run.open(tmp_path / 'run'))
  # After the first steps, which compile.
  assert restarted == [1, 6, 11]


def test_steps_skipped_in_a_row_are_counted_across_a_restart(tmp_path):
  changes = dict(max_skipped_steps=2, log_every=5, checkpoints__every=1)
  for _ in range(2):
    run = damage_batches(make_run(**changes), (7, 8, 9))
    with pytest.raises(NotFinite, match='of step 9'):
      train(run.open(tmp_path))
  assert int(make_run(**changes).open(tmp_path).state.step) == 8
  shown = {row['step'] for row in rows_in(tmp_path) if 'train/loss' in row}
  assert {7, 8} <= shown


def test_rows_that_were_deleted_are_warned_of(tmp_path, caplog):
  for is_deleted in (False, True):
    workdir = tmp_path / str(is_deleted)
    with pytest.raises(Stopped):
      train(make_run().open(workdir), evaluators=stopping_at(9))
    if is_deleted:
      (workdir / 'metrics.jsonl').unlink()
    train(make_run().open(workdir))
    assert is_deleted == ('metrics.jsonl has no rows although' in caplog.text)

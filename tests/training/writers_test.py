"""Dashboards receive the same metrics as the metrics file."""

import sys
import types

import pytest

from spdf_jax.training.loop.writers import AllWriters
from spdf_jax.training.loop.writers import choose_writers

ROWS = [(1, {'train/loss': 3.5, 'phase': 'a'}), (2, {'train/loss': 3.0})]


class Recorder:

  def __init__(self, log):
    self._log = log

  def write_scalars(self, step, scalars):
    self._log.append((step, dict(scalars)))

  def flush(self):
    self._log.append('flush')

  def close(self):
    self._log.append('close')


def test_every_writer_receives_every_value():
  logs = [], []
  writer = AllWriters([Recorder(log) for log in logs])
  for row in ROWS:
    writer.write_scalars(*row)
  writer.flush()
  writer.close()
  assert logs[0] == logs[1] == [*ROWS, 'flush', 'close']


def test_tensorboard_hides_steps_that_are_repeated_after_a_restart(tmp_path):
  pytest.importorskip('tensorboardX', reason='tensorboardX is not installed')
  from tensorboardX.proto import event_pb2

  for resume_step in (0, 1):
    (open_writer,) = choose_writers(['tensorboard'])
    writer = open_writer(tmp_path, {}, resume_step)
    for step, scalars in ROWS[resume_step:]:
      writer.write_scalars(step, scalars)
    writer.close()
  events = []
  for path in sorted((tmp_path / 'tensorboard').iterdir()):
    data = path.read_bytes()
    while data:  # Length, its checksum, the event, its checksum.
      size = int.from_bytes(data[:8], 'little')
      events.append(event_pb2.Event.FromString(data[12:12 + size]))
      data = data[16 + size:]
  points = [
      (event.step, value.tag, value.simple_value)
      for event in events for value in event.summary.value
  ]
  assert points == [
      (1, 'train/loss', 3.5), (2, 'train/loss', 3.0), (2, 'train/loss', 3.0)
  ]
  starts = [e.step for e in events if e.HasField('session_log')]
  assert 2 in starts  # TensorBoard drops what it had from step 2 on.


def test_weights_and_biases_continues_with_the_run_of_the_workdir(
    tmp_path, monkeypatch
):
  log = []
  run = types.SimpleNamespace(
      log=lambda scalars, step: log.append((step, scalars)),
      finish=lambda: log.append('finish'),
  )

  def init(**options):
    log.append(options)
    return run

  monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(init=init))
  for name in ('WANDB_PROJECT', 'WANDB_RUN_GROUP'):
    monkeypatch.delenv(name, raising=False)
  workdirs = [tmp_path / folder / 'dense' for folder in ('a', 'b')]
  for workdir in (workdirs[0], *workdirs):
    workdir.mkdir(parents=True, exist_ok=True)
    (open_writer,) = choose_writers(['wandb'])
    writer = open_writer(workdir, {'seed': 3}, 7)
    writer.write_scalars(*ROWS[0])
    writer.close()
  first, row, end, resumed, _, _, other, *_ = log
  assert first['name'] == other['name'] == 'dense'
  assert first['id'] == resumed['id'] != other['id']
  assert (first['project'], first['group']) == ('spdf_jax', 'a')
  assert other['group'] == 'b'
  assert (first['resume'], first['config']) == ('allow', {'seed': 3})
  assert (row, end) == ((1, {'train/loss': 3.5}), 'finish')
  monkeypatch.setenv('WANDB_PROJECT', 'mine')
  monkeypatch.setenv('WANDB_RUN_GROUP', 'grid')
  open_writer(workdir, {}, 7)
  assert (log[-1]['project'], log[-1]['group']) == ('mine', 'grid')


def test_a_library_that_is_missing_is_named_before_training(monkeypatch):
  monkeypatch.setitem(sys.modules, 'wandb', None)
  with pytest.raises(ImportError, match=r'wandb is not .*\[log\]'):
    choose_writers(['wandb'])


def test_a_library_whose_own_imports_fail_is_not_called_missing(
    tmp_path, monkeypatch
):
  monkeypatch.delitem(sys.modules, 'wandb', raising=False)
  (tmp_path / 'wandb.py').write_text('import not_there')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ImportError, match="cannot be imported .*'not_there'"):
    choose_writers(['wandb'])


def test_an_unknown_dashboard_is_refused_with_the_nearest_name():
  with pytest.raises(ValueError, match="writer 'tensorbord'.*'tensorboard'"):
    choose_writers(['tensorbord'])

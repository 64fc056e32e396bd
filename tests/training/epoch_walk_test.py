"""Windows over a whole run: a sparse stage, a dense one, a kill in between."""

import pytest

from spdf_jax import data
from spdf_jax import training
from spdf_jax.training.programs import Programs
from tests.quickstart_runs import small_config
from tests.tiny_run import Stopped


def make_run():
  return training.Run.create(small_config(
      data__task='', phases__order=('pretrain', 'continuation'),
      phases__pretrain__duration='8 steps',
      phases__continuation__duration='5 steps',
      phases__continuation__batch_size=6, checkpoints__every=3,
  ))


@pytest.mark.ci
def test_no_window_comes_twice_and_none_is_lost(tmp_path, monkeypatch):
  killed_at = 10
  read_of, read = {}, data.Windows.read
  step_of = Programs.device_batch_at
  at = {}

  def noting(self, blocks, offsets, *, block_length, length):
    read_of.setdefault(at['run'], {})[at['step']] = [
        (int(b) * block_length + int(o), length)
        for b, o in zip(blocks, offsets)
    ]
    return read(
        self, blocks, offsets, block_length=block_length, length=length
    )

  def stepping(self, step):
    if at['run'] == 0 and step == killed_at:
      raise Stopped
    at['step'] = step
    return step_of(self, step)

  monkeypatch.setattr(data.Windows, 'read', noting)
  monkeypatch.setattr(Programs, 'device_batch_at', stepping)
  at['run'] = 0
  run = make_run().open(tmp_path)
  with pytest.raises(Stopped):
    training.train(run)
  run.checkpoints.wait()
  at['run'] = 1
  run = make_run().open(tmp_path)
  resumed = int(run.state.step)
  training.train(run)
  assert 0 < resumed <= killed_at
  # Repeated steps after the checkpoint read what they read before.
  for step in range(resumed, killed_at):
    assert read_of[0][step] == read_of[1][step]
  steps = {**read_of[0], **read_of[1]}
  assert sorted(steps) == list(range(13))
  windows = [window for step in sorted(steps) for window in steps[step]]
  assert len(windows) == 8 * 4 + 5 * 6
  assert len(set(windows)) == len(windows)
  # Those of a run that has never been killed, in the same order.
  run, whole = make_run(), []
  at['run'] = 2
  for step in range(13):
    at['step'] = step
    run.programs.batch_at(step)
    whole += read_of[2][step]
  assert windows == whole

"""A dashboard that fails is dropped; errors of metrics.jsonl are raised."""

import logging

import pytest

from spdf_jax import training
from spdf_jax.training.loop.writers import AllWriters
from tests.tiny_run import make_run


class Recorder:
  """A writer that records its calls and raises at those that are named."""

  def __init__(self, fails=()):
    self.calls = []
    self._fails = fails

  def _call(self, name):
    self.calls.append(name)
    if name in self._fails:
      raise ConnectionError('no network')

  def write_scalars(self, step, scalars):
    self._call(f'step {step}')

  def flush(self):
    self._call('flush')

  def close(self):
    self._call('close')


@pytest.mark.parametrize('fails, calls', [
    ('step 1', ['step 1']),
    ('flush', ['step 1', 'step 2', 'flush']),
    ('close', ['step 1', 'step 2', 'flush', 'close']),
])
def test_a_dashboard_is_dropped_at_its_first_error(caplog, fails, calls):
  first, broken, last = Recorder(), Recorder({fails}), Recorder()
  writer = AllWriters([first, broken, last])
  writer.write_scalars(1, {})
  writer.write_scalars(2, {})
  writer.flush()
  writer.close()
  everything = ['step 1', 'step 2', 'flush', 'close']
  assert first.calls == last.calls == everything
  assert broken.calls == calls
  (record,) = caplog.records
  assert record.levelno == logging.WARNING
  assert 'Recorder failed (ConnectionError: no network)' in record.message


def test_errors_of_the_metrics_file_are_raised():
  writer = AllWriters([Recorder({'flush'}), Recorder()])
  with pytest.raises(ConnectionError):
    writer.write_scalars(1, {})
    writer.flush()
    writer.close()


def test_a_dashboard_that_cannot_be_opened_does_not_end_training(
    tmp_path, caplog
):
  def fails(workdir, config, step):
    raise ConnectionError('no network')

  made = []
  opens = lambda workdir, config, step: made.append(Recorder()) or made[0]
  state = training.train(
      make_run().open(tmp_path), writers=[fails, opens]
  )
  assert state.step == 14 and 'step 14' in made[0].calls
  message, = (text for text in caplog.messages if 'no network' in text)
  assert 'fails failed (ConnectionError: no network)' in message

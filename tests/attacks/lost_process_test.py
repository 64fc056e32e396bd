"""When a process of a run is killed, the others end with one sentence."""

import tempfile

import jax
import pytest

console = pytest.importorskip(
    'experiments.launch.console', reason='needs the checkout'
)

STEP = (
    'UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/'
    'pair.cc:547] Connection closed by peer [127.0.0.1]:5\nmore'
)
BARRIER = (
    'INTERNAL: Barrier failed because: task is set to ERROR: UNAVAILABLE: Task '
    '1 heartbeat timeout. This indicates that the remote task has failed\nmore'
)


@pytest.fixture
def run(monkeypatch, tmp_path):
  """Runs a command whose training raises an error of JAX with a text."""
  monkeypatch.setattr(console, 'prepare', lambda: None)
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))

  def run(text):
    def fail():
      raise jax.errors.JaxRuntimeError(text)

    return console.run(['command'], lambda: fail)

  return run


@pytest.mark.parametrize('lost', [STEP, BARRIER])
def test_the_end_of_another_process_is_one_sentence(run, caplog, lost):
  assert run(lost) == 1
  (record,) = caplog.records
  assert record.levelname == 'ERROR' and record.exc_info is None
  assert record.message == (
      f'another process of this run has ended ({lost.splitlines()[0]}); start '
      'all processes again, and they continue from the last checkpoint.'
  )


def test_other_errors_of_jax_keep_their_tracebacks(run, caplog):
  assert run('RESOURCE_EXHAUSTED: Out of memory') == 1
  assert 'Out of memory; its traceback is in ' in caplog.text

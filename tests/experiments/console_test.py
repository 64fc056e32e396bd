"""How commands end: texts, one sentence for bad input, exit statuses."""

import errno
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile

from absl import app
import pytest

from tests.quickstart_runs import finish
from tests.quickstart_runs import ROOT
from tests.quickstart_runs import start_command

pytestmark = pytest.mark.skipif(
    not (ROOT / 'experiments').is_dir(), reason='needs the checkout'
)

from experiments.launch import console  # noqa: E402
from spdf_jax import training  # noqa: E402
from spdf_jax.accelerator import native  # noqa: E402

ARGV = ['command']


@pytest.fixture(autouse=True)
def as_it_is(monkeypatch):
  # It would change this process' logging for the tests that follow.
  monkeypatch.setattr(console, 'prepare', lambda: None)


def fail(error):
  raise error


def texts():
  yield 'first'
  yield 'second'
  raise ValueError('the third cannot be.')


def start(main, **options):
  """Starts a command whose main function is an expression of Python."""
  script = (
      'from absl import flags\n'
      'from experiments.launch import console\n'
      f'console.start({main}, flags.FlagValues())\n'
  )
  return subprocess.run(
      [sys.executable, '-c', script], cwd=ROOT, capture_output=True,
      check=False, **options,
  )


@pytest.mark.process
def test_a_terminal_of_ascii_shows_a_text_with_replacements():
  done = start(
      "lambda argv: console.run(argv, lambda: ['\\xef \\xb1 1', 'the end'])",
      env=os.environ | {'PYTHONIOENCODING': 'ascii'},
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout == b'? ? 1\nthe end\n'


@pytest.mark.parametrize('returned, status, shown', [
    (None, 0, ''), (0, 0, ''), (3, 3, ''), ('a text', 0, 'a text\n'),
    (iter(['a', 'b']), 0, 'a\nb\n'),
])
def test_a_command_prints_what_its_function_yields_or_exits_with_its_status(
    returned, status, shown, capsys
):
  assert console.run(ARGV, lambda: returned) == status
  assert capsys.readouterr().out == shown


def test_texts_before_an_error_are_shown(capsys):
  assert console.run(ARGV, texts) == 1
  assert capsys.readouterr().out == 'first\nsecond\n'


@pytest.mark.parametrize('error, status', [
    (ValueError('a'), 1), (FileNotFoundError('a'), 1), (ImportError('a'), 1),
    (training.NotFinite('a'), 1), (InterruptedError('a'), 130),
    (native.Unavailable('a'), 1),
    (RuntimeError("Unable to initialize backend 'foo': it is not known"), 1),
    (KeyboardInterrupt(), 130),
    (training.Interrupted(signal.SIGTERM, 3), 128 + signal.SIGTERM),
])
def test_expected_errors_are_exit_statuses(error, status):
  assert console.run(ARGV, fail, error) == status


def test_an_interrupt_of_another_process_keeps_its_status():
  error = pickle.loads(pickle.dumps(training.Interrupted(signal.SIGTERM, 3)))
  assert str(error) == str(training.Interrupted(signal.SIGTERM, 3))
  assert isinstance(error, InterruptedError)
  assert console.run(ARGV, fail, error) == 128 + signal.SIGTERM


@pytest.mark.parametrize('call', [
    lambda: fail(TypeError('a\n  text')),
    # After a run is opened, a ValueError is a mistake in code.
    lambda: lambda: fail(ValueError('a\n  text')),
])
def test_mistakes_in_code_keep_their_tracebacks_in_a_file(
    call, caplog, tmp_path, monkeypatch
):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  assert console.run(ARGV, call) == 1
  path, = tmp_path.iterdir()
  (record,) = caplog.records
  assert record.exc_info is None and record.message.endswith(
      f'Error: a text; its traceback is in {path}.'
  )
  lines = path.read_text()
  assert lines.startswith('Traceback') and 'in fail' in lines


def test_a_traceback_that_cannot_be_written_to_a_file_is_printed(
    monkeypatch, tmp_path, capsys, caplog
):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'missing'))
  assert console.run(ARGV, fail, TypeError('a')) == 1
  assert 'Traceback' in capsys.readouterr().err
  assert caplog.messages[-1].endswith('its traceback is above.')


@pytest.mark.process
def test_an_error_outside_of_the_body_ends_a_command_in_one_sentence():
  done = start('lambda argv: {}["a"]', text=True)
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  line, = done.stderr.splitlines()
  assert "KeyError: 'a'; its traceback is in " in line
  pathlib.Path(line.rpartition(' ')[2][:-1]).unlink()


def test_a_returned_function_runs_after_the_first_output(capsys):
  assert console.run(ARGV, lambda: lambda: 'rest') == 0
  assert capsys.readouterr().out == 'rest\n'
  stopped = training.Interrupted(signal.SIGINT, 3)
  assert console.run(ARGV, lambda: lambda: fail(stopped)) == 130


@pytest.mark.parametrize('error', [
    OSError(errno.ENOSPC, 'No space left on device'), PermissionError('a'),
    ValueError('RESOURCE_EXHAUSTED: write: No space left on device'),
])
def test_a_disk_error_in_a_returned_function_is_one_sentence(error, caplog):
  assert console.run(ARGV, lambda: lambda: fail(error)) == 1
  assert 'the same command continues' in caplog.messages[0]


@pytest.mark.process
@pytest.mark.parametrize('name', ['MPLBACKEND', 'SPDF_NATIVE'])
def test_the_environment_is_checked_before_training(
    tmp_path, monkeypatch, name
):
  monkeypatch.setenv(name, 'nonsense')
  child = start_command(
      'experiments.train', '--config=configs/quickstart.py',
      f'--workdir={tmp_path / "run"}', data__task='',
      phases__order=('pretrain',), model__d_model=64,
  )
  output = finish(child, status=1)
  assert f"environment variable {name} is 'nonsense'" in output
  assert 'Traceback' not in output and not os.listdir(tmp_path)


def test_arguments_that_are_no_flags_are_refused():
  with pytest.raises(app.UsageError, match="unknown arguments: \\['x'\\]"):
    console.run(['command', 'x'], fail, ValueError('not called'))

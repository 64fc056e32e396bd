"""The progress line shows step, speed and the time left."""

import io
import types

import optax
import pytest

from spdf_jax.training import Phase
from spdf_jax.training import Plan
from spdf_jax.training.configs.early_stop import Best
from spdf_jax.training.loop.progress import format_seconds
from spdf_jax.training.loop.progress import Progress
from tests.tiny_run import DENSE


def make_phase(name, steps, batch_size):
  return Phase(
      name=name, steps=steps, data='corpus', batch_size=batch_size, length=10,
      algorithm=DENSE, learning_rate=optax.constant_schedule(0.1),
      weight_decay=0.0, reset_moments=False,
  )


# 1,000 tokens, then 400 in steps twice as large.
PLAN = Plan((make_phase('pre', 100, 1), make_phase('tune', 20, 2)))


class Terminal(io.StringIO):

  def isatty(self):
    return True


class Line:
  """A progress line whose clock is set by hand."""

  def __init__(self, start=0, out=None):
    self.now = 1_000.0
    self.out = io.StringIO() if out is None else out
    self.progress = Progress(
        types.SimpleNamespace(plan=PLAN, best={}), start, out=self.out,
        clock=lambda: self.now,
    )

  def update(self, seconds, step):
    self.now += seconds
    before = len(self.out.getvalue())
    self.progress.update(step, 1.23456)
    return self.out.getvalue()[before:]


def test_the_line_names_phase_step_loss_rate_and_time_left():
  line = Line()
  # 20 steps of 10 tokens in 10 s; 1,200 tokens are left.
  assert line.update(10, 20) == (
      'pre  step 20/120  loss 1.2346  20 tokens/s  1:00 left\n'
  )


def test_time_left_counts_tokens_not_steps():
  line = Line(start=100)
  assert 'tune  step 110/120' in (text := line.update(10, 110))
  assert '20 tokens/s  0:10 left' in text


def test_nothing_is_printed_before_the_interval_has_passed():
  line = Line()
  assert line.update(9.9, 20) == ''
  assert '20 tokens/s' in line.update(0.1, 20)
  assert line.update(9.9, 30) == ''


def test_tokens_per_second_are_averaged_with_the_previous_rate():
  line = Line()
  line.update(10, 20)
  assert ' 15 tokens/s' in line.update(10, 30)


def test_the_last_step_is_always_printed():
  line = Line(start=118)
  assert 'step 120/120' in (text := line.update(0.1, 120))
  assert text.endswith('0:00 left\n')


def test_time_for_evaluation_is_left_out_of_the_rate():
  line = Line()
  line.update(10, 20)
  line.progress.pause()
  line.now += 500
  line.progress.resume()
  assert ' 20 tokens/s' in line.update(10, 40)


def test_frequent_evaluations_keep_no_line_from_being_printed():
  line, texts = Line(), []
  for step in range(4, 24, 4):
    texts.append(line.update(4, step))
    line.progress.pause()
    line.now += 3
    line.progress.resume()
  assert [bool(text) for text in texts] == [False, False, True, False, False]
  assert ' 10 tokens/s' in texts[2]


def test_a_clock_that_stands_still_does_not_divide_by_zero():
  line = Line(start=119)
  assert 'step 120/120' in line.update(0, 120)


def test_no_time_left_is_shown_before_the_first_token():
  line = Line()
  assert '0 tokens/s  ? left' in line.update(10, 0)
  assert ' left' in Line(start=120).update(0, 120)


class Notebook(io.StringIO):
  """Stands in for the stderr of a notebook, which is known by its module."""

  __module__ = 'ipykernel.iostream'


def shown(text):
  """Returns what a terminal or a notebook shows of a text, line by line."""
  lines = []
  for written in text.split('\n'):
    line = ''
    for part in written.split('\r'):
      line = part + line[len(part):]
    lines.append(line.rstrip())
  return lines


@pytest.mark.parametrize('kind', [Terminal, Notebook])
def test_terminals_and_notebooks_have_one_line_that_is_overwritten(kind):
  line = Line(out=kind())
  line.update(0.5, 1)
  assert line.update(0.1, 3) == ''
  line.progress.best = {'pre': Best('loss', 1.0, 1)}
  line.update(0.5, 4)
  line.progress.best = {}
  line.update(0.5, 9)  # A shorter line leaves nothing of the one before it.
  (only,) = shown(line.out.getvalue())
  assert only.startswith('pre  step 9/120') and only.endswith(' left')
  line.progress.pause()
  line.out.write('validation 1.2')
  assert shown(line.out.getvalue()) == ['validation 1.2']
  assert line.update(0.5, 120).endswith('\n')


@pytest.mark.slow
def test_ipykernel_names_its_streams_as_is_assumed():
  iostream = pytest.importorskip('ipykernel.iostream')
  assert iostream.OutStream.__module__ == Notebook.__module__


@pytest.mark.parametrize('seconds, text', [
    (0, '0:00'), (59.9, '0:59'), (60, '1:00'), (3_599, '59:59'),
    (3_600, '1:00:00'), (360_061, '100:01:01'),
])
def test_times_are_written_as_a_clock_does(seconds, text):
  assert format_seconds(seconds) == text

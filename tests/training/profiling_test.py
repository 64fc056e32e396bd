"""A trace has the requested steps, and does not change the run."""

import logging

import pytest

from spdf_jax.training import Evaluators
from spdf_jax.training import train
from spdf_jax.training.loop import profiling
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import make_run

pytestmark = pytest.mark.ci


@pytest.fixture
def traced(monkeypatch):
  """Replaces the profiler by a record of its starts and stops."""
  events = []
  profiler = profiling.jax.profiler
  monkeypatch.setattr(
      profiler, 'start_trace', lambda path: events.append(('start', path))
  )
  monkeypatch.setattr(profiler, 'stop_trace', lambda: events.append('stop'))
  return events


def noting(run, events):
  batch_at = run.programs.batch_at

  def noted(step, rows):
    events.append(step + 1)
    return batch_at(step, rows)

  vars(run.programs)['batch_at'] = noted
  return run


def run(events, workdir, window):
  train(noting(make_run(), events).open(workdir), profile=window)


@pytest.mark.slow
def test_a_trace_starts_before_its_first_step_and_ends_after_its_last(
    traced, tmp_path
):
  run(traced, tmp_path, range(4, 7))
  start = ('start', str(tmp_path / 'profile'))
  assert traced == [1, 2, 3, start, 4, 5, 6, 'stop', *range(7, 15)]


@pytest.mark.parametrize('window', [range(14, 15), range(1, 15)])
def test_a_trace_ends_with_the_run(window, traced, tmp_path):
  run(traced, tmp_path, window)
  assert traced[-1] == 'stop' and traced.count('stop') == 1


@pytest.mark.slow
def test_a_run_that_continues_within_the_window_traces_the_rest(
    traced, tmp_path
):
  def failing(step, params):
    raise RuntimeError(step)

  with pytest.raises(RuntimeError):  # At step 3, after the checkpoint of 2.
    train(
        make_run().open(tmp_path), evaluators=Evaluators([failing]),
        profile=range(2, 6),
    )
  assert traced[-1] == 'stop'  # The trace ends with the run.
  traced.clear()
  run(traced, tmp_path, range(2, 6))
  start = ('start', str(tmp_path / 'profile'))
  assert traced == [start, 3, 4, 5, 'stop', *range(6, 15)]


def test_without_a_window_nothing_is_traced(traced, tmp_path):
  run(traced, tmp_path, range(0))
  assert traced == list(range(1, 15))


def test_a_trace_is_a_file_and_training_is_the_same(tmp_path, caplog):
  with caplog.at_level(logging.INFO, 'spdf_jax'):
    state = train(
        make_run().open(tmp_path / 'a'), profile=range(2, 4)
    )
  assert f'a trace is in {tmp_path / "a" / "profile"}' in caplog.text
  traces = list((tmp_path / 'a' / 'profile').rglob('*.xplane.pb'))
  assert len(traces) == 1 and traces[0].stat().st_size > 1000
  assert_same_arrays(state, train(make_run().open(tmp_path / 'b')))


@pytest.mark.parametrize('text, window', [
    ('', range(0)), ('1:1', range(1, 2)), ('96:5', range(96, 101)),
])
def test_a_profiling_window_is_a_first_step_and_a_number(text, window):
  assert profiling.parse_window(text, total_steps=100) == window


@pytest.mark.parametrize('text, message', [
    ('5', "profile is '5'; write FIRST:COUNT"),
    ('0:5', "profile is '0:5'; write FIRST:COUNT"),
    ('5:0', "profile is '5:0'; write FIRST:COUNT"),
    ('-1:5', 'write FIRST:COUNT'),
    ('97:5', "profile is '97:5' and the plan has 100 steps; choose steps"),
])
def test_an_impossible_profiling_window_is_refused(text, message):
  with pytest.raises(ValueError, match=message):
    profiling.parse_window(text, total_steps=100)

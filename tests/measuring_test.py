"""Tests of benchmarks.measuring: the statistics, never real times."""

import itertools
import math

import numpy as np
import pytest

from experiments.benchmarks.measuring import counted_row
from experiments.benchmarks.measuring import format_table
from experiments.benchmarks.measuring import interleave
from experiments.benchmarks.measuring import median_interval
from experiments.benchmarks.measuring import Row
from experiments.benchmarks.measuring import sampled_row
from experiments.benchmarks.measuring import verdict


def noisy_seconds(rng, ratio, n):
  """Two programs under shared disturbances, with some bursts on one alone."""
  shared = 0.1 * rng.lognormal(sigma=0.5, size=n)
  own = rng.lognormal(sigma=0.05, size=(2, n))
  bursts = np.where(rng.random((2, n)) < 0.1, 3.0, 1.0)
  return shared * own * bursts * np.array([[1.0], [ratio]])


def test_the_interval_covers_the_known_ratio_about_95_times_in_100():
  rng = np.random.default_rng(1)
  covered = 0
  for _ in range(200):
    seconds = noisy_seconds(rng, 1.2, 25)
    _, low, high = median_interval(seconds[1] / seconds[0], rng)
    covered += low <= 1.2 <= high
  assert 180 <= covered < 200


def test_bursts_in_some_cases_do_not_move_the_mean_of_all():
  rng = np.random.default_rng(4)
  ratios = np.linspace(4, 10, 15)
  covered = 0
  for _ in range(50):
    seconds = [noisy_seconds(rng, 1 / ratio, 13) for ratio in ratios]
    samples = np.array([dense / sparse for dense, sparse in seconds])
    value, low, high = median_interval(samples, rng)
    assert value == pytest.approx(7, rel=0.05)
    covered += low <= 7 <= high
  assert covered >= 45


@pytest.mark.parametrize('n', [1, 2])
def test_one_or_two_samples_decide_nothing(n):
  samples = np.full(n, 9.0)
  row = sampled_row('a', 'b', samples, np.random.default_rng(0), target=1)
  assert (row.value, row.low, row.high) == (9, -math.inf, math.inf)
  assert verdict(row) == 'undecided'


@pytest.mark.parametrize(
    ('low', 'high', 'at_most', 'expected'),
    [
        (0.9, 1.0, True, 'ok'),  # The target itself is ok.
        (0.9, 1.1, True, 'undecided'),
        (1.01, 1.1, True, 'missed'),
        (1.0, 1.1, False, 'ok'),
        (0.9, 0.99, False, 'missed'),
        (math.nan, math.nan, True, 'undecided'),
    ],
)
def test_a_verdict_needs_the_whole_interval(low, high, at_most, expected):
  row = Row('a', 'b', (low + high) / 2, 1.0, low, high, at_most)
  assert verdict(row) == expected


def test_without_a_target_there_is_no_verdict():
  assert verdict(counted_row('a', 'b', 3)) == ''


def test_calls_take_turns_after_their_warm_ups():
  order = []
  calls = [lambda name=name: order.append(name) for name in 'ab']
  interleave(calls, 3, warmups=2)
  assert ''.join(order) == 'abab' + 'ababab'


def test_seconds_are_those_of_the_timed_calls_on_both_clocks():
  now = dict(wall=0.0, cpu=0.0)
  numbers = itertools.count()

  def call(wall, cpu):
    now['wall'] += wall
    now['cpu'] += cpu
    return next(numbers)

  timings = interleave(
      [lambda: call(2, 3), lambda: call(5, 7)],
      4,
      wall=lambda: now['wall'],
      cpu=lambda: now['cpu'],
  )
  np.testing.assert_array_equal(timings.wall, [[2] * 4, [5] * 4])
  np.testing.assert_array_equal(timings.cpu, [[3] * 4, [7] * 4])
  assert timings.results == [8, 9]


@pytest.mark.parametrize(('calls', 'repeats'), [([], 3), ([int], 0)])
def test_nothing_to_time_is_refused(calls, repeats):
  with pytest.raises(ValueError, match='give at least one of each'):
    interleave(calls, repeats)


def test_columns_of_the_table_are_aligned():
  rows = [
      counted_row('a long case', 'bytes', 12345678, target=2e7),
      Row('toy', 'a ratio of calls', 1.5, 1.0, 1.25, 2.0, False),
      Row('toy', 'one pair', 1.5, None, -math.inf, math.inf, True),
  ]
  lines = format_table(rows).splitlines()
  heading = lines[0]
  for line in lines[1:]:
    for name in ('metric', 'value', 'target', '95 %', 'verdict'):
      start = heading.index(name)
      assert line[start - 2:start].strip() == ''
  assert '1.25 to 2' in lines[2]
  assert '>= 1' in lines[2] and lines[2].endswith('ok')

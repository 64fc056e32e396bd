"""Student's intervals and tests, Holm's correction: against known values."""

import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import stats

from experiments.papers import paired

pytestmark = pytest.mark.papers

VALUES = st.lists(st.floats(-3, 3), min_size=2, max_size=9).filter(
    lambda values: np.std(values) > 1e-3
)
# Student, The probable error of a mean, 1908: hours of sleep gained by ten
# patients under the second drug more than under the first.
SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]


def test_students_own_example_comes_out():
  # As R's t.test(extra ~ group, paired = TRUE) prints it.
  mean, deviation, low, high = paired.t_interval(SLEEP)
  assert mean == pytest.approx(1.58)
  assert deviation == pytest.approx(1.229995, abs=1e-6)
  assert (low, high) == pytest.approx((0.7001142, 2.4598858), abs=1e-7)
  assert 2 * paired.p_above(SLEEP, 0) == pytest.approx(0.002833, abs=1e-6)


@given(VALUES, st.floats(-1, 1))
@settings(deadline=None)
def test_tests_are_those_of_scipy(values, bound):
  for test, side in ((paired.p_below, 'less'), (paired.p_above, 'greater')):
    expected = stats.ttest_1samp(values, bound, alternative=side).pvalue
    assert test(values, bound) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(VALUES, st.floats(0.5, 0.999))
@settings(deadline=None)
def test_an_interval_ends_where_its_test_rejects(values, confidence):
  found = paired.t_interval(values, confidence)
  assert found.low <= found.mean <= found.high
  tail = (1 - confidence) / 2
  assert paired.p_below(values, found.high) == pytest.approx(tail, rel=1e-5)
  assert paired.p_above(values, found.low) == pytest.approx(tail, rel=1e-5)


def test_one_value_says_nothing_and_equal_ones_all():
  mean, deviation, low, high = paired.t_interval([2.0])
  assert mean == 2 and math.isnan(deviation) and (low, high) == (
      -math.inf, math.inf
  )
  assert paired.p_below([2.0], 3) == paired.p_above([2.0], 1) == 1
  assert paired.p_below([2.0, 2.0], 3) == 0
  assert paired.p_below([2.0, 2.0], 2) == paired.p_below([2.0, 2.0], 1) == 1


def test_a_run_that_diverged_proves_nothing():
  for bad in (math.nan, math.inf):
    values = [-1.0, -1.1, bad, -0.9, -1.0]
    assert paired.p_below(values, 0) == paired.p_above(values, -2) == 1
    assert paired.t_interval(values).low == -math.inf


@pytest.mark.parametrize('values, confidence, message', [
    ([], 0.95, 'give one for each seed'), ([1.0], 95, 'between 0 and 1'),
])
def test_what_cannot_be_is_refused(values, confidence, message):
  with pytest.raises(ValueError, match=message):
    paired.t_interval(values, confidence)


def test_holms_correction_is_that_of_the_textbook():
  # R: p.adjust(c(0.01, 0.02, 0.03, 0.04), 'holm').
  assert paired.holm([0.01, 0.02, 0.03, 0.04]) == pytest.approx(
      [0.04, 0.06, 0.06, 0.06]
  )
  assert paired.holm([0.6, 0.001, 0.7]) == pytest.approx([1, 0.003, 1])
  assert paired.holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_rejects_step_by_step(p_values):
  corrected = paired.holm(p_values)
  for sparsity in (0.01, 0.05, 0.3):
    rejected = set()
    for rank, i in enumerate(np.argsort(p_values, kind='stable')):
      if p_values[i] * (len(p_values) - rank) > sparsity:
        break
      rejected.add(i)
    assert {i for i, p in enumerate(corrected) if p <= sparsity} == rejected

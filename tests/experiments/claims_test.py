"""Verdicts of claims, the statistics behind them, and files of outcomes."""

import json
import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
from scipy import stats

from experiments.papers import arms
from experiments.papers import claims
from experiments.papers import json_files
from experiments.papers import paired
from experiments.papers.paired import holm
from experiments.papers.paper_claims import CLAIMS

pytestmark = pytest.mark.papers

# Five seeds: their mean is 0, their deviation 1.
NOISE = np.array([-1.2, 0.8, 0.1, 1.1, -0.8])
NOISE = (NOISE - NOISE.mean()) / NOISE.std(ddof=1)
A, B, C, D, E = map(arms.Arm, 'abcde')


def measure(**means):
  """Runs whose differences from arm `a` have the deviation 0.01."""
  return {
      arms.Arm(arm): {s: {'loss': 4 + 0.1 * s + mean + (arm != 'a') * 0.01 * x}
                 for s, x in enumerate(NOISE)}
      for arm, mean in means.items()
  }


def claim_of(*comparisons, key='x', family=claims.PRIMARY):
  return claims.Claim(key, 'it is so', 'nowhere', comparisons, family)


def verdict(runs, *comparisons):
  return claims.judge([claim_of(*comparisons)], runs)[0].verdict


@given(st.floats(-0.1, 0.1), st.floats(1e-3, 0.05), st.booleans())
@settings(deadline=None)
def test_one_claim_alone_is_decided_by_its_interval(mean, margin, has_margin):
  margin *= has_margin
  finding = claims.judge(
      [claim_of(claims.better(B, A, 'loss', margin))], measure(a=0, b=mean)
  )[0]
  low, high = finding.intervals[0][2:]
  expected = (
      (claims.BETTER if margin and high < 0 else claims.HOLDS) if high < margin
      else claims.FAILS if low > margin else claims.UNDECIDED
  )
  assert finding.verdict == expected and finding.reason == ''


@given(
    st.lists(st.floats(-1, 1), min_size=5, max_size=5), st.floats(0, 0.1)
)
@settings(deadline=None)
def test_no_claim_both_holds_and_fails(values, margin):
  runs = {
      A: {s: {'loss': 0.0} for s in range(5)},
      B: {s: {'loss': x} for s, x in enumerate(values)},
  }
  claimed = claims.better(B, A, 'loss', margin)
  opposite = claimed._replace(
      terms=tuple(t._replace(weight=-t.weight) for t in claimed.terms),
      margin=-margin,
  )
  first, second = (verdict(runs, c) for c in (claimed, opposite))
  holds = {claims.HOLDS, claims.BETTER}
  assert (first in holds) == (second == claims.FAILS)
  assert (second in holds) == (first == claims.FAILS)


def test_a_claim_holds_only_with_all_of_its_comparisons():
  runs = measure(a=0, b=-0.05, c=-0.1, d=0.05, e=0.004)
  good = claims.better(B, A, 'loss'), claims.better(C, A, 'loss')
  assert verdict(runs, *good) == claims.HOLDS
  assert verdict(runs, *good, claims.better(E, A, 'loss')) == claims.UNDECIDED
  assert verdict(runs, *good, claims.better(D, A, 'loss')) == claims.FAILS


def test_one_failed_comparison_refutes_a_claim_only_after_correction():
  # Two-sided, one comparison alone fails at p = 0.03; one of two at 0.06.
  claim = claim_of(claims.better(B, A, 'loss'), claims.better(C, A, 'loss'))
  t = 0.01 / np.sqrt(len(NOISE)) * stats.t(len(NOISE) - 1).ppf(1 - 0.015)
  alone = claim_of(claims.better(B, A, 'loss'))
  assert claims.judge([alone], measure(a=0, b=t))[0].verdict == claims.FAILS
  finding, = claims.judge([claim], measure(a=0, b=t, c=0))
  assert finding.verdict == claims.UNDECIDED
  assert finding.p == pytest.approx(0.06)


def test_better_needs_margins_and_intervals_below_0_everywhere():
  runs = measure(a=0, b=-0.05, c=-0.1, e=0.004)
  within = lambda arm: claims.better(arm, A, 'loss', 0.05)
  assert verdict(runs, within(B), within(C)) == claims.BETTER
  assert verdict(runs, within(B), within(E)) == claims.HOLDS
  assert verdict(runs, within(B), claims.better(C, A, 'loss')) == claims.HOLDS


def test_p_values_are_corrected_for_the_claims_of_their_family():
  runs = measure(a=0, b=-0.0135)
  comparison = claims.better(B, A, 'loss')
  first, *others = claims.judge([
      claim_of(comparison), *(
          claim_of(comparison, key=str(i), family=claims.SECONDARY)
          for i in range(5)
      )
  ], runs)
  assert first.corrected == first.p and first.verdict == claims.HOLDS
  assert [f.corrected for f in others] == holm([first.p] * 5)
  assert {f.verdict for f in others} == {claims.UNDECIDED}


def test_a_gate_that_fails_changes_no_other_claim():
  runs = measure(a=0, b=-0.02, c=-0.03)
  both = [
      claim_of(claims.better(arm, A, 'loss'), key=key)
      for key, arm in (('b', B), ('c', C))
  ]
  before = claims.judge(both, runs)
  first, second = claims.judge(both, runs, {'b': 'G2 static-99'})
  assert (first.verdict, first.reason) == (claims.NO_VERDICT, 'G2 static-99')
  # A failed gate leaves the numbers unchanged.
  assert first[:5] == before[0][:5]
  assert second == before[1]


def test_few_seeds_give_no_verdict_and_unpaired_ones_are_left_out():
  runs = measure(a=0, b=-1)
  del runs[B][0]
  claim = claim_of(claims.better(B, A, 'loss'))
  finding = claims.judge([claim], runs)[0]
  assert finding.verdict == claims.NO_VERDICT and len(finding.values[0]) == 4
  assert finding.reason == '4 of at least 5 seeds'
  finding = claims.judge([claim], runs, {'x': 'G1 dense'})[0]
  assert finding.reason == '4 of at least 5 seeds; G1 dense'


def test_a_claim_without_runs_has_no_verdict_and_counts_in_its_family():
  runs = measure(a=0, b=-0.02)
  missing, other = claims.judge([
      claim_of(claims.better(C, A, 'loss'), key='missing'),
      claim_of(claims.better(B, A, 'loss')),
  ], runs)
  assert missing.verdict == claims.NO_VERDICT
  assert missing.intervals == (claims.NOT_RUN,)
  assert missing.reason == '0 of at least 5 seeds' and missing.p == 1
  assert other.corrected == pytest.approx(2 * other.p)


def test_a_claim_with_a_diverged_seed_is_undecided():
  for bad in (float('nan'), float('inf')):
    runs = measure(a=0, b=-1)
    runs[B][0]['loss'] = bad
    assert verdict(runs, claims.better(B, A, 'loss')) == claims.UNDECIDED


def test_gaps_are_compared_seed_by_seed():
  runs = measure(a=0, b=0.3, c=1.0, d=1.1)
  gap = claims.smaller_gap((D, C), (B, A), 'loss')
  finding = claims.judge([claim_of(gap)], runs)[0]
  assert finding.intervals[0].mean == pytest.approx(0.1 - 0.3)
  noise = [0.01 * x for x in NOISE]
  assert finding.values[0] == pytest.approx([-0.2 - x for x in noise])


@given(st.floats(-2, 2), st.floats(1, 4))
def test_a_trend_is_minus_the_slope_of_the_regression_line(slope, start):
  sparsities = {A: 0.0, B: 0.5, C: 0.75, D: 0.9}
  runs = {
      arm: {1: {'loss': start + slope * x + 0.1 * (x == 0.5)}}
      for arm, x in sparsities.items()
  }
  value, = claims.contrast(claims.trend('', sparsities, 'loss'), runs)
  line = np.polyfit(
      list(sparsities.values()), [runs[arm][1]['loss'] for arm in sparsities], 1
  )
  assert value == pytest.approx(-line[0], abs=1e-9)


def test_a_metric_that_a_run_lacks_is_named():
  with pytest.raises(ValueError, match="'a below a' needs 'x', which one of"):
    claims.judge([claim_of(claims.better(A, A, 'x'))], measure(a=0))


GOOD = {
    'static-50': 0.03, 'static-75': 0.08, 'static-90': 0.18,
    'static-75_small': 0.5, 'static-75_large': 0.02, 'set-90': 0.16,
    'rigl-90': 0.14, 'variable-90': 0.05, 'pruned-75': -0.003,
    'static-50+task': 0.01, 'static-75+task': 0.03,
    'static-75+task-sparse': 0.3, 'variable-90+task': 0.01,
    'static-75+hard': 0.4, 'gmp-75': 0.05,
    'static-75_w96': 0.05, 'variable-90_w96': 0.02,
    'variable-80-at-static-75-dense-0.5': 0.02,
} | {
    f'dense{name}': 0.2 for name in (
        '-at-static-75', '-at-static-75_w96', '_small', '_small-w96',
        '_small-gradual',
    )
} | {
    f'{method}-{percent}_w96': 0.05
    for method in ('rigl', 'rigl-skipped', 'granet') for percent in (80, 90)
}
"""Losses less those of the dense arm, by folder: every claim is true."""


@pytest.mark.parametrize('key', CLAIMS)
def test_claims_hold_on_data_where_they_are_true_and_fail_where_they_are_false(
    key
):
  claim = CLAIMS[key]
  rng = np.random.default_rng(0)
  noise = {arm: 0.002 * rng.standard_normal(5) for arm in claim.arms}
  metrics = {t.metric for c in claim.comparisons for t in c.terms}

  def world(sign):
    return {
        arm: {
            s: dict.fromkeys(
                metrics, 3 + sign * GOOD.get(arm.folder, 0) + noise[arm][s]
            )
            for s in range(5)
        }
        for arm in claim.arms
    }

  finding, = claims.judge([claim], world(1))
  assert finding.verdict in (claims.HOLDS, claims.BETTER)
  bad = world(-1)
  # Makes the sparse model better than dense, not only within the margin.
  if claim.comparisons[0].margin:
    for outcomes in bad.values():
      for outcome in outcomes.values():
        for metric in metrics:
          outcome[metric] = 6 - outcome[metric]
    arm = claim.comparisons[0].terms[0].arm
    for outcome in bad[arm].values():
      for metric in metrics:
        outcome[metric] += 0.2
  assert claims.judge([claim], bad)[0].verdict == claims.FAILS


VALUES = st.lists(st.floats(-3, 3), min_size=2, max_size=9).filter(
    lambda values: np.std(values) > 1e-3
)


@given(VALUES, st.floats(-1, 1))
@settings(deadline=None)
def test_p_values_equal_those_of_scipy(values, bound):
  for test, side in ((paired.p_below, 'less'), (paired.p_above, 'greater')):
    expected = stats.ttest_1samp(values, bound, alternative=side).pvalue
    assert test(values, bound) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(VALUES)
@settings(deadline=None)
def test_an_interval_ends_where_its_test_rejects(values):
  interval = paired.t_interval(values)
  assert interval.low <= interval.mean <= interval.high
  assert paired.p_below(values, interval.high) == pytest.approx(0.025, rel=1e-5)
  assert paired.p_above(values, interval.low) == pytest.approx(0.025, rel=1e-5)


def test_one_value_has_no_interval_and_equal_values_an_interval_of_width_zero():
  mean, deviation, low, high = paired.t_interval([2.0])
  assert mean == 2 and math.isnan(deviation) and (low, high) == (
      -math.inf, math.inf
  )
  assert paired.p_below([2.0], 3) == paired.p_above([2.0], 1) == 1
  assert paired.p_below([2.0, 2.0], 3) == 0
  assert paired.p_below([2.0, 2.0], 2) == paired.p_below([2.0, 2.0], 1) == 1


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


def test_numbers_that_are_not_finite_are_strings_and_are_restored(tmp_path):
  path = tmp_path / 'outcome.json'
  json_files.write_json(path, {
      'validation/loss': math.nan, 'high': math.inf, 'low': -math.inf,
      'curve': [[4, 0.5, math.nan], (8, 1.0, 2.5)], 'name': 'NaN-free',
  }, indent=2)
  stored = json.loads(path.read_text(), parse_constant=pytest.fail)
  assert stored['validation/loss'] == 'NaN'
  assert stored['high'] == 'Infinity' and stored['low'] == '-Infinity'
  restored = json_files.read_json(path)
  assert math.isnan(restored['validation/loss'])
  assert restored['high'] == math.inf and restored['low'] == -math.inf
  (step, seconds, loss), last = restored['curve']
  assert (step, seconds) == (4, 0.5) and math.isnan(loss)
  assert last == [8, 1.0, 2.5] and restored['name'] == 'NaN-free'


def test_nan_and_infinity_in_older_json_files_are_read():
  decoded = json_files.decode('{"loss": NaN, "curve": [Infinity, -Infinity]}')
  assert math.isnan(decoded['loss'])
  assert decoded['curve'] == [math.inf, -math.inf]

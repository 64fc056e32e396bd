"""Verdicts: what holds, what does not, what stays undecided."""

import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from spdf_jax.analysis import claim_plots
from spdf_jax.analysis import claim_report
from spdf_jax.analysis.claims import better
from spdf_jax.analysis.claims import Claim
from spdf_jax.analysis.claims import FAILS
from spdf_jax.analysis.claims import HOLDS
from spdf_jax.analysis.claims import judge
from spdf_jax.analysis.claims import NO_VERDICT
from spdf_jax.analysis.claims import p_values
from spdf_jax.analysis.claims import smaller_gap
from spdf_jax.analysis.claims import UNDECIDED
from spdf_jax.analysis.paired import holm
from spdf_jax.analysis.paper_claims import CLAIMS
from spdf_jax.analysis.pool import Arm

# Five seeds: their mean is 0, their deviation 1.
NOISE = np.array([-1.2, 0.8, 0.1, 1.1, -0.8])
NOISE = (NOISE - NOISE.mean()) / NOISE.std(ddof=1)


def measure(**means):
  """Runs whose differences from arm `a` have the deviation 0.01."""
  return {
      arm: {s: {'loss': 4 + 0.1 * s + mean + (arm != 'a') * 0.01 * x}
            for s, x in enumerate(NOISE)}
      for arm, mean in means.items()
  }


def claim_of(*comparisons, key='x'):
  return Claim(key, 'it is so', 'nowhere', comparisons)


def verdict(runs, *comparisons):
  return judge([claim_of(*comparisons)], runs)[0].verdict


@pytest.mark.parametrize('relation, bound, difference, expected', [
    ('below', 0.0, -0.02, HOLDS),
    ('below', 0.0, 0.02, FAILS),
    ('below', 0.0, -0.005, UNDECIDED),
    ('at most', 0.01, -0.005, HOLDS),
    ('at most', 0.01, 0.005, UNDECIDED),
    ('at most', 0.01, 0.03, FAILS),
    ('matches', 0.02, 0.0, HOLDS),
    ('matches', 0.02, 0.004, HOLDS),
    ('matches', 0.02, 0.015, UNDECIDED),
    ('matches', 0.02, 0.05, FAILS),
    ('matches', 0.02, -0.05, FAILS),
])
def test_a_verdict_is_what_the_interval_says(
    relation, bound, difference, expected
):
  comparison = better('b', 'a', 'loss', relation, bound)
  assert verdict(measure(a=0, b=difference), comparison) == expected


@given(
    st.sampled_from(['below', 'at most', 'matches']), st.floats(-0.1, 0.1),
    st.floats(1e-3, 0.05),
)
@settings(deadline=None)
def test_one_claim_alone_is_decided_by_its_interval(relation, mean, bound):
  bound = 0.0 if relation == 'below' else bound
  finding = judge(
      [claim_of(better('b', 'a', 'loss', relation, bound))],
      measure(a=0, b=mean),
  )[0]
  low, high = finding.intervals[0][2:]
  if relation == 'matches':
    holds, fails = -bound < low and high < bound, high < -bound or low > bound
    # Against it there are two ways, each at half the level: a wider interval.
    if finding.verdict != UNDECIDED or holds:
      assert finding.verdict == (HOLDS if holds else FAILS)
      assert holds or fails
  else:
    expected = HOLDS if high < bound else FAILS if low > bound else UNDECIDED
    assert finding.verdict == expected


@given(
    st.lists(st.floats(-1, 1), min_size=5, max_size=5),
    st.sampled_from(['below', 'at most', 'matches']),
)
@settings(deadline=None)
def test_nothing_is_claimed_and_refuted_at_once(values, relation):
  pro, con = p_values(values, better('b', 'a', 'loss', relation, 0.1))
  assert 0 <= pro <= 1 and 0 <= con <= 1
  assert not (pro < 0.4 and con < 0.4)


def test_a_claim_holds_only_with_all_of_its_comparisons():
  runs = measure(a=0, b=-0.05, c=-0.1, d=0.05, e=0.004)
  good = better('b', 'a', 'loss'), better('c', 'a', 'loss')
  assert verdict(runs, *good) == HOLDS
  assert verdict(runs, *good, better('e', 'a', 'loss')) == UNDECIDED
  assert verdict(runs, *good, better('d', 'a', 'loss')) == FAILS


def test_claims_are_corrected_for_their_number():
  runs = measure(a=0, b=-0.0135)
  comparison = better('b', 'a', 'loss')
  alone = judge([claim_of(comparison)], runs)
  assert alone[0].verdict == HOLDS and alone[0].corrected == alone[0].p
  many = judge([claim_of(comparison, key=str(i)) for i in range(5)], runs)
  assert {finding.verdict for finding in many} == {UNDECIDED}
  assert [f.corrected for f in many] == holm([f.p for f in many])


def test_few_seeds_give_no_verdict_and_unpaired_ones_are_left_out():
  runs = measure(a=0, b=-1)
  del runs['b'][0]
  finding = judge([claim_of(better('b', 'a', 'loss'))], runs)[0]
  assert finding.verdict == NO_VERDICT and len(finding.values[0]) == 4


def test_gaps_are_compared_seed_by_seed():
  runs = measure(a=0, b=0.3, c=1.0, d=1.1)
  gap = smaller_gap('', ('d', 'c'), ('b', 'a'), 'loss')
  finding = judge([claim_of(gap)], runs)[0]
  assert finding.intervals[0].mean == pytest.approx(0.1 - 0.3)


def test_what_was_not_measured_is_named():
  runs = measure(a=0)
  with pytest.raises(ValueError, match='no seed that all of b, a'):
    judge([claim_of(better('b', 'a', 'loss'))], runs)
  with pytest.raises(ValueError, match="needs 'x', which"):
    judge([claim_of(better('a', 'a', 'x'))], runs)
  with pytest.raises(ValueError, match="relation 'belo' is unknown"):
    judge([claim_of(better('a', 'a', 'loss', 'belo'))], runs)


@pytest.mark.parametrize('key', CLAIMS)
def test_a_world_where_a_claim_is_true_and_one_where_it_is_not(key):
  claim = CLAIMS[key]
  good = dict(
      dense=0, dense_small=0, dense_large=0, longer=0, **{
          'static-50': 0.03, 'static-75': 0.08, 'static-90': 0.18,
          'static-75_small': 0.2, 'static-75_large': 0.02, 'set-90': 0.16,
          'rigl-90': 0.14, 'rigl-80': 0.1, 'granet-80': 0.05,
          'variable-split': 0.05, 'variable-extended': 0.03, 'pruned-75': -0.02,
          'dense+task': 0, 'static-75+task': 0.1, 'static-75+task-sparse': 0.3,
          'variable-split+task': 0.0, 'variable-extended+task': 0.0,
          'dense_large+task': -0.3, 'dense+hard': 0, 'static-75+hard': 0.4,
          'dense+tenth': 0, 'static-75+tenth': 0.4,
      }
  )
  rng = np.random.default_rng(0)
  noise = {arm: 0.002 * rng.standard_normal(5) for arm in good}
  metrics = {t.metric for c in claim.comparisons for t in c.terms}

  def world(sign):
    return {
        arm: {
            s: dict.fromkeys(metrics, 3 + sign * mean + noise[arm][s])
            for s in range(5)
        }
        for arm, mean in good.items()
    }

  assert judge([claim], world(1))[0].verdict == HOLDS
  bad = world(-1)
  if key == 'j':
    for outcome in bad['variable-split+task'].values():
      outcome['target/loss'] += 0.1
  assert judge([claim], bad)[0].verdict == FAILS


def test_the_report_says_all_that_was_found_and_is_json():
  runs = measure(a=0, b=-0.02, c=0.02)
  findings = judge([
      claim_of(better('b', 'a', 'loss'), key='yes'),
      claim_of(better('c', 'a', 'loss'), key='no'),
      claim_of(better('c', 'a', 'loss', 'matches', 0.01), key='near'),
  ], runs)
  text = claim_report.format_report('T', {'seeds': 5}, findings, {'H': 'x'})
  assert '**holds**' in text and '**does not hold**' in text
  assert '-0.0200 | -0.0324 to -0.0076' in text and text.endswith('## H\n\nx\n')
  described = json.loads(json.dumps(claim_report.describe_findings(findings)))
  assert [d['verdict'] for d in described] == [f.verdict for f in findings]
  assert described[0]['comparisons'][0]['differences'] == pytest.approx(
      [-0.02 + 0.01 * x for x in NOISE]
  )
  arms = [Arm(name, {}, '', 'loss') for name in runs]
  figure = claim_plots.plot_claims(arms, runs, findings)
  left, right = figure.axes
  assert [t.get_text() for t in left.get_yticklabels()] == list(runs)
  assert len(right.get_yticklabels()) == 3
  marks = [line for line in right.lines if line.get_marker() == 'D']
  assert [line.get_xdata()[0] for line in marks] == pytest.approx(
      [f.intervals[0].mean for f in findings]
  )

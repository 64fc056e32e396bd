"""Gates: conditions for a verdict, and the claims that they affect."""

import dataclasses
import functools
import math

from made_up_results import entries_of
from made_up_results import FAIR
from made_up_results import finish
from made_up_results import GAPS
from made_up_results import look_at
from made_up_results import outcome_of
from made_up_results import world_of
import pytest

from experiments.papers.claims import BETTER
from experiments.papers.claims import HOLDS
from experiments.papers.claims import NO_VERDICT
from experiments.papers.scales import SCALES

pytestmark = pytest.mark.papers


@functools.cache
def true_world():
  return world_of()


def assert_without_verdict(world, keys, reason):
  """Asserts that only these claims lack a verdict, for that reason."""
  before = true_world().findings
  for key, finding in world.findings.items():
    if key in keys:
      assert (finding.verdict, finding.reason) == (NO_VERDICT, reason), key
    else:
      assert (finding.verdict, finding.reason) == (before[key].verdict, ''), key


def failed(world):
  return {
      f'{gate.key} {gate.subject.name if gate.subject else ""}'.strip()
      for gate in world.gates if not gate.passed
  }


def test_all_gates_hold_in_a_world_where_all_claims_do():
  world = true_world()
  assert all(gate.passed and gate.found for gate in world.gates)
  assert {gate.key for gate in world.gates} == {'G1', 'G2', 'G3', 'G4'}
  assert {f.verdict for f in world.findings.values()} == {HOLDS}


@pytest.mark.parametrize('ngrams', [(1.55, 2.2), (2.4, 1.55)])
def test_an_ngram_as_good_as_dense_models_fails_g1_at_its_size(ngrams):
  world = world_of(ngrams={'large': ngrams})
  assert_without_verdict(world, {'c', 'c-ppl'}, 'G1 dense_large')
  gate, = (gate for gate in world.gates if not gate.passed)
  name = 'bigram' if ngrams[0] < 2 else 'trigram'
  assert name in gate.text and gate.found.endswith(' nats, 5 seeds')
  assert float(gate.found.split()[0]) == pytest.approx(0.05, abs=0.003)


def test_an_ngram_at_the_main_size_spares_the_claim_on_other_sizes():
  world = world_of(ngrams={'': (1.7, 1.7)})
  keys = set(FAIR.claims) - {'c', 'c-ppl'}
  assert_without_verdict(world, keys, 'G1 dense')


def test_a_control_as_good_as_dense_fails_g2_at_its_size():
  world = world_of(gaps=GAPS | {'static-99_small': 0.09})
  assert_without_verdict(world, {'c', 'c-ppl'}, 'G2 static-99_small')


def test_a_control_that_diverged_shows_no_sensitivity():
  def run(job):
    outcome = outcome_of(job)
    if job.arm.folder == 'static-99_large' and job.seed:
      outcome['validation/loss'] = math.nan
    return outcome

  world = look_at(FAIR, entries_of(), finish(entries_of(), run))
  assert failed(world) == {'G2 static-99_large'}
  assert_without_verdict(world, {'c', 'c-ppl'}, 'G2 static-99_large')


@pytest.mark.parametrize('end', [8 * 1.6e-2, 4e-3 / 8])
def test_a_best_rate_at_the_end_of_the_extended_grid_fails_g3(end):
  world = world_of(best={'rigl-90': end})
  assert_without_verdict(world, {'e'}, 'G3 rigl-90')
  gate, = (gate for gate in world.gates if not gate.passed)
  assert gate.found.startswith(f'{end:g} in ') and gate.found.count(',') == 5


def test_a_best_rate_inside_the_extended_grid_passes_g3():
  assert not failed(world_of(best={'rigl-90': 3.2e-2, 'set-90': 2e-3}))


def test_an_arm_that_diverges_at_every_rate_fails_g3():
  def run(job):
    outcome = outcome_of(job)
    if job.arm.folder == 'rigl-90':
      outcome['validation/loss'] = math.nan
    return outcome

  world = look_at(FAIR, entries_of(), finish(entries_of(), run))
  assert_without_verdict(world, {'e'}, 'G3 rigl-90')


def test_the_rate_of_a_parent_counts_for_what_starts_from_it():
  world = world_of(best={'static-75': 1.0})
  keys = {'a', 'b1', 'b2', 'd-pre', 'd-ft', 'h', 'i'}
  assert_without_verdict(world, keys, 'G3 static-75')


def test_the_rate_of_an_arm_counts_for_the_arm_that_uses_it():
  world = world_of(best={'dense+task': 1.0})
  # In (h) the dense arm has the rate of static 75 %, and is not tuned.
  keys = {'b1', 'i', 'j'}
  assert_without_verdict(world, keys, 'G3 dense+task')
  world = world_of(best={'static-75+task': 1.0})
  assert world.findings['h'].reason == 'G3 static-75+task'


def test_several_gates_are_all_named():
  world = world_of(
      ngrams={'large': (1.5, 1.5)}, gaps=GAPS | {'static-99_small': 0.0}
  )
  reason = 'G1 dense_large, G2 static-99_small'
  assert_without_verdict(world, {'c', 'c-ppl'}, reason)


def test_a_demonstration_gives_no_verdict_by_g4():
  scale = dataclasses.replace(
      FAIR, tokens_per_parameter=2.5, demonstration=True
  )
  world = world_of(scale)
  assert_without_verdict(world, set(FAIR.claims), 'G4')
  assert world.gates[-1].found.startswith('2.5 tokens per parameter')


@pytest.mark.parametrize('changes, message', [
    (dict(tokens_per_parameter=19.9), 'tokens_per_parameter is 19.9; gate G4'),
    (dict(epochs=5), 'epochs is 5; gate G4 allows 4'),
])
def test_a_scale_that_breaks_g4_must_be_a_demonstration(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(FAIR, **changes)
  world = world_of(dataclasses.replace(FAIR, demonstration=True, **changes))
  assert {f.reason for f in world.findings.values()} == {'G4'}


def test_scales_of_less_than_20_tokens_per_parameter_are_demonstrations():
  for scale in SCALES.values():
    assert scale.demonstration == (scale.tokens_per_parameter < 20)


def test_better_than_dense_is_no_failure_of_non_inferiority():
  gaps = GAPS | {
      'static-50+task': -0.03, 'static-75+task': -0.06,
      'variable-90+task': -0.1, 'pruned-75': -0.05,
  }
  findings = world_of(gaps=gaps).findings
  for key in ('b1', 'g1', 'g2', 'j'):
    assert findings[key].verdict == BETTER, key
  # One interval of two across 0.
  findings = world_of(gaps=gaps | {'static-50+task': 0.0}).findings
  assert findings['b1'].verdict == HOLDS


def test_what_has_not_run_passes_no_gate():
  entries = entries_of()
  done = {
      name: outcome for name, outcome in finish(entries, outcome_of).items()
      if '_large' not in name
  }
  world = look_at(FAIR, entries, done)
  missing = [gate for gate in world.gates if not gate.passed]
  assert all(gate.found == '' for gate in missing)
  assert {(gate.key, gate.subject.name) for gate in missing} == {
      ('G1', 'dense_large'), ('G2', 'static-99_large'), ('G3', 'dense_large'),
      ('G3', 'static-99_large'), ('G3', 'static-75_large'),
  }
  for key in ('c', 'c-ppl'):
    finding = world.findings[key]
    assert finding.verdict == NO_VERDICT
    assert finding.reason.startswith('0 of at least 5 seeds; G1 dense_large')
  assert world.findings['b2'].verdict == HOLDS

"""Gates, the claims that they affect, and the report of all."""

import dataclasses
import functools
import json
import math

import pytest

from experiments.papers import arm_report
from experiments.papers import claim_plots
from experiments.papers import claim_report
from experiments.papers import flops_scatter
from experiments.papers import scales
from experiments.papers.arms import Arm
from experiments.papers.claims import HOLDS
from experiments.papers.claims import NO_VERDICT
from experiments.papers.scales import SCALES
from experiments.pool import processes as pool_processes
from experiments.pool.pool import all_jobs
from spdf_jax.runs.markdown import escape
from tests.made_up_results import entries_of
from tests.made_up_results import FAIR
from tests.made_up_results import finish
from tests.made_up_results import GAPS
from tests.made_up_results import look_at
from tests.made_up_results import outcome_of
from tests.made_up_results import world_of

pytestmark = pytest.mark.papers

CONTEXT_64 = SCALES['context-64']


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


def test_arms_of_equal_flops_are_drawn_under_one_heading():
  loss = lambda x, flops: {1: {'validation/loss': x, 'flops': flops}}
  sparse, small = Arm('static', 0.75), Arm('dense', size='small')
  figure = flops_scatter.plot_flops(CONTEXT_64, {
      Arm('dense'): loss(1.5, 6.2e12), sparse: loss(1.58, 2.5e12),
      small: loss(1.59, 2.48e12), Arm('static', 0.99): loss(2.0, 1.3e12),
      Arm('dense', flops_of=sparse): loss(1.65, 2.5e12),
  })
  ax, = figure.axes
  assert [tick.get_text() for tick in ax.get_yticklabels()] == [
      'width 36 and 64, 2.5e12 FLOPs', 'dense, 40 % of the tokens',
      'dense, width 36', '75 % zeros', 'width 64, 6.2e12 FLOPs', 'dense',
  ]
  assert [text.get_text() for text in ax.texts] == [
      '1.650', '1.590', '1.580', '1.500'
  ]


def test_all_gates_hold_in_a_world_where_all_claims_do():
  world = true_world()
  assert all(gate.passed and gate.found for gate in world.gates)
  assert {gate.key for gate in world.gates} == {'G1', 'G2', 'G3', 'G4', 'G6'}
  assert {f.verdict for f in world.findings.values()} == {HOLDS}


@pytest.mark.parametrize('ngrams', [(1.55, 2.2), (2.4, 1.55)])
def test_an_ngram_as_good_as_dense_models_fails_g1_at_its_size(ngrams):
  world = world_of(ngrams={'large': ngrams})
  assert_without_verdict(world, {'c', 'c-ppl'}, 'G1 dense_large')
  gate, = (gate for gate in world.gates if not gate.passed)
  name = 'bigram' if ngrams[0] < 2 else 'trigram'
  assert name in gate.text and gate.found.endswith(' nats, 5 seeds')
  assert float(gate.found.split()[0]) == pytest.approx(0.05, abs=0.003)


OF_SIZES = {'c', 'c-ppl'}


@pytest.mark.parametrize('changes, keys, reason', [
    (dict(ngrams={'': (1.7, 1.7)}), set(FAIR.claims) - OF_SIZES, 'G1 dense'),
    (dict(gaps=GAPS | {'static-99_small': 0.09}), OF_SIZES,
     'G2 static-99_small'),
    (dict(ngrams={'large': (1.5, 1.5)}, gaps=GAPS | {'static-99_small': 0.0}),
     OF_SIZES, 'G1 dense_large, G2 static-99_small'),
    # The rate of a parent also applies to the arms that start from it,
    (dict(best={'static-75': 1.0}),
     {'a', 'b1', 'b2', 'd-pre', 'd-ft', 'h', 'i'}, 'G3 static-75'),
    # and in (h) the dense arm has the rate of static 75 %, and is not tuned.
    (dict(best={'dense+task': 1.0}), {'b1', 'i', 'j'}, 'G3 dense+task'),
])
def test_a_failed_gate_removes_only_the_verdicts_that_depend_on_it(
    changes, keys, reason
):
  assert_without_verdict(world_of(**changes), keys, reason)


def test_a_gate_is_judged_by_the_mean_over_seeds():
  lucky = min(next(iter(true_world().measured.values())))

  def run(job):
    # The mean over seeds is below 0.1.
    gap = 0.2 if job.seed == lucky else 0.02
    gaps = GAPS | {'static-99_small': gap}
    return outcome_of(job, gaps=gaps)

  world = look_at(FAIR, entries_of(), finish(entries_of(), run))
  gate, = (g for g in world.gates if not g.passed)
  assert (gate.key, gate.subject.folder) == ('G2', 'static-99_small')


def test_a_gate_on_a_rate_applies_to_arms_that_take_the_rate():
  world = world_of(best={'static-75+task': 1.0})
  assert world.findings['h'].reason == 'G3 static-75+task'


@pytest.mark.parametrize('folder, first_seed, keys, reason', [
    ('static-99_large', 1, OF_SIZES, 'G2 static-99_large'),
    ('rigl-90', 0, {'e'}, '0 of at least 6 seeds; G3 rigl-90'),
])
def test_an_arm_that_diverges_passes_no_gate(folder, first_seed, keys, reason):
  def run(job):
    outcome = outcome_of(job)
    if job.arm.folder == folder and job.seed >= first_seed:
      outcome['validation/loss'] = math.nan
    return outcome

  world = look_at(FAIR, entries_of(), finish(entries_of(), run))
  assert failed(world) == {reason.rpartition('; ')[2]}
  assert_without_verdict(world, keys, reason)


@pytest.mark.parametrize('end', [8 * 1.6e-2, 4e-3 / 8])
def test_a_best_rate_at_the_end_of_the_extended_grid_fails_g3(end):
  world = world_of(best={'rigl-90': end})
  assert_without_verdict(world, {'e'}, 'G3 rigl-90')
  gate, = (gate for gate in world.gates if not gate.passed)
  assert gate.found.startswith(f'{end:g} in ') and gate.found.count(',') == 5


def test_a_best_rate_inside_the_extended_grid_passes_g3():
  assert not failed(world_of(best={'rigl-90': 3.2e-2, 'set-90': 2e-3}))


@pytest.mark.parametrize('gap', [0.05, None])
def test_non_inferiority_after_fine_tuning_needs_a_control_that_is_worse(gap):
  entries = entries_of()
  done = finish(entries, functools.partial(
      outcome_of, gaps=GAPS | {'static-99+task': gap or 0.0}
  ))
  if gap is None:  # Not run, or left out of the records.
    done = {n: o for n, o in done.items() if 'static-99+task' not in n}
  # A measure that misses 99 % zeros cannot support other claims.
  assert_without_verdict(
      look_at(FAIR, entries, done), {'b1', 'j'},
      'G6 static-99+task at the rate of static-75+task',
  )


@functools.cache
def context_world(control=0.4, control_rate=8e-3):
  """Judges the scale context-64; each argument is what one gate looks at.

  Args:
    control: Loss of the control at width 64 less that of dense.
    control_rate: Best rate of the control at width 64.
  """
  gaps = {'static-99': control, 'static-99_w96': 0.4, 'static-99+e2e-150': 0.2}
  entries = entries_of(CONTEXT_64)
  return look_at(CONTEXT_64, entries, finish(entries, functools.partial(
      outcome_of, gaps=gaps, best={'static-99': control_rate}, scale=CONTEXT_64
  )))


OF_WIDTH_64 = {
    'flops-64', 'small-64', 'variable-64', 'early-64', 'size', 'gradual'
}


def test_the_control_of_each_budget_is_measured_on_seeds_that_tune():
  gates = [g for g in context_world().gates if g.key == 'G6']
  assert [gate.subject.task for gate in gates if gate.passed] == ['e2e-150']
  assert len(gates) == 4
  assert all(gate.found.endswith(' nats, 3 seeds') for gate in gates)
  assert not any(f.reason for f in context_world().findings.values())


@pytest.mark.parametrize('changes', [
    dict(control=0.05), dict(control_rate=2.5e-4)
], ids=['as good as dense', 'at the end of its grid'])
def test_a_failed_control_removes_verdicts_of_its_width_only(changes):
  findings = context_world(**changes).findings
  assert {f.reason for f in findings.values()} == {'', 'G2 static-99'}
  assert {k for k, f in findings.items() if f.reason} == OF_WIDTH_64


def test_a_verdict_needs_all_registered_seeds():
  world = context_world()
  done = {
      name: outcome for name, outcome in world.done.items()
      if not (name.startswith('static-75/') and name.endswith('seed=12'))
  }
  findings = look_at(CONTEXT_64, world.entries, done).findings
  assert findings['flops-64'].reason == '11 of at least 12 seeds'
  assert not findings['flops-96'].reason
  # Gates, too, need all registered seeds.
  done = {
      name: outcome for name, outcome in world.done.items()
      if not (name.startswith('static-99_w96/') and name.endswith('seed=2'))
  }
  judged = look_at(CONTEXT_64, world.entries, done)
  gate, = (g for g in judged.gates if not g.passed and g.key != 'G6')
  assert (gate.key, gate.subject.size, gate.found) == ('G2', 'w96', '')


def test_an_arm_that_is_measured_on_tuning_seeds_alone_is_not_judged():
  world = context_world()
  done = {
      name: outcome for name, outcome in world.done.items()
      if not name.startswith('dense/') or 'seed=10' in name
      and not name.endswith('seed=10')
  }
  judged = look_at(CONTEXT_64, world.entries, done)
  assert scales.DENSE not in judged.measured
  assert judged.findings['size'].reason.startswith('0 of at least 12 seeds')


def test_an_arm_without_an_eligible_rate_has_no_verdict(capsys):
  def run(job):
    outcome = outcome_of(job, scale=CONTEXT_64)
    if job.arm.folder == 'dense_small':
      outcome['validation/loss'] = math.nan
    return outcome

  entries = entries_of(CONTEXT_64)
  done = finish(entries, run)
  world = look_at(CONTEXT_64, entries, done)
  assert {job.arm.folder for job in all_jobs(entries, done)} == {
      entry.arm.folder for entry in entries
  }
  small, = (e for e in entries if e.arm.folder == 'dense_small')
  assert small.arm not in world.measured
  gate, = (g for g in world.gates if g.subject == small.arm)
  assert gate.found == 'no rate is eligible' and not gate.passed
  # The grid is extended once, below its lowest rate, and no rate is chosen.
  table = arm_report.format_choices(entries, done)
  line, = lines_of(table, f'| {escape("dense_small")} |')
  assert line.count(': inf') == 4 and '**' not in line
  # No runs of other seeds are expected.
  counts = pool_processes.PoolProgress(entries, 2, lambda arm: 1.0).counts(done)
  assert counts == f'{len(done)} of {len(done)}'


def test_repeated_runs_are_reported_and_change_no_verdict():
  world = context_world()
  again = {n: o for n, o in world.done.items() if n.endswith(',again')}
  # Of twelve seeds, 6 and 12 are repeated.
  assert sum(name.startswith('static-75/') for name in again) == 2
  done = world.done | {
      name: outcome | {'validation/loss': outcome['validation/loss'] + 0.02}
      for name, outcome in again.items() if name.startswith('static-75/')
  }
  changed = look_at(CONTEXT_64, world.entries, done)
  finding = changed.findings['flops-64']
  assert finding.values == world.findings['flops-64'].values
  assert finding.repeats[0] == pytest.approx([0.02, 0.02])
  table = claim_report.format_claims([finding])
  assert '| SD, repeated |' in table and '| 0.0141 |' in table
  others = list(true_world().findings.values())
  assert 'repeated' not in claim_report.format_claims(others)


def test_a_demonstration_gives_no_verdict_by_g4():
  scale = dataclasses.replace(
      FAIR, tokens_per_parameter=2.5, demonstration=True
  )
  world = world_of(scale)
  assert_without_verdict(world, set(FAIR.claims), 'G4')
  gate, = (gate for gate in world.gates if gate.key == 'G4')
  assert gate.found.startswith('2.5 tokens per parameter')


@pytest.mark.parametrize('changes, message', [
    (dict(tokens_per_parameter=19.9), 'tokens_per_parameter is 19.9; gate G4'),
    (dict(epochs=5), 'epochs is 5; gate G4 allows 4'),
])
def test_a_scale_that_breaks_g4_must_be_a_demonstration(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(FAIR, **changes)
  world = world_of(dataclasses.replace(FAIR, demonstration=True, **changes))
  assert {f.reason for f in world.findings.values()} == {'G4'}


def test_arms_without_runs_pass_no_gate():
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


BEST = {'rigl-90': 1.0}


@functools.cache
def mixed_world():
  """Results with every verdict: (e) fails a gate, (d-pre) does not hold."""
  gaps = GAPS | {
      'variable-90': 0.12, 'static-75+task': 0.15, 'variable-90+task': -0.1,
      'static-75+task-sparse': 0.151, 'longer': 0.01,
  }
  return world_of(gaps=gaps, best=BEST)


def report(world):
  return claim_report.format_report(
      'T', {'seeds': 8}, list(world.findings.values()), {
          'Gates': claim_report.format_gates(world.gates),
          'Arms': arm_report.format_arms(
              world.entries, world.done, world.measured
          ),
          'Chosen': arm_report.format_choices(world.entries, world.done),
      },
  )


def test_units_other_than_nats_are_named_and_not_drawn_beside_nats():
  findings = list(true_world().findings.values())
  text = claim_report.format_report('T', {}, findings, {})
  assert 'in nats (perplexities for c-ppl, cosine distances for h). The' in text
  *_, right = claim_plots.plot_claims([], {}, findings).axes
  ticks = [tick.get_text() for tick in right.get_yticklabels()]
  assert len(ticks) == sum(
      len(f.claim.comparisons) for f in findings if f.claim.key != 'c-ppl'
  )
  assert 'perplexities' not in right.get_xlabel()


def test_a_report_names_the_intervals_of_better_uncorrected():
  text = claim_report.format_report('T', {}, [], {})
  assert (
      'intervals are of 95 % and not corrected; a claim with margins holds '
      '(better) if they are below 0.'
  ) in text


def lines_of(text, start):
  return [line for line in text.splitlines() if line.startswith(start)]


@pytest.mark.parametrize('key, verdict', [
    ('b2', '**holds**'), ('j', '**holds (better)**'),
    ('d-pre', '**does not hold**'), ('a', '**undecided**'),
    ('e', '**no verdict** (G3 rigl-90)'),
])
def test_the_table_of_claims_has_every_verdict_and_its_reason(key, verdict):
  line, = lines_of(report(mixed_world()), f'| ({key}) ')
  assert line.endswith(f'| {verdict} |')
  finding = mixed_world().findings[key]
  cells = line.strip('| ').split(' | ')
  assert cells[1] == escape(finding.claim.comparisons[0].text)
  assert cells[2] == str(len(finding.values[0]))
  assert cells[3] == f'{finding.intervals[0].mean:+.4f}'
  _, _, low, high = finding.intervals[0]
  assert cells[4] == f'{low:+.4f} to {high:+.4f}'
  assert cells[6] == f'{finding.corrected:.2g}'


def test_each_family_has_a_table_and_each_comparison_a_line():
  text = report(mixed_world())
  primary, secondary = text.split('## Secondary claims')
  assert '## Primary claims' in primary
  table = secondary.partition('## Gates')[0]
  for finding in mixed_world().findings.values():
    part = primary if finding.claim.family == 'primary' else table
    for comparison in finding.claim.comparisons:
      assert part.count(f'| {escape(comparison.text)} |') == 1


def test_claims_without_runs_are_null_in_json_and_listed_without_a_verdict():
  entries = entries_of()
  world = look_at(FAIR, entries, {})
  text = report(world)
  line, = lines_of(text, '| G2 | dense beats')
  assert line.endswith('| – | not yet run |')
  line, = lines_of(text, '| (a) ')
  assert '| 0 | – | – | 0 | 1 | **no verdict** (0 of at least 8' in line
  assert 'nan' not in text and 'inf' not in text.replace('inferior', '')
  described = claim_report.describe_findings(list(world.findings.values()))
  text = json.dumps(described, allow_nan=False)
  comparison = json.loads(text)[0]['comparisons'][0]
  assert comparison['low'] is comparison['mean'] is None


def test_numbers_are_json_and_name_verdicts_reasons_and_gates():
  findings = list(mixed_world().findings.values())
  described = json.loads(json.dumps(claim_report.describe_findings(findings)))
  for finding, each in zip(findings, described, strict=True):
    assert each['claim'] == finding.claim.key
    assert each['verdict'] == finding.verdict
    assert each['reason'] == finding.reason
    assert each['p_holm'] == finding.corrected
    assert each['family'] == finding.claim.family
    for values, comparison in zip(finding.values, each['comparisons']):
      assert comparison['differences'] == pytest.approx(values)
      assert comparison['low'] < comparison['mean'] < comparison['high']
  described = claim_report.describe_gates(mixed_world().gates)
  gates = json.loads(json.dumps(described))
  assert [gate['subject'] for gate in gates if not gate['passed']] == [
      'rigl-90'
  ]


def test_the_figure_has_a_row_per_comparison_and_its_verdict():
  findings = mixed_world().findings
  figure = claim_plots.plot_claims(
      mixed_world().entries, mixed_world().measured, list(findings.values())
  )
  findings = [f for key, f in findings.items() if key != 'c-ppl']
  pretrained, tuned, right = figure.axes
  ticks = *pretrained.get_yticklabels(), *tuned.get_yticklabels()
  assert {tick.get_text() for tick in ticks} == {
      entry.arm.name for entry in mixed_world().entries
      if entry.arm.method != 'init'
  }
  comparisons = [c for f in findings for c in f.claim.comparisons]
  ticks = [tick.get_text() for tick in right.get_yticklabels()]
  assert len(ticks) == len(comparisons)
  assert all(c.text in tick for c, tick in zip(comparisons, ticks))
  marks = [
      line for line in right.lines
      if line.get_marker() == 'D' and len(line.get_xdata())
  ]
  assert [mark.get_xdata()[0] for mark in marks] == pytest.approx(
      [interval.mean for f in findings for interval in f.intervals]
  )
  verdicts = [text.get_text() for text in right.texts]
  assert verdicts == [finding.verdict for finding in findings]

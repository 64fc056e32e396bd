"""The report of claims: tables, numbers and figure of made-up results."""

import functools
import json

from made_up_results import entries_of
from made_up_results import FAIR
from made_up_results import GAPS
from made_up_results import look_at
from made_up_results import world_of
import pytest

from experiments.papers import arm_report
from experiments.papers import claim_plots
from experiments.papers import claim_report
from spdf_jax.runs.markdown import escape

pytestmark = pytest.mark.papers

BEST = {'rigl-90': 1.0}


@functools.cache
def world():
  """Results with every verdict: (e) fails a gate, (d-pre) does not hold."""
  gaps = GAPS | {
      'variable-90': 0.12, 'static-75+task': 0.15, 'variable-90+task': -0.1,
      'static-75+task-sparse': 0.151, 'longer': 0.01,
  }
  return world_of(gaps=gaps, best=BEST)


def report(found):
  return claim_report.format_report(
      'T', {'seeds': 8}, list(found.findings.values()), {
          'Gates': claim_report.format_gates(found.gates),
          'Arms': arm_report.format_arms(
              found.entries, found.done, found.measured
          ),
          'Chosen': arm_report.format_choices(found.entries, found.done),
      },
  )


def lines_of(text, start):
  return [line for line in text.splitlines() if line.startswith(start)]


@pytest.mark.parametrize('key, verdict', [
    ('b2', '**holds**'), ('j', '**holds (better)**'),
    ('d-pre', '**does not hold**'), ('a', '**undecided**'),
    ('e', '**no verdict** (G3 rigl-90)'),
])
def test_the_table_has_every_verdict_and_its_reason(key, verdict):
  line, = lines_of(report(world()), f'| ({key}) ')
  assert line.endswith(f'| {verdict} |')
  finding = world().findings[key]
  cells = line.strip('| ').split(' | ')
  assert cells[1] == escape(finding.claim.comparisons[0].text)
  assert cells[2] == str(len(finding.values[0]))
  assert cells[3] == f'{finding.intervals[0].mean:+.4f}'
  _, _, low, high = finding.intervals[0]
  assert cells[4] == f'{low:+.4f} to {high:+.4f}'
  assert cells[6] == f'{finding.corrected:.2g}'


def test_each_family_has_a_table_and_each_comparison_a_line():
  text = report(world())
  primary, secondary = text.split('## Secondary claims')
  assert '## Primary claims' in primary
  table = secondary.partition('## Gates')[0]
  for finding in world().findings.values():
    part = primary if finding.claim.family == 'primary' else table
    for comparison in finding.claim.comparisons:
      assert part.count(f'| {escape(comparison.text)} |') == 1


def test_the_gates_that_fail_are_bold():
  text = report(world())
  line, = lines_of(text, '| G3 | the rate of rigl-90 is')
  assert line.endswith('| **fails** |')
  assert all(
      line.endswith('| holds |') or 'rigl-90' in line
      for line in lines_of(text, '| G')
  )


def test_what_has_not_run_is_called_so():
  entries = entries_of()
  found = look_at(FAIR, entries, {})
  text = report(found)
  line, = lines_of(text, '| G2 | dense beats')
  assert line.endswith('| – | not yet run |')
  line, = lines_of(text, '| (a) ')
  assert '| 0 | – | – | 0 | 1 | **no verdict** (0 of at least 5' in line
  assert 'nan' not in text and 'inf' not in text.replace('inferior', '')


def test_arms_have_their_chosen_rate_and_mean():
  text = report(world())
  line, = lines_of(text, '| variable-90 | rate 0.008, stage continue |')
  outcomes = world().measured[FAIR.blocks[0].arms[3]].values()
  mean = sum(o['validation/loss'] for o in outcomes) / 8
  assert f'| {mean:.4f} ± ' in line and line.endswith('| 8 | 1.00e+09 |')
  line = lines_of(text, '| rigl-90 | rate 0.004: ')[0]
  assert line.endswith('**rate 0.128: ' + line.rpartition(' ')[0][-8:] + ' |')


def test_numbers_are_json_and_name_verdicts_reasons_and_gates():
  findings = list(world().findings.values())
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
  gates = json.loads(json.dumps(claim_report.describe_gates(world().gates)))
  assert [gate['subject'] for gate in gates if not gate['passed']] == [
      'rigl-90'
  ]


def test_intervals_without_ends_are_null_in_json():
  found = look_at(FAIR, entries_of(), {})
  text = json.dumps(
      claim_report.describe_findings(list(found.findings.values())),
      allow_nan=False,
  )
  comparison = json.loads(text)[0]['comparisons'][0]
  assert comparison['low'] is comparison['mean'] is None


def test_the_figure_has_a_row_per_comparison_and_a_legend():
  findings = world().findings
  figure = claim_plots.plot_claims(
      world().entries, world().measured, list(findings.values())
  )
  findings = [f for key, f in findings.items() if key != 'c-ppl']
  pretrained, tuned, right = figure.axes
  arms = [tick.get_text() for tick in (
      *pretrained.get_yticklabels(), *tuned.get_yticklabels()
  )]
  assert sorted(arms) == sorted(
      entry.arm.name for entry in world().entries if entry.arm.method != 'init'
  )
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
  legend = [text.get_text() for text in right.get_legend().get_texts()]
  assert legend == [
      'interval inside the margin', 'interval outside the margin',
      'interval across the margin', 'margin claimed',
  ]
  verdicts = [text.get_text() for text in right.texts]
  assert verdicts == [finding.verdict for finding in findings]

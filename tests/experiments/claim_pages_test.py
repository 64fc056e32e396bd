"""Pages about claims have the numbers of committed records."""

import functools
import json
import pathlib
import re
import statistics

import pytest

from experiments.papers import paired

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / 'experiments' / 'results'
README = (ROOT / 'README.md').read_text()
GUIDES = RESULTS.parent / 'guides'
GROWTH = (RESULTS / 'claims-growth' / 'README.md').read_text()

METHODS = {
    'static': 'static', 'SET': 'set',
    'RigL': 'rigl', 'balanced RigL': 'rigl-balanced',
    'RigL with skipped steps': 'rigl-skipped',
    'GraNet': 'granet', 'balanced GraNet': 'granet-balanced',
}

minus = lambda text: text.replace('-', '−')


@functools.cache
def read_results(study):
  return json.loads((RESULTS / study / 'results.json').read_text())


def judged_differences(study):
  """Returns the first comparisons of the claims that have a verdict."""
  return [
      claim['comparisons'][0] for claim in read_results(study)['claims']
      if claim['verdict'] != 'no verdict'
  ]


def amount(found):
  """Returns the size of a difference, its interval, and its direction."""
  mean, low, high = (found[name] for name in ('mean', 'low', 'high'))
  word = 'lower' if mean < 0 else 'higher'
  if mean < 0:
    low, high = -high, -low
  return f'{abs(mean):.3f}', minus(f'({low:.3f} to {high:.3f})'), word


def grown(method, zeros, measure='validation/loss'):
  """Returns a measure of the arm's evaluation seeds, by seed."""
  arm = re.compile(rf'{METHODS[method]}-{zeros}_w96/.*seed=(\d)$')
  return {
      arm.match(name)[1]: outcome[measure]
      for name, outcome in read_results('claims-growth')['runs'].items()
      if arm.match(name)
  }


def rows_of_growth(pattern):
  return [
      (match.groups(), [cell.strip() for cell in match.string.split('|')[2:]])
      for line in GROWTH.splitlines()
      if (match := re.match(rf'\| (\d\d) % zeros{pattern} \|', line))
  ]


@pytest.mark.parametrize(
    'study,count', [('claims-context-64', 4), ('claims-fine-tuning-64', 2)]
)
def test_decided_differences_are_written_as_they_are_recorded(study, count):
  readme = re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', README)  # Without links.
  tables = [
      (RESULTS / study / 'README.md').read_text(),
      (GUIDES / 'papers.md').read_text(),
  ]
  judged = judged_differences(study)
  assert len(judged) >= count
  for found in judged:
    mean, low, high = (found[name] for name in ('mean', 'low', 'high'))
    ends = f'({low:.3f} to {high:.3f})'
    assert all(minus(f'{mean:+.3f} {ends}') in text for text in tables)
    size, ends, word = amount(found)
    assert f'{size} {word} {ends}' in readme


def test_the_page_of_fine_tuning_has_what_its_control_lost():
  study = 'claims-fine-tuning-64'
  control, = (g for g in read_results(study)['gates'] if g['key'] == 'G6')
  lost = re.match(r'\+(.+) nats', control['found'])[1]
  page = (RESULTS / study / 'README.md').read_text()
  assert f'{lost} nats above dense' in page


def test_judged_differences_of_growth_are_written_as_they_are_recorded():
  guide = ' '.join((GUIDES / 'algorithms.md').read_text().split())
  judged = judged_differences('claims-growth')
  assert len(judged) >= 4
  for found in judged:
    mean, low, high = (found[name] for name in ('mean', 'low', 'high'))
    assert minus(f'{mean:+.3f} ({low:.3f} to {high:.3f})') in GROWTH
    size, ends, _ = amount(found)
    assert f'{size} {ends}' in guide
  least, *_, most = sorted(
      -found['mean'] for found in judged
      if re.match('(rigl-balanced|set).* at most static', found['text'])
  )
  assert f'ended {least:.3f} to {most:.3f} below fixed masks' in README


@pytest.mark.parametrize('names,cells', rows_of_growth(': (.+) less (.+?)'))
def test_a_row_of_differences_of_growth_is_computed(names, cells):
  zeros, first, second = names
  losses, others = grown(first, zeros), grown(second, zeros)
  assert losses.keys() == others.keys()
  found = paired.t_interval([losses[seed] - others[seed] for seed in losses])
  ends = f'({found.low:.3f} to {found.high:.3f})'
  assert cells[0] == minus(f'{found.mean:+.3f} {ends}')


@pytest.mark.parametrize('names,cells', rows_of_growth(', (.+?)'))
def test_a_row_of_units_of_growth_is_computed(names, cells):
  zeros, method = names
  cut_off, *variances = (
      statistics.fmean(grown(method, zeros, f'sparsity/{measure}').values())
      for measure in ('cut_off', 'row_variation', 'column_variation')
  )
  variances = (f'{variance:.1f}' for variance in variances)
  assert cells[:3] == [f'{cut_off:.1%}'.replace('%', ' %'), *variances]


def test_pages_of_growth_have_rows_of_both_kinds():
  assert len(rows_of_growth(': (.+) less (.+?)')) >= 13
  assert len(rows_of_growth(', (.+?)')) >= 10

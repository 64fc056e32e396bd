"""JSON files of outcomes: strict, and the same numbers when read back."""

import json
import math

import pytest
from quickstart_runs import ROOT

pytestmark = [
    pytest.mark.papers,
    pytest.mark.skipif(
        not (ROOT / 'experiments').is_dir(), reason='needs the checkout'
    ),
]

from experiments.papers import json_files  # noqa: E402


def refuse(word):
  raise AssertionError(f'{word} is no JSON')


def test_numbers_that_are_not_finite_are_strings_and_come_back(tmp_path):
  path = tmp_path / 'outcome.json'
  json_files.write_json(path, {
      'validation/loss': math.nan, 'high': math.inf, 'low': -math.inf,
      'curve': [[4, 0.5, math.nan], (8, 1.0, 2.5)], 'name': 'NaN-free',
  }, indent=2)
  stored = json.loads(path.read_text(), parse_constant=refuse)
  assert stored['validation/loss'] == 'NaN'
  assert stored['high'] == 'Infinity' and stored['low'] == '-Infinity'
  found = json_files.read_json(path)
  assert math.isnan(found['validation/loss'])
  assert found['high'] == math.inf and found['low'] == -math.inf
  (step, seconds, loss), last = found['curve']
  assert (step, seconds) == (4, 0.5) and math.isnan(loss)
  assert last == [8, 1.0, 2.5] and found['name'] == 'NaN-free'


def test_finite_values_are_written_as_pythons_json_writes_them():
  value = {'loss': 1.25, 'steps': 3, 'kernels': True, 'none': None, 'x': [1, 2]}
  for indent in (None, 1, 2):
    assert json_files.encode(value, indent) == json.dumps(value, indent=indent)


def test_bare_constants_of_older_files_are_read():
  found = json_files.decode('{"loss": NaN, "curve": [Infinity, -Infinity]}')
  assert math.isnan(found['loss']) and found['curve'] == [math.inf, -math.inf]

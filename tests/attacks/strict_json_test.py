"""Files of scores are JSON that every parser reads, whatever the scores are."""

import json
import math

import pytest

from experiments.scores import sheets


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_null_with_a_note(value):
  scores = [
      sheets.Score('wikitext', 'harness', 'perplexity', value, '12 words'),
      sheets.Score('wikitext', 'harness', 'loss', 2.5, '12 words'),
      sheets.Score('e2e', 'lora_e2e', 'meteor', None, 'no jar'),
  ]
  sheet = sheets.to_json('a', scores, sheets.Settings())
  text = json.dumps(sheet, allow_nan=False)
  first, *others = json.loads(text)['scores']
  assert first['value'] is None
  assert first['note'] == f'the score is {value}'
  assert others == [score._asdict() for score in scores[1:]]
  table = sheets.format_means([sheet, sheet])
  assert '| wikitext | harness | perplexity | – | – | 0 |' in table

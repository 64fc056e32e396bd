"""Files of scores are JSON that every parser reads, whatever the scores are."""

import json
import math

import pytest

from experiments.scores.sheets import format_means
from experiments.scores.sheets import Score
from experiments.scores.sheets import Settings
from experiments.scores.sheets import to_json


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_null_with_a_note(value):
  scores = [
      Score('wikitext', 'harness', 'perplexity', value, '12 words'),
      Score('wikitext', 'harness', 'loss', 2.5, '12 words'),
      Score('e2e', 'lora_e2e', 'meteor', None, 'no jar'),
  ]
  found = to_json('a', scores, Settings())
  text = json.dumps(found, allow_nan=False)
  first, *others = json.loads(text)['scores']
  assert first['value'] is None
  assert first['note'] == f'the score is {value}'
  assert others == [score._asdict() for score in scores[1:]]
  assert '| wikitext | harness | perplexity | – | – | 0 |' in format_means(
      [found, found]
  )

"""The command that plots the loss after a dense transition."""

import json

import pytest

from experiments import dense_transition
from tests import command


def test_the_rise_is_the_highest_loss_over_the_mean_before():
  before = [2.0, 3.0] * (dense_transition.BEFORE // 2)
  losses = [before + [2.0, peak, 1.0] for peak in (3.0, 4.5)]
  results = [dict(way='a', losses=row) for row in losses]
  results.append(dict(way='b', losses=before + [9.0]))
  assert dense_transition.describe(results, 'a') == (
      'the loss rises by 1.25 (0.50 to 2.00 over seeds)'
  )


@pytest.mark.slow
def test_revived_weights_take_smaller_steps_with_their_own_age(tmp_path):
  found = command.run(
      'dense_transition', f'--output={tmp_path}', '--seeds=1', '--steps=40',
  )
  assert found.status == 0 and (tmp_path / 'transition.png').exists()
  rows = json.loads((tmp_path / 'transition.json').read_text())
  highest = {
      row['way']: max(row['losses'][dense_transition.BEFORE:]) for row in rows
  }
  as_it_is, _, age, both = highest.values()
  assert both < as_it_is and age < as_it_is

"""The command that plots the loss over the learning rate at densities."""

import json

import pytest

from experiments import density_rates
from tests import command


def row(density, rate, loss, seed=0):
  return dict(
      name='standard', density=density, rate=rate, seed=seed, loss=loss
  )


def test_the_star_is_at_the_best_mean_over_seeds():
  results = [
      row(1.0, 1e-3, 2.0), row(1.0, 1e-3, 4.0, seed=1), row(1.0, 2e-3, 2.5),
      row(0.5, 1e-3, 1.0), row(0.5, 2e-3, 2.0),
  ]
  ax, _ = density_rates.plot(results).axes
  means, star, *_ = ax.lines
  assert means.get_xydata().tolist() == [[1e-3, 3.0], [2e-3, 2.5]]
  assert star.get_xydata().tolist() == [[2e-3, 2.5]]


@pytest.mark.slow
def test_the_command_continues_where_it_stopped(tmp_path):
  run = lambda: command.run(
      'density_rates', f'--output={tmp_path}', '--densities=1,.25',
      '--rates=2e-3', '--steps=20', '--width=32',
  )
  assert run().status == 0
  rows = json.loads((tmp_path / 'rates.json').read_text())
  assert len(rows) == 4 and all(4 < r['loss'] < 7.2 for r in rows)
  assert (tmp_path / 'rates.png').exists()
  (tmp_path / 'rates.json').write_text(json.dumps(rows[:3]))
  assert run().output.count('density') == 1
  assert json.loads((tmp_path / 'rates.json').read_text()) == rows

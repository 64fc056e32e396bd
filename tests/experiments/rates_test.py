"""Studies of learning rates: coordinates, densities, dense transitions."""

import json

import pytest

from experiments import rates
from experiments.papers import coordinates
from experiments.papers import rate_plots
from tests import command
from tests.quickstart_runs import small_config

CONFIG = small_config(
    phases__pretrain__length=8, phases__pretrain__batch_size=1,
    phases__pretrain__learning_rate__peak=3e-4,
)
BASE = dict(base_width=32, base_density=1.0)


def rows(**changes):
  """Rows of two widths, with the given changes of a layer over the base."""
  return [
      dict(parameterization=name, width=width, density=1.0, changes={
          '1': {'mlp/wi': 0.1 * (factor if width == 64 else 1)}
      })
      for name, factor in changes.items() for width in (32, 64)
  ]


@pytest.mark.slow
def test_sparse_mup_keeps_the_changes_that_density_otherwise_shrinks():
  ratio = {}
  for name in ('standard', 'sparse-mup'):
    changes = coordinates.measure(CONFIG, name, 64, [1.0, 0.25], BASE, 1)
    first = [changes[density][0]['attn/wq'] for density in (1.0, 0.25)]
    ratio[name] = first[1] / first[0]
  # In the standard parameterization, outputs of a quarter of the inputs change
  # less.
  assert ratio['standard'] < 0.5
  assert 0.75 < ratio['sparse-mup'] < 1.5


@pytest.mark.slow
def test_the_logits_of_targets_change_equally_at_all_widths():
  narrow, wide = (
      coordinates.measure(CONFIG, 'sparse-mup', width, [1.0], BASE, 1)
      for width in (32, 128)
  )
  assert wide[1.0][0]['logits'] == pytest.approx(
      narrow[1.0][0]['logits'], rel=0.2
  )


def test_a_scaled_config_has_the_width_the_density_and_the_base():
  scaled = coordinates.scaled(CONFIG, 'sparse-mup', 64, 0.25, BASE, 3)
  assert (scaled['seed'], scaled['model']['d_ff']) == (3, 128)
  assert scaled['model']['n_heads'] == 8
  assert scaled['phases']['pretrain']['algorithm']['sparsity'] == 0.75
  assert scaled['parameterization']['base_width'] == 32


def test_widths_that_heads_do_not_divide_are_refused():
  with pytest.raises(ValueError, match='widths has 60, which is no multiple'):
    coordinates.scaled(CONFIG, 'mup', 60, 1.0, BASE, 0)


def test_the_figure_has_a_panel_for_each_parameterization_and_step():
  many = [
      row | dict(changes={str(s): row['changes']['1'] for s in (1, 5, 10)})
      for row in rows(standard=2.0, mup=1.0)
  ]
  figure = rate_plots.plot_coordinates(many)
  assert [ax.get_title(loc='left') for ax in figure.axes] == [
      f'{name}, step {step}' for name in ('Standard', 'mup')
      for step in (1, 5, 10)
  ]
  line = figure.axes[0].lines[0]
  assert line.get_ydata().tolist() == [1.0, 2.0]
  assert next(coordinates.describe(many)) == (
      'standard, step 1: changes are 1.00 to 2.00 of those at the base'
  )


def row(density, rate, loss, seed=0):
  return dict(
      name='standard', density=density, rate=rate, seed=seed, loss=loss
  )


def test_the_star_is_at_the_best_mean_over_seeds():
  results = [
      row(1.0, 1e-3, 2.0), row(1.0, 1e-3, 4.0, seed=1), row(1.0, 2e-3, 2.5),
      row(0.5, 1e-3, 1.0), row(0.5, 2e-3, 2.0),
  ]
  ax, _ = rate_plots.plot_densities(results).axes
  means, star, *_ = ax.lines
  assert means.get_xydata().tolist() == [[1e-3, 3.0], [2e-3, 2.5]]
  assert star.get_xydata().tolist() == [[2e-3, 2.5]]


@pytest.mark.parametrize('changes, message', [
    (dict(steps=20), 'has runs with steps 20, not 300; give another folder.'),
    (dict(width=32), 'has runs with width 32, not 64; give another folder.'),
])
def test_densities_of_other_steps_or_widths_are_refused(
    tmp_path, changes, message
):
  path = tmp_path / 'rates.json'
  path.write_text(json.dumps([
      row(1.0, 1e-3, 2.0) | dict(width=64, steps=300) | changes
  ]))
  before = path.read_bytes()
  done = command.run('rates', '--study=densities', f'--output={tmp_path}')
  assert done.status == 1 and not done.output and message in done.log
  assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


@pytest.mark.slow
def test_the_study_of_densities_continues_where_it_stopped(tmp_path):
  run = lambda: command.run(
      'rates', '--study=densities', f'--output={tmp_path}',
      '--densities=1,.25', '--rates=2e-3', '--steps=20', '--seeds=1',
  )
  assert run().status == 0
  rows = json.loads((tmp_path / 'rates.json').read_text())
  assert len(rows) == 4 and all(4 < r['loss'] < 7.2 for r in rows)
  assert (tmp_path / 'rates.png').exists()
  (tmp_path / 'rates.json').write_text(json.dumps(rows[:3]))
  assert run().output.count('density') == 1
  assert json.loads((tmp_path / 'rates.json').read_text()) == rows


def test_the_rise_is_the_highest_loss_over_the_mean_before():
  before = [2.0, 3.0] * (rate_plots.BEFORE // 2)
  losses = [before + [2.0, peak, 1.0] for peak in (3.0, 4.5)]
  results = [dict(way='a', losses=row) for row in losses]
  results.append(dict(way='b', losses=before + [9.0]))
  assert rates.describe_rise(results, 'a') == (
      'the loss rises by 1.25 (0.50 to 2.00 over seeds)'
  )


@pytest.mark.slow
def test_revived_weights_take_smaller_steps_with_their_own_age(tmp_path):
  done = command.run(
      'rates', '--study=transition', f'--output={tmp_path}', '--seeds=1',
      '--steps=40',
  )
  assert done.status == 0 and (tmp_path / 'transition.png').exists()
  rows = json.loads((tmp_path / 'transition.json').read_text())
  highest = {
      row['way']: max(row['losses'][rate_plots.BEFORE:]) for row in rows
  }
  as_it_is, _, age, both = highest.values()
  assert both < as_it_is and age < as_it_is

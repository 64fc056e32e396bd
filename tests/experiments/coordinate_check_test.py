"""The coordinate check: which outputs change, and what is drawn of it."""

import pytest

from experiments import coordinate_check
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
    found = coordinate_check.measure(CONFIG, name, 64, [1.0, 0.25], BASE, 1)
    first = [found[density][0]['attn/wq'] for density in (1.0, 0.25)]
    ratio[name] = first[1] / first[0]
  # In standard parameterization a quarter of the inputs change an output less.
  assert ratio['standard'] < 0.5
  assert 0.75 < ratio['sparse-mup'] < 1.5


@pytest.mark.slow
def test_the_logits_of_targets_change_equally_at_all_widths():
  narrow, wide = (
      coordinate_check.measure(CONFIG, 'sparse-mup', width, [1.0], BASE, 1)
      for width in (32, 128)
  )
  assert wide[1.0][0]['logits'] == pytest.approx(
      narrow[1.0][0]['logits'], rel=0.2
  )


def test_a_scaled_config_has_the_width_the_density_and_the_base():
  found = coordinate_check.scaled(CONFIG, 'sparse-mup', 64, 0.25, BASE, 3)
  assert (found['seed'], found['model']['d_ff']) == (3, 128)
  assert found['model']['n_heads'] == 8
  assert found['phases']['pretrain']['algorithm']['sparsity'] == 0.75
  assert found['parameterization']['base_width'] == 32


def test_widths_that_heads_do_not_divide_are_refused():
  with pytest.raises(ValueError, match='widths has 60, which is no multiple'):
    coordinate_check.scaled(CONFIG, 'mup', 60, 1.0, BASE, 0)


def test_the_figure_has_a_panel_for_each_parameterization_and_step():
  many = [
      row | dict(changes={str(s): row['changes']['1'] for s in (1, 5, 10)})
      for row in rows(standard=2.0, mup=1.0)
  ]
  figure = coordinate_check.plot(many)
  assert [ax.get_title(loc='left') for ax in figure.axes] == [
      f'{name}, step {step}' for name in ('standard', 'mup')
      for step in (1, 5, 10)
  ]
  line = figure.axes[0].lines[0]
  assert line.get_ydata().tolist() == [1.0, 2.0]
  assert next(coordinate_check.describe(many)) == (
      'standard, step 1: changes are 1.00 to 2.00 of those at the base'
  )

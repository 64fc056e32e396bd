"""Plots of runs show their values, without touching one another."""

import dataclasses
import re

import numpy as np
import pytest

from spdf_jax.costs.plan_costs import Span
from spdf_jax.runs import read
from spdf_jax.runs import style
from spdf_jax.runs.curves import flops_at
from spdf_jax.runs.mask_plots import plot_mask
from spdf_jax.runs.mask_plots import plot_mask_updates
from spdf_jax.runs.plots import plot_layer_sparsity
from spdf_jax.runs.plots import plot_loss_over_flops
from spdf_jax.runs.plots import plot_loss_over_steps

pytestmark = pytest.mark.ci


def make_run(sparsities, losses=(6.0, 4.0, 3.0, 2.5), layers=3):
  phases, start = [], 0
  for index, sparsity in enumerate(sparsities):
    source = 'task' if index == len(sparsities) - 1 else 'text'
    phases.append(read.PhaseRecord(
        f'phase{index}', start, 10, 2, 8, source, sparsity, 160,
        1e9 * (1 - 0.8 * sparsity), 1e9,
    ))
    start += 10
  rows = []
  for p in phases:
    for step in (p.start + 5, p.end):
      loss = losses[min(len(rows), len(losses) - 1)]
      row = {'step': step, 'train/loss': loss, 'validation/loss': loss + 0.1,
             'target/loss': loss + 1, 'sparsity/all': p.sparsity / 2,
             'sparsity/sparsified': p.sparsity}
      row |= {'sparsity/exploration': 0.3 + step / 100}
      row |= {f'sparsity/block_{i}/up': p.sparsity for i in range(layers)}
      rows.append(row)
  return read.RunRecord('toy', tuple(phases), tuple(rows))


RUNS = {
    'dense': make_run([0.0, 0.0]),
    'variable': make_run([0.75, 0.0, 0.0], (6.5, 4.5, 3.0, 2.51), layers=12),
    'static': make_run([0.838, 0.0], (6.2, 4.2, 3.2)),
}
PLOTS = (
    plot_layer_sparsity, plot_loss_over_flops, plot_loss_over_steps,
    plot_mask_updates,
)


def respend(scale, growth=1.0):
  """Returns RUNS with FLOPs times `scale`, and `growth` with each phase."""
  return {
      label: dataclasses.replace(run, phases=tuple(
          phase._replace(
              flops_per_step=phase.flops_per_step * scale * growth**index
          )
          for index, phase in enumerate(run.phases)
      ))
      for label, run in RUNS.items()
  }


def tick_labels_of(axis):
  low, high = sorted(axis.get_view_interval())
  ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
  drawn = [t for t in ticks if low <= t.get_loc() <= high]
  return [tick.label1 for tick in drawn if tick.label1.get_visible()]


def texts_of(ax):
  texts = [*ax.texts, ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label]
  return texts + tick_labels_of(ax.xaxis) + tick_labels_of(ax.yaxis)


def assert_texts_stand_free(figure):
  figure.draw_without_rendering()
  texts = [t for ax in figure.axes for t in texts_of(ax) if t.get_text()]
  boxes = [text.get_window_extent() for text in texts if text.get_visible()]
  assert len(boxes) > 6
  for i, first in enumerate(boxes):
    assert first.x0 >= 0 and first.y0 >= 0
    assert first.x1 <= figure.bbox.x1 and first.y1 <= figure.bbox.y1
    assert not any(first.overlaps(other) for other in boxes[i + 1 :])


@pytest.mark.parametrize('plot', PLOTS)
def test_no_text_touches_another_or_leaves_the_figure(plot, tmp_path):
  figure = plot(RUNS)
  figure.savefig(tmp_path / 'plot.png')
  assert_texts_stand_free(figure)


@pytest.mark.parametrize('scale, growth', [
    *((1.0, growth) for growth in (0.001, 0.3, 1.0, 9.0, 70.0, 4000.0)),
    (2.2, 0.3), (7.7, 0.001),
])
def test_loss_over_flops_is_legible_over_any_span(scale, growth):
  figure = plot_loss_over_flops(respend(scale, growth))
  assert_texts_stand_free(figure)
  ax, lower = figure.axes
  names = [label.get_text() for label in tick_labels_of(lower.xaxis)]
  names = [name for name in names if name]
  assert len(names) >= 3
  form = r'\$\\mathdefault\{((1\.5|[234568]) × )?10\^\{\d+\}\}\$'
  assert all(re.fullmatch(form, name) for name in names)
  notes = [t for t in ax.texts if t.get_text().startswith('end of')]
  for note in notes:
    assert ax.bbox.count_contains(note.get_window_extent().corners()) == 4
  assert len(notes) == 1


def test_labels_of_points_avoid_lines_edges_and_other_labels():
  ax = style.new_figure(4, 3).subplots()
  ax.set(xlim=(0, 1), ylim=(0, 1))
  ax.plot([0.5, 1.0], [0.5, 0.9])
  ax.text(0.35, 0.55, 'taken', ha='center')
  points = [(0.5, 0.5, 'middle', 'k'), (0.98, 0.02, 'corner', 'k')]
  style.label_points(ax, [*points, (0.5, 0.5, 'no room for this ' * 9, 'k')])
  corners = {
      text.get_text(): (text.get_ha(), text.get_va()) for text in ax.texts
  }
  corners.pop('taken')
  assert corners == {'middle': ('right', 'top'), 'corner': ('right', 'bottom')}


def test_loss_over_flops_shows_pre_training_on_a_logarithmic_axis():
  ax, lower = plot_loss_over_flops(RUNS).axes
  assert ax.get_xscale() == 'log'
  assert lower.get_xlabel() == 'Training FLOPs'
  assert ax.get_ylabel() == 'Validation loss (nats per token)'
  lines = {line.get_label(): line for line in ax.get_lines()}
  run = RUNS['variable']
  np.testing.assert_allclose(
      lines['variable'].get_xdata(),
      [flops_at(run, step) for step in (5, 10, 15, 20)],
  )
  np.testing.assert_allclose(
      lines['variable'].get_ydata(), [6.6, 4.6, 3.1, 2.61]
  )
  assert lines['dense'].get_xdata().tolist() == [5e9, 1e10]
  texts = {text.get_text(): text for text in ax.texts}
  assert set(texts) == {'dense', 'variable', 'static', 'end of phase0'}
  for label, color in zip(RUNS, style.COLORS):
    assert texts[label].get_color() == lines[label].get_color() == color
  ring = next(x for x in ax.get_lines() if x.get_markersize() == 9)
  assert ring.get_xdata() == pytest.approx([flops_at(run, 10)])
  assert ring.get_ydata() == pytest.approx([4.6])
  zeros = lower.get_lines()[list(RUNS).index('variable')]
  assert zeros.get_drawstyle() == 'steps-post'
  np.testing.assert_allclose(
      zeros.get_xdata(), [flops_at(run, step) for step in (5, 10, 20)]
  )
  assert zeros.get_ydata().tolist() == [75, 0, 0]


def test_the_end_of_a_phase_is_marked_where_the_sparsity_changes():
  runs = {'dense': make_run([0.0, 0.0, 0.0]), 'ramp': make_run([0.0, 0.5, 0.0])}
  ax, lower = plot_loss_over_flops(runs).axes
  rings = [x for x in ax.get_lines() if x.get_markersize() == 9]
  assert [x.get_xdata()[0] for x in rings] == [flops_at(runs['ramp'], 10)]
  assert lower.get_lines()[1].get_ydata().tolist() == [0, 50, 50]


def test_loss_over_steps_marks_phases_in_a_panel_for_each_run():
  panels = plot_loss_over_steps(RUNS).axes
  assert [ax.get_title(loc='left') for ax in panels] == list(RUNS)
  assert panels[-1].get_xlabel() == 'Step'
  assert panels[0].get_xlim() == (0, 30)
  lines = panels[1].get_lines()
  assert [x.get_label() for x in lines[:3]] == [
      'training', 'validation', 'target',
  ]
  assert lines[2].get_xdata().tolist() == [5, 10, 15, 20, 25, 30]
  assert lines[2].get_ydata()[-1] == pytest.approx(3.51)
  assert [x.get_xdata()[0] for x in lines[3:]] == [10, 20]
  texts = [text.get_text() for text in panels[1].texts]
  assert {'phase0\n75% zeros', 'phase2\n0% zeros', 'target'} <= set(texts)


def test_rounds_within_a_phase_are_marked_and_a_ramp_is_not():
  run = RUNS['dense']

  def dotted(count):
    parts = [Span(0, 2, 0.0, 1.0)] + [
        Span(2 + i, 1, i / 100, 1.0) for i in range(count)
    ]
    first = run.phases[0]._replace(spans=tuple(parts))
    changed = dataclasses.replace(run, phases=(first, *run.phases[1:]))
    ax = plot_loss_over_steps({'toy': changed}).axes[0]
    names = [text.get_text().split('\n')[-1] for text in ax.texts]
    assert f'0% to {count - 1}% zeros' in names
    return [x.get_xdata()[0] for x in ax.get_lines() if x.get_ls() == ':']

  assert dotted(3) == [2, 3, 4]
  assert dotted(20) == []


def test_layer_sparsity_has_a_cell_for_each_layer_and_phase():
  figure = plot_layer_sparsity(RUNS)
  names = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
  layers = [f'block_{i}/up' for i in range(12)]
  assert names == [*layers, 'all sparsified', 'all parameters']
  sparsities = figure.axes[1].get_images()[0].get_array()
  assert sparsities.shape == (14, 3)
  np.testing.assert_allclose(sparsities[:, 0], [0.75] * 13 + [0.375])
  assert not sparsities[:, 1:].any()
  texts = [text.get_text() for text in figure.axes[2].texts]
  # The static run has three layers; cells of other layers have no number.
  assert texts[::2] == ['83.8%'] * 3 + ['–'] * 9 + ['83.8%', '41.9%']


def test_a_run_without_logged_sparsities_is_reported_to_have_none():
  phase = read.PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
  run = read.RunRecord('toy', (phase,), ({'step': 4},))
  figure = plot_layer_sparsity({'toy': run})
  assert figure.get_suptitle() == 'No sparsities were logged'


def test_exploration_jumps_at_the_mask_update_before_it_is_logged():
  phase = read.PhaseRecord(
      'p', 0, 30, 2, 8, 'text', 0.5, 480, 1e9, 1e9, (range(12, 19, 6),)
  )
  rows = [
      {'step': step, 'sparsity/exploration': share}
      for step, share in ((10, 0.5), (20, 0.75), (30, 0.75))
  ]
  figure = plot_mask_updates({'toy': read.RunRecord('toy', (phase,), rows)})
  line = next(
      x for x in figure.axes[0].get_lines()
      if x.get_color() == style.COLORS[2]
  )
  assert line.get_drawstyle() == 'steps-post'
  assert line.get_xydata().tolist() == [
      [10, 50], [18, 75], [20, 75], [30, 75]
  ]


def test_a_picture_of_a_mask_shows_its_kept_weights():
  kept = np.zeros((2, 3, 4), bool)
  kept[1, 2, :2] = True
  mask = {'a': kept, 'b': None, **{f'c{i:02}': kept[0] for i in range(20)}}
  figure = plot_mask(mask, most=5)
  assert [ax.get_title() for ax in figure.axes[:5]] == [
      'a: 91.7% zeros', *(f'c{i:02}: 100% zeros' for i in range(4))
  ]
  shown = figure.axes[0].get_images()[0].get_array()
  np.testing.assert_array_equal(shown, kept.reshape(6, 4))
  assert figure.get_suptitle() == 'The first 5 of 21 matrices'
  with pytest.raises(ValueError, match='mask has no sparsified leaf; give'):
    plot_mask({'b': None})

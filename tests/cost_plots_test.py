"""Losses over costs: seconds from timed steps, and what the figure shows."""

import statistics

import pytest
from quickstart_runs import ROOT

pytestmark = [
    pytest.mark.papers,
    pytest.mark.skipif(
        not (ROOT / 'experiments').is_dir(), reason='needs the checkout'
    ),
]

from experiments.papers import cost_plots  # noqa: E402
from experiments.papers.arms import Arm  # noqa: E402
from experiments.papers.pool_data import Prepared  # noqa: E402
from experiments.papers.scales import DENSE  # noqa: E402
from experiments.papers.scales import SCALES  # noqa: E402
from experiments.papers.scales import sized  # noqa: E402
from experiments.papers.scales import STATIC_75  # noqa: E402
from experiments.papers.scales import VARIABLE  # noqa: E402

SCALE = SCALES['fair']
LARGE = sized(DENSE, 'large')
RIGL = Arm('rigl', 0.9)
SECONDS = {DENSE: 100.0, STATIC_75: 60.0, LARGE: 500.0}
LOSSES = {DENSE: (1.6, 1.7), STATIC_75: (1.75,), LARGE: (1.4, 1.45)}
FLOPS = {DENSE: 1e14, STATIC_75: 4e13, LARGE: 9e14}
FOUND = {
    arm: {
        seed: {'validation/loss': loss, 'flops': FLOPS[arm]}
        for seed, loss in enumerate(losses, start=1)
    }
    for arm, losses in LOSSES.items()
}


def test_seconds_are_steps_times_those_of_a_step(monkeypatch):
  timed = []
  of_sparsity = {0.0: 0.08, 0.75: 0.05, 0.9: 0.04}

  def step_seconds(cases, prepared):
    timed.extend(cases)
    return [of_sparsity[arm.sparsity] for _, arm in cases]

  monkeypatch.setattr(cost_plots, 'step_seconds', step_seconds)
  arms = [DENSE, STATIC_75, VARIABLE, RIGL]
  found = cost_plots.training_seconds(SCALE, arms, Prepared('', '', {}))
  # Each matrix is timed once: RigL's steps are those of a static mask.
  static = Arm('static', 0.9)
  assert timed == [(SCALE, arm) for arm in (DENSE, STATIC_75, static)]
  steps = {arm: SCALE.steps(arm) for arm in arms}
  assert found == pytest.approx({
      DENSE: 0.08 * steps[DENSE], STATIC_75: 0.05 * steps[STATIC_75],
      VARIABLE: (5 * 0.04 + 0.08) / 6 * steps[VARIABLE],
      RIGL: 0.04 * steps[RIGL],
  })


def test_finished_pre_trainings_are_shown_by_size_but_no_other_runs():
  found = dict.fromkeys([
      LARGE, STATIC_75, Arm('init'), Arm('static', 0.75, task='task'),
      Arm('static', 0.99), Arm('pruned', 0.75), DENSE,
  ], {})
  shown = cost_plots.shown_arms(found, ['', 'large'])
  assert shown == [STATIC_75, DENSE, LARGE]


def test_the_figure_has_a_row_for_each_size_and_a_column_for_each_cost():
  pytest.importorskip('matplotlib')
  figure = cost_plots.plot_costs(SCALE, FOUND, SECONDS)
  labels = [(ax.get_title(), ax.get_xlabel()) for ax in figure.axes]
  flops, seconds = (
      'FLOPs of pre-training', 'seconds of pre-training, steps timed in turn'
  )
  main, large = (f'width {SCALE.sizes[s].width}' for s in ('', 'large'))
  assert labels == [
      (main, flops), (main, seconds), (large, flops), (large, seconds),
  ]
  assert {ax.get_ylabel() for ax in figure.axes} == {
      'validation loss (nats per byte)'
  }
  assert all(ax.get_xlim()[0] == 0 for ax in figure.axes)


def test_every_seed_is_a_point_and_the_mean_a_larger_one():
  pytest.importorskip('matplotlib')
  axes = cost_plots.plot_costs(SCALE, FOUND, SECONDS).axes
  for pair, arms in ((axes[:2], (DENSE, STATIC_75)), (axes[2:], (LARGE,))):
    for ax, costs in zip(pair, (FLOPS, SECONDS)):
      lines = ax.get_lines()
      assert len(lines) == 2 * len(arms)
      for arm, points, mean in zip(arms, lines[::2], lines[1::2]):
        assert tuple(points.get_ydata()) == LOSSES[arm]
        assert set(points.get_xdata()) == {costs[arm]}
        assert points.get_color() == mean.get_color()
        assert mean.get_xdata()[0] == costs[arm]
        assert mean.get_ydata()[0] == statistics.fmean(LOSSES[arm])
        assert mean.get_markersize() > 5
    names = [text.get_text() for text in pair[1].get_legend().get_texts()]
    assert names == [arm.kind for arm in arms]

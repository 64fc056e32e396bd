"""Figures show the values of runs and papers, and name missing runs."""

import json
import pathlib
import statistics

import numpy as np
import pytest

from experiments import figures
from experiments.papers import diagrams
from experiments.papers import flops_plots
from experiments.papers import run_figures
from experiments.papers import run_groups
from experiments.papers.run_figures import MissingRunsError
from experiments.papers.run_groups import by_label
from experiments.papers.run_groups import describe_pretraining
from experiments.papers.run_groups import describe_run
from experiments.papers.run_groups import group_runs
from experiments.papers.run_groups import pretrained
from experiments.scores import ancestry
from experiments.scores.ancestry import read_ancestry
from experiments.scores.scored_runs import find_runs
from spdf_jax.runs.style import COLORS
from tests import command
from tests.experiments.paper_tables_test import make_run
from tests.experiments.paper_tables_test import RIGL
from tests.experiments.paper_tables_test import RISING
from tests.experiments.paper_tables_test import score
from tests.runs.plots_test import assert_texts_stand_free

pytestmark = pytest.mark.papers


def log(workdir, *points, key='validation/loss'):
  """Adds values of (step, loss) to what a run has logged."""
  with (workdir / 'metrics.jsonl').open('a') as file:
    for step, loss in points:
      file.write(json.dumps({'step': step, key: loss}) + '\n')
  return workdir


def pretrain(workdir, spec=0.0, sparsity=None, loss=3.0, steps=100, **fields):
  sparsity = spec if sparsity is None else sparsity
  phases = [('pretrain', 'corpus', spec, sparsity, steps)]
  workdir = make_run(workdir, phases, **fields)
  return log(workdir, (steps // 2, loss + 1), (steps, loss))


def tune(workdir, start, loss, sparsity=0.0, **fields):
  phases = [('finetune', 'task', sparsity, sparsity, 20)]
  workdir = make_run(
      workdir, phases, task='e2e', init_from=str(start), **fields
  )
  return log(workdir, (20, loss), key='target/loss')


def prune(workdir, start, losses=(3.4, 3.1), **fields):
  rounds = [dict(steps=50, fraction=0.25)] * 2
  spec = dict(name='iterative', rounds=rounds)
  phases = [
      (f'round{i}', 'corpus', spec, sparsity, 50)
      for i, sparsity in enumerate((0.5, 0.75))
  ]
  workdir = make_run(workdir, phases, init_from=str(start), **fields)
  return log(workdir, *zip((50, 100), losses))


@pytest.fixture(name='runs')
def fixture_runs(tmp_path):
  """Runs for every figure; returns their folder."""
  folder = tmp_path / 'runs'
  dense = pretrain(folder / 'dense')
  sparse = pretrain(folder / 'sparse', 0.75, loss=3.2)
  pretrain(folder / 'rigl', RIGL, 0.8, loss=3.15)
  pretrain(folder / 'granet', RISING, 0.8, loss=3.1)
  for seed, loss in enumerate((1.0, 1.2)):
    tune(folder / f'dense-e2e{seed}', dense, loss, seed=seed)
  for seed, loss in enumerate((1.1, 1.4)):
    tune(folder / f'sparse-e2e{seed}', sparse, loss, seed=seed)
    tune(folder / f'kept-e2e{seed}', sparse, loss + 1, 0.75, seed=seed)
  pruned = prune(folder / 'pruned', dense)
  log(pruned, (100, 0.75), key='sparsity/exploration')
  pretrain(folder / 'longer', steps=200, loss=2.9)
  return folder


def groups_of(folder):
  return group_runs(find_runs([folder]).runs)[0]


def line_of(ax, **looks):
  """Returns x and y of the one line with these looks."""
  lines = [
      line for line in ax.get_lines()
      if all(getattr(line, f'get_{k}')() == v for k, v in looks.items())
  ]
  assert len(lines) == 1, lines
  return [list(map(float, values)) for values in lines[0].get_data()]


@pytest.mark.parametrize('place, ends, losses', [
    # Steps after the phase that was continued are left out.
    ('a', [100, 150, 200], ([60, 100, 150, 200], [4.0, 5.0, 3.4, 3.1])),
    ('a:best', [60, 110, 160], ([60, 110, 160], [4.0, 3.4, 3.1])),
])
def test_a_history_counts_on_through_its_launches(
    place, ends, losses, tmp_path, monkeypatch
):
  first = make_run(tmp_path / 'first', [
      ('a', 'corpus', 0.9, 0.9, 100), ('b', 'corpus', 0.0, 0.0, 20),
  ])
  log(first, (60, 4.0), (100, 5.0), (120, 3.5))
  if place == 'a:best':
    for module in (ancestry, run_groups):
      monkeypatch.setattr(
          module, 'find_checkpoint', lambda _: pathlib.Path('checkpoints/60')
      )
  second = prune(tmp_path / 'second', f'{first}@{place}')
  run = run_groups.read_history(read_ancestry(second))
  assert [(p.name, p.start, p.end) for p in run.phases] == [
      *zip(['a', 'round0', 'round1'], [0, *ends], ends)
  ]
  assert run.phases[0].tokens == ends[0] * 32
  assert run.series('validation/loss') == losses


def test_exploration_is_known_only_of_runs_that_started_densely(tmp_path):
  for name, sparsity, expected in (('dense', 0.0, [1.0]), ('sparse', 0.3, [])):
    start = pretrain(tmp_path / name, sparsity)
    workdir = prune(tmp_path / f'from-{name}', start)
    log(workdir, (100, 0.5), key='sparsity/exploration')
    own = run_groups.read_history(read_ancestry(start))
    assert own.series('validation/loss')[0] == [50, 100]
    run = run_groups.read_history(read_ancestry(workdir))
    assert run.series('sparsity/exploration')[1] == expected


def test_the_mean_run_has_the_means_over_seeds(tmp_path):
  rng = np.random.default_rng(0)
  losses = rng.normal(size=(3, 4))
  runs = []
  for i, row in enumerate(losses):
    phases = [('p', 'corpus', 0.0, 0.0, 40)]
    workdir = make_run(tmp_path / str(i), phases, seed=i)
    points = list(zip((10, 20, 30, 40), row))
    log(workdir, *(points[1:] if i == 2 else points))
    runs.append(run_groups.read_history(read_ancestry(workdir)))
  steps, means = run_groups.average_runs(runs).series('validation/loss')
  assert steps == [20, 30, 40]  # The third run has these steps only.
  np.testing.assert_allclose(means, losses.mean(0)[1:], rtol=1e-12)


def test_of_configs_that_differ_in_rates_the_best_known_is_shown(tmp_path):
  for name, seed, rate, loss in (
      ('a0', 0, 1, 3.0), ('b0', 0, 2, 2.5), ('b1', 1, 2, 2.7), ('c0', 0, 3, 2.0)
  ):
    pretrain(tmp_path / name, loss=loss, seed=seed, max_length=1000 * rate)
  pretrain(tmp_path / 'b2', loss=2.5, seed=1, max_length=2000)  # Repeats b1.
  (group,), notes = group_runs(find_runs([tmp_path]).runs)
  assert [source.rpartition('/')[2] for source in group.sources] == ['b0', 'b1']
  assert group.loss == pytest.approx(statistics.fmean((2.5, 2.7)))
  assert len(notes) == 3 and notes[0].endswith('b1')
  assert 'a0' in ''.join(notes) and 'c0' in ''.join(notes)


def test_every_group_has_a_label_of_its_own(runs):
  groups = groups_of(runs)
  labels = list(by_label(groups, describe_run))
  assert len(set(labels)) == len(groups) == 9
  assert {'static 75%, e2e sparsely', 'static 75%, e2e', 'dense, e2e'} <= set(
      labels
  )
  labels = list(by_label(pretrained(groups), describe_pretraining))
  assert labels == [
      'dense, 3.2K tokens', 'dense, 6.4K tokens', 'static 75%', 'RigL 80%',
      'GraNet 80%', 'pruned to 75%',
  ]


def test_fine_tuning_shows_every_seed_and_lines_through_means(runs):
  figure = run_figures.fine_tunings(groups_of(runs))
  ax, = figure.axes
  for color, marker, mean in (
      (COLORS[2], 'o', 1.25), (COLORS[1], 's', 2.25)
  ):
    x, y = line_of(ax, color=color, marker=marker, linestyle='-')
    assert x == [0, 75] and y == pytest.approx([1.1, mean])
  baseline, = [x for x in ax.get_lines() if x.get_linestyle() == '--']
  assert baseline.get_ydata() == pytest.approx([1.1, 1.1])
  seeds = {
      (x, round(y, 6)) for line in ax.get_lines() if line.get_alpha()
      for x, y in zip(*line.get_data())
  }
  assert seeds == {(0, 1.0), (0, 1.2), (75, 1.1), (75, 1.4), (75, 2.1),
                   (75, 2.4)}
  assert_texts_stand_free(figure)
  for name, value in (('sparse-e2e0', 66.0), ('kept-e2e0', 60.0)):
    score(runs / f'{name}.json', runs / name, value)
  _, scores = run_figures.fine_tunings(groups_of(runs)).axes
  assert scores.get_ylabel() == 'BLEU (e2e, lora_e2e)'
  assert line_of(scores, marker='o', linestyle='-')[1] == [66.0]


def test_the_sawtooth_starts_at_the_dense_model_and_has_a_control(runs):
  figure = run_figures.sawtooth(groups_of(runs))
  upper, lower = figure.axes
  x, y = line_of(upper, color=COLORS[0])
  assert (x, y) == ([50, 100, 150, 200], [4.0, 3.0, 3.4, 3.1])
  assert set(line_of(upper, color=COLORS[1])[1]) == {3.0}
  assert line_of(upper, color=COLORS[2]) == [[200], [2.9]]
  stairs = line_of(lower, drawstyle='steps-post')
  assert stairs == [[0, 100, 150, 200], [0, 50, 75, 75]]
  texts = [text.get_text() for text in upper.texts]
  assert {'0%', '50%', '75%', 'dense model', 'dense, as long'} <= set(texts)
  assert_texts_stand_free(figure)


def test_rigl_and_granet_have_the_losses_of_their_runs(runs):
  figure = run_figures.rigl_and_granet(groups_of(runs))
  upper, _ = figure.axes
  for color, loss in ((COLORS[0], 3.15), (COLORS[1], 3.1)):
    looks = {'color': color, 'marker': 'o', 'linewidth': 1.8}
    assert line_of(upper, **looks) == [[50, 100], [loss + 1, loss]]
  assert {text.get_text(): text.get_color() for text in upper.texts} == {
      'RigL 80%': COLORS[0], 'GraNet 80%': COLORS[1]
  }
  assert_texts_stand_free(figure)


def test_flops_bars_equal_the_printed_totals():
  bars = flops_plots.published_bars()
  printed = [bar for bar in bars if bar.model.startswith('gpt')]
  assert [f'{bar.printed / 1e18:.2f}' for bar in printed] == [
      '2.48', '1.84', '1.52', '236.62', '142.40', '95.29'
  ]
  for bar in printed:
    assert bar.total == pytest.approx(bar.printed, rel=0.005)
  by_name = {(bar.model, bar.label): bar for bar in bars}
  dense, static, split = (
      by_name['cerebras-gpt-256m', label]
      for label in ('dense', 'static\n75%', '90%, then\ndense')
  )
  assert split.total == pytest.approx(static.total, rel=1e-3)
  assert split.total < dense.total
  dense, extended = (
      by_name['cerebras-gpt-6.7b', label]
      for label in ('dense', '90%, then\ndense')
  )
  # The post prints "64% fewer"; the FLOPs of its tables give another number,
  # see experiments.flops.
  pretraining = dense.flops[flops_plots.DENSE]
  assert extended.printed / pretraining == pytest.approx(0.36)
  assert extended.flops[flops_plots.DENSE] / pretraining == pytest.approx(
      9379 / 62523
  )
  figure = flops_plots.plot_flops_bars()
  assert_texts_stand_free(figure)
  heights = sum(bar.get_height() for ax in figure.axes for bar in ax.patches)
  assert heights == pytest.approx(sum(bar.total for bar in bars) / 1e18)


def test_the_flops_reduction_rises_with_the_model_size():
  sizes, times = zip(*flops_plots.reductions(0.75))
  assert list(sizes) == sorted(sizes) and list(times) == sorted(times)
  assert times[-1] < 4
  # SPDF, section 3.5.
  reduction = dict(zip(flops_plots.MODELS, times))
  assert_texts_stand_free(flops_plots.plot_flops_reduction())
  assert reduction['gpt2-small'] == pytest.approx(1.65, rel=6e-3)
  assert reduction['gpt3-xl'] == pytest.approx(2.5, rel=6e-3)


@pytest.mark.parametrize('plot', [
    diagrams.plot_mask_diagram, diagrams.plot_spdf_diagram,
    diagrams.plot_variable_diagram,
])
def test_texts_of_diagrams_do_not_overlap(plot):
  figure = plot()
  figure.draw_without_rendering()
  ax, = figure.axes
  boxes = [text.get_window_extent() for text in ax.texts if text.get_text()]
  boxes += [figure.legends[0].get_window_extent()]
  assert len(boxes) > 6
  # Each box overlaps only itself.
  assert all(box.count_overlaps(boxes) == 1 for box in boxes)
  assert all(figure.bbox.count_contains(b.corners()) == 4 for b in boxes)


def test_diagrams_hold_exactly_the_weights_of_their_masks():
  dense, sparse = (diagrams.draw_masks(sparsity, 1) for sparsity in (0.0, 0.75))
  assert [m.sum() for m in sparse] == [6, 9, 6]
  assert all((small <= large).all() for small, large in zip(
      diagrams.draw_masks(0.9, 1), sparse
  ))
  edges = diagrams.edges_of(diagrams.Network('', '', dense, sparse))
  assert not edges[diagrams.PRUNED]
  assert {(k, *ij) for k, m in enumerate(sparse) for ij in np.argwhere(m)} == (
      set(edges[diagrams.KEPT])
  )
  assert len(edges[diagrams.GROWN]) == 84 - 21


def test_all_draws_what_the_runs_allow_and_lists_the_rest(
    runs, tmp_path, monkeypatch
):
  of_runs = {n: f for n, f in figures.FIGURES.items() if f.needs}
  monkeypatch.setattr(figures, 'FIGURES', of_runs)
  written = figures.write_figures('all', [runs], tmp_path / 'figures')
  assert written.left_out == {
      'layers': 'no run with logged sparsities; it needs pre-training'
  }
  assert [path.stem for path in written.paths] == [
      name for name in of_runs if name != 'layers'
  ]
  assert all(path.stat().st_size > 5000 for path in written.paths)
  few = figures.write_figures('all', [runs / 'dense'], tmp_path / 'few')
  assert set(few.left_out) == {'fine-tuning', 'sawtooth', 'rigl-granet',
                               'masks', 'layers'}
  assert few.left_out['rigl-granet'] == (
      'no run of rigl or granet; it needs a run of each'
  )


def test_a_figure_without_its_runs_names_what_it_needs(runs, tmp_path):
  with pytest.raises(MissingRunsError, match=(
      "'rigl-granet' needs a run of each, and there is no run of granet; give "
  )):
    figures.write_figures('rigl-granet', [runs / 'rigl'], tmp_path / 'out')
  with pytest.raises(MissingRunsError, match='there is no run; give'):
    figures.write_figures('sawtooth', [], tmp_path / 'out')
  with pytest.raises(MissingRunsError, match='no sparse fine-tuning'):
    figures.write_figures('fine-tuning', [runs / 'sparse-e2e0'], tmp_path)
  with pytest.raises(ValueError, match="did you mean 'sawtooth'"):
    figures.write_figures('sawtoot', [runs], tmp_path / 'out')
  assert not (tmp_path / 'out').exists()


def test_the_command_shows_what_it_wrote(tmp_path):
  done = command.run('figures', '--figure=mask', f'--output={tmp_path}')
  assert done.status == 0 and done.output == f'{tmp_path / "mask.png"}\n'
  assert (tmp_path / 'mask.png').exists()

"""Scaling laws of finished runs, and plans of least loss."""

import dataclasses
import itertools
import json
import math
import statistics

import numpy as np
import pytest

from experiments.planner import finished
from experiments.planner import law
from experiments.planner import loss_plans
from experiments.planner.finished import Setting
from experiments.planner.law import Law
from experiments.planner.law import Point
from spdf_jax import models
from spdf_jax.costs import training_flops
from tests import command
from tests import tiny_run

RESULTS = command.ROOT / 'experiments/results'
SIZES = models.GPTConfig(257, 4, 4, 64, 256, 256)
SETTING = Setting('text as bytes', SIZES, 256, 4)
SPARSE = Law(law.SPARSE, np.array([0.72, 0.25, 0.4]),
             np.array([2.0, 6.0, 150.0, 0.65]))
AVERAGE = Law(law.AVERAGE, np.array([0.34, 0.28]), np.array([40.0, 41.0, 1.0]))


def points_of(law_, weights, sparsities, tokens):
  found = []
  for n, s, d in itertools.product(weights, sparsities, tokens):
    loss, = law_.predict([n], [s], [d])
    found.append(Point('75%', n, s, d, 1e12 * n, (loss - 0.01, loss + 0.01)))
  return found


def grid_of(law_):
  return points_of(
      law_, (5e4, 2e5, 8e5), (0.0, 0.5, 0.9), (1e6, 5e6, 2.5e7)
  )


@pytest.mark.parametrize('known', [SPARSE, AVERAGE], ids=['sparse', 'average'])
def test_a_law_is_recovered_from_the_losses_that_it_predicts(known):
  found = law.fit(known.form, grid_of(known))
  np.testing.assert_allclose(found.values, known.values, rtol=2e-2)


def test_the_law_that_predicts_held_out_runs_better_comes_first():
  # Jin et al.'s law is that of Frantar et al. with a_S = 0.
  found = law.fit_all(grid_of(SPARSE))
  assert [f.law.form for f in found] == [law.SPARSE, law.AVERAGE]
  assert found[0].error < 1e-3 < found[1].error
  for fitted in found:
    assert law.rms(fitted.residuals) <= fitted.error


def test_held_out_residuals_are_those_of_laws_without_the_configuration():
  points = points_of(AVERAGE, (5e4, 2e5, 8e5), (0.0, 0.9), (1e6, 5e6))
  points[3] = points[3]._replace(losses=(points[3].loss - 0.5,))
  fitted, = (f for f in law.fit_all(points) if f.law.form == law.AVERAGE)
  assert fitted.held_out[3] == pytest.approx(0.5, abs=1e-3)
  assert 0 < fitted.residuals[3] < 0.5


def test_six_configurations_fit_the_law_of_five_parameters_and_five_none():
  points = points_of(AVERAGE, (5e4, 2e5, 8e5), (0.0,), (1e6, 5e6))
  assert [f.law.form for f in law.fit_all(points)] == [law.AVERAGE]
  with pytest.raises(ValueError, match='runs has 5 configurations.*at least 6'):
    law.fit_all(points[:5])


def test_candidates_take_the_budget():
  points = [p._replace(flops=1e13) for p in grid_of(SPARSE)]
  for tokens in (None, 4e6):
    found = loss_plans.find_candidates(
        points, SETTING, 1e13, tokens, [0.5, 0.9, 0.95], False
    )
    assert len({c.sizes.d_model for c in found}) > 4
    assert max(c.sparsity for c in found) <= 0.9  # That of the runs.
    for c in found:
      cost = lambda s, c=c: (
          c.tokens / 256 * training_flops(c.sizes, 256, s)
      )
      assert c.weights == 12 * 4 * c.sizes.d_model**2
      if tokens is None:
        assert cost(c.sparsity) == pytest.approx(1e13)
      else:  # The least sparsity, a multiple of 0.0001.
        assert cost(c.sparsity) <= 1e13 * (1 + 1e-9)
        assert not c.sparsity or cost(c.sparsity - 1e-4) > 1e13


def test_the_best_candidate_is_dense_unless_zeros_lower_the_loss():
  # By mean parameters zeros gain nothing, and attention and head stay dense.
  points = [p._replace(flops=1e13) for p in grid_of(AVERAGE)]
  candidates = loss_plans.find_candidates(
      points, SETTING, 1e13, None, [0.5, 0.9], False
  )
  best = lambda law_: loss_plans.describe_candidates(
      candidates, law_, [law_]
  )[1]
  assert best(AVERAGE).sparsity == 0
  gain = SPARSE._replace(amplitudes=np.array([40.0, 1.0, 150.0, 0.65]))
  assert best(gain).sparsity == 0.9


def test_budgets_and_models_that_a_law_cannot_plan_are_refused():
  points = [p._replace(flops=1e13) for p in grid_of(SPARSE)]
  plan = lambda flops, setting=SETTING, beyond=False: (
      loss_plans.find_candidates(points, setting, flops, None, [0.5], beyond)
  )
  with pytest.raises(ValueError, match='up to 1e.13; give at most 4 times'):
    plan(4.1e13)
  assert plan(4e13) and plan(4.1e13, beyond=True)
  with pytest.raises(ValueError, match='flops is 1.*, which no model takes'):
    plan(1.0)
  with pytest.raises(ValueError, match='has object, whose width cannot be'):
    plan(1e13, SETTING._replace(sizes=object()))


def write_run(folder, width, sparsity, tokens, loss, **changes):
  """Writes what a run of two phases leaves: sparse, then dense."""
  folder.mkdir()
  steps = tokens // 16
  split = steps * 5 // 6 if sparsity else steps
  flops = lambda s: 2 * training_flops(sizes_of(width), 8, s)
  phases = [
      dict(
          name=name, start=start, steps=n, batch_size=2, length=8,
          source='corpus', sparsity=s, tokens=16 * n, flops_per_step=flops(s),
          dense_flops_per_step=flops(0.0), mask_updates=[], spans=[],
          overall_sparsity=None, notes=[],
      )
      for name, start, n, s in (
          ('pretrain', 0, split, sparsity), ('dense', split, steps - split, 0.0)
      ) if n
  ]
  config = {**tiny_run.CONFIG, 'init_from': changes.pop('init_from', '')}
  config['model'] = {**config['model'], 'd_model': width, 'd_ff': width}
  rows = [{'step': changes.pop('step', steps), 'validation/loss': loss}]
  data = dict(corpus='text', tokenizer='bytes', task='') | changes
  (folder / 'config.json').write_text(json.dumps(config))
  (folder / 'metrics.jsonl').write_text(json.dumps(rows[0]) + '\n')
  (folder / 'plan.json').write_text(json.dumps(dict(
      name=folder.name, phases=phases, model={}, parameters=1,
      sparsified_parameters=sizes_of(width).hidden_weights, bigram=None,
      compute='', totals=[], data=data,
  )))


def sizes_of(width):
  return models.GPTConfig(16, 1, 2, width, width, 8)


def test_workdirs_are_read_as_the_report_reads_them(tmp_path):
  for seed, loss in enumerate((2.0, 2.5)):
    write_run(tmp_path / f'sparse{seed}', 16, 0.9, 960, loss)
  write_run(tmp_path / 'dense', 32, 0.0, 480, 3.0)
  points, setting = finished.read_finished(sorted(map(str, tmp_path.iterdir())))
  dense, sparse = points
  assert dense == Point('dense', 6 * 32**2, 0.0, 480, dense.flops, (3.0,))
  assert dense.flops == 480 / 8 * training_flops(sizes_of(32), 8)
  assert sparse[:4] == ('90% to 0%', 6 * 16**2, 0.75, 960)
  assert sparse.losses == (2.0, 2.5)
  assert sparse.flops == pytest.approx(
      960 / 8 * training_flops(sizes_of(16), 8, 0.75)
  )
  largest = max(points, key=lambda p: p.flops)
  assert setting.sizes.hidden_weights == largest.weights
  assert setting[2:] == (8, 2) and setting.data == 'text as bytes'


@pytest.mark.parametrize('changes, message', [
    (dict(tokenizer='bpe-512'), 'text as bpe-512 and text as bytes, whose'),
    (dict(corpus='news'), 'runs read different data, news as bytes and text'),
    (dict(step=9), 'no finite validation/loss at the end of a pre-training'),
    (dict(init_from='runs/a'), 'starts from the weights of runs/a, whose'),
])
def test_runs_that_cannot_be_compared_are_refused(tmp_path, changes, message):
  write_run(tmp_path / 'a', 16, 0.0, 960, 2.0)
  write_run(tmp_path / 'b', 16, 0.0, 960, 2.0, **changes)
  with pytest.raises(ValueError, match=message):
    finished.read_finished([str(tmp_path / 'a'), str(tmp_path / 'b')])


@pytest.mark.parametrize('results, message', [
    ({'runs': []}, 'results.json is not of experiments.reproduce; give'),
    (
        {'scale': 'fair', 'identity': {'data': {'corpus': 'abc'}}, 'runs': {}},
        'has no finished pre-training of a GPT; give workdirs',
    ),
])
def test_results_without_pre_trainings_are_refused(tmp_path, results, message):
  (tmp_path / 'results.json').write_text(json.dumps(results))
  with pytest.raises(ValueError, match=message):
    finished.read_finished([str(tmp_path)])


@pytest.mark.papers
def test_results_that_diverged_are_left_out(tmp_path):
  results = json.loads((RESULTS / 'claims-fair/results.json').read_text())
  for seed in range(2, 9):
    results['runs'][f'dense/rate=0.016,seed={seed}'] |= {
        'validation/loss': 'NaN', 'steps': 0
    }
  (tmp_path / 'results.json').write_text(json.dumps(results))
  points, _ = finished.read_finished([str(tmp_path)])
  dense, = (p for p in points if p.kind == 'dense' and p.weights == 48 * 64**2)
  assert len(dense.losses) == 1 and math.isfinite(dense.loss)


@pytest.mark.papers
def test_results_of_reproduce_are_read_at_their_chosen_rates():
  path = RESULTS / 'claims-fair'
  points, setting = finished.read_finished([str(path)])
  done = json.loads((path / 'results.json').read_text())['runs']
  dense, = (p for p in points if p.kind == 'dense' and p.weights == 48 * 64**2)
  assert dense.loss == pytest.approx(statistics.fmean(
      done[f'dense/rate=0.016,seed={seed}']['validation/loss']
      for seed in range(1, 9)
  ))
  assert (dense.tokens, dense.flops) == (4549 * 4 * 256, 9789771743232)
  assert setting.sizes == dataclasses.replace(
      SIZES, n_heads=6, d_model=96, d_ff=384
  )
  for point in points:  # Zeros are not counted, whatever their schedule.
    width = math.isqrt(point.weights // 48)
    sizes = dataclasses.replace(
        SIZES, n_heads=width // 16, d_model=width, d_ff=4 * width
    )
    assert point.flops == pytest.approx(
        point.tokens / 256 * training_flops(sizes, 256, point.sparsity),
        rel=1e-3,
    )
  kinds = {p.kind for p in points}
  assert kinds == {'dense', '50%', '75%', '90%', '99%', '90% to 0%'}


@pytest.mark.ci
def test_the_command_prints_the_law_and_writes_its_figure(tmp_path):
  folders = []
  for width, tokens, sparsity in itertools.product(
      (16, 32, 64), (960, 9600), (0.0, 0.9)
  ):
    loss, = AVERAGE.predict(
        [6 * width**2], [0.75 if sparsity else 0.0], [tokens]
    )
    folders.append(tmp_path / f'{width}-{tokens}-{sparsity}')
    write_run(folders[-1], width, sparsity, tokens, loss)
  runs = f'--runs={",".join(map(str, folders))}'
  done = command.run(
      'plan', runs, '--flops=1e9', f'--output={tmp_path / "law"}'
  )
  assert done.status == 0, done.log
  assert '12 configurations, 12 runs on text as bytes' in done.output
  assert 'Least loss: model.d_model=' in done.output
  assert (tmp_path / 'law' / 'law.md').read_text() in done.output
  assert (tmp_path / 'law' / 'law.png').stat().st_size > 10_000
  found = json.loads((tmp_path / 'law' / 'law.json').read_text())
  assert found['laws']['average']['alpha'] == pytest.approx(0.34, rel=0.05)
  done = command.run('plan', runs, '--hours=1')
  assert done.status == 1 and 'give --flops' in done.log
  done = command.run('plan', runs, '--flops=1e12')
  assert done.status == 1 and '--extrapolate' in done.log

"""Replicas agree with ordinary runs, in one program that can be resumed."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from tiny_run import assert_same_arrays

from spdf_jax import sparsity
from spdf_jax import training
from spdf_jax.sparsity.paths import by_name
from spdf_jax.training.metrics import read_rows
from spdf_jax.training.processes import Interrupts

pytest.importorskip('experiments')
from experiments.papers import replica_groups
from experiments.papers import replica_runs
from experiments.papers import reproduction
from experiments.papers.arms import Arm
from experiments.papers.pool import Entry
from experiments.papers.pool import Job
from experiments.papers.pool_data import prepare
from experiments.papers.pool_runs import read_outcomes
from experiments.papers.pool_runs import Runner
from experiments.papers.pool_runs import write_initial
from experiments.papers.replicas import Replicas
from experiments.papers.scales import SCALES
from experiments.papers.scales import Size

pytestmark = pytest.mark.papers

RATES = (4e-3, 1.6e-2)
SCALE = dataclasses.replace(
    SCALES['small'],
    blocks=tuple(
        dataclasses.replace(block, seeds=1) for block in SCALES['small'].blocks
    ),
    sizes={name: Size(width, RATES) for name, width in (
        ('', 16), ('small', 16), ('large', 32)
    )},
    layers=1, length=32, batch_size=4, tokens_per_parameter=0.325, corpus='',
    batches=2, demonstration=True,
)
STEPS = SCALE.steps(Arm('dense'))


@pytest.fixture(scope='module')
def runner(tmp_path_factory):
  """Makes recipes, of initial weights for seeds 0 and 1 that are there."""
  directory = tmp_path_factory.mktemp('pool')
  corpus = prepare(SCALE, '', directory).corpus
  runner = Runner(SCALE, str(directory / 'runs'), corpus, '')
  for seed in (0, 1):
    job = Job(Arm('init'), {}, seed)
    workdir = directory / 'runs' / job.name
    workdir.mkdir(parents=True)
    write_initial(runner.create_recipe(job), workdir)
  return runner


def job_of(arm, rate, seed):
  return Job(arm, {'rate': rate}, seed, Job(Arm('init'), {}, seed))


JOBS = [
    job_of(Arm('dense'), RATES[1], 0),
    job_of(Arm('static', 0.75), RATES[1], 1),
    job_of(Arm('static', 0.75), RATES[0], 0),
]


@pytest.fixture(scope='module')
def replicas(runner):
  return Replicas([runner.create_recipe(job) for job in JOBS])


@pytest.fixture(scope='module')
def trained(replicas):
  """The stacked state after all steps, and the losses of the last chunk."""
  state, _ = replicas.run(replicas.create_state(), replicas.read(0, STEPS))
  return jax.device_get(state)


@pytest.fixture(scope='module')
def alone(replicas):
  """The states of the same runs, each trained by its own `recipe.step`."""
  states = []
  for recipe in replicas.recipes:
    params = training.read_params(
        training.find_checkpoint(recipe.config.init_from),
        recipe.abstract_state.params,
    )
    state = recipe.state_from(params)
    for step in range(STEPS):
      state, _ = recipe.step(state, recipe.device_batch_at(step))
    states.append(jax.device_get(state))
  return states


def replica(tree, i):
  return jax.tree.map(lambda x: x[i], tree)


def test_a_group_trains_as_its_runs_do_one_by_one(trained, alone):
  assert trained.step == alone[0].step == STEPS == 20
  for i, state in enumerate(alone):
    together = by_name(replica(trained.params, i))
    for name, expected in by_name(state.params).items():
      # Softmax does not depend on the bias of keys. Its gradient is rounding,
      # which Adam scales up, as it does the rounding of single weights.
      if not name.endswith('wk/bias'):
        error = np.linalg.norm(together[name] - expected)
        assert error <= 1e-5 * np.linalg.norm(expected), name


def test_masks_are_those_of_the_runs_and_pruned_weights_stay_zero(
    trained, alone
):
  masks = sparsity.get_mask(trained.opt_state)
  masked = sparsity.apply_mask(trained.params, masks)
  assert_same_arrays(jax.device_get(masked), trained.params)
  for i, (job, state) in enumerate(zip(JOBS, alone)):
    own = replica(masks, i)
    assert_same_arrays(own, sparsity.get_mask(state.opt_state))
    kept = np.concatenate([m.ravel() for m in jax.tree.leaves(own)])
    assert kept.mean() == 1 - job.arm.sparsity


def test_results_do_not_depend_on_where_training_is_cut(replicas, trained):
  state = replicas.create_state()
  for start, count in ((0, 0), (0, 1), (1, 12), (13, 99)):
    state, losses = replicas.run(state, replicas.read(start, count))
  assert_same_arrays(jax.device_get(state), trained)
  assert np.isfinite(losses[:7]).all() and np.isnan(losses[7:]).all()


@pytest.fixture(scope='module')
def outcomes(runner, tmp_path_factory):
  """Returns the outcomes of a group that is interrupted and resumed."""
  folder = tmp_path_factory.mktemp('group')
  with pytest.raises(InterruptedError, match='after step 1 of 20'):
    replica_runs.train_group(JOBS, runner, folder, deadline=0)
  found = replica_runs.train_group(JOBS, runner, folder)
  steps = [row['step'] for row in read_rows(folder / 'metrics.jsonl')]
  assert steps == sorted(set(steps)) and (steps[0], steps[-1]) == (1, STEPS)
  return found


def test_a_group_that_is_stopped_goes_on_bit_for_bit(
    replicas, trained, outcomes
):
  whole = replicas.validation_losses(trained.params)
  assert [o['validation/loss'] for o in outcomes] == [x.loss for x in whole]


def test_outcomes_are_those_of_ordinary_runs(runner, outcomes):
  ordinary, together = runner(JOBS[1]), outcomes[1]
  assert set(together) == set(ordinary) | {'replicas'}
  assert together['replicas'] == 3
  for name in ('flops', 'steps', 'kernels'):
    assert together[name] == ordinary[name]
  for name in ('loss', 'perplexity', 'bits_per_byte'):
    name = f'validation/{name}'
    np.testing.assert_allclose(together[name], ordinary[name], rtol=1e-5)


def test_runs_of_other_sizes_or_arms_are_refused(runner):
  large = runner.create_recipe(job_of(Arm('dense', size='large'), 1e-2, 0))
  recipe = runner.create_recipe(JOBS[0])
  with pytest.raises(ValueError, match='steps is 56 and 20, but runs in one'):
    Replicas([recipe, large])
  with pytest.raises(ValueError, match='arm rigl-90 cannot be trained in one'):
    replica_groups.check_arms([Entry(Arm('rigl', 0.9), {}, 1)])


def test_groups_train_a_pool_and_one_that_was_interrupted_comes_first(
    tmp_path, monkeypatch
):
  groups = []

  def train_group(jobs, runner, folder, deadline):
    groups.append([job.name for job in jobs])
    if len(groups) == 2:  # With a checkpoint, as of a signal.
      (folder / 'checkpoints' / '7').mkdir(parents=True)
      raise InterruptedError
    return [
        {'validation/loss': abs(job.point['rate'] - 8e-3)} for job in jobs
    ]

  monkeypatch.setattr(replica_groups, 'train_group', train_group)
  runner = Runner(SCALE, str(tmp_path / 'runs'), '', '')
  entries = [
      Entry(Arm('init'), {}, 2),
      Entry(Arm('init', size='large'), {}, 1),
      Entry(Arm('dense'), {'rate': (4e-3, 8e-3)}, 2),
      Entry(Arm('dense', size='large'), {'rate': (8e-3,)}, 1, extend=False),
  ]
  initial = {
      f'init{size}/seed={seed}': {} for size in ('', '_large')
      for seed in range(3)
  }
  for name in initial:
    (tmp_path / 'runs' / name).mkdir(parents=True)
    (tmp_path / 'runs' / name / 'outcome.json').write_text('{}')
  reported = []
  run = lambda done, replicas: replica_groups.run_groups(
      runner, entries, done, replica_groups.Limits(replicas=replicas),
      lambda job, done: reported.append(job.name),
  )
  with pytest.raises(InterruptedError):
    run(initial, 2)
  found = run(initial | read_outcomes(tmp_path / 'runs'), 8)
  dense = lambda rate, seed: f'dense/rate={rate},seed={seed}'
  large = lambda seed: f'dense_large/rate=0.008,seed={seed}'
  assert groups == [
      [dense(0.004, 0), dense(0.008, 0)],
      [dense(0.016, 0)],  # The grid is extended, by the best that is its end.
      [dense(0.016, 0)],
      [dense(0.008, 1), dense(0.008, 2)],
      [large(0)],
      [large(1)],
  ]
  assert found.keys() - initial.keys() == set(reported)
  assert not list(tmp_path.glob('groups/*/checkpoints'))


def test_a_group_that_exceeds_memory_is_answered_with_a_smaller_one(
    tmp_path, monkeypatch
):
  def train_group(*unused):
    raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory')

  monkeypatch.setattr(replica_groups, 'train_group', train_group)
  runner = Runner(SCALE, str(tmp_path / 'runs'), '', '')
  (tmp_path / 'runs' / 'init' / 'seed=0').mkdir(parents=True)
  (tmp_path / 'runs' / 'init' / 'seed=0' / 'outcome.json').write_text('{}')
  entries = [
      Entry(Arm('init'), {}, 0), Entry(Arm('dense'), {'rate': RATES}, 0)
  ]
  with pytest.raises(OSError, match='2 runs in one program.*--replicas=1'):
    replica_groups.run_groups(
        runner, entries, {'init/seed=0': {}}, replica_groups.UNLIMITED,
        lambda job, done: None,
    )


def test_a_scale_is_stopped_and_goes_on_to_its_table(tmp_path, monkeypatch):
  scale = dataclasses.replace(
      SCALE, claims=('b2',), sizes={'': Size(16, RATES[:1])}
  )
  whole = reproduction.Reproduction(
      'test', scale, tmp_path / 'runs', tmp_path / 'out'
  )
  run = lambda deadline=math.inf: reproduction.reproduce(
      whole, '', 2, False, replica_groups.Limits(deadline)
  )
  with pytest.raises(InterruptedError, match='the time is over'):
    run(deadline=0.0)
  with monkeypatch.context() as patch:
    patch.setattr(Interrupts, 'stop_after', lambda self, step: step == 2)
    with pytest.raises(InterruptedError, match='after step 2 of 20'):
      run()
  report = run()
  assert '**no verdict**' in report and 'G4' in report
  results = json.loads((tmp_path / 'out' / 'results.json').read_text())
  # Initial weights of two seeds, five arms on each.
  assert len(results['runs']) == 2 + 5 * 2
  assert {g['key'] for g in results['gates']} == {'G1', 'G2', 'G3', 'G4'}
  assert results['runs']['static-75/rate=0.004,seed=1']['replicas'] == 5

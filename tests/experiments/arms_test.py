"""Arms of the claims: their common settings and their differences."""

import dataclasses
import doctest
import importlib
import math
import pkgutil
import re

import jax
import numpy as np
import pytest

from experiments import papers
from experiments import pool
from experiments.launch.grid import points
from experiments.papers import arm_report
from experiments.papers import claim_report
from experiments.papers import scales
from experiments.papers.arm_configs import create_config
from experiments.papers.arms import Arm
from experiments.papers.arms import ROUNDS
from experiments.papers.claims import PRIMARY
from experiments.papers.gates import arms_of_gates
from experiments.papers.paper_claims import CLAIMS
from experiments.papers.scale import parameters
from experiments.papers.scale import Size
from experiments.papers.scale import Task
from experiments.pool import worker as pool_worker
from experiments.pool.identity import RESULTS
from experiments.pool.pool import Job
from spdf_jax import files
from spdf_jax import training
from spdf_jax.costs.flops import training_flops
from spdf_jax.costs.plan_costs import describe_plan
from spdf_jax.sparsity import get_mask
from spdf_jax.sparsity.algorithms import resolve
from spdf_jax.training import initial_state
from tests.quickstart_runs import CACHE

pytestmark = pytest.mark.papers

FAIR, CONTEXT_64 = scales.FAIR, scales.CONTEXT_64
SCALE = dataclasses.replace(
    scales.SCALES['smoke'], claims=FAIR.claims,
    sizes={
        '': Size(16, (1e-2,)), 'small': Size(16, (1e-2,)),
        'large': Size(32, (1e-2,)),
    },
    tasks=dict.fromkeys(('task', 'hard'), Task('jsonl')),
)
SMALL_LLAMAS = dataclasses.replace(
    CONTEXT_64, corpus='', layers=1, length=48, tokens_per_parameter=20,
    sizes={
        name: dataclasses.replace(size, width=8 * size.n_heads)
        for name, size in CONTEXT_64.sizes.items()
    },
    tasks=dict.fromkeys(CONTEXT_64.tasks, Task('jsonl', steps=12)),
)
INIT, RIGL, SET = Arm('init'), Arm('rigl', 0.9), Arm('set', 0.9)
PRUNED, LONGER = Arm('pruned', 0.75), Arm('longer')
STATIC = scales.STATIC_75, scales.STATIC_90
KEPT = scales.tuned(scales.STATIC_75, sparse_tuning=True)


def entries_of(scale):
  claims = [CLAIMS[key] for key in scale.claims]
  arms = [arm for claim in claims for arm in claim.arms]
  return scale.entries(arms + arms_of_gates(scale, claims))


@pytest.fixture(scope='module')
def tasks(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tasks')
  for task in (*SCALE.tasks, *CONTEXT_64.tasks):
    (folder / task).mkdir()
    for split in ('train', 'validation', 'test'):
      files.write_atomically(folder / task / f'{split}.jsonl', ''.join(
          f'{{"context": "{i}", "target": "{split} {i}"}}\n' for i in range(96)
      ))
  return str(folder)


def run_of(arm, tasks, seed=1, scale=SCALE, number=0):
  grid = {e.arm: e.grid for e in entries_of(scale)}[arm]
  job = Job(arm, points(grid)[number], seed)
  config = create_config(job, scale, 'python-stdlib', tasks)
  config.data.cache_dir = str(CACHE)
  return training.Run.create(config)


def first_state(run):
  return initial_state.from_params(run.programs, run.programs.init_params())


def masks_of(arm, tasks, seed=1):
  mask = get_mask(first_state(run_of(arm, tasks, seed)).opt_state)
  return {
      jax.tree_util.keystr(path): np.asarray(m)
      for path, m in jax.tree_util.tree_leaves_with_path(mask)
  }


def test_masks_of_a_seed_are_nested_and_algorithms_start_from_them(tasks):
  masks = {
      arm: masks_of(arm, tasks)
      for arm in (scales.STATIC_50, *STATIC, RIGL, SET, scales.VARIABLE)
  }
  other = masks_of(scales.STATIC_75, tasks, seed=2)
  for path, half in masks[scales.STATIC_50].items():
    quarter, tenth = (masks[arm][path] for arm in STATIC)
    assert half.sum() == half.size // 2 and quarter.sum() == half.size // 4
    assert (half | ~quarter).all() and (quarter | ~tenth).all()
    for arm in (RIGL, SET, scales.VARIABLE):
      np.testing.assert_array_equal(masks[arm][path], tenth)
    assert (other[path] != quarter).any()


def test_arms_of_a_seed_read_the_same_batches(tasks):
  # Initial weights, too: G1 counts n-grams on what they would read.
  arms = (scales.DENSE, scales.STATIC_90, RIGL, scales.VARIABLE, INIT)
  runs = [run_of(arm, tasks) for arm in arms]
  assert len({run.plan.total_steps for run in runs}) == 1
  for step in (0, 3, SCALE.steps(scales.DENSE) - 1):
    first, *others = [run.programs.batch_at(step) for run in runs]
    for batch in others:
      np.testing.assert_array_equal(first.inputs, batch.inputs)
  other = run_of(scales.DENSE, tasks, seed=2).programs.batch_at(0)
  assert (other.inputs != runs[0].programs.batch_at(0).inputs).any()


@pytest.mark.parametrize('arm, kept', [
    (scales.tuned(scales.STATIC_75), 1), (KEPT, 0.25),
    (LONGER, 1),
], ids=lambda value: getattr(value, 'name', ''))
def test_only_sparse_fine_tuning_continues_with_zeros(tasks, arm, kept):
  for leaf in masks_of(arm, tasks).values():
    assert leaf.mean() == kept


def test_sparse_fine_tuning_keeps_the_zeros_of_pre_training(tasks):
  run = run_of(scales.STATIC_75, tasks)
  params = first_state(run).params
  tuning = run_of(KEPT, tasks)
  mask = get_mask(initial_state.from_params(tuning.programs, params).opt_state)
  for m, w in zip(jax.tree.leaves(mask), jax.tree.leaves(
      jax.tree.map(lambda m, w: None if m is None else w, mask, params,
                   is_leaf=lambda x: x is None)
  )):
    np.testing.assert_array_equal(m, w != 0)


def test_iterative_pruning_ends_at_its_sparsity_and_its_control_at_none(tasks):
  pruned, longer = (run_of(arm, tasks) for arm in (PRUNED, LONGER))
  assert pruned.plan.total_steps == longer.plan.total_steps
  sparsities = [p['sparsity'] for p in describe_plan(pruned, 'x')['phases']]
  assert sparsities == pytest.approx([0.5, 0.75], abs=0.01)
  rate = lambda run, step: float(run.plan.learning_rate(step))
  for step in range(pruned.plan.total_steps):
    assert rate(pruned, step) == rate(longer, step)
  # Both read the same batches, each round in an order of its own.
  start = pruned.plan.starts[1]
  inputs = lambda run, step: run.programs.batch_at(step).inputs
  for step in (0, start):
    np.testing.assert_array_equal(
        inputs(pruned, step), inputs(longer, step)
    )
  assert (inputs(pruned, 0) != inputs(pruned, start)).any()


def test_five_rounds_prune_the_same_share_of_what_is_left(tasks):
  scale = dataclasses.replace(SCALE, rounds=FAIR.rounds)
  run = run_of(PRUNED, tasks, scale=scale)
  sparsities = [p['sparsity'] for p in describe_plan(run, 'x')['phases']]
  expected = [1 - 0.25 ** (i / 5) for i in range(1, 6)]
  assert sparsities == pytest.approx(expected, abs=0.01)


def flops(run):
  return sum(
      phase['steps'] * phase['flops_per_step']
      for phase in describe_plan(run, 'x')['phases']
  )


def test_variable_spdf_costs_what_static_75_costs(tasks):
  # As many steps as the scale fair has at its main size: a multiple of 6.
  steps = FAIR.steps(scales.DENSE)
  read = steps * SCALE.batch_size * SCALE.length
  tokens = read / parameters(SCALE.model(''))
  scale = dataclasses.replace(SCALE, tokens_per_parameter=tokens)
  variable = run_of(scales.VARIABLE, tasks, scale=scale)
  static = run_of(scales.STATIC_75, tasks, scale=scale)
  assert variable.plan.total_steps == static.plan.total_steps == steps
  assert flops(variable) == pytest.approx(flops(static), rel=1e-3)


def test_the_dense_stage_continues_the_cosine_or_is_warmed_up_anew(tasks):
  continued = run_of(scales.VARIABLE, tasks, number=0).plan
  anew = run_of(scales.VARIABLE, tasks, number=1).plan
  start = continued.starts[1]
  rates = lambda plan: [
      float(plan.learning_rate(i)) for i in range(plan.total_steps)
  ]
  assert np.argmax(rates(continued)[start:]) == 0
  assert rates(anew)[start - 1] < 0.2 * max(rates(anew))
  assert max(rates(anew)[start:]) == pytest.approx(max(rates(anew)))


def test_phases_of_the_scale_fair_are_those_of_the_protocol():
  def phases(arm, **point):
    config = create_config(
        Job(arm, {'rate': 8e-3} | point, 1), FAIR, 'x', 'tasks'
    )
    return [config.phases[name] for name in config.phases.order]

  for arm in (scales.DENSE, scales.STATIC_75, RIGL, SET):
    phase, = phases(arm)
    assert (phase.batch_size, phase.length, phase.weight_decay) == (4, 256, 0.1)
    rate = phase.learning_rate
    assert (rate.schedule, rate.peak, rate.warmup, rate.final_fraction) == (
        'cosine', 8e-3, '303 steps', 0.1
    )
  for arm in (RIGL, SET):
    algorithm = resolve(phases(arm)[0].algorithm.to_dict(), 4549)
    assert algorithm['update_every'] == 227
    assert algorithm['update_until'] == 3411
    assert algorithm['sparsity'] == 0.9
  assert phases(scales.VARIABLE, stage=0.3)[1].learning_rate.peak == (
      pytest.approx(2.4e-3)
  )
  sparse, dense = phases(scales.VARIABLE, stage='continue')
  assert (sparse.duration, sparse.algorithm.sparsity) == ('3791 steps', 0.9)
  assert (dense.duration, dense.algorithm.name) == ('758 steps', 'dense')
  assert dense.learning_rate.schedule == 'continue'
  rounds = phases(PRUNED)
  assert [each.duration for each in rounds] == ['1137 steps'] * 5
  assert all(each.reset_moments and each.new_epoch for each in rounds)
  for arm in (scales.tuned(scales.DENSE), KEPT):
    phase, = phases(arm)
    assert (phase.duration, phase.weight_decay) == ('1200 steps', 0.01)
    assert phase.learning_rate.schedule == 'linear'
    assert phase.learning_rate.final_fraction == 0


@pytest.mark.parametrize('scale, arm', [
    (scale, entry.arm) for scale in (SCALE, SMALL_LLAMAS)
    for entry in entries_of(scale)
], ids=lambda value: getattr(value, 'name', ''))
def test_every_arm_of_every_claim_can_be_run(tasks, scale, arm):
  steps = scale.steps(arm)
  if arm.method in ROUNDS:
    steps = scale.rounds * round(scale.round_share * steps)
  assert run_of(arm, tasks, scale=scale).plan.total_steps == steps


@pytest.mark.parametrize('name', scales.SCALES)
def test_scales_have_what_their_claims_need(name):
  scale = scales.SCALES[name]
  entries = entries_of(scale)
  arms = [entry.arm for entry in entries]
  assert len({arm.name for arm in arms}) == len(set(arms))
  folders = {arm.folder for arm in arms if arm.rate_of is None}
  assert len(folders) == len({arm for arm in arms if arm.rate_of is None})
  assert len({(entry.arm, entry.seeds) for entry in entries}) == len(entries)
  for place, entry in enumerate(entries):
    for before in (entry.arm.parent, entry.arm.rate_of):
      assert before is None or before in arms[:place]
    config = create_config(
        Job(entry.arm, points(entry.grid)[-1], 1), scale, 'x', 'tasks'
    )
    rates = [
        config.phases[phase].learning_rate.get('peak')
        for phase in config.phases.order
    ]
    assert all(rate > 0 for rate in rates)
    assert entry.extend == (not scale.demonstration)
    assert name == 'smoke' or not entry.grid or len(entry.grid['rate']) >= 3


def test_claims_of_an_arm_that_no_block_trains_are_refused():
  scale = dataclasses.replace(CONTEXT_64, blocks=CONTEXT_64.blocks[:-1])
  with pytest.raises(ValueError, match='need dense_small-gradual, gmp-75, ini'):
    entries_of(scale)


def test_a_seed_may_not_both_tune_rates_and_decide_claims():
  with pytest.raises(ValueError, match=r'tuning_seeds has \[12\], which judge'):
    dataclasses.replace(CONTEXT_64, tuning_seeds=(12, 13))
  assert dataclasses.replace(CONTEXT_64, tuning_seeds=(13, 14))


def rows_of(scale, columns):
  """Returns the rows with so many columns of a scale's protocol."""
  text = (RESULTS / scale.protocol).read_text()
  rows = re.findall(r'^\| (.*) \|$', text, re.MULTILINE)
  return [
      cells for cells in (row.split(' | ') for row in rows)
      if len(cells) == columns
  ]


def test_a_run_measures_its_losses_on_its_own_text_and_on_others(
    tasks, tmp_path
):
  scale = dataclasses.replace(
      SCALE, tokens_per_parameter=0.2, tune_steps=8, tune_length=64,
      sizes={'': Size(16, (1e-2,), n_heads=2, rotary=True)},
      tasks={'task': Task('jsonl', 'task')},
  )
  texts = {'letters': bytes(range(97, 123)) * 40, 'zeros': b'\0' * 1000}
  run = pool_worker.Runner(
      scale, str(tmp_path), 'python-stdlib', tasks, texts
  )
  job = Job(scales.tuned(scales.DENSE), {'rate': 1e-2}, 1, Job(
      scales.DENSE, {'rate': 1e-2}, 1, Job(INIT, {}, 1)
  ))
  initial, dense = run(job.parent.parent), run(job.parent)
  assert 0 < initial['trigram/loss'] < initial['bigram/loss'] < 6
  assert dense['steps'] > 0 and dense['flops'] > 0
  # Sources of Python have letters, and no zeros.
  assert dense['letters/loss'] < dense['zeros/loss']
  # Masks that move have statistics of their units.
  moving = run(job.parent._replace(arm=RIGL))
  assert 0 < moving['sparsity/cut_off'] < 1 < moving['sparsity/row_variation']
  assert 'sparsity/cut_off' not in dense
  table = arm_report.format_units({RIGL: {1: moving}, scales.DENSE: {1: dense}})
  assert '| rigl-90 |' in table and 'dense' not in table
  outcome = run(job)
  assert outcome['distance/wd'] > 0 and 'letters/loss' not in outcome
  assert 0 < outcome['target/loss'] < math.log(257) + 1
  config = run.create_run(job).config
  assert config.model.sizes.max_length == config.phases[0].length == 64
  # A run that diverges at its first step has no checkpoint to be measured.
  diverged = run(job.parent._replace(point={'rate': 1e30}))
  for metric in ('validation/loss', 'letters/loss', 'zeros/loss'):
    assert math.isnan(diverged[metric])
  diverged = run(job._replace(point={'rate': 1e30}))
  for metric in ('target/loss', 'distance/wd'):
    assert math.isnan(diverged[metric])


def test_the_protocol_states_the_sizes_of_the_scale():
  rows = {row[0]: row[1:] for row in rows_of(FAIR, 5)}
  for row, size in (('small', 'small'), ('main', ''), ('large', 'large')):
    width, count, read, steps = rows[row]
    assert FAIR.sizes[size].width == int(width)
    number = parameters(FAIR.model(size))
    assert count == f'{number:,}' and read == f'{20 * number / 1e6:.2f}M'
    assert steps == f'{FAIR.steps(scales.sized(scales.DENSE, size)):,}'


def test_the_protocol_states_margins_and_seeds_of_primary_claims():
  rows = {row[0]: row[1:] for row in rows_of(FAIR, 4)}
  seeds = {entry.arm: entry.seeds for entry in entries_of(FAIR)}
  primary = [key for key in FAIR.claims if CLAIMS[key].family == PRIMARY]
  assert [key for key in rows if key in CLAIMS] == primary
  for key in primary:
    margins = [c.margin for c in CLAIMS[key].comparisons]
    assert rows[key][1] == ', '.join(f'{margin:g}' for margin in margins)
    assert int(rows[key][2]) == min(seeds[arm] for arm in CLAIMS[key].arms)


def test_protocol_8_states_its_sizes():
  rows = {row[0]: row[1:] for row in rows_of(CONTEXT_64, 7)}
  for name in CONTEXT_64.sizes:
    model, arm = CONTEXT_64.model(name), Arm('dense', size=name)
    *numbers, share = rows[name or 'main']
    assert numbers == [
        f'{number:,}' for number in (
            model.d_model, model.n_heads, model.d_ff, parameters(model),
            CONTEXT_64.steps(arm),
        )
    ]
    flops = [
        training_flops(CONTEXT_64.model(size), CONTEXT_64.length)
        for size in (name, CONTEXT_64.reference(name))
    ]
    assert float(share) == pytest.approx(flops[0] / flops[1], abs=5e-4)


@pytest.mark.parametrize('scale, number_of_seeds', [
    (CONTEXT_64, 12), (scales.GROWTH, 7),
])
def test_protocols_8_and_9_state_margins_and_power_of_all_claims(
    scale, number_of_seeds
):
  seeds = {entry.arm: entry.seeds for entry in entries_of(scale)}
  table = claim_report.format_power(
      [CLAIMS[key] for key in scale.claims], seeds
  )
  computed = {
      cells[0]: cells[1:]
      for line in table.splitlines()[2:] if (cells := line[2:-2].split(' | '))
  }
  stated = []
  for family, keys, _, *numbers in rows_of(scale, 8)[2:]:
    for key in keys.split(', '):
      claim = CLAIMS[key]
      stated.append(key)
      assert claim.family == family, key
      assert {seeds[arm] for arm in claim.arms} == {number_of_seeds}
      difference, margin, deviation, _, power, needed, _ = computed[key]
      if numbers[0] != 'as above':
        margin_, difference_, *rest = numbers
        assert float(margin_) == float(margin)
        assert float(difference_.replace('−', '-')) == float(difference)
        assert rest == [deviation, power, needed]
  assert stated == list(scale.claims)


def test_arms_of_growth_differ_in_their_growth_alone():
  configs = {
      method: create_config(
          Job(scales.grown(method, 0.8), {'rate': 1e-2}, 101), scales.GROWTH,
          'python-stdlib', '',
      ).to_dict()
      for method in (*scales.GROWTH_METHODS, 'rigl-skipped')
  }
  algorithms = {
      method: {
          name: value for name, value in
          config['phases']['pretrain'].pop('algorithm').items()
          if value is not None
      } for method, config in configs.items()
  }
  assert all(config == configs['static'] for config in configs.values())
  rigl, granet = algorithms['rigl'], algorithms['granet']
  assert algorithms['rigl-balanced'] == rigl | {'grow': 'balanced'}
  assert algorithms['rigl-skipped'] == rigl | {'skip_gradient_step': True}
  assert algorithms['granet-balanced'] == granet | {'grow': 'balanced'}
  assert granet['sparsity']['final'] == rigl['sparsity'] == 0.8
  assert 'grow' not in rigl and 'skip_gradient_step' not in granet


@pytest.mark.parametrize('size', ['', 'w96'])
def test_arms_of_equal_flops_differ_by_less_than_2_percent(size):
  cost = lambda arm: CONTEXT_64.steps(arm) * CONTEXT_64.step_flops(arm)
  sparse = scales.sized(scales.STATIC_75, size)
  small = Arm('dense', size=f'small-{size}'.rstrip('-'))
  for arm in (
      scales.at_flops_of(sparse), scales.sized(scales.VARIABLE, size),
      scales.EARLY_DENSE_96 if size else scales.EARLY_DENSE,
  ):
    assert cost(arm) == pytest.approx(cost(sparse), rel=1e-3)
  assert cost(small) == pytest.approx(cost(sparse), rel=0.02)
  assert CONTEXT_64.steps(small) == CONTEXT_64.steps(sparse)


def test_gradual_pruning_costs_what_its_smaller_dense_model_costs(tasks):
  run = run_of(scales.GRADUAL, tasks, scale=SMALL_LLAMAS)
  phase, = describe_plan(run, 'x')['phases']
  hidden = lambda share: training_flops(CONTEXT_64.model(''), 64, 1 - share)
  # Of a cubic rise, a quarter of the initial density is left on average.
  kept = 0.25 + 0.5 * (0.25 + 0.75 / 4) + 0.25 * 0.25
  small = training_flops(CONTEXT_64.model('small-gradual'), 64)
  assert small == pytest.approx(hidden(kept), rel=0.01)
  sparsities = [part['sparsity'] for part in phase['spans']]
  assert sparsities[0] == 0 and sparsities[-1] == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize('module', [
    module.name for package in (papers, pool)
    for module in pkgutil.iter_modules(package.__path__, f'{package.__name__}.')
])
def test_examples_in_docstrings_of_the_pool_run(module):
  imported = importlib.import_module(module)
  assert not doctest.testmod(imported).failed

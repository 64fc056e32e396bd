"""Arms of the claims: what they share, and what each one is."""

import jax
import numpy as np
import pytest
from quickstart_runs import CACHE
from quickstart_runs import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / 'experiments').is_dir(), reason='needs the checkout'
)

from experiments import arms as arms_lib  # noqa: E402
from experiments.claims import check_same  # noqa: E402
from experiments.scales import SCALES  # noqa: E402
from spdf_jax import training  # noqa: E402
from spdf_jax.analysis.paper_claims import CLAIMS  # noqa: E402
from spdf_jax.analysis.plan import describe_plan  # noqa: E402
from spdf_jax.analysis.pool import Job  # noqa: E402
from spdf_jax.analysis.sweeps import points  # noqa: E402
from spdf_jax.sparsity import get_mask  # noqa: E402
from spdf_jax.training.metrics import write_atomically  # noqa: E402

SCALE = SCALES['smoke']._replace(
    claims=tuple(CLAIMS), widths={'': 16, '_small': 16, '_large': 32},
    tasks=dict.fromkeys(('task', 'hard', 'tenth'), ('jsonl', '', 1)),
)


@pytest.fixture(scope='module')
def tasks(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tasks')
  for task in SCALE.tasks:
    (folder / task).mkdir()
    for split in ('train', 'validation', 'test'):
      write_atomically(folder / task / f'{split}.jsonl', ''.join(
          f'{{"context": "{i}", "target": "{split} {i}"}}\n' for i in range(96)
      ))
  return str(folder)


def recipe_of(name, tasks, seed=1, scale=SCALE, number=0):
  arm = {a.name: a for a in arms_lib.arms_of(scale.claims, scale)}[name]
  job = Job(name, points(arm.grid)[number], seed, '')
  config = arms_lib.create_config(job, scale, 'python-stdlib', tasks)
  config.data.cache_dir = str(CACHE)
  return training.create_recipe(config)


def masks_of(name, tasks, seed=1):
  recipe = recipe_of(name, tasks, seed)
  mask = get_mask(recipe.state_from(recipe.init_params()).opt_state)
  return {
      jax.tree_util.keystr(path): np.asarray(m)
      for path, m in jax.tree_util.tree_leaves_with_path(mask)
  }


def test_masks_of_a_seed_are_nested_and_algorithms_start_from_them(tasks):
  masks = {
      name: masks_of(name, tasks) for name in
      ('static-50', 'static-75', 'static-90', 'rigl-90', 'set-90',
       'variable-split')
  }
  other = masks_of('static-75', tasks, seed=2)
  for path, half in masks['static-50'].items():
    quarter, tenth = masks['static-75'][path], masks['static-90'][path]
    assert half.sum() == half.size // 2 and quarter.sum() == half.size // 4
    assert (half | ~quarter).all() and (quarter | ~tenth).all()
    for name in ('rigl-90', 'set-90', 'variable-split'):
      np.testing.assert_array_equal(masks[name][path], tenth)
    assert (other[path] != quarter).any()


def test_arms_of_a_seed_read_the_same_batches(tasks):
  names = ('dense', 'static-90', 'rigl-90', 'variable-split')
  recipes = [recipe_of(name, tasks) for name in names]
  for step in (0, 3, SCALE.steps - 1):
    first, *others = [recipe.batch_at(step) for recipe in recipes]
    for batch in others:
      np.testing.assert_array_equal(first.inputs, batch.inputs)
  other = recipe_of('dense', tasks, seed=2).batch_at(0)
  assert (other.inputs != recipes[0].batch_at(0).inputs).any()


@pytest.mark.parametrize('name, kept', [
    ('dense+task', 1), ('static-75+task', 1), ('static-75+task-sparse', 0.25),
    ('variable-split+task', 1), ('longer', 1),
])
def test_what_goes_on_densely_has_all_weights(tasks, name, kept):
  for leaf in masks_of(name, tasks).values():
    assert leaf.mean() == kept


def test_sparse_fine_tuning_keeps_the_zeros_of_pre_training(tasks):
  recipe = recipe_of('static-75', tasks)
  params = recipe.state_from(recipe.init_params()).params
  tuned = recipe_of('static-75+task-sparse', tasks)
  mask = get_mask(tuned.state_from(params).opt_state)
  for m, w in zip(jax.tree.leaves(mask), jax.tree.leaves(
      jax.tree.map(lambda m, w: None if m is None else w, mask, params,
                   is_leaf=lambda x: x is None)
  )):
    np.testing.assert_array_equal(m, w != 0)


def test_iterative_pruning_ends_at_its_level_and_its_control_at_none(tasks):
  pruned, longer = (recipe_of(name, tasks) for name in ('pruned-75', 'longer'))
  assert pruned.plan.total_steps == longer.plan.total_steps
  levels = [p['sparsity'] for p in describe_plan(pruned, 'x')['phases']]
  assert levels == pytest.approx([0.5, 0.75], abs=0.01)
  assert masks_of('pruned-75', tasks)  # Pruned from the start.
  rate = lambda recipe, step: float(recipe.plan.learning_rate(step))
  for step in range(pruned.plan.total_steps):
    assert rate(pruned, step) == rate(longer, step)


def flops(recipe):
  return sum(
      phase['steps'] * phase['flops_per_step']
      for phase in describe_plan(recipe, 'x')['phases']
  )


def test_the_split_reading_costs_what_static_75_costs(tasks):
  scale = SCALE._replace(steps=1500)
  split = recipe_of('variable-split', tasks, scale=scale)
  static = recipe_of('static-75', tasks, scale=scale)
  assert flops(split) == pytest.approx(flops(static), rel=1e-3)
  assert split.plan.total_steps == static.plan.total_steps


def test_the_dense_stage_goes_on_or_is_warmed_up_anew(tasks):
  goes_on = recipe_of('variable-split', tasks, number=0).plan
  anew = recipe_of('variable-split', tasks, number=1).plan
  start = goes_on.starts[1]
  rates = lambda plan: [float(plan.learning_rate(i)) for i in range(60)]
  assert np.argmax(rates(goes_on)[start:]) == 0
  assert rates(anew)[start - 1] < 0.2 * max(rates(anew))
  assert max(rates(anew)[start:]) == pytest.approx(max(rates(anew)))


@pytest.mark.parametrize('name', [
    arm.name for arm in arms_lib.arms_of(SCALE.claims, SCALE)
])
def test_every_arm_of_every_claim_can_be_run(tasks, name):
  assert recipe_of(name, tasks).plan.total_steps


@pytest.mark.parametrize('scale', SCALES)
def test_scales_have_what_their_claims_need(scale):
  scale = SCALES[scale]
  listed = arms_lib.arms_of(scale.claims, scale)
  names = [arm.name for arm in listed]
  assert len(names) == len(set(names))
  for place, arm in enumerate(listed):
    assert not arm.parent or arm.parent in names[:place]
    config = arms_lib.create_config(
        Job(arm.name, points(arm.grid)[-1], 1, ''), scale, 'x', 'tasks'
    )
    rates = [
        config.phases[phase].learning_rate.get('peak')
        for phase in config.phases.order
    ]
    assert all(rate > 0 for rate in rates)


def test_a_pool_goes_on_with_its_own_scale_only(tmp_path):
  path = tmp_path / 'scale.json'
  check_same(path, SCALE, {'corpus': 'abc'})
  check_same(path, SCALE._replace(seeds=9, claims=('a',)), {'corpus': 'abc'})
  with pytest.raises(ValueError, match='steps differ; give another workdir'):
    check_same(path, SCALE._replace(steps=61), {'corpus': 'abc'})
  with pytest.raises(ValueError, match='data differ'):
    check_same(path, SCALE, {'corpus': 'abd'})

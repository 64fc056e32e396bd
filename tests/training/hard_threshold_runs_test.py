"""Phases of `hard_threshold`: counts, moments, restarts and refusals."""

import shutil

import jax
import numpy as np
import pytest

import spdf_jax as spdf
from spdf_jax.costs import plan_costs
from spdf_jax.sparsity import tracking
from spdf_jax.training.loop.loop import train
from spdf_jax.training.plan import planned_sparsities
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import DENSE
from tests.tiny_run import make_config
from tests.tiny_run import PHASE
from tests.tiny_run import run_of
from tests.tiny_run import static

RISE = dict(
    schedule='linear_schedule', init_value=0.0, end_value=0.75,
    transition_steps='50%',
)
RULE = dict(name='hard_threshold', sparsity=RISE, update_until='50%', least=1)
THRESHOLD = dict(
    phases=dict(
        order=['pretrain', 'continuation'],
        pretrain=PHASE | dict(duration='8 steps', algorithm=RULE),
        continuation=PHASE | dict(algorithm=DENSE),
    ),
)
GROUPS = [['*/wi/*', RULE], ['*/attn/*', RULE | {'least': 0}], ['*', DENSE]]


def make_run(**changes):
  return run_of(make_config(**THRESHOLD | changes))


def states(run, steps):
  """Returns the states after each of the first steps."""
  state, found = run.programs.first_state(), []
  for step in range(steps):
    program, state = run.programs.prepare_step(state, step)
    state, _ = program(
        jax.tree.map(lambda x: x.copy(), state),
        run.programs.device_batch_at(step),
    )
    found.append(jax.device_get(state))
  return found


@pytest.mark.parametrize('rule', ['one', 'groups'])
def test_each_step_has_the_planned_counts_and_dense_moments(rule):
  changes = {} if rule == 'one' else dict(
      phases__pretrain__algorithm=dict(name='partition', groups=GROUPS)
  )
  run = make_run(**changes)
  programs, plan = run.programs, run.programs.plan
  assert programs.storage == 'dense' and plan.update_steps.size == 9
  for step, state in enumerate(states(run, 10)):
    spdf.check_zeros(state.params, state.opt_state)
    layers = spdf.summarize(state.opt_state, state.params).layers
    planned = planned_sparsities(plan, step, state.params, programs.model.where)
    assert {name: layer.sparsity for name, layer in layers.items()} == {
        name: layer.sparsity for name, layer in planned.items()
    }
    sparsities = {round(p.sparsity, 6) for p in planned.values()}
    wanted = {min(step / 4, 1) * 0.75} if step < 8 else {0.0}
    assert sparsities == (wanted if rule == 'one' else wanted | {0.0})
    nu = spdf.map_masked(
        lambda m, nu: bool((nu != 0).all()),
        spdf.get_mask(state.opt_state), moments(state).nu,
    )
    assert all(jax.tree.leaves(nu))
  statistics = tracking.mask_statistics(state.opt_state)
  assert float(statistics['exploration']) == 1.0


def moments(state):
  is_adam = lambda x: hasattr(x, 'nu')
  return next(filter(
      is_adam, jax.tree.leaves(state.opt_state, is_leaf=is_adam)
  ))


@pytest.mark.ci
def test_a_run_continues_from_a_checkpoint_bit_for_bit(tmp_path):
  whole = train(make_run().open(tmp_path / 'a'))
  copy = shutil.copytree(tmp_path / 'a', tmp_path / 'b')
  for folder in (copy / 'checkpoints').iterdir():
    if folder.name.isdigit() and int(folder.name) > 8:
      shutil.rmtree(folder)
  resumed = make_run().open(copy)
  assert int(resumed.state.step) == 8
  assert_same_arrays(whole, train(resumed))


def test_flops_count_dense_gradients_of_weights():
  run = make_run(phases__pretrain__algorithm=RULE | {'sparsity': 0.75})
  sparse, dense = (
      plan_costs.describe_plan(run, 'a')['phases'][0][name]
      for name in ('flops_per_step', 'dense_flops_per_step')
  )
  static_run = run_of(make_config(
      phases__order=['pretrain'], phases__pretrain__algorithm=static(0.75)
  ))
  other = plan_costs.describe_plan(static_run, 'b')['phases'][0]
  # A third of the products, those of the gradients of weights, stay dense.
  saved = dense - other['flops_per_step']
  np.testing.assert_allclose(dense - sparse, saved * 2 / 3, rtol=1e-6)


@pytest.mark.parametrize('changes, message', [
    (dict(phases__continuation__algorithm=static(0.5)),
     "phase 'continuation' has the algorithm static, and another phase"),
    (dict(phases__pretrain__revive=0.5), 'has hard_threshold.*revive is 0.5'),
    (dict(phases__pretrain__initial_mask='snip'), "initial_mask is 'snip'"),
    (dict(phases__pretrain__frozen=('head/*',)), 'frozen'),
    (dict(revival_warmup=3), 'revival_warmup is set.*has hard_threshold'),
    (dict(adapter=dict(rank=2, scale=1.0)), 'adapter is set.*hard_threshold'),
    (dict(phases__pretrain__algorithm=dict(
        name='partition', groups=[['*/wi/*', RULE], ['*', static(0.5)]],
    )), "phase 'pretrain' has the algorithm .*static"),
])
def test_unsupported_settings_of_hard_threshold_are_refused(changes, message):
  with pytest.raises(ValueError, match=message) as caught:
    make_run(**changes)
  assert '\n' not in str(caught.value) and str(caught.value).endswith('.')

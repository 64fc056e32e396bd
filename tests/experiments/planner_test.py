"""The planner agrees with an exhaustive search."""

import math
import re

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from configs import planned
from experiments.planner import machines
from experiments.planner import stages
from experiments.planner.stages import Stages
from experiments.wafer.run_costs import simulate_run
from spdf_jax.accelerator.wafer import create_device
from spdf_jax.costs.flops import training_flops
from spdf_jax.costs.plan_costs import describe_plan
from spdf_jax.models import PRESETS
from spdf_jax.training import Run
from tests import command

pytestmark = pytest.mark.ci

LEVELS = [0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]
XL = PRESETS['gpt3-xl']


def xl_flops(sparsity):
  return 512 * training_flops(XL, 2048, sparsity)


@st.composite
def costs(draw):
  """Costs that fall with the sparsity, by a line or by steps, never to zero."""
  fixed = draw(st.floats(0.01, 5))
  slope = draw(st.floats(0, 5))
  stairs = draw(st.booleans())
  rounded = lambda s: math.floor(8 * s) / 8 if stairs else s
  return lambda sparsity: fixed + slope * (1 - rounded(sparsity))


@given(costs(), st.integers(1, 40), st.floats(0.05, 1.2), st.lists(
    st.sampled_from(LEVELS), min_size=1, unique=True,
))
@settings(deadline=None, max_examples=60)
def test_plans_equal_those_of_an_exhaustive_search(
    cost, steps, share, sparsities
):
  sparsities = sorted(sparsities)
  budget = share * steps * cost(0.0)
  fits = lambda total: total <= budget * (1 + 1e-9)
  try:
    plans = stages.plan_stages(cost, steps, budget, sparsities)
  except stages.OutOfBudget as error:
    assert error.least == steps * cost(sparsities[-1]) > budget
    return
  if fits(steps * cost(0.0)):
    assert plans == [Stages('dense', 0.0, 0, steps)]
    return
  static, *variable = plans
  grid = range(round(sparsities[-1] * 10_000) + 1)
  least = next(k for k in grid if fits(steps * cost(k / 10_000)))
  assert static == Stages('static', least / 10_000, steps, 0)
  expected = []
  for sparsity in sparsities:
    paid = [
        n for n in range(1, steps)
        if fits((steps - n) * cost(sparsity) + n * cost(0.0))
    ]
    if paid:
      expected.append(Stages('variable', sparsity, steps - paid[-1], paid[-1]))
  assert variable == expected


@given(costs(), st.integers(2, 40), st.floats(0.3, 0.99), st.floats(0, 1))
@settings(deadline=None, max_examples=60)
def test_the_chosen_plan_has_the_dense_share_or_the_longest_dense_stage(
    cost, steps, part, share
):
  try:
    plans = stages.plan_stages(cost, steps, part * steps * cost(0.0), LEVELS)
  except stages.OutOfBudget:
    return
  chosen = stages.choose(plans, share)
  assert chosen in plans
  if chosen.dense_steps + 1 > share * steps:
    assert not any(
        p.sparsity < chosen.sparsity and p.dense_steps + 1 > share * steps
        for p in plans
    )
  else:
    assert chosen.dense_steps == max(p.dense_steps for p in plans)


def test_the_flops_of_static_75_percent_yield_the_static_and_variable_plan():
  steps = 24_796
  plans = stages.plan_stages(xl_flops, steps, steps * xl_flops(0.75), LEVELS)
  assert plans[0] == Stages('static', 0.75, steps, 0)
  chosen = stages.choose(plans, 1 / 6)
  # The post's split reading: 5/6 at 90 %, 1/6 dense.
  assert chosen == Stages('variable', 0.9, steps - steps // 6, steps // 6)


def test_a_budget_for_dense_training_gives_the_dense_plan_alone():
  plans = stages.plan_stages(xl_flops, 100, 101 * xl_flops(0), LEVELS)
  assert plans == [Stages('dense', 0.0, 0, 100)]
  assert stages.choose(plans, 1 / 6) == plans[0]


@pytest.mark.parametrize('steps, budget, sparsities, message', [
    (0, 1.0, [0.5], 'steps is 0'), (1, math.nan, [0.5], 'budget is nan'),
    (1, 1.0, [0.9, 0.5], 'give rising'),
    (9, 1e-3, [0.5], 'budget is 0.001, and at least 4.5 is needed'),
])
def test_arguments_out_of_range_are_refused(steps, budget, sparsities, message):
  with pytest.raises(ValueError, match=message):
    stages.plan_stages(lambda s: 1 - s, steps, budget, sparsities)
  with pytest.raises(ValueError, match='dense_share is 2'):
    stages.choose([Stages('static', 0.5, 9, 0)], 2)


@pytest.mark.parametrize('model', ['gpt-mini', 'gpt2-small', 'llama-1.3b'])
def test_the_planned_config_takes_the_flops_that_were_planned(model):
  plan = Stages('variable', 0.9, 300, 60)
  config = planned.get_config(f'model={model},sparsity=0.9,sparse=300,dense=60')
  config.phases.pretrain.learning_rate.warmup = '50 steps'
  run = Run.create(config, planning=True)
  shape = run.model.config
  phase = run.plan.phases[0]
  flops = lambda sparsity: phase.batch_size * training_flops(
      shape, phase.length, sparsity
  )
  total = sum(
      p['steps'] * p['flops_per_step']
      for p in describe_plan(run, 'plan')['phases']
  )
  # In the first step of a dense stage only the gradients of weights are dense:
  # the other two products still skip zeros.
  spared = 2 / 3 * (flops(0.0) - flops(0.9))
  assert total == pytest.approx(plan.total(flops) - spared, rel=1e-4)


def run_at(sparsity):
  config = planned.get_config(f'model=gpt-mini,sparsity={sparsity},sparse=100')
  return Run.create(config, planning=True)


@pytest.mark.slow
def test_steps_on_the_wafer_take_what_a_simulated_recipe_takes():
  seconds = machines.step_seconds(run_at, 'cs2', 2, [0.5, 0.75])
  phase, = simulate_run(run_at(0.75), create_device('cs2'), 2).phases
  assert 100 * seconds(0.75) == pytest.approx(phase.seconds, rel=1e-3)
  assert 100 * seconds(0.0) == pytest.approx(phase.dense_seconds)
  assert seconds(0.5) >= seconds(0.75)


def test_zeros_save_no_time_on_gpus_and_four_gpus_take_a_quarter():
  one = machines.step_seconds(run_at, 'h100', 1, [0.9])
  four = machines.step_seconds(run_at, 'h100', 4, [0.9])
  assert one(0.9) == one(0.0) == pytest.approx(4 * four(0.5))


def test_unknown_machines_and_counts_are_refused():
  with pytest.raises(ValueError, match="machine 'cs4' is unknown"):
    machines.step_seconds(run_at, 'cs4', 1, [0.5])
  with pytest.raises(ValueError, match='count is 2; give 1 for the CPU'):
    machines.step_seconds(run_at, 'cpu', 2, [0.5])


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6))
@settings(deadline=None)
def test_interpolated_seconds_never_rise_with_the_sparsity(values):
  sparsities = [i / 10 for i in range(len(values))]
  seconds = machines.interpolated(dict(zip(sparsities, values)))
  curve = [seconds(i / 100) for i in range(100)]
  assert all(b <= a for a, b in zip(curve, curve[1:]))
  assert seconds(0.0) == values[0] and seconds(0.99) == min(values)


def call(*arguments):
  done = command.run('plan', *arguments)
  return done.status, done.output + done.log


def test_the_command_prints_plans_and_a_command_that_can_be_planned():
  code, output = call('--model=gpt3-xl', '--tokens=26e9', '--flops=9.476e19')
  assert code == 0, output
  assert re.search(r'static +75.0% +24,796 \(26,000,490,496\)', output)
  chosen, = re.findall(r'(variable|static) +([0-9.]+)%.* \*\n', output)
  assert chosen == ('variable', '90.0')
  argument = re.search(r'--config=configs/planned.py:(\S+)', output)[1]
  run = Run.create(planned.get_config(argument), planning=True)
  assert run.plan.total_steps == 24_796


def test_a_budget_that_is_too_small_is_refused_with_the_least():
  code, output = call('--model=gpt3-xl', '--tokens=26e9', '--flops=1e19')
  least = 24_796 * xl_flops(0.95)
  assert code == 1
  assert f'flops is 1e+19, and at least {least:.4g} FLOPs are ne' in output


@pytest.mark.parametrize('flag, message', [
    ('--sparsities=', 'sparsities is []; give rising fractions of zeros'),
    ('--sparsities=0.5,0.5', 'sparsities is [0.5, 0.5]; give rising'),
    ('--sparsities=0.5,nan,0.9', 'sparsities is [0.5, nan, 0.9]; give ri'),
    ('--dense_share=20', 'dense_share is 20.0; give the share of all'),
    ('--hours=-1', 'hours is -1.0; it must be positive and finite.'),
])
def test_flags_out_of_range_are_refused_before_steps_are_measured(
    monkeypatch, flag, message
):
  def measure(*_):
    raise AssertionError('Steps are measured.')

  monkeypatch.setattr(machines, 'step_seconds', measure)
  code, output = call(
      '--model=gpt-mini', '--hours=1', '--machine=cpu', flag
  )
  assert code == 1 and message in output
  assert len(output.splitlines()) == 1


@pytest.mark.slow
def test_steps_are_measured_on_this_cpu():
  code, output = call(
      '--model=gpt-mini', '--hours=10', '--machine=cpu', '--sparsities=0.9'
  )
  assert code == 0, output
  assert re.search(r'dense +0.0% .* (s|min|h) \*\n', output)

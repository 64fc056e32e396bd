"""Costs of runs on the modeled wafer: phases, batches, inference, text."""

import dataclasses
import re

import pytest

from configs import spdf as spdf_config
from experiments.wafer import report
from experiments.wafer import run_costs
from experiments.wafer.training_step import training_step
from spdf_jax.accelerator import wafer
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.models import PRESETS
from spdf_jax.training import Run
from tests import quickstart_runs

pytestmark = pytest.mark.ci

DEVICE = wafer.create_device('cs2')
UPDATES = dict(update_every=3, update_until=12)
RIGL = dict(name='rigl', sparsity=0.75, **UPDATES)


def make_run(algorithm=None, **changes):
  config = quickstart_runs.small_config(
      data__task='', phases__order=('pretrain', 'continuation'), **changes
  )
  if algorithm is not None:
    config.phases.pretrain.algorithm = algorithm
  return Run.create(config)


@pytest.fixture(scope='module')
def static():
  return make_run()


def test_an_estimate_is_the_sum_of_its_steps(static):
  estimate = run_costs.simulate_run(static, DEVICE)
  sparse, dense = estimate.phases
  assert [p.sparsity for p in estimate.phases] == pytest.approx([0.75, 0])
  assert sparse.seconds < sparse.dense_seconds
  assert dense.seconds == pytest.approx(dense.dense_seconds)
  assert sparse.dense_seconds == pytest.approx(dense.seconds)
  assert dense.host_seconds == pytest.approx(15 * DEVICE.step_seconds)
  assert estimate.seconds == sparse.seconds + dense.seconds
  # A mask made at a step is used from the next one on: one sparse step more.
  assert estimate.report.seconds * 15 == pytest.approx(sparse.seconds)
  low, high = estimate.energy
  assert 0 < low < high == estimate.seconds * DEVICE.power


def test_a_mask_update_takes_the_time_of_an_optimizer_step(static):
  updated = make_run(RIGL | dict(name='set'))  # SET needs no dense gradients.
  seconds = [
      run_costs.simulate_run(run, DEVICE).phases[0].seconds
      for run in (static, updated)
  ]
  # At steps 3, 6, 9 and 12; that of step 0 is the initial mask.
  assert seconds[1] - seconds[0] == pytest.approx(4 * DEVICE.step_seconds)


def test_traced_costs_are_close_to_the_closed_form(static):
  # Far from the calibration points: here elementwise operations weigh most.
  shape = static.model.config
  form = wafer.report_on(training_step(shape, 4, 32), DEVICE)
  traced = run_costs.simulate_run(static, DEVICE).phases[1].seconds / 15
  assert traced == pytest.approx(form.seconds, rel=0.01)


def test_the_selection_of_masks_has_no_products():
  def count(program):
    own = sum(isinstance(o.work, Product) for o in program.operations)
    inside = (p for branch in program.branches for p in branch.programs)
    return own + sum(map(count, inside))

  for algorithm in (RIGL, None):
    step = run_costs.trace_step(make_run(algorithm), 4, 32)
    # Three products per matrix, and three of the head.
    assert count(step) == 3 * 6 + 3


def test_batches_that_do_not_fit_are_split_into_micro_batches(static):
  config = static.model.config
  fits_one = run_costs.advise_batch(config, DEVICE, 32).working_set * 1.5
  small = dataclasses.replace(DEVICE, sram=fits_one)
  phase = run_costs.simulate_run(static, small).phases[0]
  assert phase.micro_batches == 4
  larger = run_costs.simulate_run(static, DEVICE).phases[0]
  assert phase.seconds > larger.seconds
  phase = run_costs.simulate_run(static, small, 4).phases[0]
  assert phase.micro_batches == 1
  tiny = dataclasses.replace(DEVICE, sram=fits_one / 2)
  with pytest.raises(ValueError, match='one sequence of 32 tokens'):
    run_costs.simulate_run(static, tiny)


@pytest.mark.parametrize(
    'preset, batch, stash', [
        ('cerebras-gpt-1.3b', 132, 26.6), ('cerebras-gpt-6.7b', 65, 34.9),
        ('cerebras-gpt-13b', 90, 75.5),
    ],
)
def test_micro_batches_that_the_vendor_published_fit(
    preset, batch, stash
):
  advice = run_costs.advise_batch(PRESETS[preset], DEVICE, 2048)
  assert batch <= advice.largest
  assert batch * advice.stash / 1e9 == pytest.approx(stash, abs=0.06)
  assert (batch <= advice.advised) == (stash < 40)


def test_inference_is_faster_with_zeros(static):
  decode = True
  estimates = run_costs.simulate_inference(
      static, DEVICE, batch_size=2, length=32, decode=decode
  )
  sparse, dense = estimates
  assert sparse.tokens == 2
  assert sparse.report.flops < dense.report.flops
  assert sparse.report.seconds < dense.report.seconds
  assert not sparse.report.unknown and not sparse.report.total.host
  assert 'sparsity 75.0%' in report.format_inference(estimates, decode=decode)


def test_the_text_of_an_estimate_has_phases_energy_and_sources(static):
  estimate = run_costs.simulate_run(static, DEVICE, 2)
  text = report.format_estimate(
      estimate, static, price=report.Rate(10, 'a price list'),
      carbon=report.Rate(0.4, 'a grid'),
  )
  for words in ('modeled, not measured', 'pretrain', '75.0%', 'a price list',
                'a grid', 'of CO2', 'kWh', 'micro-batch of 32 tokens'):
    assert words in text
  assert 'cost' not in report.format_estimate(estimate, static)


@pytest.mark.papers
def test_cost_energy_and_carbon_are_those_of_the_post_on_iterative_pruning():
  # Of GPT-3 175B it prints, in its introduction, the FLOPs, 1,287 MWh and 552
  # tons of 10,000 V100s in 15 days; in footnote 2 the cost of 1,024 A100s, 8
  # per instance, for 30 days at 32.77 $ per hour.
  config = spdf_config.get_config('model=gpt3-xl,sparsity=0')
  config.model.update(preset='gpt3-175b', remat='none')
  config.phases.pretrain.duration = '300B tokens'
  run = Run.create(config, planning=True)
  estimate = run_costs.simulate_run(run, DEVICE, 64)
  phase, = estimate.phases
  # The formula gives 3.23e23; the traced FLOPs include elementwise operations.
  assert phase.flops == pytest.approx(3.14e23, rel=0.05)

  def lines_of(systems, days, power, **rates):
    spent = dataclasses.replace(
        estimate, device=dataclasses.replace(DEVICE, power=power),
        systems=systems, phases=(phase._replace(seconds=days * 86_400),),
    )
    text = report.format_estimate(spent, run, **rates)
    return {
        name: [float(x.replace(',', '')) for x in re.findall(
            r'[0-9][0-9,.]*', line.partition('(')[0]
        )]
        for name, line in re.findall(
            r'^(energy|cost|carbon): (.*)$', text, re.M
        )
    }

  price = report.Rate(32.77, 'on demand')
  cost, = lines_of(1024 // 8, 30, DEVICE.power, price=price)['cost']
  assert f'${cost / 1e6:.2f}M' == '$3.02M'
  # Mean power of a GPU and emissions per kWh that the printed numbers imply.
  carbon = report.Rate(552 / 1287, 'implied')
  lines = lines_of(10_000, 15, 1287e6 / (10_000 * 15 * 24), carbon=carbon)
  low = phase.flops * DEVICE.energy_per_flop / 3.6e6
  assert lines['energy'] == pytest.approx([low, 1287e3], abs=0.5)  # kWh
  assert lines['carbon'][:2] == pytest.approx(
      [low * carbon.value, 552e3], abs=0.5  # kg
  )


@pytest.mark.process
def test_the_command_simulates_a_config_and_writes_files(tmp_path):
  child = quickstart_runs.start_command(
      'experiments.simulate', '--config=configs/quickstart.py', '--systems=4',
      f'--trace={tmp_path / "trace.json"}', '--figure=roofline',
      '--sensitivities',
      f'--out={tmp_path / "roofline.png"}', data__task='',
      phases__order='("pretrain", "continuation")',
  )
  output = quickstart_runs.finish(child)
  assert '4 x cs2 (default): modeled, not measured' in output
  assert 'step_seconds' in output and 'H100' in output
  assert (tmp_path / 'trace.json').exists()
  assert (tmp_path / 'roofline.png').stat().st_size > 10_000

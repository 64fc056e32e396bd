"""Sweeps and sensitivities agree with single reports."""

import jax
import numpy as np
import pytest

from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator.wafer import create_device
from spdf_jax.accelerator.wafer import report_on
from spdf_jax.accelerator.wafer import trace_program
from spdf_jax.accelerator.wafer.closed_form import GPT3_XL
from spdf_jax.accelerator.wafer.closed_form import training_step
from spdf_jax.accelerator.wafer.what_if import in_micro_batches
from spdf_jax.accelerator.wafer.what_if import sensitivities
from spdf_jax.accelerator.wafer.what_if import sweep_devices
from spdf_jax.accelerator.wafer.what_if import sweep_sparsities

DEVICE = create_device('cs2')
STEP = training_step(GPT3_XL, 132, 2048, 0.75)


def test_sweeps_are_the_points_one_by_one():
  sparsities = np.linspace(0, 0.95, 1000)
  found = sweep_sparsities(STEP, DEVICE, sparsities, systems=4)
  for i in (0, 400, 999):
    step = training_step(GPT3_XL, 132, 2048, float(sparsities[i]))
    exact = report_on(step, DEVICE, 4).seconds
    assert found[i] == pytest.approx(exact, rel=1e-4)
  dispatch = np.linspace(0, 4, 1000)
  seconds = sweep_devices(STEP, DEVICE, {'dispatch': dispatch})
  for i in (0, 999):
    changed = create_device('cs2', dispatch=float(dispatch[i]))
    exact = report_on(STEP, changed).seconds
    assert seconds[i] == pytest.approx(exact, rel=1e-4)
  assert (np.diff(seconds) >= -1e-6 * seconds[0]).all()


def test_sweeps_refuse_what_cannot_be():
  with pytest.raises(ValueError, match="did you mean 'clock'"):
    sweep_devices(STEP, DEVICE, {'clok': np.ones(3)})
  with pytest.raises(ValueError, match='equally many'):
    sweep_devices(STEP, DEVICE, {'clock': np.ones(3), 'sram': np.ones(2)})
  with pytest.raises(ValueError, match='below 1'):
    sweep_sparsities(STEP, DEVICE, np.linspace(0, 1, 3))
  with pytest.raises(ValueError, match='number is 0; give 1 micro-batch'):
    in_micro_batches(STEP, 0)


def test_a_sweep_of_a_program_whose_branch_is_not_known_is_refused():
  f = lambda x, i: jax.lax.cond(i > 0, lambda: x @ x, lambda: x @ (x @ x))
  program = trace_program(f)(np.ones((8, 8), np.float32), jax.ShapeDtypeStruct(
      (), np.int32
  ))
  with pytest.raises(ValueError, match='cond_0 takes a branch .* frequencies'):
    sweep_devices(program, DEVICE, {'clock': np.ones(2)})


def test_products_without_weights_can_be_swept():
  x, w = np.ones((8, 64), np.float32), np.ones((64, 64), np.float32)
  program = trace_program(sparse_matmul)(x, w, np.zeros((64, 64), bool))
  seconds = sweep_devices(program, DEVICE, {'clock': np.full(2, DEVICE.clock)})
  np.testing.assert_allclose(seconds, report_on(program, DEVICE).seconds, 1e-4)


@pytest.mark.parametrize('share', [0.995, 1.0])
def test_shares_are_changed_within_their_range(share):
  found = sensitivities(STEP, create_device('cs2', efficiency=share))
  assert found['efficiency'] < -0.5


def test_a_number_is_worth_what_a_change_of_it_shows():
  found = sensitivities(STEP, DEVICE)
  # All time is cycles of the clock but for I/O, latency and hosts.
  report = report_on(STEP, DEVICE)
  fixed = report.total.host + report.total.latency
  assert found['clock'] == pytest.approx(-(1 - fixed / report.cycles), abs=0.02)
  assert found['efficiency'] < -0.5 and found['dispatch'] > 0
  assert found['power'] == 0

"""Devices and the cost equations: golden tables, limits, sources."""

import dataclasses

import hypothesis
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from spdf_jax.accelerator.wafer.cost import cost_of
from spdf_jax.accelerator.wafer.cost import expected_imbalance
from spdf_jax.accelerator.wafer.device import create_device
from spdf_jax.accelerator.wafer.device import NUMBERS
from spdf_jax.accelerator.wafer.program import MaskProfile
from spdf_jax.accelerator.wafer.program import Product

# Speed-up of forward, dX and dW of 12288 x 12288 at 65 x 2048 tokens: a golden
# of this model, not a measurement. It changes with the equations in `cost`.
GOLDEN = {
    'ideal': (2, 3.03, 4, 5, 5.88, 7.14, 8.33, 9.09, 10),
    'optimistic': (1.98, 2.98, 3.93, 4.91, 5.76, 6.99, 8.13, 8.86, 9.74),
    'default': (1.93, 2.86, 3.70, 4.57, 5.31, 6.34, 7.28, 7.86, 8.55),
    'pessimistic': (1.87, 2.69, 3.42, 4.15, 4.75, 5.57, 6.29, 6.73, 7.24),
}
SPARSITIES = (0.5, 0.67, 0.75, 0.8, 0.83, 0.86, 0.88, 0.89, 0.9)
LAYER = Product(65 * 2048, 12288, 12288)


def layer_cycles(device, sparsity, layer=LAYER):
  forward = layer._replace(sparsity=sparsity)
  backward = forward._replace(
      inputs=forward.outputs, outputs=forward.inputs
  )
  sampled = forward._replace(sampled=True)
  return sum(cost_of(w, device).cycles for w in (forward, backward, sampled))


@pytest.mark.parametrize('band', GOLDEN)
def test_speedups_of_every_band_equal_the_recorded_ones(band):
  device = create_device('cs2', band).as_kernel()
  speedups = [
      layer_cycles(device, 0.0) / layer_cycles(device, s)
      for s in SPARSITIES
  ]
  np.testing.assert_allclose(speedups, GOLDEN[band], rtol=0.02)


def test_the_ideal_device_has_exactly_the_theoretical_speed_up():
  device = create_device('cs2', 'ideal')
  dense = layer_cycles(device, 0.0)
  for n in range(1, 11):
    ratio = dense / layer_cycles(device, 1 - 1 / n)
    assert ratio == pytest.approx(n, rel=1e-12)


@pytest.mark.parametrize(
    'columns, window, expected', [(768, 64, 1.309), (768, 4096, 1.037)]
)
def test_the_imbalance_formula_fits_random_masks(
    columns, window, expected
):
  mask = np.random.default_rng(0).random((12288, 4096)) < 0.1
  counted = MaskProfile(mask).imbalance(np.array([columns]), window)[0]
  formula = expected_imbalance(window * 16, 0.9, columns)
  assert counted == pytest.approx(expected, rel=0.01)
  assert formula == pytest.approx(counted, rel=0.01)


sizes = st.integers(1, 5000)


@hypothesis.given(
    tokens=st.integers(1, 300_000), inputs=sizes, outputs=sizes,
    first=st.floats(0, 0.99), second=st.floats(0, 0.99),
    sampled=st.booleans(),
    band=st.sampled_from(list(GOLDEN)),
    encoding=st.sampled_from(['wavelet', 'bitmap']),
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_more_zeros_never_cost_more_and_bounds_hold(
    tokens, inputs, outputs, first, second, sampled, band, encoding
):
  device = create_device('cs2', band, encoding=encoding)
  work = Product(tokens, inputs, outputs, sampled=sampled)
  costs = [
      cost_of(work._replace(sparsity=s), device)
      for s in sorted((first, second), reverse=True)
  ]
  assert costs[0].cycles <= costs[1].cycles * (1 + 1e-9)
  for cost in costs:
    assert cost.cycles >= max(cost.core, cost.fabric, cost.io)
    assert cost.flops + cost.skipped_flops == pytest.approx(
        2 * tokens * inputs * outputs
    )
    # No band is faster than its peak.
    seconds = (cost.cycles - cost.latency) / device.clock
    assert cost.flops <= device.peak_flops * seconds * (1 + 1e-9)


def test_a_crowded_mask_costs_more_than_a_balanced_one():
  device = create_device('cs2')
  crowded = np.zeros((1024, 1024), bool)
  crowded[:128] = True
  balanced = np.zeros((1024, 1024), bool)
  balanced[::8] = True
  cycles = [
      cost_of(
          Product(131072, 1024, 1024, 7 / 8, mask=MaskProfile(mask)), device
      ).cycles
      for mask in (crowded, balanced)
  ]
  assert cycles[0] > 3 * cycles[1]


def test_derivatives_of_costs_equal_finite_differences():
  device = create_device('cs2')

  def seconds(clock, dispatch):
    changed = dataclasses.replace(device, clock=clock, dispatch=dispatch)
    return cost_of(LAYER._replace(sparsity=0.75), changed).cycles / clock

  by_dispatch = jax.grad(seconds, 1)(device.clock, 1.0)
  step = 1e-3
  difference = (
      seconds(device.clock, 1 + step) - seconds(device.clock, 1 - step)
  ) / (2 * step)
  assert float(by_dispatch) == pytest.approx(difference, rel=1e-3)


def test_few_tokens_are_bound_by_streaming_and_gain_nothing_at_50_percent():
  device = create_device('cs2').as_kernel()
  few, many = (
      [cost_of(LAYER._replace(tokens=n, sparsity=s), device) for s in (0, 0.5)]
      for n in (30_000, 65 * 2048)
  )
  assert few[0].io > max(few[0].core, few[0].fabric)
  assert few[1].cycles == few[0].cycles  # An index for each weight.
  assert many[1].cycles < 0.6 * many[0].cycles
  bitmap = create_device('cs2', encoding='bitmap').as_kernel()
  half = LAYER._replace(tokens=30_000, sparsity=0.5)
  assert cost_of(half, bitmap).cycles < 0.6 * few[0].cycles


@pytest.mark.parametrize('name, band', [
    ('cs3', 'default'), *(('cs2', band) for band in GOLDEN),
])
def test_every_number_of_a_device_has_unit_grade_and_source(name, band):
  device = create_device(name, band)
  facts = dict(device.facts)
  assert set(facts) == set(NUMBERS)
  for field, fact in facts.items():
    assert getattr(device, field) == fact.value
    assert fact.unit and fact.grade in ('P', 'P2', 'C', 'K', 'A')
    assert len(fact.source) >= 5
    assert f'{field} ' in device.audit() and fact.source in device.audit()


@pytest.mark.parametrize(
    'name, petaflops', [('cs2', 5.78), ('cs3', 12.24)]
)
def test_peak_rates_equal_the_published_ones(name, petaflops):
  peak = create_device(name).peak_flops
  assert peak / 1e15 == pytest.approx(petaflops, rel=0.005)


@pytest.mark.parametrize('name, changes, message', [
    ('cs4', {}, "'cs4' is unknown; did you mean"),
    ('cs2', dict(clok=1.0), "did you mean 'clock'"),
    ('cs2', dict(clock=float('nan')), 'clock is nan'),
    ('cs2', dict(overlap=1.5), 'overlap .* at most 1'),
    ('cs2', dict(encoding='bitmp'), "mean 'bitmap'"),
])
def test_unknown_names_and_numbers_out_of_range_are_refused(
    name, changes, message
):
  with pytest.raises(ValueError, match=message):
    create_device(name, **changes)

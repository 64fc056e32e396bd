"""Every number of a device has a source and a range."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from spdf_jax.accelerator.wafer.device import BANDS
from spdf_jax.accelerator.wafer.device import create_device
from spdf_jax.accelerator.wafer.device import NUMBERS
from spdf_jax.accelerator.wafer.device import PRESETS


@pytest.mark.parametrize('name, band', [
    *((name, 'default') for name in PRESETS), *(('cs2', b) for b in BANDS),
])
def test_every_number_has_unit_grade_and_source(name, band):
  device = create_device(name, band)
  facts = dict(device.facts)
  assert set(facts) == set(NUMBERS)
  for field, fact in facts.items():
    assert getattr(device, field) == fact.value
    assert fact.unit and fact.grade in ('P', 'P2', 'C', 'K', 'A')
    assert len(fact.source) >= 5
    assert f'{field} ' in device.audit() and fact.source in device.audit()


def test_a_changed_number_is_marked_as_set_by_the_caller():
  line = next(
      line for line in create_device('cs2', clock=1.1e9).audit().splitlines()
      if line.startswith('clock')
  )
  assert line.endswith('set by the caller')


@pytest.mark.parametrize(
    'name, petaflops', [('cs2', 5.78), ('cs3', 12.24)]
)
def test_peaks_are_the_printed_ones(name, petaflops):
  peak = create_device(name).peak_flops
  assert peak / 1e15 == pytest.approx(petaflops, rel=0.005)


@pytest.mark.parametrize(
    'make, message',
    [
        (lambda: create_device('cs4'), "'cs4' is unknown; did you mean"),
        (lambda: create_device('cs2', clok=1.0), "did you mean 'clock'"),
        (lambda: create_device('cs2', clock=0.0), 'clock is 0.0; .* above 0'),
        (lambda: create_device('cs2', latency=-1.0), 'latency .* at least 0'),
        (lambda: create_device('cs2', clock=float('nan')), 'clock is nan'),
        (lambda: create_device('cs2', overlap=1.5), 'overlap .* at most 1'),
        (lambda: create_device('cs2', encoding='bitmp'), "mean 'bitmap'"),
    ],
)
def test_unknown_names_and_numbers_out_of_range_are_refused(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_a_device_is_a_tree_of_its_numbers():
  device = create_device('cs2')
  assert jax.tree.structure(device).num_leaves == len(NUMBERS)
  clocks = jax.vmap(
      lambda clock: dataclasses.replace(device, clock=clock).peak_flops
  )(jnp.array([1.0, 2.0]))
  assert clocks.tolist() == [2 * 850_000 * 4, 4 * 850_000 * 4]

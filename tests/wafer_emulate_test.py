"""The emulated grid agrees with the reference lowering and the cost rule."""

import hypothesis
from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.accelerator import reference
from spdf_jax.accelerator.wafer.cost import product_on_grid
from spdf_jax.accelerator.wafer.device import create_device
from spdf_jax.accelerator.wafer.emulate import emulate
from spdf_jax.accelerator.wafer.emulate import emulate_sampled
from spdf_jax.accelerator.wafer.program import MaskProfile
from spdf_jax.accelerator.wafer.program import Product

GRIDS = dict(
    rows=st.integers(1, 3), columns=st.integers(1, 4),
    tokens=st.integers(1, 24), inputs=st.integers(2, 12),
    outputs=st.integers(4, 24), sparsity=st.floats(0, 0.95),
    band=st.sampled_from(['ideal', 'optimistic', 'default', 'pessimistic']),
    window=st.sampled_from([4, 8, 64]),
    encoding=st.sampled_from(['wavelet', 'bitmap']),
    seed=st.integers(0, 1000),
)


def arrays(tokens, inputs, outputs, sparsity, seed):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(tokens, inputs)).astype(np.float32)
  w = rng.normal(size=(inputs, outputs)).astype(np.float32)
  dy = rng.normal(size=(tokens, outputs)).astype(np.float32)
  return x, w, dy, rng.random((inputs, outputs)) >= sparsity


def rule_on_grid(tokens, mask, device, rows, columns, sampled):
  profile = MaskProfile(mask)
  work = Product(tokens, *mask.shape, profile.sparsity, sampled, profile)
  m, c = np.array([tokens / rows]), np.array([columns])
  return product_on_grid(work, device, m, c)


@pytest.mark.parametrize('sampled', [False, True])
@hypothesis.given(**GRIDS)
@hypothesis.settings(max_examples=60, deadline=None)
def test_the_grid_computes_the_reference_and_counts_what_the_rule_says(
    sampled, rows, columns, tokens, inputs, outputs, sparsity, band, window,
    encoding, seed,
):
  tokens, inputs = tokens * rows, inputs * columns
  x, w, dy, mask = arrays(tokens, inputs, outputs, sparsity, seed)
  # The real mask's imbalance is waited for in every band.
  device = create_device(
      'cs2', band, window=window, encoding=encoding, imbalance=1, latency=0
  ).as_kernel()
  options = dict(accumulation_dtype=jnp.float32, out_sharding=None)
  if sampled:
    found = emulate_sampled(x, dy, mask, device, rows=rows, columns=columns)
    expected = reference.sampled_matmul(x, dy, mask, **options)
    terms = np.abs(x.T) @ np.abs(dy)
  else:
    found = emulate(x, w, mask, device, rows=rows, columns=columns)
    expected = reference.sparse_matmul(
        x, w, mask, mask, transpose=False, **options
    )
    terms = np.abs(x) @ np.abs(w)
  # Two roundings of operands, one of a product, one at each hop.
  bound = (3 + rows + columns) * 2.0**-11 * terms + 1e-3
  assert (np.abs(found.output - np.asarray(expected)) <= bound).all()

  rule = rule_on_grid(tokens, mask, device, rows, columns, sampled)
  events = found.events
  assert events.nonzeros == mask.sum()
  assert 2 * events.multiply_adds == rule.flops
  assert events.hops * device.wavelet_bits / 8 == rule.fabric_bytes[0]
  assert events.streamed_bytes == pytest.approx(rule.streamed_bytes)
  compute = max(rule.core[0], rule.fabric[0])
  # The rule leaves out how long a wavelet takes to cross the grid.
  crossing = rows + columns
  assert events.cycles - crossing == pytest.approx(compute, rel=0.1)


def test_weights_off_the_mask_never_enter():
  x, w, _, mask = arrays(4, 6, 8, 0.5, 0)
  device = create_device('cs2')
  clean = emulate(x, w, mask, device, rows=2, columns=3)
  w[~mask] = np.nan
  found = emulate(x, w, mask, device, rows=2, columns=3)
  np.testing.assert_array_equal(found.output, clean.output)


def test_fewer_weights_take_fewer_cycles():
  x, w, _, _ = arrays(64, 64, 32, 0, 0)
  device = create_device('cs2')
  cycles = [
      emulate(
          x, w, np.arange(64)[:, None] % n == np.zeros(32), device,
          rows=1, columns=1,
      ).events.cycles
      for n in (1, 2, 4, 8)
  ]
  assert cycles == sorted(cycles, reverse=True)
  assert cycles[0] > 6 * cycles[3]


@pytest.mark.parametrize(
    'rows, columns, message',
    [(3, 1, 'rows is 3'), (1, 5, 'columns is 5'), (0, 1, 'rows is 0')],
)
def test_grids_that_do_not_divide_are_refused(rows, columns, message):
  x, w, _, mask = arrays(4, 6, 8, 0.5, 0)
  with pytest.raises(ValueError, match=message):
    emulate(x, w, mask, create_device('cs2'), rows=rows, columns=columns)


def test_shapes_that_do_not_fit_are_refused():
  x, w, dy, mask = arrays(4, 6, 8, 0.5, 0)
  with pytest.raises(ValueError, match=r'\(4, 6\), \(6, 8\), \(8, 6\)'):
    emulate(x, w, mask.T, create_device('cs2'), rows=1, columns=1)
  with pytest.raises(ValueError, match='give'):
    emulate_sampled(x, dy[:3], mask, create_device('cs2'), rows=1, columns=1)

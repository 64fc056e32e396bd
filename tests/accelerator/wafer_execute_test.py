"""The emulated wafer computes the reference's products and counts events."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator import wafer
from spdf_jax.accelerator.wafer.cost import product_on_grid
from spdf_jax.accelerator.wafer.device import create_device
from spdf_jax.accelerator.wafer.execute import CORNER
from spdf_jax.accelerator.wafer.execute import grid_of
from spdf_jax.accelerator.wafer.program import MaskProfile
from spdf_jax.accelerator.wafer.program import Product

HALF, SINGLE = 2.0**-11, 2.0**-24  # Unit roundoffs.
SUBNORMAL = 2.0**-25  # Largest rounding error below fp16's normal numbers.
DRAWS = 12  # of each shape
SHAPES = [(33, 24, 16, 64), (48, 7, 40, 256), (5, 64, 10, 96), (96, 16, 8, 12)]


def draw(rng, tokens, inputs, outputs):
  """Draws operands of many magnitudes, and two masks."""
  normal = lambda *shape: rng.normal(size=shape) * 10 ** rng.uniform(-3, 1)
  shapes = (tokens, inputs), (inputs, outputs), (tokens, outputs)
  arrays = [normal(*s).astype(np.float32) for s in (*shapes, *shapes[:2])]
  masks = [rng.random(shapes[1]) >= rng.choice([0, 0.5, 0.75, 0.9, 1])
           for _ in range(2)]
  return *arrays, *masks


@functools.partial(jax.jit, static_argnames='lowering')
def differentiated(x, w, dy, dx, dw, mask, grad_mask, lowering):
  """Returns a product, its gradients and its tangent."""
  f = lambda x, w: sparse_matmul(
      x, w, mask, grad_mask=grad_mask, lowering=lowering
  )
  y, transposed = jax.vjp(f, x, w)
  _, tangent = jax.jvp(f, (x, w), (dx, dw))
  return y, *transposed(dy), tangent


def exact(x, y, hops):
  """Returns a float64 product, and a bound of the emulation's error.

  Each term passes two roundings of operands and at most one at each hop to
  fp16, and fewer float32 roundings than there are terms and hops. Below the
  normal numbers an error is absolute instead.
  """
  x, y = np.float64(x), np.float64(y)
  terms = x.shape[-1]
  growth = (1 + HALF) ** (hops + 2) * (1 + SINGLE) ** (terms + hops)
  absolute = hops * SUBNORMAL + SUBNORMAL * (
      np.abs(x).sum(-1)[:, None] + np.abs(y).sum(0) + terms * SUBNORMAL
  )
  return x @ y, (growth - 1) * (np.abs(x) @ np.abs(y)) + growth * absolute


def check_case(rng, tokens, inputs, outputs, device):
  x, w, dy, dx, dw, mask, grad_mask = case = draw(rng, tokens, inputs, outputs)
  arrays = differentiated(*case, lowering=wafer.lowering(device))
  kept, dkept = np.where(mask, w, 0), np.where(grad_mask, dw, 0)
  grid = functools.partial(grid_of, device=device, sparsity=0.75)
  forward = grid(tokens, inputs, outputs).columns
  back = grid(tokens, outputs, inputs).columns
  rows = grid(tokens, inputs, outputs, sampled=True).rows
  tangents = exact(dx, kept, forward), exact(x, dkept, forward)
  gradient, of_gradient = exact(x.T, dy, rows)
  expected = [
      exact(x, kept, forward),
      exact(dy, kept.T, back),
      (grad_mask * gradient, grad_mask * of_gradient),
      tuple(a + b * (1 + SINGLE) for a, b in zip(*tangents)),
  ]
  for array, (value, bound) in zip(arrays, expected, strict=True):
    error = np.abs(np.float64(array) - value)
    assert (error <= bound + SINGLE * np.abs(value)).all()


@pytest.mark.parametrize('case', range(4))
def test_products_and_derivatives_are_within_the_bound_of_fp16(case):
  tokens, inputs, outputs, cores = SHAPES[case]
  rng = np.random.default_rng(case)
  device = dataclasses.replace(CORNER, cores=cores)
  for _ in range(DRAWS):
    check_case(rng, tokens, inputs, outputs, device)


def emulated(x, w, grid):
  """Multiplies core by core, in NumPy; returns the product and the hops."""
  hops = 0
  y = np.zeros((grid.tokens, grid.outputs), np.float16)
  ends = np.arange(grid.columns + 1) * grid.inputs // grid.columns
  for j in range(grid.outputs):
    for first in range(0, grid.tokens, grid.tokens_per_core):
      row = slice(first, min(first + grid.tokens_per_core, grid.tokens))
      for c in range(grid.columns):
        kept = [i for i in range(ends[c], ends[c + 1]) if w[i, j]]
        hops += len(kept)  # Each weight arrives from above.
        if c:  # Two partial sums travel in one wavelet.
          hops += -(-(row.stop - row.start) // 2)
        own = np.float32(y[row, j])
        for i in kept:
          own += np.float32(x[row, i]) * np.float32(w[i, j])
        y[row, j] = own.astype(np.float16)
  return y, hops


def emulated_gradient(x, dy, mask, grid):
  """Sums the gradient of weights up the rows of cores, and counts the hops."""
  hops = 0
  dw = np.zeros(mask.shape, np.float16)
  for first in range(0, grid.tokens, grid.tokens_per_core):
    row = slice(first, min(first + grid.tokens_per_core, grid.tokens))
    own = np.float32(x[row]).T @ np.float32(dy[row])
    dw = (np.float32(dw) + own).astype(np.float16)
    hops += 2 * mask.sum()  # Each weight arrives, and its gradient leaves.
    pairs = -(-(row.stop - row.start) // 2)  # Two values of dY in one wavelet.
    hops += pairs * (grid.columns - 1) * grid.outputs
  return np.where(mask, dw, 0), hops


@pytest.mark.parametrize('sizes', [(12, 8, 6, 16), (70, 5, 9, 50)])
def test_every_bit_and_hop_equals_a_core_by_core_emulation(sizes):
  tokens, inputs, outputs, cores = sizes
  device = dataclasses.replace(CORNER, cores=cores)
  rng = np.random.default_rng(0)
  # Sums of these integers are exact in float32, but not in fp16.
  x = rng.integers(-2047, 2048, (tokens, inputs)).astype(np.float32)
  w = rng.integers(1, 4, (inputs, outputs)).astype(np.float32)
  dy = rng.integers(-3, 4, (tokens, outputs)).astype(np.float32)
  mask = rng.random(w.shape) < 0.5
  f = lambda w: sparse_matmul(x, w, mask, lowering=wafer.lowering(device))
  with wafer.record() as events:
    y, transposed = jax.vjp(f, w)
    dw, = jax.block_until_ready(transposed(dy))
  forward, backward = events
  kept = np.where(mask, w, 0)
  for actual, event, (expected, hops), rounded in (
      (y, forward, emulated(x, kept, forward.grid), x @ kept),
      (dw, backward, emulated_gradient(x, dy, mask, backward.grid),
       mask * (x.T @ dy)),
  ):
    np.testing.assert_array_equal(actual, expected)
    assert (np.asarray(actual) != rounded).any()
    assert event.hops == hops
    assert event.nonzeros == mask.sum()
    assert event.multiply_adds == tokens * mask.sum()
  assert forward.grid.columns > 2 and backward.grid.rows > 2


@pytest.mark.parametrize('encoding', ['wavelet', 'bitmap'])
def test_counts_equal_those_of_the_cost_rule(encoding):
  tokens, inputs, outputs = 64, 32, 48
  device = create_device('cs2', cores=64, window=16, encoding=encoding)
  rng = np.random.default_rng(1)
  x, w, dy, *_ = draw(rng, tokens, inputs, outputs)
  mask = rng.random(w.shape) < rng.random((inputs, 1))  # Uneven loads.
  lowering = wafer.lowering(device)
  f = lambda w: sparse_matmul(x, w, mask, lowering=lowering)
  with wafer.record() as events:
    jax.block_until_ready(jax.vjp(f, w)[1](dy))
  assert [e.kind for e in events] == ['forward', 'sampled']
  for event in events:
    check_counts(event, mask, device)


def check_counts(event, mask, device):
  profile = MaskProfile(mask)
  work = Product(
      event.grid.tokens, *mask.shape, profile.sparsity,
      event.kind == 'sampled', profile,
  )
  m, columns = event.grid.tokens_per_core, event.grid.columns
  rule = product_on_grid(work, device, np.array([m]), np.array([columns]))
  assert event.nonzeros == mask.sum()
  assert 2 * event.multiply_adds == rule.flops
  assert event.hops * device.wavelet_bits / 8 == rule.fabric_bytes[0]
  assert event.streamed_bytes == pytest.approx(rule.streamed_bytes)
  assert event.core == pytest.approx(rule.core[0], rel=1e-9)
  # The rule applies the cores' imbalance to the links.
  assert event.fabric == pytest.approx(rule.fabric[0], rel=0.1)
  # The rule leaves out how long a wavelet takes to cross the grid.
  crossing = event.grid.rows + event.grid.columns
  assert event.cycles - crossing == pytest.approx(rule.cycles[0], rel=0.02)


def test_layers_are_named_and_counted_in_scans_and_compiled_programs():
  ws = np.ones((3, 8, 8), np.float32)
  masks = np.arange(3 * 64).reshape(ws.shape) % np.array([[[2]], [[3]], [[4]]])
  masks = masks == 0

  @jax.jit
  def loss(ws, masks):
    def layer(x, w_mask):
      return sparse_matmul(x, *w_mask, lowering='wafer', layer='ffn'), None
    return jax.lax.scan(layer, jnp.ones((4, 8)), (ws, masks))[0].sum()

  gradient = jax.jit(jax.grad(loss))
  jax.block_until_ready(gradient(ws, masks))  # Compiles outside of a record.
  with wafer.record() as events, wafer.record() as twice:
    jax.block_until_ready(gradient(ws, masks))
  assert events == twice and {e.layer for e in events} == {'ffn'}
  products = sorted((e.kind, e.nonzeros) for e in events)
  counts = masks.sum((1, 2)).tolist()
  kinds = 'forward', 'sampled', 'transposed'
  assert products == sorted((kind, n) for kind in kinds for n in counts)


def test_pruned_weights_do_not_reach_the_emulated_product():
  x, w = np.ones((4, 6), np.float32), np.ones((6, 8), np.float32)
  mask = np.arange(48).reshape(w.shape) % 3 == 0
  w[~mask] = np.nan
  y = sparse_matmul(x, w, mask, lowering='wafer')
  np.testing.assert_array_equal(y, np.tile(mask.sum(0), (4, 1)))


def test_operands_and_partial_sums_are_rounded_to_fp16_or_not_at_all():
  x, w = jnp.array([[2048.0, 1 + 2**-12]]), jnp.ones((2, 1))
  two = create_device('cs2', cores=2)
  wide = dataclasses.replace(two, value_bits=32)
  actual = [
      jax.jit(functools.partial(
          sparse_matmul, lowering=wafer.lowering(device)
      ))(x, w, w > 0).item()
      for device in (two, wide)
  ]
  assert actual == [2048, 2049 + 2**-12]


def test_an_input_that_overflows_is_infinite():
  cores = 3
  device = create_device('cs2', cores=cores)
  x, w = jnp.array([[1e5, 1, 1, 1, 1]]), jnp.ones((5, 2))
  with wafer.record() as events:
    y = jax.block_until_ready(
        sparse_matmul(x, w, w > 0, lowering=wafer.lowering(device))
    )
  assert events[0].grid.columns == cores
  np.testing.assert_array_equal(y, np.full((1, 2), np.inf))


def test_a_device_has_one_lowering_and_unsupported_numbers_are_refused():
  assert wafer.lowering(create_device('cs2', cores=1024)) == 'wafer'
  other = [wafer.lowering(create_device('cs3', cores=16)) for _ in range(2)]
  assert other[0] == other[1] != 'wafer'
  with pytest.raises(ValueError, match='value_bits .* is 8; create an emul'):
    wafer.lowering(create_device('cs2', value_bits=8))
  for name in ('cores', 'window'):
    with pytest.raises(ValueError, match=f'{name} of the device is 0.5; '):
      wafer.lowering(create_device('cs2', **{name: 0.5}))

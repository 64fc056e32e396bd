"""Masks of whole blocks have kernels, and every sum one order.

The oracle is NumPy in float64. Other processors emulate the tiles of AMX: child
processes build the kernels with `emulated_tiles.h` in place of the intrinsics.
"""

import hashlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax import packing
from spdf_jax.accelerator import NATIVE
from spdf_jax.accelerator import native
from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator.native import library
from tests.accelerator.native_test import ROUNDING
from tests.accelerator.native_test import with_dtypes
from tests.child import run_python

pytestmark = pytest.mark.skipif(
    not native.is_available(), reason='there are no kernels here'
)

SIDE = 32
IMPORT = 'from tests.accelerator import native_blocks_test as test'
EMULATION = pathlib.Path(__file__).parent / 'emulated_tiles.h'


def wide(a):
  return np.asarray(a).astype(np.float64)


def draw_blocks(rng, rows, columns, sparsity):
  kept = rng.random((rows // SIDE, columns // SIDE)) >= sparsity
  if rng.random() < 0.3:
    kept[:, rng.integers(kept.shape[1])] = False
  if rng.random() < 0.3:
    kept[rng.integers(kept.shape[0])] = False
  return np.kron(kept, np.ones((SIDE, SIDE), bool))


class Draw:
  """Operands and masks, drawn from a seed."""

  def __init__(
      self, seed, tokens=None, stack=None, dtype='bfloat16', shape=None
  ):
    rng = np.random.default_rng(seed)
    self.tokens = tokens or int(rng.integers(1, 301))
    inputs, outputs = SIDE * rng.integers(1, 8, 2) if shape is None else shape
    sparsity = rng.choice([0.0, 0.4, 0.6, 0.75, 0.9, 1.0])
    self.stack = int(rng.choice([1, 1, 3])) if stack is None else stack
    draw = lambda *shape: jnp.asarray(
        rng.normal(size=(self.stack, *shape)), dtype
    )
    blocks = lambda: np.stack([
        draw_blocks(rng, inputs, outputs, sparsity) for _ in range(self.stack)
    ])
    self.mask = blocks()
    self.x, self.dy = draw(self.tokens, inputs), draw(self.tokens, outputs)
    self.w = jnp.where(self.mask, draw(inputs, outputs), jnp.nan)
    self.grad_mask = {
        'kept': lambda: self.mask,
        'equal': self.mask.copy,
        'all': lambda: np.full_like(self.mask, True),
        'other blocks': blocks,
        'other entries': lambda: rng.random(self.mask.shape) < 0.5,
    }[rng.choice(['kept', 'equal', 'all', 'other blocks', 'other entries'])]()


def results(draw):
  """Computes y, dx and dw, then both gradients alone, and packed."""
  same = draw.grad_mask is draw.mask

  def of_one(x, w, dy, mask, grad_mask):
    f = lambda x, w: sparse_matmul(
        x, w, mask, grad_mask=None if same else grad_mask, lowering=NATIVE
    )
    y, pullback = jax.vjp(f, x, w)
    dx, dw = pullback(dy)
    (dx_alone,) = jax.vjp(lambda x: f(x, w), x)[1](dy)
    (dw_alone,) = jax.vjp(lambda w: f(x, w), w)[1](dy)
    packed = packing.pack_mask(mask)
    values = packing.gather_kept(w, packed, w.size)
    g = lambda x, values: sparse_matmul(x, values, packed, lowering=NATIVE)
    y_packed, pullback = jax.vjp(g, x, values)
    dx_packed, dvalues = pullback(dy)
    (dx_packed_alone,) = jax.vjp(lambda x: g(x, values), x)[1](dy)
    (dvalues_alone,) = jax.vjp(lambda v: g(x, v), values)[1](dy)
    return (
        (y, dx, dw), (dx_alone, dw_alone), (y_packed, dx_packed, dvalues),
        (dx_packed_alone, dvalues_alone),
    )

  f = jax.jit(jax.vmap(of_one))
  return f(draw.x, draw.w, draw.dy, draw.mask, draw.grad_mask)


def assert_rounded(actual, left, right, mask=True):
  """Compares with left @ right, to the bound of sums of floats.

  Products of two bfloat16 are exact in float32; of floats, they may be rounded.
  A product takes part in at most one addition per term and, with tiles, two per
  block of 32 terms, so the error of a sum of n terms is at most gamma_(n + 2)
  times that of the magnitudes, in any order (Higham, Accuracy and Stability of
  Numerical Algorithms, lemma 3.1). One rounding to bfloat16 may follow.
  """
  exact = left @ right
  gamma = (left.shape[-1] + 2) * 2.0**-24
  gamma /= 1 - gamma
  error = gamma * (np.abs(left) @ np.abs(right))
  rounding = 0 if actual.dtype == 'float32' else ROUNDING
  bound = error + rounding * (np.abs(exact) + error) + 1e-30
  assert (np.abs(wide(actual) - np.where(mask, exact, 0)) <= bound).all()


def check(draw):
  (y, dx, dw), alone, packed, packed_alone = results(draw)
  for i in range(draw.stack):
    x, dy = wide(draw.x[i]), wide(draw.dy[i])
    mask, grad_mask = draw.mask[i], draw.grad_mask[i]
    w = np.where(mask, wide(draw.w[i]), 0)
    for product in (y, packed[0]):
      assert_rounded(product[i], x, w)
    for product in (dx, alone[0], packed[1], packed_alone[0]):
      assert_rounded(product[i], dy, w.T)
    for product in (dw, alone[1]):
      kept = jnp.where(grad_mask, product[i], 0)
      np.testing.assert_array_equal(wide(product[i]), wide(kept))
      assert_rounded(kept, x.T, dy, grad_mask)
    for product in (packed[2], packed_alone[1]):
      spread = np.zeros(mask.shape, product.dtype)
      spread[mask] = product[i][:mask.sum()]
      assert_rounded(spread, x.T, dy, mask)
      np.testing.assert_array_equal(wide(product[i])[mask.sum():], 0)


# With the default seeds, a gradient mask is equal, other blocks, or all.
@with_dtypes
@pytest.mark.parametrize('seed', [
    i if i in (0, 9, 10) else pytest.param(i, marks=pytest.mark.ci)
    for i in range(12)
])
def test_products_of_block_masks_equal_numpys_within_derived_bounds(
    seed, dtype
):
  check(Draw(seed, dtype=dtype))


@pytest.mark.slow
@with_dtypes
def test_products_of_500_block_masks_equal_numpys_within_derived_bounds(dtype):
  for seed in range(100, 600):
    check(Draw(seed, dtype=dtype))
    if seed % 50 == 0:
      jax.clear_caches()  # Every draw compiles programs.


# Gradients of more than 1,024 tokens are summed in parts.
@pytest.mark.ci
@with_dtypes
def test_products_of_many_tokens_equal_numpys_within_derived_bounds(dtype):
  check(Draw(0, tokens=2500, stack=1, dtype=dtype))


# Results of 2 MiB and more are written past the caches.
LARGE = dict(y=(1100, 32, 1024), dx=(1100, 1024, 32), dw=(33, 1024, 1024))


def check_large(dtype, *names):
  for tokens, *shape in map(LARGE.get, names):
    size = jnp.dtype(dtype).itemsize
    results = [shape[0] * shape[1], *(tokens * n for n in shape)]
    assert max(results) * size >= 2**21
    draw = Draw(1, tokens=tokens, stack=1, dtype=dtype, shape=shape)
    assert draw.mask.any()
    check(draw)


@pytest.mark.ci
@with_dtypes
@pytest.mark.parametrize('name', LARGE)
def test_results_larger_than_caches_equal_numpys_within_derived_bounds(
    name, dtype
):
  check_large(dtype, name)


def draw_for_order(dtype):
  draw = Draw(10, tokens=1200, stack=1, dtype=dtype)
  draw.grad_mask = draw.mask
  assert draw.mask.size > 30 * SIDE**2 and 0.2 < draw.mask.mean() < 0.8
  return draw


@with_dtypes
def test_packed_and_single_products_have_the_same_bits(dtype):
  draw = draw_for_order(dtype)
  (y, dx, dw), alone, packed, packed_alone = jax.tree.map(
      wide, results(draw)
  )
  np.testing.assert_array_equal(packed[0], y)
  for product in (alone[0], packed[1], packed_alone[0]):
    np.testing.assert_array_equal(product, dx)
  np.testing.assert_array_equal(alone[1], dw)
  for product in (packed[2], packed_alone[1]):
    np.testing.assert_array_equal(product[0][:draw.mask.sum()], dw[draw.mask])


@with_dtypes
def test_a_block_without_one_entry_row_or_column_equals_numpy(dtype):
  draw = Draw(10, tokens=40, stack=6, dtype=dtype)
  draw.grad_mask = draw.mask.copy()
  for i, mask in enumerate([*draw.mask[:3], *draw.grad_mask[3:]]):
    row, column = np.argwhere(mask)[-1] // SIDE * SIDE
    block = mask[row:row + SIDE, column:column + SIDE]
    off = (slice(5, 6), slice(7, 8)), (slice(5, 6),), (slice(None), slice(7, 8))
    block[off[i % 3]] = False
  check(draw)


@with_dtypes
def test_more_packed_blocks_than_values_are_refused(dtype):
  packed = packing.pack_mask(jnp.ones((64, 96), bool))
  x, values = (jnp.ones(shape, dtype) for shape in ((2, 64), 64 * 96 - 1))
  with pytest.raises(jax.errors.JaxRuntimeError, match='more weights than'):
    jax.block_until_ready(sparse_matmul(x, values, packed, lowering=NATIVE))


def print_digest(dtype):
  """Prints the results of a draw; runs in a child process."""
  leaves = jax.device_get(jax.tree.leaves(results(draw_for_order(dtype))))
  print(hashlib.sha256(b''.join(a.tobytes() for a in leaves)).hexdigest())


@pytest.mark.process
@with_dtypes
def test_bits_are_equal_for_any_number_of_threads(dtype):
  code = f'{IMPORT}; test.print_digest({dtype!r})'
  digests = {run_python(code, NPROC=str(number)) for number in (1, 2, 5)}
  assert len(digests) == 1


def check_avx2():
  """Runs in a child process."""
  assert native.kernels() == 'avx2'
  for seed in range(12):
    check(Draw(seed, dtype='float32'))
  check_large('float32', *LARGE)
  test_packed_and_single_products_have_the_same_bits('float32')
  print('avx2')


@pytest.mark.process
@pytest.mark.skipif(
    native.is_available() and native.kernels() == 'portable',
    reason='this processor has no AVX2',
)
def test_kernels_of_avx2_equal_numpy_within_derived_bounds():
  code = f'{IMPORT}; test.check_avx2()'
  assert 'avx2' in run_python(code, SPDF_NATIVE_KERNELS='avx2')


# Matrix units (AMX tiles), emulated.


@pytest.fixture(scope='module')
def emulating(tmp_path_factory):
  """Returns the variables of children that emulate tiles."""
  if not native.is_available('bfloat16'):
    pytest.skip('there are no kernels of bfloat16 here')
  folder = tmp_path_factory.mktemp('emulating')
  compiler = folder / 'compiler'
  compiler.write_text(
      f'#!/bin/sh\nexec {library.find_compiler()} -DSPDF_TILES_PERMITTED=1 '
      f"'-DSPDF_EMULATED_TILES=\"{EMULATION}\"' \"$@\" "
      '$(case "$*" in *blocks.cc*) echo -O1;; *) echo -O0;; esac)\n'
  )
  compiler.chmod(0o755)
  return {
      'CXX': str(compiler), 'XDG_CACHE_HOME': str(folder), 'NPROC': '3',
      'SPDF_NATIVE': 'require',
  }


def check_emulated(seeds):
  """Runs in a child process."""
  assert native.has_matrix_unit() and native.kernels('bfloat16') == 'avx512bf16'
  for seed in seeds:
    check(Draw(seed))
  check_large('bfloat16', 'y', 'dx')
  # Tiles add the first and second terms of pairs separately, vector kernels in
  # alternation.
  x = np.zeros((1, SIDE), np.float32)
  x[0, :3] = 2.0**30, 1, -2.0**30
  w, mask = np.ones((SIDE, SIDE), np.float32), np.ones((SIDE, SIDE), bool)
  x, w = jnp.asarray(x, 'bfloat16'), jnp.asarray(w, 'bfloat16')
  y = sparse_matmul(x, w, mask, lowering=NATIVE)
  np.testing.assert_array_equal(wide(y), 1)
  test_packed_and_single_products_have_the_same_bits('bfloat16')
  print('emulated')


@pytest.mark.process
def test_emulated_tiles_equal_numpy_within_derived_bounds(emulating):
  code = f'{IMPORT}; test.check_emulated(range(12))'
  assert 'emulated' in run_python(code, **emulating)


@pytest.mark.slow
def test_emulated_tiles_of_500_draws_equal_numpy_within_bounds(emulating):
  code = IMPORT + '; test.check_emulated(range({}, {}))'
  for first in range(100, 600, 50):
    assert 'emulated' in run_python(
        code.format(first, first + 50), **emulating
    )

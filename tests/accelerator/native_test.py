"""The native kernels compute what NumPy does in float64, and are called.

Weights off the mask are NaN or infinite in all that is compared. The tests of
every kernel set run in child processes, since a process chooses one.
"""

import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from spdf_jax import packing
from spdf_jax.accelerator import NATIVE
from spdf_jax.accelerator import native
from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator.native import library
from tests.accelerator import primitives_test
from tests.accelerator.primitives_test import Case
from tests.accelerator.primitives_test import measured
from tests.accelerator.primitives_test import oracle
from tests.child import run_python

pytestmark = pytest.mark.skipif(
    not native.is_available(),
    reason='there are no native kernels here (is a C++ compiler installed?)',
)

few = settings(max_examples=12, deadline=None, derandomize=True)
fewer = settings(few, max_examples=6)

DTYPES = ['float32', pytest.param('bfloat16', marks=pytest.mark.skipif(
    not native.is_available('bfloat16'),
    reason='there are no kernels of bfloat16 here',
))]
with_dtypes = pytest.mark.parametrize('dtype', DTYPES)
only_bfloat16 = pytest.mark.parametrize('dtype', DTYPES[1:])

ROUNDING = 1 / 256
"""How far, relative, rounding to bfloat16 may change a number."""


def multiply(x, w, mask, *, dtype='float32', **kwargs):
  """Multiplies operands of any type in another, and returns float32."""
  x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
  y = sparse_matmul(x, w, mask, lowering=NATIVE, **kwargs)
  return y.astype(jnp.float32)


def multiply_in(dtype):
  return functools.partial(multiply, dtype=dtype)


def in_dtype(case, dtype):
  """Rounds what is multiplied, such that it is the oracle's as well."""
  for name in ('x', 'w', 'vx', 'vw'):
    a = getattr(case, name)
    setattr(case, name, a.astype(jnp.dtype(dtype)).astype(np.float32))
  return case

SKEWS = {
    'none': lambda mask: None,
    'full column': lambda mask: mask[:, -1:].fill(True),
    'full row': lambda mask: mask[-1:].fill(True),
    'empty rows': lambda mask: mask[::2].fill(False),
    'empty columns': lambda mask: mask[:, 1:].fill(False),
}
"""Changes masks in place: some lists are then long, others empty."""


def make_case(seed, tokens, inputs, outputs, sparsity, skew, wanted):
  """Makes a case with a skewed mask and a choice of gradient mask."""
  case = Case(seed, tokens, inputs, outputs, sparsity)
  SKEWS[skew](case.mask)
  if wanted == 'kept':
    case.grad_mask = case.mask
  elif wanted == 'all':
    case.grad_mask = np.full_like(case.mask, True)
  elif wanted == 'pruned':
    case.grad_mask = ~case.mask
  return case


def assert_close(actual, wanted, dtype='float32'):
  # In bfloat16 y, its cotangent, a product and its cotangent are rounded.
  tolerance = 2e-6 if dtype == 'float32' else 4 * ROUNDING
  primitives_test.assert_close(actual, wanted, tolerance)


def check(case, dtype='float32'):
  """Compares product, gradients, each alone, and the second derivative."""
  case, multiply = in_dtype(case, dtype), multiply_in(dtype)
  everything, args = measured(case, multiply)

  def with_gradients_alone(x, w, mask, grad_mask, c, *directions):
    y, both, hvp = everything(x, w, mask, grad_mask, c, *directions)
    # Differentiates each operand alone, so that neither is part of the joint
    # call.
    cy = c * y
    of_x = jax.vjp(lambda x: multiply(x, w, mask), x)[1](cy)
    of_w = jax.vjp(lambda w: multiply(x, w, mask, grad_mask=grad_mask), w)[1](
        cy
    )
    return y, both, hvp, (*of_x, *of_w)

  y, both, hvp = oracle(case)
  actual = jax.jit(with_gradients_alone)(*args)
  assert_close(actual, (y, both, hvp, both), dtype)
  dw = np.asarray(actual[1][1])
  np.testing.assert_array_equal(dw[~case.grad_mask], 0)


cases = st.builds(
    make_case,
    seed=st.integers(0, 99),
    tokens=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    sparsity=st.sampled_from([0.0, 0.5, 0.75, 0.95, 1.0]),
    skew=st.sampled_from(list(SKEWS)),
    wanted=st.sampled_from(['kept', 'all', 'pruned', 'others']),
)


@few
@given(cases)
def test_products_and_derivatives_equal_numpys(case):
  check(case)


@only_bfloat16
@fewer
@given(case=cases)
def test_products_and_derivatives_of_bfloat16_equal_numpys(dtype, case):
  check(case, dtype)


def check_one_rounding(case, dtype):
  """Compares each product of bfloat16 with the rounded sum in float64."""
  x, w, dy = (
      jnp.asarray(a, dtype) for a in (
          case.x, np.where(case.mask, case.w, np.nan), case.weights,
      )
  )
  f = lambda x, w: sparse_matmul(
      x, w, case.mask, grad_mask=case.grad_mask, lowering=NATIVE
  )
  y, pullback = jax.vjp(f, x, w)
  of_x, of_w = pullback(dy)
  alone = (
      *jax.vjp(lambda x: f(x, w), x)[1](dy),
      *jax.vjp(lambda w: f(x, w), w)[1](dy),
  )
  wide = lambda a: np.asarray(a).astype(np.float64)
  rows = lambda a: wide(a).reshape(-1, a.shape[-1])
  kept = np.where(case.mask, wide(w), 0)
  of_both = (
      (rows(dy) @ kept.T).reshape(x.shape),
      np.where(case.grad_mask, rows(x).T @ rows(dy), 0),
  )
  wanted = (rows(x) @ kept).reshape(y.shape), *of_both, *of_both
  for a, b in zip((y, of_x, of_w, *alone), wanted):
    assert a.dtype == dtype
    error = np.abs(wide(a) - b) - ROUNDING * np.abs(b)
    assert error.max() <= 1e-5 * max(1.0, np.abs(b).max())


@only_bfloat16
@few
@given(case=cases)
def test_bfloat16_sums_are_computed_in_float32_and_rounded_once(dtype, case):
  check_one_rounding(in_dtype(case, dtype), dtype)


# Around the widths of vectors (16), blocks (64 to 384) and regions (256).
EDGES = [
    ((300,), 257, 513, 0.9, 'full column', 'kept'),
    ((129,), 64, 300, 0.75, 'empty rows', 'all'),
    ((2, 16), 16, 256, 0.5, 'none', 'others'),
    ((17,), 255, 385, 0.95, 'full row', 'kept'),
    ((1,), 512, 15, 0.0, 'none', 'kept'),
    ((33,), 31, 97, 1.0, 'none', 'all'),
]


@with_dtypes
@pytest.mark.parametrize('edge', EDGES[::2])
def test_sizes_near_those_of_vectors_and_blocks_equal_numpy(edge, dtype):
  check(make_case(0, *edge), dtype)


@with_dtypes
def test_results_larger_than_caches_equal_numpy(dtype):
  rng = np.random.default_rng(0)
  features = 1030  # Some rows begin where a vector may be streamed.
  tokens = 2**24 // (jnp.dtype(dtype).itemsize * 1024) + 3
  # Small integers, so that every sum is exact.
  draw = lambda *shape: rng.integers(-3, 4, shape).astype(np.float32)
  x, w, dy = draw(tokens, 3), draw(3, features), draw(tokens, features)
  mask = rng.random(w.shape) < 0.5
  multiply = multiply_in(dtype)
  def results(x, w, dy):
    pullback = jax.vjp(lambda dy, w: multiply(dy, w.T, mask.T), dy, w)[1]
    return multiply(x, w, mask), *pullback(x)

  y, dx, _ = jax.jit(results)(x, w, dy)
  for product in (y, dx):
    np.testing.assert_array_equal(
        np.asarray(product, np.float32), x @ (mask * w)
    )


def check_packed(case, spare=0, dtype='float32'):
  """Compares product and gradients of packed weights, together and alone."""
  case, multiply = in_dtype(case, dtype), multiply_in(dtype)
  packed = packing.pack_mask(jnp.asarray(case.mask))
  kept = int(case.mask.sum())
  values = np.full(max(1, kept) + spare, np.nan, np.float32)
  values[:kept] = case.w[case.mask]  # Further values are not read.
  case.grad_mask = case.mask

  def everything(x, values, packed, c):
    f = lambda x, values: multiply(x, values, packed)
    y, pullback = jax.vjp(f, x, values)
    cy = c * y
    of_x = jax.vjp(lambda x: f(x, values), x)[1](cy)
    of_values = jax.vjp(lambda values: f(x, values), values)[1](cy)
    return y, pullback(cy), (*of_x, *of_values)

  y, (dx, dw), _ = oracle(case)
  dvalues = np.zeros(values.shape)
  dvalues[:kept] = dw[case.mask]
  actual = jax.jit(everything)(case.x, values, packed, case.weights)
  assert_close(actual, (y, (dx, dvalues), (dx, dvalues)), dtype)


@with_dtypes
@pytest.mark.parametrize('spare, edge', [*enumerate(EDGES[1::2])])
def test_packed_weights_equal_numpy_at_edge_sizes(spare, edge, dtype):
  check_packed(make_case(2, *edge), spare, dtype)


def test_more_packed_weights_than_values_are_refused():
  packed = packing.pack_mask(jnp.ones((4, 6), bool))
  with pytest.raises(jax.errors.JaxRuntimeError, match='more weights than'):
    jax.block_until_ready(multiply(jnp.ones((2, 4)), jnp.ones(23), packed))


CASE = make_case(0, (3, 40), 70, 50, 0.8, 'none', 'others')


def gradient(case, multiply=multiply, argnums=(0, 1)):
  """Returns the gradient of sum(c y²) / 2 as a function of x, w and masks."""
  def loss(x, w, mask, grad_mask):
    y = multiply(x, w, mask, grad_mask=grad_mask)
    return (case.weights * y ** 2).sum() / 2
  return jax.grad(loss, argnums)


def operands(case):
  return case.x, case.w, case.mask, case.grad_mask


def calls(f, *args):
  """Returns the targets of the custom calls in the compiled program."""
  text = jax.jit(f).lower(*args).compile().as_text()
  assert ' dot(' not in text
  return sorted(
      part.split('"')[0] for part in text.split('custom_call_target="')[1:]
  )


def test_a_gradient_of_packed_weights_takes_two_calls():
  packed = packing.pack_mask(jnp.asarray(CASE.mask))
  values = CASE.w[CASE.mask]
  f = lambda x, values: (
      CASE.weights * multiply(x, values, packed) ** 2
  ).sum()
  assert calls(jax.grad(f, (0, 1)), CASE.x, values) == [
      'spdf_packed_backward', 'spdf_packed_matmul'
  ]


def test_the_product_and_both_gradients_take_one_kernel_call_each():
  assert calls(gradient(CASE), *operands(CASE)) == [
      'spdf_sparse_matmul', 'spdf_sparse_matmul_backward'
  ]


@pytest.mark.parametrize('argnums, expected', [
    (0, ['spdf_sparse_matmul', 'spdf_sparse_matmul']),
    (1, ['spdf_sampled_matmul', 'spdf_sparse_matmul']),
])
def test_the_gradient_of_one_operand_computes_no_other(argnums, expected):
  f = gradient(CASE, argnums=argnums)
  assert calls(f, *operands(CASE)) == expected
  assert_close(jax.jit(f)(*operands(CASE)), oracle(CASE)[1][argnums])


def test_a_new_mask_compiles_nothing():
  f = jax.jit(gradient(CASE))
  f(*operands(CASE))
  other = make_case(0, (3, 40), 70, 50, 0.3, 'full column', 'kept')
  other.weights = CASE.weights
  assert_close(f(*operands(other)), oracle(other)[1])
  assert f._cache_size() == 1


def test_repeated_calls_agree_in_every_bit():
  case = make_case(0, (300,), 257, 120, 0.8, 'none', 'others')
  f = jax.jit(gradient(case))
  first = jax.device_get(f(*operands(case)))
  for _ in range(5):
    jax.tree.map(np.testing.assert_array_equal, f(*operands(case)), first)


@with_dtypes
def test_nan_and_infinity_in_kept_weights_propagate(dtype):
  rng = np.random.default_rng(0)
  x = rng.uniform(1, 2, (20, 40)).astype(np.float32)
  w = rng.uniform(1, 2, (40, 30)).astype(np.float32)
  mask = rng.random(w.shape) < 0.3
  mask[3, 7] = mask[4, 8] = True
  x[5, 0], mask[0] = np.nan, np.arange(30) == 11
  w[3, 7], w[4, 8] = np.nan, np.inf
  x, w = (a.astype(jnp.dtype(dtype)).astype(np.float32) for a in (x, w))
  f = lambda x, w: multiply(x, w, mask, dtype=dtype)
  y, pullback = jax.vjp(f, x, w)
  wanted = x @ np.where(mask, w, 0)
  # A NaN in x[5, 0] reaches only output 11, whose weight is kept.
  wanted[5] = x[5, 1:] @ np.where(mask, w, 0)[1:]
  wanted[5, 11] = np.nan
  rounding = 0 if dtype == 'float32' else ROUNDING
  np.testing.assert_allclose(y, wanted, rtol=1e-5 + rounding)
  dx, dw = pullback(jnp.ones_like(y).at[2, 9].set(np.nan))
  finite = np.isfinite
  wanted = np.full(x.shape, True)
  wanted[:, [3, 4]] = False  # Inputs whose weights are not finite.
  wanted[2, mask[:, 9]] = False
  np.testing.assert_array_equal(finite(dx), wanted)
  wanted = ~(mask & (np.arange(30) == 9))
  wanted[0, 11] = False
  np.testing.assert_array_equal(finite(dw), wanted)


# In bfloat16 three weights are two pairs: the second has a zero.
@with_dtypes
def test_an_infinite_token_affects_only_its_own_outputs_at_kept_weights(dtype):
  x = np.ones((4, 3), np.float32)
  x[1, 2] = np.inf
  mask = np.array([[True, True], [True, True], [True, False]])
  y = multiply(x, np.ones((3, 2), np.float32), mask, dtype=dtype)
  np.testing.assert_array_equal(y, [[3, 2], [np.inf, 2], [3, 2], [3, 2]])
  x[2, 0] = -np.inf
  y = multiply(x, np.ones((3, 1), np.float32), mask[:, :1], dtype=dtype)
  np.testing.assert_array_equal(y, [[3], [np.inf], [-np.inf], [3]])


def test_vmap_over_all_operands_equals_a_loop():
  cases = [
      make_case(seed, (20,), 33, 18, 0.7, 'none', 'others')
      for seed in range(3)
  ]
  columns = zip(*(measured(case)[1] for case in cases))
  stacks = [np.stack(column) for column in columns]
  everything, _ = measured(cases[0], multiply)
  wanted = [oracle(case) for case in cases]
  assert_close(
      jax.jit(jax.vmap(everything))(*stacks),
      jax.tree.map(lambda *arrays: np.stack(arrays), *wanted),
  )
  f = jax.vmap(lambda x, w, mask: multiply(x, w, mask))
  assert calls(f, *stacks[:3]) == ['spdf_sparse_matmul']


def check_kernels(name, dtype):
  """Runs in a child process."""
  from tests.accelerator import listed_matrix_test

  print('kernels', library.kernels())
  if library.kernels() == name:
    for edge in EDGES:
      check(make_case(1, *edge), dtype)
      check_packed(make_case(1, *edge), dtype=dtype)
    listed_matrix_test.check_edges()


# NPROC is the size of XLA's thread pool: dw is summed in as many parts.
@pytest.mark.process
@pytest.mark.parametrize('name, threads, dtype', [
    ('avx512', 1, 'float32'), ('avx2', 3, 'float32'),
    ('portable', 5, 'float32'), ('avx512', 5, 'bfloat16'),
])
def test_every_kernel_set_equals_numpy_on_any_number_of_threads(
    name, threads, dtype
):
  if not native.is_available(dtype):
    pytest.skip(f'there are no kernels of {dtype} here')
  printed = run_python(
      'from tests.accelerator import native_test as test; '
      f'test.check_kernels({name!r}, {dtype!r})',
      SPDF_NATIVE_KERNELS=name, NPROC=str(threads),
  )
  if f'kernels {name}' not in printed:
    pytest.skip(f'this processor does not run {name}')


def check_on_eight_devices():
  """Runs in a child process."""
  mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
  tokens, whole = PartitionSpec('data'), PartitionSpec()
  case = make_case(0, (16,), 70, 50, 0.8, 'none', 'others')
  args = [
      jax.device_put(a, jax.NamedSharding(mesh, spec))
      for a, spec in zip(operands(case), (tokens, whole, whole, whole))
  ]
  plain = lambda *args, grad_mask: multiply(*args, grad_mask=grad_mask)
  in_shards = jax.shard_map(
      lambda *args: multiply(*args[:3], grad_mask=args[3]), mesh=mesh,
      in_specs=(tokens, whole, whole, whole), out_specs=tokens,
  )
  for f, native_calls in (
      (plain, 0), (lambda *args, grad_mask: in_shards(*args, grad_mask), 2),
  ):
    compiled = jax.jit(gradient(case, f)).lower(*args).compile()
    assert_close(compiled(*args), oracle(case)[1])
    text = compiled.as_text()
    assert text.count('custom_call_target="spdf') == native_calls, text
    assert 'all-gather' not in text


@pytest.mark.process
def test_shards_call_the_kernels_and_nothing_is_gathered():
  run_python(
      "import jax; jax.config.update('jax_num_cpu_devices', 8); "
      'from tests.accelerator import native_test as test; '
      'test.check_on_eight_devices()'
  )


def test_other_dtypes_are_left_to_the_reference():
  x, w = (jnp.asarray(a, 'float16') for a in (CASE.x, CASE.w))
  text = jax.jit(multiply_in('float16')).lower(x, w, CASE.mask).as_text()
  assert 'spdf_' not in text and 'dot_general' in text

"""The matmul of packed weights is that of the masked matrix, in every use.

The oracle is that of `primitives_test`: NumPy in float64. Weights off the mask
are NaN or infinite before they are packed.
"""

import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
from primitives_test import assert_close
from primitives_test import Case
from primitives_test import measured
from primitives_test import oracle
from primitives_test import TOLERANCE
import pytest

from spdf_jax import packing
from spdf_jax.accelerator import matmuls_saveable
from spdf_jax.accelerator import sparse_matmul

few = settings(max_examples=8, deadline=None, derandomize=True)


def make_case(*args, **kwargs):
  case = Case(*args, **kwargs)
  case.grad_mask = case.mask
  return case


def multiply_packed(x, w, mask, *, grad_mask=None, spare=0, **kwargs):
  """Packs a matrix and multiplies; its derivatives are those of the matrix."""
  del grad_mask
  packed = packing.pack_mask(mask)
  if isinstance(mask, np.ndarray):
    size = max(1, int(mask.sum())) + spare
  else:
    size = w.size
  values = packing.gather_kept(w, packed, size)
  return sparse_matmul(x, values, packed, **kwargs)


@few
@given(st.builds(
    make_case,
    seed=st.integers(0, 99),
    tokens=st.sampled_from([(), (3,), (2, 4)]),
    inputs=st.sampled_from([1, 6]),
    outputs=st.sampled_from([1, 8, 13]),
    sparsity=st.sampled_from([0.0, 0.5, 0.9, 1.1]),
), st.sampled_from([None, 0, 3]))
def test_product_gradient_and_second_derivative_are_numpys(case, spare):
  multiply = multiply_packed
  if spare is not None:
    # Exactly as much room as is needed, or a little more.
    multiply = lambda x, w, mask, **kwargs: multiply_packed(
        x, w, case.mask, spare=spare
    )
  everything, args = measured(case, multiply)
  assert_close(jax.jit(everything)(*args), oracle(case))


CASE = make_case(0, (3, 4), 6, 5, 0.6)


@pytest.mark.parametrize('policy', [
    None, matmuls_saveable, jax.checkpoint_policies.nothing_saveable
])
def test_remat_changes_nothing(policy):
  multiply = jax.checkpoint(
      lambda x, w, mask, grad_mask: multiply_packed(x, w, mask), policy=policy
  )
  everything, args = measured(CASE, lambda x, w, m, grad_mask: multiply(
      x, w, m, grad_mask
  ))
  assert_close(jax.jit(everything)(*args), oracle(CASE))


@pytest.mark.parametrize('mapped', [
    (True, False, False), (False, True, False), (True, True, True),
    (False, True, True), (False, False, True), (True, False, True),
])
def test_vmap_over_any_operand_is_a_loop(mapped):
  axis = -1
  rng = np.random.default_rng(0)
  x, w = rng.normal(size=(3, 4, 5)), rng.normal(size=(3, 5, 9))
  mask = rng.random((3, 5, 9)) < 0.5
  packed = packing.pack_mask(jnp.asarray(mask))
  loss = lambda x, v, bits: jnp.sin(
      sparse_matmul(x, v, packing.PackedMask(bits, 9))
  ).sum()
  f = jax.grad(loss, (0, 1))
  values = np.asarray(packing.gather_kept(w, packed, 45))
  args = np.float32(x), np.float32(values), np.asarray(packed.bits)
  axes = [axis if m else None for m in mapped]
  given_args = [
      np.moveaxis(a, 0, axis) if m else a[0] for a, m in zip(args, mapped)
  ]
  found = jax.jit(jax.vmap(f, axes))(*given_args)
  f = jax.jit(f)
  for i in range(3):
    wanted = f(*(a[i if m else 0] for a, m in zip(args, mapped)))
    assert_close((found[0][i], found[1][i]), wanted)


def test_scan_over_stacked_layers_is_a_loop():
  rng = np.random.default_rng(0)
  x, w = rng.normal(size=(4, 5)), rng.normal(size=(3, 5, 5))
  mask = rng.random(w.shape) < 0.5
  packed = packing.pack_mask(jnp.asarray(mask))
  size = int(mask.sum((-2, -1)).max())
  assert len(set(mask.sum((-2, -1)))) > 1  # Some layers leave room.

  def scanned(x, w):
    layer = lambda x, vm: (jnp.tanh(sparse_matmul(x, *vm)), None)
    values = packing.gather_kept(w, packed, size)
    return jax.lax.scan(layer, x, (values, packed))[0]

  def looped(x, w):
    for i in range(3):
      x = jnp.tanh(x @ jnp.where(mask[i], w[i], 0))
    return x

  x, w = jnp.float32(x), jnp.float32(w)
  for order in (
      lambda f: f(x, w),
      lambda f: jax.grad(lambda x, w: f(x, w).sum(), (0, 1))(x, w),
  ):
    assert_close(*jax.jit(lambda order=order: [
        order(f) for f in (scanned, looped)
    ])())


@pytest.mark.slow
def test_derivatives_of_third_order_are_those_of_differences():
  multiply = jax.jit(
      lambda x, w: jnp.sin(multiply_packed(x, w, CASE.mask))
  )
  jax.test_util.check_grads(
      multiply, (jnp.asarray(CASE.x), jnp.asarray(CASE.w)), order=3,
      atol=3e-2, rtol=3e-2,
  )


@pytest.mark.parametrize('dtype', TOLERANCE)
def test_every_dtype_keeps_its_own_and_is_right_within_its_precision(dtype):
  case = make_case(1, (5,), 64, 8, 0.5)
  for name in ('x', 'w', 'weights', 'vx', 'vw'):
    rounded = jnp.asarray(getattr(case, name), dtype)
    setattr(case, name, np.asarray(rounded.astype(jnp.float32)))
  everything, args = measured(case, multiply_packed)
  args = [a if a.dtype == bool else jnp.asarray(a, dtype) for a in args]
  found = jax.jit(everything)(*args)
  assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
  assert_close(found, oracle(case), TOLERANCE[dtype])


def test_gradients_of_values_are_those_of_the_matrix_bit_for_bit():
  packed = packing.pack_mask(CASE.mask)
  size = int(CASE.mask.sum())
  take = functools.partial(packing.gather_kept, packed=packed, size=size)
  loss = lambda x, w, mask: (
      CASE.weights * sparse_matmul(x, w, mask) ** 2
  ).sum()
  wanted = jax.grad(loss, (0, 1))(CASE.x, CASE.w, CASE.mask)
  found = jax.grad(loss, (0, 1))(CASE.x, take(CASE.w), packed)
  np.testing.assert_array_equal(found[0], wanted[0])
  np.testing.assert_array_equal(found[1], take(wanted[1]))
  assert found[1].shape == (size,)


@pytest.mark.parametrize('change, message', [
    (dict(x=np.ones((2, 7), np.float32)), r'x \[2, 7\], values \[3\] and a'),
    (dict(values=np.ones((2, 3), np.float32)), r'values \[2, 3\]'),
    (dict(values=np.ones(0, np.float32)), 'at least one entry'),
    (dict(mask=packing.PackedMask(np.zeros((6, 1), np.uint8), 9)),
     r'packed mask \[6, 9\] of 1 bytes'),
    (dict(grad_mask=np.ones((6, 5), bool)), 'packed mask and grad_mask'),
    (dict(out_sharding=jax.P('x')), 'packed mask and out_sharding'),
])
def test_what_does_not_fit_is_refused(change, message):
  given_args = dict(
      x=CASE.x, values=np.ones(3, np.float32),
  ) | change
  x, values = given_args.pop('x'), given_args.pop('values')
  mask = given_args.pop('mask', packing.pack_mask(CASE.mask))
  with pytest.raises(ValueError, match=message):
    sparse_matmul(x, values, mask, **given_args)


def test_mixed_precisions_are_refused():
  with pytest.raises(TypeError, match='not cast implicitly'):
    sparse_matmul(
        CASE.x, jnp.ones(3, jnp.bfloat16), packing.pack_mask(CASE.mask)
    )

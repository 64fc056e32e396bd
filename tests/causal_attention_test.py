"""Causal attention in blocks equals that of `jax.nn`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.models.attention import causal_attention


def reference(q, k, v, scale=None):
  return jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=scale)


def draw(length, heads, groups, dtype='float32'):
  rng = np.random.default_rng(length)
  normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
  q = 3 * normal(2, length, heads, 8)
  return q, normal(2, length, groups, 8), normal(2, length, groups, 8)


@pytest.mark.parametrize('heads, groups, length', [
    (4, 4, 1), (4, 4, 128), (4, 4, 300), (4, 2, 1), (4, 2, 1100),
    pytest.param(4, 4, 1100, marks=pytest.mark.slow),
])
def test_values_and_gradients_equal_those_of_jax(length, heads, groups):
  operands = draw(length, heads, groups)
  weights = jnp.cos(jnp.arange(operands[0].size)).reshape(operands[0].shape)

  def run(attend):
    loss = lambda *xs: jnp.sum(weights * attend(*xs))
    both = lambda *xs: (attend(*xs), *jax.grad(loss, (0, 1, 2))(*xs))
    return jax.jit(both)(*operands)

  for ours, theirs in zip(run(causal_attention), run(reference)):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-5)


def test_the_scale_is_that_which_is_given():
  operands = draw(140, 2, 2)
  np.testing.assert_allclose(
      causal_attention(*operands, 1.0), reference(*operands, 1.0),
      rtol=1e-5, atol=1e-5,
  )


def test_bfloat16_stays_bfloat16_and_sums_in_float32():
  operands = draw(300, 2, 2, 'bfloat16')
  found = causal_attention(*operands)
  assert found.dtype == jnp.bfloat16
  exact = reference(*(x.astype(jnp.float32) for x in operands))
  np.testing.assert_allclose(
      found.astype(jnp.float32), exact, rtol=2e-2, atol=2e-2
  )


def test_no_query_sees_a_later_key():
  q, k, v = draw(260, 2, 2)
  before = causal_attention(q, k, v)
  k, v = (x.at[:, 131:].set(jnp.nan) for x in (k, v))
  after = causal_attention(q, k, v)
  np.testing.assert_array_equal(before[:, :128], after[:, :128])

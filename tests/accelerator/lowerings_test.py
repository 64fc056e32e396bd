"""Lowerings are chosen by name and platform, with the reference as fallback."""

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.accelerator import reference
from spdf_jax.accelerator import register_lowering
from spdf_jax.accelerator import sampled_matmul_p
from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator import sparse_matmul_p

pytestmark = pytest.mark.skipif(
    jax.default_backend() != 'cpu', reason='its lowerings are for CPUs'
)
X = np.arange(6, dtype=np.float32).reshape(2, 3)
W = np.arange(12, dtype=np.float32).reshape(3, 4)
MASK = W % 3 == 1
Y = X @ np.where(MASK, W, 0)


def doubled(*args, **params):
  """Returns twice the product, which shows that this lowering was used."""
  return 2 * reference.sparse_matmul(*args, **params)


def doubled_if_small(x, *args, **params):
  if x.shape[0] > 2:
    return NotImplemented
  return doubled(x, *args, **params)


@pytest.fixture(scope='module', autouse=True)
def registered():
  cpu, tpu = dict(platform='cpu'), dict(platform='tpu')
  register_lowering('doubled', sparse_matmul_p, doubled, **cpu)
  register_lowering('if_small', sparse_matmul_p, doubled_if_small, **cpu)
  register_lowering('elsewhere', sparse_matmul_p, doubled, **tpu)


def apply(lowering, x=X):
  return np.asarray(
      jax.jit(lambda x: sparse_matmul(x, W, MASK, lowering=lowering))(x)
  )


def test_a_lowering_is_used_where_it_is_requested_only():
  np.testing.assert_array_equal(apply('reference'), Y)
  np.testing.assert_array_equal(apply('doubled'), 2 * Y)
  np.testing.assert_array_equal(
      sparse_matmul(X, W, MASK, lowering='doubled'), 2 * Y
  )


def test_on_other_platforms_the_reference_is_used():
  np.testing.assert_array_equal(apply('elsewhere'), Y)
  f = jax.jit(lambda x: sparse_matmul(x, W, MASK, lowering='elsewhere'))
  count = lambda platform: export.export(f, platforms=[platform])(
      X
  ).mlir_module().count('stablehlo.multiply')
  assert (count('cpu'), count('tpu')) == (0, 1)


def test_a_lowering_that_declines_leaves_it_to_the_reference():
  np.testing.assert_array_equal(apply('if_small'), 2 * Y)
  np.testing.assert_array_equal(apply('if_small', np.ones((3, 3), 'f')), (
      np.ones((3, 3)) @ np.where(MASK, W, 0)
  ))


def test_a_primitive_without_the_lowering_uses_its_reference():
  loss = lambda w: sparse_matmul(X, w, MASK, lowering='doubled').sum()
  text = str(jax.make_jaxpr(jax.grad(loss))(W))
  assert text.count('lowering=doubled') == text.count('lowering=') > 0
  assert sparse_matmul_p.name in text and sampled_matmul_p.name in text
  wanted = np.where(MASK, X.T @ np.ones_like(Y), 0)
  np.testing.assert_array_equal(jax.grad(loss)(W), wanted)


@pytest.mark.parametrize('name', ['reference', 'doubled'])
def test_a_lowering_cannot_be_registered_twice(name):
  with pytest.raises(ValueError, match=f"'{name}' of sparse_matmul on 'cpu'"):
    register_lowering(name, sparse_matmul_p, doubled, platform='cpu')


def test_an_unknown_lowering_is_refused_with_the_nearest_name():
  with pytest.raises(ValueError, match="did you mean 'doubled'"):
    sparse_matmul(jnp.asarray(X), W, MASK, lowering='double')

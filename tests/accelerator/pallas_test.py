"""Kernels that skip blocks equal the reference, and lower for GPUs and TPUs."""

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest

import spdf_jax as spdf
from spdf_jax import lowerings
from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator.pallas import lowering as pallas

pytestmark = pytest.mark.skipif(
    jax.default_backend() != 'cpu', reason='interprets kernels on a CPU'
)
KERNELS = [('cuda', 64), ('cuda', 128), ('tpu', 128)]


@pytest.fixture(scope='module', autouse=True)
def interpreted():
  for platform, size in KERNELS:
    kernels = pallas.lower_blocks(platform, size, interpret=True)
    for primitive, function in kernels.items():
      lowerings.register_lowering(
          f'{platform}-{size}', primitive, function, platform='cpu'
      )


def operands(size, dtype, sparsity=0.6, shape=(3, 4), tokens=(2, 128)):
  keys = jax.random.split(jax.random.key(size), 3)
  inputs, outputs = shape[0] * size, shape[1] * size
  params = {'w': jnp.ones((1, inputs, outputs))}
  mask = spdf.static(
      sparsity, structure=spdf.structures.block(size, size)
  ).init(keys[0], params)['w'][0]
  x = jax.random.normal(keys[1], (*tokens, inputs), dtype)
  w = jax.random.normal(keys[2], (inputs, outputs), dtype)
  return x, w, mask


def products(x, w, mask, lowering, grad_mask=None):
  def loss(x, w):
    y = sparse_matmul(x, w, mask, grad_mask=grad_mask, lowering=lowering)
    return jnp.sum(y.astype(jnp.float32) ** 2), y

  (_, y), (dx, dw) = jax.jit(
      jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  )(x, w)
  return y, dx, dw


def assert_equal_to_reference(lowering, *args):
  actual, wanted = products(*args, lowering), products(*args, 'reference')
  eps = jnp.finfo(args[0].dtype).eps
  for a, b in zip(actual, wanted):
    assert a.dtype == b.dtype
    b = np.asarray(b, np.float64)
    np.testing.assert_allclose(
        np.asarray(a, np.float64), b, atol=8 * eps * np.abs(b).max(), rtol=0
    )
  assert not np.asarray(actual[2])[~np.asarray(args[2])].any()


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('platform, size', KERNELS)
def test_all_three_products_equal_the_reference(platform, size, dtype):
  x, w, mask = operands(size, dtype)
  w = jnp.where(mask, w, jnp.nan)  # Pruned weights are ignored.
  assert_equal_to_reference(f'{platform}-{size}', x, w, mask)


@pytest.mark.ci
@pytest.mark.parametrize('platform, size', KERNELS)
@pytest.mark.parametrize('kind', ['unstructured', 'no zeros', 'empty column'])
def test_every_kind_of_mask_equals_the_reference(platform, size, kind):
  x, w, mask = operands(size, jnp.float32, shape=(2, 2))
  if kind == 'unstructured':
    mask = jax.random.bernoulli(jax.random.key(1), 0.01, mask.shape)
  elif kind == 'no zeros':
    mask = jnp.ones_like(mask)
  else:
    mask = jnp.zeros_like(mask).at[:size, -size:].set(True)
  assert_equal_to_reference(f'{platform}-{size}', x, w, mask)


def test_dense_gradients_are_computed_where_they_are_requested():
  x, w, mask = operands(64, jnp.float32, shape=(2, 2))
  grad_mask = jnp.ones_like(mask)
  dw = products(x, w, mask, 'cuda-64', grad_mask)[2]
  wanted = products(x, w, mask, 'reference', grad_mask)[2]
  np.testing.assert_allclose(dw, wanted, rtol=1e-4, atol=1e-3)
  assert np.asarray(dw)[~np.asarray(mask)].all()


def test_sizes_that_blocks_do_not_divide_use_the_reference(caplog):
  x, w, mask = operands(32, jnp.float32, shape=(3, 2))
  y = sparse_matmul(x, w, mask, lowering='cuda-64')
  np.testing.assert_allclose(y, x @ jnp.where(mask, w, 0), atol=1e-4)
  assert 'blocks of 64 do not divide weights [96, 64]' in caplog.text


@pytest.mark.parametrize('platform, size', KERNELS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_step_lowers_to_kernels_and_gathers_no_weights(
    platform, size, dtype
):
  x, w, mask = operands(size, dtype)
  target = {'cuda': '__gpu$xla.gpu.triton', 'tpu': 'tpu_custom_call'}[platform]
  module = export.export(
      jax.jit(lambda *args: products(*args, f'blocks-{size}')),
      platforms=[platform],
      disabled_checks=[export.DisabledSafetyCheck.custom_call(target)],
  )(x, w, mask).mlir_module()
  # The product, and the gradients of inputs and of weights.
  assert module.count(f'@{target}(') == 3
  assert 'stablehlo.dot_general' not in module

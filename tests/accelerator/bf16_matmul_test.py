"""Products of 16-bit arrays with float32 sums, and where models use them."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax import models
from spdf_jax.accelerator import bf16_matmul

HALF = 2.0**-8  # Half a unit in the last place of a bfloat16 in [1, 2).
PRODUCTS = [
    ('abk,kn->abn', (3, 5, 7), (7, 4)),
    ('abk,nk->abn', (1, 5, 7), (6, 7)),
    ('k,kn->n', (7,), (7, 4)),
    (',kn->kn', (), (7, 4)),
    ('kn,->kn', (7, 4), ()),
    ('bgqij,bgjn->bgqin', (2, 3, 1, 4, 5), (2, 3, 5, 6)),
    ('bgqij,bgjn->bgqin', (2, 3, 1, 1, 5), (2, 3, 5, 6)),
]


def normal(shape, seed=0, dtype=jnp.bfloat16):
  values = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(values, dtype)


def of_float64(f, *xs):
  """Calls NumPy's einsum, the oracle."""
  return np.einsum(f, *(np.asarray(x, np.float64) for x in xs))


def assert_rounded_once(x, want):
  # A sum of float32 products, rounded once to the dtype of x.
  scale = np.abs(want) + 1e-4
  assert (np.abs(np.asarray(x, np.float64) - want) <= 1.01 * HALF * scale).all()


@pytest.mark.parametrize(('subscripts', 'x_shape', 'y_shape'), PRODUCTS)
def test_a_product_and_its_gradients_are_rounded_once(
    subscripts, x_shape, y_shape
):
  x, y = normal(x_shape), normal(y_shape, 1)
  f = functools.partial(bf16_matmul.einsum, subscripts)
  z, transpose = jax.vjp(f, x, y)
  assert_rounded_once(z, of_float64(subscripts, x, y))
  dz = normal(z.shape, 2)
  dx, dy = transpose(dz)
  assert {a.dtype for a in (z, dx, dy)} == {jnp.dtype('bfloat16')}
  operands, of_z = subscripts.split('->')
  of_x, of_y = operands.split(',')
  assert_rounded_once(dx, of_float64(f'{of_z},{of_y}->{of_x}', dz, y))
  assert_rounded_once(dy, of_float64(f'{of_x},{of_z}->{of_y}', x, dz))


def test_a_float32_result_is_not_rounded_and_its_cotangent_is():
  x, y = normal((8, 16)), normal((16, 8), 1)
  f = functools.partial(bf16_matmul.einsum, 'ik,kj->ij', dtype=jnp.float32)
  z, transpose = jax.vjp(f, x, y)
  want = of_float64('ik,kj->ij', x, y)
  np.testing.assert_allclose(z, want, rtol=0, atol=1e-5)
  dz = normal(z.shape, 2, jnp.float32)
  rounded_dz = dz.astype(jnp.bfloat16).astype(jnp.float32)
  for got, same in zip(transpose(dz), transpose(rounded_dz)):
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, same)


@pytest.mark.parametrize('subscripts, shapes, axes', [
    ('ik,kj->ij', ((5, 7), (7, 3)), (0, None)),
    ('ik,kj->ij', ((5, 7), (7, 3)), (None, 1)),
    # XLA's CPU products of bfloat16 require batch axes to come first.
    ('bik,bkj->bij', ((4, 5, 7), (4, 7, 3)), (1, 0)),
    ('bk,bk->b', ((4, 7), (4, 7)), (1, 0)),
])
def test_batched_products_equal_a_loop_also_in_gradients(
    subscripts, shapes, axes
):
  shapes = [
      shape if axis is None else (*shape[:axis], 2, *shape[axis:])
      for shape, axis in zip(shapes, axes)
  ]
  x, y = (normal(shape, i) for i, shape in enumerate(shapes))
  f = functools.partial(bf16_matmul.einsum, subscripts)
  square = lambda x, y: (f(x, y).astype(jnp.float32) ** 2).sum()
  for g in (f, jax.grad(square, argnums=(0, 1))):
    got = jax.vmap(g, in_axes=axes)(x, y)
    for i in range(2):
      parts = (
          a if axis is None else jnp.take(a, i, axis)
          for a, axis in zip((x, y), axes)
      )
      of_i = jax.tree.leaves(jax.tree.map(operator.itemgetter(i), got))
      for a, b in zip(of_i, jax.tree.leaves(g(*parts)), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32),
            rtol=2 * HALF, atol=2 * HALF,
        )


def test_the_tangent_of_a_gradient_equals_that_of_the_plain_product():
  x, y, dx = normal((4, 6)), normal((6, 3), 1), normal((4, 6), 2)
  def tangent(product):
    loss = lambda x: jnp.tanh(product(x, y).astype(jnp.float32)).sum()
    return jax.jvp(jax.grad(loss), (x,), (dx,))[1].astype(jnp.float32)

  ours = tangent(functools.partial(bf16_matmul.einsum, 'ik,kj->ij'))
  np.testing.assert_allclose(ours, tangent(jnp.dot), rtol=0.1, atol=0.05)


@pytest.fixture
def has_bfloat16(monkeypatch):
  monkeypatch.setattr(bf16_matmul, 'multiplies_bfloat16', lambda: True)


CONFIGS = {
    'gpt': models.GPTConfig(32, 2, 2, 16, 32, 8),
    'tied llama': models.LlamaConfig(
        32, 2, 4, 16, 32, 8, n_kv_heads=2, tied=True
    ),
}


def products(dtype, name='gpt'):
  # Only the attention of CPUs, without a branch for other platforms.
  model = models.model_of(dataclasses.replace(
      CONFIGS[name], dtype=dtype, attention='blocks'
  ))
  tokens = jnp.zeros((2, 8), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)
  loss = lambda p: model.apply(p, tokens).sum()
  return str(jax.make_jaxpr(jax.grad(loss))(params)), model, params, tokens


@pytest.mark.parametrize('name', ['gpt', 'tied llama'])
def test_all_products_of_a_bfloat16_model_on_a_cpu_are_rounded(
    name, has_bfloat16
):
  text, *_ = products('bfloat16', name)
  assert 'bf16_einsum[' in text and 'dot_general[' not in text
  text, *_ = products('float32', name)
  assert 'bf16_einsum[' not in text


@pytest.mark.parametrize('name, leading', [('gpt', (2,)), ('tied llama', ())])
def test_a_tied_head_takes_inputs_with_any_number_of_axes(
    name, leading, has_bfloat16
):
  _, model, *_ = products('bfloat16', name)
  tokens = jnp.arange(16).reshape(2, 8)
  params = model.init(jax.random.key(0), tokens)
  chosen = (*(slice(n) for n in leading), *(0 for _ in range(2 - len(leading))))
  read_out = lambda head, x: head(x[chosen])
  logits = model.apply(params, tokens, read_out=read_out)
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(
      logits, model.apply(params, tokens)[chosen], rtol=1e-5, atol=1e-6
  )


def test_with_several_devices_products_are_left_to_jax(
    monkeypatch, has_bfloat16
):
  monkeypatch.setattr(jax, 'device_count', lambda: 8)
  assert 'bf16_einsum[' not in products('bfloat16')[0]


def test_without_bfloat16_instructions_products_are_left_to_jax(
    monkeypatch
):
  monkeypatch.setattr(bf16_matmul, 'multiplies_bfloat16', lambda: False)
  assert 'bf16_einsum[' not in products('bfloat16')[0]


def test_the_policy_saves_products_without_batch():
  w = normal((8, 8))
  def saved(subscripts, x):
    f = jax.checkpoint(
        lambda x: jnp.sin(bf16_matmul.einsum(subscripts, x, w)),
        policy=bf16_matmul.no_batch_dims_saveable,
    )
    text = str(jax.make_jaxpr(jax.grad(lambda x: f(x).sum()))(x))
    return text.count('bf16_einsum[')

  # One call is the product, one the gradient of x; without the policy the
  # product is computed twice.
  assert saved('ik,kj->ij', normal((4, 8))) == 2
  assert saved('ki,kj->kij', normal((8, 4))) == 3

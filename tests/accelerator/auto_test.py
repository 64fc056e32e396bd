"""`lowering='auto'` multiplies by kernels where they are faster, rightly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.accelerator import auto
from spdf_jax.accelerator import crossovers
from spdf_jax.accelerator import explain
from spdf_jax.accelerator import native
from spdf_jax.accelerator import processor
from spdf_jax.accelerator import skip_zeros
from spdf_jax.accelerator import sparse_matmul

pytestmark = pytest.mark.skipif(
    not native.is_available(), reason='no native kernels here'
)
TOKENS, WIDTH = 64, 64


def operands(sparsity, side=1, dtype='float32', stack=()):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  kept = rng.random((*stack, WIDTH // side, 2 * WIDTH // side)) >= sparsity
  mask = jnp.asarray(kept.repeat(side, -1).repeat(side, -2))
  x, w = draw(*stack, TOKENS, WIDTH), draw(*stack, WIDTH, 2 * WIDTH)
  return x, w, mask


def differentiated(lowering, x, w, mask, grad_mask):
  multiply = lambda x, w, mask, grad_mask: sparse_matmul(
      x, w, mask, grad_mask=grad_mask, lowering=lowering
  )
  if x.ndim > 2:
    multiply = jax.vmap(multiply)
  loss = lambda x, w: jnp.sum(jnp.sin(multiply(x, w, mask, grad_mask)))
  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, w)


@pytest.mark.parametrize('sparsity, side', [
    (0.0, 1), (0.1, 1), (0.75, 1), (0.75, 32), (1.0, 1),
])
@pytest.mark.parametrize('stack', [(), (2,)])
def test_auto_computes_what_the_reference_does_at_every_sparsity(
    sparsity, side, stack
):
  x, w, mask = operands(sparsity, side, stack=stack)
  w = jnp.where(mask, w, jnp.nan)
  for grad_mask in (mask, jnp.ones_like(mask)):
    actual = differentiated('auto', x, w, mask, grad_mask)
    expected = differentiated('reference', x, w, mask, grad_mask)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=2e-4),
        actual, expected,
    )


@pytest.fixture
def on_processor(monkeypatch):
  """Simulates a processor, whose kernels return NaN, so that uses are seen."""
  def simulate(vendor, kernels, has_tiles=False):
    monkeypatch.setattr(processor, 'vendor', lambda: vendor)
    monkeypatch.setattr(native, 'kernels', lambda dtype: kernels)
    monkeypatch.setattr(native, 'has_matrix_unit', lambda: has_tiles)
    monkeypatch.setattr(native, 'is_available', lambda dtype: True)
    monkeypatch.setattr(
        auto.kernels, 'sparse_matmul',
        lambda x, w, *_, **__: jnp.full((*x.shape[:-1], w.shape[-1]), jnp.nan,
                                        x.dtype),
    )

  return simulate


def uses_kernels(sparsity, side=1, dtype='float32'):
  x, w, mask = operands(sparsity, side, dtype)
  # A new function, since programs are cached by the function.
  multiply = jax.jit(lambda x, w, mask: sparse_matmul(
      x, w, mask, lowering='auto'
  ))
  return bool(jnp.isnan(multiply(x, w, mask)).all())


@pytest.mark.parametrize('vendor, kernels, dtype, least', [
    ('AuthenticAMD', 'avx512', 'float32', 0.3),
    ('AuthenticAMD', 'avx512bf16', 'bfloat16', 0.45),
    ('AuthenticAMD', 'avx2', 'float32', 0.5),
    ('AuthenticAMD from Zen 5 on', 'avx512', 'float32', 0.3),
    ('AuthenticAMD from Zen 5 on', 'avx512bf16', 'bfloat16', 0.6),
])
def test_kernels_are_used_above_the_crossover(
    on_processor, vendor, kernels, dtype, least
):
  on_processor(vendor, kernels)
  assert not uses_kernels(0.0, dtype=dtype)
  assert not uses_kernels(least - 0.05, dtype=dtype)
  assert uses_kernels(least + 0.05, dtype=dtype)


def test_with_amx_bfloat16_kernels_are_used_for_blocks_only(on_processor):
  on_processor('GenuineIntel with AMX', 'avx512bf16', has_tiles=True)
  assert not uses_kernels(0.75, dtype='bfloat16')
  assert uses_kernels(0.75, side=32, dtype='bfloat16')


def test_an_unknown_processor_is_measured_once_while_a_step_is_traced(
    on_processor, monkeypatch, tmp_path
):
  on_processor('unknown', 'portable')
  measured = []

  def measure(*args):
    measured.append(args)
    # A measurement computes, here while a function is traced.
    return float(jnp.ones(()).item()) * 0.5

  monkeypatch.setattr(crossovers, 'measure_crossover', measure)
  monkeypatch.setattr(
      crossovers.library, 'build', lambda: tmp_path / 'libspdf.so'
  )
  assert uses_kernels(0.75) and not uses_kernels(0.4)
  assert len(measured) == 1


def test_products_that_cannot_be_faster_are_dense_and_explained(on_processor):
  on_processor('AuthenticAMD', 'avx512')
  multiply = lambda w, x: x @ w
  x, w, mask = operands(0.75)
  table = lambda w, x, mask: str(explain(multiply)(w, x, mask=mask))
  assert 'native above 30% zeros' in table(w, x, mask)
  assert 'fewer than 64 tokens' in table(w, x[:63], mask)
  assert 'narrower than 64' in table(w[:63], x[:, :63], mask[:63])
  few = jax.jit(skip_zeros(multiply))(w, x[:63], mask=mask)
  assert jnp.isfinite(few).all()
  on_processor('GenuineIntel with AMX', 'avx512bf16')
  assert 'native above 95% zeros' in table(w, x, mask)


@pytest.mark.parametrize('lowering, dtype, setting, reason', [
    ('native', 'float32', '1', ''),
    ('native', 'float16', '1', 'no kernels for float16'),
    ('native', 'float32', '0', 'no kernels for float32'),
    ('reference', 'float32', '1', 'the reference multiplies zeros'),
])
def test_weights_reach_kernels_only_if_there_are_some(
    lowering, dtype, setting, reason, monkeypatch
):
  monkeypatch.setenv('SPDF_NATIVE', setting)
  x, w, mask = operands(0.75, dtype=dtype)
  multiply = lambda p, x: x @ p['w']
  table = explain(multiply, lowering=lowering)({'w': w}, x, mask={'w': mask})
  assert table.dense == ({'w': reason} if reason else {})


@pytest.mark.parametrize('lowering', ['auto', 'native'])
def test_a_stack_of_no_matrices_has_products_and_gradients(lowering):
  x, w, mask = operands(0.75, stack=(0,))
  multiply = lambda w, x, mask: jax.vmap(
      lambda w, x, m: sparse_matmul(x, w, m, lowering=lowering)
  )(w, x, mask)
  fast = skip_zeros(lambda w: multiply(w, x, mask), lowering=lowering)
  for f in (lambda w: multiply(w, x, mask), lambda w: fast(w, mask=mask)):
    y, transpose = jax.vjp(f, w)
    assert y.shape == (0, TOKENS, 2 * WIDTH)
    assert transpose(y)[0].shape == w.shape


def test_derivatives_save_operands_only():
  # A branch around a whole model would save the residuals of both branches.
  x, w, mask = operands(0.75)
  loss = lambda lowering: lambda x, w: jnp.sum(jnp.sin(sparse_matmul(
      x, w, mask, lowering=lowering
  )))
  saved = lambda lowering: [
      x.shape for x in jax.tree.leaves(jax.vjp(loss(lowering), x, w)[1])
  ]
  assert sorted(saved('auto')) == sorted(saved('native'))

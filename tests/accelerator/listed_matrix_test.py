"""Products with listed matrices are those of NumPy in float64, also in models.

Weights off the mask are NaN before they are listed.
"""

import dataclasses
import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax import models
from spdf_jax.accelerator import list_matrix
from spdf_jax.accelerator import list_params
from spdf_jax.accelerator import listed_matmul
from spdf_jax.accelerator import listed_matrix
from spdf_jax.accelerator import native
from spdf_jax.evaluation import CachedModel
from spdf_jax.evaluation import generate
from spdf_jax.sparsity import MatrixAxes
from tests.accelerator import primitives_test
from tests.refusals import refuse
from tests.sparse_params import make_sparse_params

needs_kernels = pytest.mark.skipif(
    jax.default_backend() != 'cpu' or not native.is_available(),
    reason='there are no native kernels here (is a C++ compiler installed?)',
)
LOWERINGS = ['reference', pytest.param('native', marks=needs_kernels)]
with_lowerings = pytest.mark.parametrize('lowering', LOWERINGS)

# Around the lanes of vectors (4, 8, 16) and the number of sums (8).
EDGES = [
    (1, 1, 1, 0.0), (1, 300, 70, 0.5), (2, 17, 33, 0.75), (4, 64, 9, 1.0),
    (5, 8, 3, 0.0), (9, 100, 1, 0.9), (16, 7, 40, 0.5), (17, 513, 15, 0.95),
    (32, 65, 31, 0.75), (33, 40, 300, 0.6),
]


def draw(seed, tokens, inputs, outputs, sparsity, dtype='float32'):
  """Returns inputs, weights of a dtype with NaN off the mask, and the mask."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(tokens, inputs)).astype(np.float32)
  mask = rng.random((inputs, outputs)) >= sparsity
  mask[:, -1:] = seed % 3 == 0  # A full or an empty output.
  mask[:1] = seed % 2 == 0
  w = np.where(mask, rng.normal(size=mask.shape), np.nan)
  return x, np.asarray(w.astype(jnp.dtype(dtype))), mask


def product(x, w, mask):
  wide = lambda a: np.asarray(a).astype(np.float64)
  return wide(x) @ np.where(mask, wide(w), 0)


assert_close = functools.partial(primitives_test.assert_close, tolerance=2e-6)


def check(lowering, seed, *shape, dtype='float32'):
  x, w, mask = draw(seed, *shape, dtype)
  f = jax.jit(lambda x, w: listed_matmul(x, w, lowering=lowering))
  assert_close(f(x, list_matrix(w, mask)), product(x, w, mask))


@needs_kernels
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 99),
    tokens=st.integers(1, 32),
    inputs=st.integers(1, 90),
    outputs=st.integers(1, 40),
    sparsity=st.sampled_from([0.0, 0.5, 0.75, 0.95, 1.0]),
    dtype=st.sampled_from(listed_matrix.DTYPES),
)
def test_native_products_equal_numpys(dtype, **case):
  check('native', *case.values(), dtype=dtype)


def check_edges():
  """Runs in a child process of `native_test`, with every set of kernels."""
  for seed, edge in enumerate(EDGES):
    for dtype in listed_matrix.DTYPES:
      check('native', seed, *edge, dtype=dtype)
  check('native', 3, 20, 700, 900, 0.7)  # Several parts.


@pytest.mark.parametrize('dtype', listed_matrix.DTYPES)
def test_reference_products_equal_numpys(dtype):
  for seed, edge in enumerate(EDGES[1:4]):
    check('reference', seed, *edge, dtype=dtype)


@with_lowerings
def test_inputs_of_bfloat16_are_summed_in_float32_and_rounded_once(lowering):
  x, w, mask = draw(1, 3, 200, 20, 0.5, 'bfloat16')
  x = jnp.asarray(x, 'bfloat16')
  y = listed_matmul(x, list_matrix(w, mask), lowering=lowering)
  assert y.dtype == x.dtype
  wanted = product(x, w, mask)
  error = np.abs(np.asarray(y).astype(np.float64) - wanted)
  assert (error <= np.abs(wanted) / 256 + 1e-5).all()


@needs_kernels
def test_a_token_has_the_same_bits_alone_and_among_others_and_repeated():
  x, w, mask = draw(0, 16, 700, 300, 0.75)
  w = list_matrix(w, mask)
  f = jax.jit(lambda x: listed_matmul(x, w, lowering='native'))
  all_y = np.asarray(f(x))
  for _ in range(3):
    np.testing.assert_array_equal(f(x), all_y)
  for first, last in ((0, 1), (2, 5), (8, 16)):
    np.testing.assert_array_equal(f(x[first:last]), all_y[first:last])


@needs_kernels
def test_the_native_product_compiles_to_one_call():
  x, w, mask = draw(0, 2, 20, 30, 0.5)
  f = jax.jit(lambda x, w: listed_matmul(x, w, lowering='native'))
  text = f.lower(x, list_matrix(w, mask)).compile().as_text()
  assert text.count('custom_call_target="spdf_listed_matmul"') == 1
  assert ' dot(' not in text and 'scatter' not in text


@needs_kernels
def test_infinite_inputs_affect_only_outputs_that_keep_their_weights():
  x = np.array([[1, np.inf, 2], [1, 1, 1]], np.float32)
  w = np.array([[1, 2], [3, 0], [5, 6]], np.float32)
  w = list_matrix(w, w != 0)
  wanted = np.array([[np.inf, 14], [9, 8]])
  for rows in (slice(0, 1), slice(0, 2)):
    y = listed_matmul(x[rows], w, lowering='native')
    np.testing.assert_array_equal(y, wanted[rows])


@needs_kernels
def test_a_listed_matrix_whose_starts_exceed_its_values_is_refused():
  x, w, mask = draw(0, 2, 20, 30, 0.5)
  w = list_matrix(w, mask)
  for starts in (w.starts + 1, w.starts[::-1].copy(), w.starts - 1):
    bad = listed_matrix.ListedMatrix(w.values, w.indices, starts, w.inputs)
    with pytest.raises(jax.errors.JaxRuntimeError, match='starts of the lists'):
      jax.block_until_ready(listed_matmul(x, bad, lowering='native'))


@pytest.mark.parametrize('axes', [(1, None), (1, 0)])
def test_vmap_over_either_operand_equals_a_loop(axes):
  x, w, mask = draw(0, 3 * 4, 6, 5, 0.5)
  x = x.reshape(3, 4, 6)
  rng = np.random.default_rng(1)
  mask = np.stack([mask, mask & (rng.random(mask.shape) < 0.5), ~mask])
  w = np.where(mask, rng.normal(size=mask.shape), np.nan).astype(np.float32)
  stack = list_matrix(w, mask)
  assert stack.shape == w.shape
  at = lambda i: jax.tree.map(lambda a: a[i], stack)
  x_axis, w_axis = axes
  products = jax.vmap(listed_matmul, axes)(
      x[0] if x_axis is None else np.moveaxis(x, 0, x_axis),
      at(0) if w_axis is None else stack,
  )
  for i in range(3):
    j, k = (0 if axis is None else i for axis in axes)
    assert_close(products[i], product(x[j], w[k], mask[k]))


@pytest.mark.parametrize('error, call, message', [
    (ValueError, lambda w, m: list_matrix(w, m[1:]),
     r'w \[4, 6\] and mask \[3, 6\]'),
    (ValueError, lambda w, m: list_matrix(
        np.ones((65537, 1), np.float32), np.ones((65537, 1), bool)
    ), '65537 inputs and keeps'),
    (ValueError, lambda w, m: listed_matrix.list_values(
        w[0, :4], np.arange(4) + 1, m.sum(0), 4
    ), 'from 1 to 4, but the matrix has 4 inputs'),
    (ValueError, lambda w, m: listed_matmul(
        np.ones((2, 5), np.float32), list_matrix(w, m)
    ), r'x \[2, 5\] and w \[4, 6\]'),
    (TypeError, lambda w, m: list_matrix(w, w), 'a mask of dtype float32'),
    (TypeError, lambda w, m: list_matrix(w, m, dtype='float16'),
     'dtype is float16; use'),
])
def test_operands_that_do_not_fit_a_listed_matrix_are_refused(
    error, call, message
):
  w = np.eye(4, 6, dtype=np.float32)
  refuse(message, call, w, w != 0, error=error)


def test_weights_with_inputs_between_outputs_cannot_be_listed():
  w = np.ones((2, 3, 4), np.float32)
  where = {'w': MatrixAxes(1, (0, 2))}
  with pytest.raises(ValueError, match=r"'w' of shape \[2, 3, 4\] .* cannot"):
    list_params({'w': w}, {'w': w > 0}, where=where)


SIZES = dict(
    vocab_size=23, n_layers=2, n_heads=2, d_model=16, d_ff=24, max_length=16
)
GPT, LLAMA = models.GPTConfig(**SIZES), models.LlamaConfig(**SIZES)
PROMPTS = [[3], [7, 1, 19], [2, 2]]
SEARCH = dict(max_new_tokens=6, end_of_text=0, batch_size=3, length=16)


def native_model(config):
  return models.model_of(dataclasses.replace(config, lowering='native'))


def dense_and_sparse(config):
  params, mask = make_sparse_params(config, 0.7)
  return (
      (CachedModel(models.model_of(config)), params),
      (CachedModel(native_model(config)), list_params(params, mask)),
  )


@pytest.mark.parametrize('config', [
    dataclasses.replace(GPT, n_layers=1),
    pytest.param(LLAMA, marks=pytest.mark.slow),
])
def test_greedy_texts_are_those_of_the_dense_model(config):
  actual, wanted = (
      generate(*model, PROMPTS, **SEARCH) for model in dense_and_sparse(config)
  )
  assert actual == wanted and any(actual)


@needs_kernels
def test_a_listed_model_multiplies_by_no_hidden_matrix():
  params, mask = make_sparse_params(GPT, 0.7)
  tokens = np.array([[3, 1]])
  apply = lambda params: native_model(GPT).apply({'params': params}, tokens)
  text = jax.jit(apply).lower(list_params(params, mask)).compile().as_text()
  assert text.count('custom_call_target="spdf_listed_matmul"') == 12
  assert 'f32[16,24]' not in text and 'f32[24,16]' not in text


def test_a_listed_model_refuses_masks_and_another_width():
  params, mask = make_sparse_params(GPT, 0.7)
  listed = list_params(params, mask)
  tokens = np.array([[3, 1]])
  model = native_model(GPT)
  apply = lambda model, **variables: jax.eval_shape(
      model.apply, variables, tokens
  )
  with pytest.raises(ValueError, match='h_0/attn/wq/kernel is a List.* omit'):
    apply(model, params=listed, masks=mask)
  wide = native_model(dataclasses.replace(GPT, d_ff=32))
  listed['h_0']['mlp']['wi']['bias'] = np.zeros(32, np.float32)
  refuse(r'wi/kernel is a Listed.*\[16, 24\]', apply, wide, params=listed)

"""The sparse matmul is right under every transformation of JAX.

Weights are dense, or packed: the values of kept weights and bits of the mask.

The oracle is NumPy in float64: the product, both gradients, and the product of
the second derivative with a vector, written out by hand.
"""

import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
from jax import export
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from spdf_jax import packing
from spdf_jax.accelerator import bf16_matmul
from spdf_jax.accelerator import matmuls_saveable
from spdf_jax.accelerator import sampled_matmul_p
from spdf_jax.accelerator import sparse_matmul
from spdf_jax.accelerator import sparse_matmul_p

pytestmark = pytest.mark.filterwarnings('error::DeprecationWarning')

TOLERANCE = {'bfloat16': 0.16, 'float16': 0.024}
few = settings(max_examples=8, deadline=None, derandomize=True)


class Case:
  """Operands in float64, and a direction for derivatives."""

  def __init__(self, seed, tokens, inputs, outputs, sparsity, stack=()):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    self.x = draw(*stack, *tokens, inputs)
    self.w = draw(*stack, inputs, outputs)
    self.mask = rng.random(self.w.shape) >= sparsity
    self.grad_mask = rng.random(self.w.shape) >= sparsity / 2
    self.weights = draw(*stack, *tokens, outputs)  # Weights of the loss.
    self.vx, self.vw = draw(*self.x.shape), draw(*self.w.shape)


def tokens_first(x):
  return x.reshape(-1, x.shape[-1])


def oracle(case):
  """Product, gradient and Hessian-vector product of sum(c y²) / 2."""
  x, c, vx = (
      tokens_first(a).astype(np.float64)
      for a in (case.x, case.weights, case.vx)
  )
  w = np.where(case.mask, case.w, 0).astype(np.float64)
  vw = np.where(case.grad_mask, case.vw, 0).astype(np.float64)
  y = x @ w
  dy = vx @ w + x @ vw
  gradient = (c * y) @ w.T, case.grad_mask * (x.T @ (c * y))
  hvp = (
      (c * dy) @ w.T + (c * y) @ vw.T,
      case.grad_mask * (vx.T @ (c * y) + x.T @ (c * dy)),
  )
  as_x = lambda a: a.reshape(case.x.shape)
  return (
      y.reshape(case.weights.shape),
      (as_x(gradient[0]), gradient[1]),
      (as_x(hvp[0]), hvp[1]),
  )


def measured(case, multiply=sparse_matmul):
  """The same by JAX, with weights off the mask that are not numbers."""
  w = np.where(case.mask, case.w, np.nan)
  w[~case.mask & (np.arange(w.size).reshape(w.shape) % 2 == 0)] = np.inf

  def everything(x, w, mask, grad_mask, c, vx, vw):
    product = lambda x, w: multiply(x, w, mask, grad_mask=grad_mask)
    loss = lambda x, w: (c * product(x, w) ** 2).sum() / 2
    gradient = jax.grad(loss, (0, 1))
    _, hvp = jax.jvp(gradient, (x, w), (vx, vw))
    return product(x, w), gradient(x, w), hvp

  return everything, (
      case.x, w, case.mask, case.grad_mask, case.weights, case.vx, case.vw
  )


def assert_close(actual, wanted, tolerance=1.6e-5):
  """Asserts that leaves are close in units of the largest of each leaf."""
  for a, b in zip(
      jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True
  ):
    a, b = np.asarray(a).astype(np.float64), np.asarray(b)
    assert a.shape == b.shape
    scale = max(1.0, np.abs(b).max())
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


shapes = st.builds(
    Case,
    seed=st.integers(0, 99),
    tokens=st.lists(st.integers(1, 5), max_size=3),
    inputs=st.integers(1, 9),
    outputs=st.integers(1, 9),
    sparsity=st.sampled_from([0.0, 0.3, 0.75, 0.99, 1.1]),
)


def multiply_packed(x, w, mask, *, grad_mask=None, **kwargs):
  """Packs a matrix and multiplies; its derivatives are those of the matrix.

  Traced masks have room for all weights, others exactly as much as is needed.
  """
  del grad_mask
  size = w.size
  if isinstance(mask, np.ndarray):
    size = max(1, int(mask.sum()))
  packed = packing.pack_mask(mask)
  values = packing.gather_kept(w, packed, size)
  return sparse_matmul(x, values, packed, **kwargs)


STORAGES = {'dense': sparse_matmul, 'packed': multiply_packed}


def stored(storage, case):
  """Returns a case that a storage supports, and its product."""
  if storage == 'packed':  # The gradient has the mask of the product.
    case.grad_mask = case.mask
  return case, STORAGES[storage]


@few
@given(shapes, st.sampled_from(list(STORAGES)), st.booleans())
def test_product_gradient_and_second_derivative_equal_numpys(
    case, storage, jitted
):
  case, multiply = stored(storage, case)
  everything, args = measured(case, multiply)
  run = jax.jit(everything) if jitted else everything
  assert_close(run(*args), oracle(case))


CASE = Case(0, (3, 4), 6, 5, 0.6)


@pytest.mark.parametrize('storage, policy', [
    ('dense', jax.checkpoint_policies.nothing_saveable),
    ('packed', matmuls_saveable),
])
def test_remat_changes_nothing(storage, policy):
  case, multiply = stored(storage, Case(0, (3, 4), 6, 5, 0.6))
  everything, args = measured(case, jax.checkpoint(multiply, policy=policy))
  assert_close(jax.jit(everything)(*args), oracle(case))


@few
@given(
    st.integers(0, 99),
    st.lists(st.booleans(), min_size=4, max_size=4).filter(any),
    st.integers(-3, 2),
)
def test_vmap_over_any_operand_equals_a_loop(seed, mapped, axis):
  stack = Case(seed, (3,), 4, 5, 0.5, stack=(3,))
  names = 'x', 'w', 'mask', 'grad_mask'
  layers = []
  for i in range(3):
    layer = Case(seed, (3,), 4, 5, 0.5)
    for name in (*names, 'weights', 'vx', 'vw'):
      index = i if name not in names or mapped[names.index(name)] else 0
      setattr(layer, name, getattr(stack, name)[index])
    layers.append(layer)
  wanted = [oracle(layer) for layer in layers]
  everything, _ = measured(layers[0])
  columns = list(zip(*(measured(layer)[1] for layer in layers)))
  args, axes = [], []
  for i, column in enumerate(columns):
    if i < len(names) and not mapped[i]:
      args.append(column[0])
      axes.append(None)
    else:
      args.append(np.stack(column, axis if column[0].ndim == 2 else 0))
      axes.append(axis)
  if not mapped[1]:  # Where the mask differs, so do the weights it hides.
    args[1] = stack.w[0]
  actual = jax.vmap(everything, axes)(*args)
  assert_close(actual, jax.tree.map(lambda *xs: np.stack(xs), *wanted))


@pytest.mark.parametrize('mapped', [(False, True, True), (True, False, True)])
def test_vmap_over_any_packed_operand_equals_a_loop(mapped):
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
  gradients = jax.jit(jax.vmap(f, axes))(*given_args)
  f = jax.jit(f)
  for i in range(3):
    wanted = f(*(a[i if m else 0] for a, m in zip(args, mapped)))
    assert_close((gradients[0][i], gradients[1][i]), wanted)


@pytest.mark.parametrize('storage', STORAGES)
def test_scan_over_stacked_layers_equals_a_loop(storage):
  rng = np.random.default_rng(0)
  x, w = rng.normal(size=(4, 5)), rng.normal(size=(3, 5, 5))
  mask = rng.random(w.shape) < 0.5
  # Layers keep different numbers of weights.
  assert len(set(mask.sum((-2, -1)))) > 1

  def scanned(x, w):
    masks = mask
    if storage == 'packed':
      masks = packing.pack_mask(mask)
      w = packing.gather_kept(w, masks, int(mask.sum((-2, -1)).max()))
    layer = lambda x, wm: (jnp.tanh(sparse_matmul(x, *wm)), None)
    return jax.lax.scan(layer, x, (w, masks))[0]

  def looped(x, w):
    for i in range(3):
      x = jnp.tanh(x @ jnp.where(mask[i], w[i], 0))
    return x

  x, w = jnp.float32(x), jnp.float32(w)
  for order in (
      lambda f: f(x, w),
      lambda f: jax.grad(lambda x, w: f(x, w).sum(), (0, 1))(x, w),
      lambda f: jax.hessian(lambda w: f(x, w).sum())(w),
  ):
    assert_close(order(scanned), order(looped))


def test_third_derivatives_equal_finite_differences():
  multiply = lambda x, w: jnp.sin(
      sparse_matmul(x, w, CASE.mask, grad_mask=CASE.mask)
  )
  jax.test_util.check_grads(
      multiply, (jnp.asarray(CASE.x), jnp.asarray(CASE.w)), order=3,
      atol=3e-2, rtol=3e-2,
  )


def test_the_transposes_in_x_and_w_equal_numpys():
  x, w, mask = CASE.x, CASE.w, CASE.mask
  y = CASE.weights
  # The mask of the gradient is for derivatives only.
  by_w = lambda w: sparse_matmul(x, w, mask, grad_mask=CASE.grad_mask)
  by_x = lambda x: sparse_matmul(x, w, mask)
  (dw,), (dx,) = (
      jax.linear_transpose(f, a)(y) for f, a in ((by_w, w), (by_x, x))
  )
  kept = np.where(mask, w, 0).astype(np.float64)
  assert_close(dx, y.astype(np.float64) @ kept.T)
  assert_close(dw, mask * (tokens_first(x).T @ tokens_first(y)))
  transposed = lambda y: jax.linear_transpose(by_w, w)(y)[0]
  again = jax.linear_transpose(transposed, y)(w)
  assert_close(again[0], x.astype(np.float64) @ kept)


@pytest.mark.parametrize('storage, dtype', [
    ('dense', 'float16'), ('packed', 'bfloat16'),
])
def test_results_have_the_dtype_of_the_operands_and_its_precision(
    storage, dtype
):
  case, multiply = stored(storage, Case(1, (5,), 64, 8, 0.5))
  for name in ('x', 'w', 'weights', 'vx', 'vw'):
    rounded = jnp.asarray(getattr(case, name), dtype)
    setattr(case, name, np.asarray(rounded.astype(jnp.float32)))
  everything, args = measured(case, multiply)
  args = [a if a.dtype == bool else jnp.asarray(a, dtype) for a in args]
  actual = jax.jit(everything)(*args)
  assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {jnp.dtype(dtype)}
  assert_close(actual, oracle(case), TOLERANCE[dtype])


@pytest.mark.parametrize('chosen, expected', [
    (None, 'float32'), ('bfloat16', 'bfloat16')
])
def test_sums_are_accumulated_in_the_chosen_dtype(chosen, expected):
  x, w = (jnp.asarray(a, jnp.bfloat16) for a in (CASE.x, CASE.w))
  loss = lambda x, w: sparse_matmul(
      x, w, CASE.mask, accumulation_dtype=chosen
  ).sum()
  lowered = jax.jit(jax.grad(loss, (0, 1))).trace(x, w).lower()
  dots = [
      line for line in lowered.as_text().splitlines() if 'dot_general' in line
  ]
  kind = {'float32': 'xf32>', 'bfloat16': 'xbf16>'}[expected]
  assert len(dots) == 2  # The product itself is not needed.
  assert all(line.rstrip().endswith(kind) for line in dots)


def test_the_gradient_mask_is_the_mask_unless_given():
  loss = lambda w, **masks: sparse_matmul(CASE.x, w, CASE.mask, **masks).sum()
  dw = jax.grad(loss)(CASE.w)
  assert (np.asarray(dw)[~CASE.mask] == 0).all()
  assert (np.asarray(dw)[CASE.mask] != 0).all()
  dense = jax.grad(functools.partial(loss, grad_mask=np.full((6, 5), True)))
  np.testing.assert_array_equal(
      np.where(CASE.mask, dense(CASE.w), 0), dw
  )
  assert (np.asarray(dense(CASE.w)) != 0).all()


def test_gradients_of_packed_values_are_those_of_the_matrix_bit_for_bit():
  packed = packing.pack_mask(CASE.mask)
  size = int(CASE.mask.sum())
  take = functools.partial(packing.gather_kept, packed=packed, size=size)
  loss = lambda x, w, mask: (
      CASE.weights * sparse_matmul(x, w, mask) ** 2
  ).sum()
  wanted = jax.grad(loss, (0, 1))(CASE.x, CASE.w, CASE.mask)
  gradients = jax.grad(loss, (0, 1))(CASE.x, take(CASE.w), packed)
  np.testing.assert_array_equal(gradients[0], wanted[0])
  np.testing.assert_array_equal(gradients[1], take(wanted[1]))
  assert gradients[1].shape == (size,)


def test_a_nan_in_the_output_gradient_reaches_chosen_weights_only():
  dy = np.array([[np.nan, 1.0]], np.float32)
  mask = np.array([[False, True], [True, True]])
  _, pullback = jax.vjp(
      lambda w: sparse_matmul(np.ones((1, 2), np.float32), w, mask),
      jnp.ones((2, 2)),
  )
  np.testing.assert_array_equal(pullback(dy)[0], [[0, 1], [np.nan, 1]])


def test_an_exported_program_has_equal_results_on_all_platforms():
  pytest.importorskip('flatbuffers', reason='export serialises with it')
  everything, args = measured(CASE)
  exported = export.export(
      jax.jit(everything), platforms=('cpu', 'cuda', 'tpu')
  )(*args)
  restored = export.deserialize(exported.serialize())
  assert_close(restored.call(*args), oracle(CASE))


def count_primitives(f, *args):
  text = str(jax.make_jaxpr(f)(*args))
  return (
      text.count(f'= {sparse_matmul_p.name}['),
      text.count(f'= {sampled_matmul_p.name}['),
  )


def test_remat_with_the_policy_recomputes_no_matmul():
  def loss(policy):
    layer = lambda x: jnp.sin(
        sparse_matmul(jnp.sin(sparse_matmul(x, w, mask)), w.T, mask.T)
    )
    return lambda x, w_: (
        jax.checkpoint(layer, policy=policy)(x) * w_.sum()
    ).sum()

  x, w, mask = CASE.x, CASE.w, CASE.mask
  count = lambda policy: count_primitives(
      jax.grad(loss(policy), (0, 1)), x, w
  )[0]
  plain = count(jax.checkpoint_policies.everything_saveable)
  assert count(matmuls_saveable) == plain == 4
  # JAX's own policy does not know the primitive.
  assert count(jax.checkpoint_policies.dots_saveable) > plain


def test_remat_with_the_policy_recomputes_no_rounded_product():
  w = jnp.ones((6, 6), jnp.bfloat16)
  def layer(x):
    for _ in range(2):
      x = jnp.sin(bf16_matmul.einsum('ik,kj->ij', x, w))
    return x.sum()

  def count(policy):
    f = jax.grad(jax.checkpoint(layer, policy=policy))
    return str(jax.make_jaxpr(f)(w)).count('bf16_einsum[')

  plain = count(jax.checkpoint_policies.everything_saveable)
  assert count(matmuls_saveable) == plain == 4
  assert count(jax.checkpoint_policies.dots_saveable) > plain


FLOATS = jnp.ones((2, 6), jnp.float32)
PACKED = packing.pack_mask(CASE.mask)


@pytest.mark.parametrize('error, change, words', [
    (ValueError, dict(x=np.float32([[1] * 7])),
     r'x \[1, 7\], w \[6, 5\]; give x \[..., inputs'),
    (ValueError, dict(mask=np.ones((5, 6), bool)),
     r'mask \[5, 6\]; give the mask the'),
    (ValueError, dict(grad_mask=np.ones(5, bool)),
     r'grad_mask \[5\]; give the grad_mask'),
    (ValueError, dict(w=np.float32([[]] * 6), mask=np.ones((6, 0), bool)),
     r'w \[6, 0\]; every axis'),
    (ValueError, dict(lowering='nativ'), "lowering 'nativ' is unknown"),
    (TypeError, dict(x=FLOATS.astype(jnp.bfloat16)),
     'bfloat16 and w .* float32; cast'),
    (TypeError, dict(x=FLOATS.astype(int)), 'x of dtype int32; cast x and w'),
    (TypeError, dict(mask=np.ones((6, 5), np.float32)),
     r'mask \[6, 5\] of dtype float32'),
    (TypeError, dict(accumulation_dtype='bfloat16'),
     'accumulation_dtype is bfloat16'),
    (ValueError, dict(w=np.ones((2, 3), np.float32), mask=PACKED),
     r'values \[2, 3\]'),
    (ValueError, dict(
        w=np.ones(3, np.float32),
        mask=packing.PackedMask(np.zeros((6, 1), np.uint8), 9),
    ), r'packed mask \[6, 9\] with 1 bytes'),
    (ValueError, dict(
        w=np.ones(3, np.float32), mask=PACKED, grad_mask=CASE.grad_mask,
    ), 'packed mask and grad_mask'),
])
def test_operands_that_do_not_fit_are_refused(error, change, words):
  args = dict(x=CASE.x, w=CASE.w, mask=CASE.mask) | change
  with pytest.raises(error, match=words):
    sparse_matmul(args.pop('x'), args.pop('w'), args.pop('mask'), **args)

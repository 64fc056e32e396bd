"""`skip_zeros(f)` around and inside other transformations, and its arguments.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.accelerator import bf16_matmul
from spdf_jax.accelerator import explain
from spdf_jax.accelerator import list_params
from spdf_jax.accelerator import native
from spdf_jax.accelerator import skip_zeros
from tests.accelerator.skip_zeros_programs_test import assert_equal_trees
from tests.accelerator.skip_zeros_programs_test import draw_arrays
from tests.accelerator.skip_zeros_programs_test import program
from tests.accelerator.skip_zeros_programs_test import SIZE
from tests.accelerator.skip_zeros_programs_test import TOKENS

needs_kernels = pytest.mark.skipif(
    jax.default_backend() != 'cpu' or not native.is_available(),
    reason='there are no native kernels here (is a C++ compiler installed?)',
)


def simple(seed=0, sparsity=0.5):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  params = {'wi': draw(SIZE, 8), 'b': draw(8), 'wo': draw(8, SIZE)}
  mask = {
      name: rng.random(w.shape) >= sparsity if w.ndim == 2 else None
      for name, w in params.items()
  }
  return params, mask, draw(TOKENS, SIZE)


def simple_loss(params, x):
  h = jnp.tanh(x @ params['wi'] + params['b'])
  return jnp.mean((h @ params['wo'] - x) ** 2)


def masked(params, mask, fill=0):
  return {
      name: w if mask[name] is None else np.where(mask[name], w, fill)
      for name, w in params.items()
  }


def dense_value_and_grad(loss, params, mask, x):
  """Returns the value and the masked gradient of a dense program."""
  value, grads = jax.value_and_grad(loss)(masked(params, mask), x)
  return value, masked(grads, mask)


def to_float32(tree):
  return jax.tree.map(lambda x: np.asarray(x, 'float32'), tree)


def test_skip_zeros_can_be_mapped_over_masks_and_weights():
  params, mask, x = simple()
  others, other_mask, _ = simple(1)
  both = jax.tree.map(lambda *p: jnp.stack(p), params, others)
  masks = jax.tree.map(lambda *m: jnp.stack(m), mask, other_mask)
  g = skip_zeros(simple_loss)
  batched = jax.vmap(
      lambda p, m: jax.value_and_grad(g)(p, x, mask=m)
  )(both, masks)
  for i, (p, m) in enumerate([(params, mask), (others, other_mask)]):
    batched_i = jax.tree.map(lambda a, i=i: a[i], batched)
    expected = dense_value_and_grad(simple_loss, p, m, x)
    assert_equal_trees(batched_i, expected, 1e-5)


def test_the_mask_is_data_and_recompiles_nothing():
  params, mask, x = simple()
  traced = []

  def loss(params, x):
    traced.append(None)
    return simple_loss(params, x)

  step = jax.jit(jax.grad(skip_zeros(loss)))
  for m in (mask, jax.tree.map(np.logical_not, mask)):
    step(params, x, mask=m, grad_mask=jax.tree.map(np.ones_like, m))
  assert len(traced) == 1


def test_without_a_mask_skip_zeros_returns_what_the_function_does():
  params, _, x = simple()
  jaxpr = jax.make_jaxpr(skip_zeros(simple_loss))(params, x)
  assert str(jaxpr) == str(jax.make_jaxpr(simple_loss)(params, x))


def test_skip_zeros_may_be_applied_twice_and_inside_itself():
  params, mask, x = simple()
  twice = skip_zeros(skip_zeros(simple_loss))
  inner = lambda params, x: skip_zeros(simple_loss)(params, x, mask=mask)
  everything = jax.tree.map(np.ones_like, mask)
  expected = simple_loss(masked(params, mask), x)
  for value in (
      twice(params, x, mask=mask),
      skip_zeros(inner)(params, x, mask=everything),
      skip_zeros(inner)(params, x, mask=mask),
  ):
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_pruned_weights_may_be_nan():
  params, mask, x = simple()
  damaged = masked(params, mask, np.nan)
  both = lambda p, x: simple_loss(p, x) + jnp.sum(p['wi'] ** 2)
  actual = jax.value_and_grad(skip_zeros(both))(damaged, x, mask=mask)
  expected = dense_value_and_grad(both, params, mask, x)
  assert_equal_trees(actual, expected, 1e-5)


@needs_kernels
def test_values_and_tangents_of_a_while_loop_equal_dense_ones():
  params, mask, x = simple()

  def f(params, x):
    w = params['wi'][:, :SIZE]
    done = lambda carry: (carry[0] < 3) & (jnp.sum(carry[1] @ w) < 1e6)
    step = lambda carry: (carry[0] + 1, jnp.sin(carry[1] @ w))
    return jax.lax.while_loop(done, step, (0, x))[1]

  tangents = params, x
  g = functools.partial(skip_zeros(f), mask=mask)
  actual = jax.jvp(g, (params, x), tangents)
  kept = masked(params, mask)
  assert_equal_trees(actual, jax.jvp(f, (kept, x), (kept, x)), 1e-5)
  uses = explain(f, lowering='native')(params, x, mask=mask).uses
  assert len([use for use in uses if use.kernels]) == 2


@needs_kernels
def test_a_while_loop_with_a_condition_per_example_stays_dense():
  params, mask, x = simple()

  def until_large(w, row):
    step = lambda row: jnp.abs(row @ w) + 1
    return jax.lax.while_loop(lambda row: row.sum() < 20, step, row)

  f = lambda params, x: jax.vmap(
      functools.partial(until_large, params['wi'][:, :SIZE])
  )(x) @ params['wo'].T
  for only in (mask, mask | {'wi': None}):
    actual = skip_zeros(f, fast_bfloat16=True)(params, x, mask=only)
    np.testing.assert_allclose(actual, f(masked(params, only), x), rtol=1e-5)
  table = explain(f, lowering='native')(params, x, mask=mask)
  assert table.dense == {'wi': 'a while_loop with a batch of conditions'}


def test_the_policy_of_remat_saves_sparse_products_as_dense_ones():
  params, mask, x = simple()

  def computed(policy):
    loss = jax.checkpoint(simple_loss, policy=policy)
    gradient = jax.grad(skip_zeros(loss))
    jaxpr = jax.make_jaxpr(gradient)(params, x, mask=mask)
    return str(jaxpr).count('= sparse_matmul[')

  policies = jax.checkpoint_policies
  everything, nothing, dots, no_batch = map(computed, (
      policies.everything_saveable, policies.nothing_saveable,
      policies.dots_saveable, policies.dots_with_no_batch_dims_saveable,
  ))
  assert everything == dots == no_batch < nothing


def test_names_of_layers_and_of_jitted_functions_survive():
  params, mask, x = simple()

  def loss(params, x):
    with jax.named_scope('my_layer'):
      return simple_loss(params, x)

  jaxpr = jax.make_jaxpr(skip_zeros(loss))(params, x, mask=mask)
  scopes = {
      eqn.primitive.name: str(eqn.source_info.name_stack)
      for eqn in jaxpr.eqns
  }
  assert scopes['sparse_matmul'] == scopes['tanh'] == 'my_layer'


# Dtypes.


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_16_bit_products_agree_with_dense_ones(dtype):
  params, mask, x = simple()
  params = jax.tree.map(lambda w: w.astype(dtype), params)
  x = x.astype(dtype)
  value, grads = jax.value_and_grad(skip_zeros(simple_loss))(
      params, x, mask=mask
  )
  assert value.dtype == grads['wi'].dtype == dtype
  expected = dense_value_and_grad(simple_loss, params, mask, x)
  assert_equal_trees(*map(to_float32, ((value, grads), expected)), 3e-2)


def test_a_product_into_a_wider_dtype_is_not_rounded():
  params, mask, x = simple()
  wide = lambda p, x: jnp.dot(
      x.astype('bfloat16'), p['wi'].astype('bfloat16'),
      preferred_element_type='float32',
  )
  product = skip_zeros(wide)(params, x, mask=mask)
  expected = wide(masked(params, mask), x)
  assert product.dtype == 'float32'
  np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-6)
  mixed = lambda p, x: jax.lax.dot(
      x.astype('bfloat16'), p['wi'], preferred_element_type='float32'
  )
  np.testing.assert_allclose(
      skip_zeros(mixed)(params, x, mask=mask),
      mixed(masked(params, mask), x), rtol=1e-5, atol=1e-6,
  )
  only = {name: m if name == 'wi' else None for name, m in mask.items()}
  listed = list_params(params, only, dtype='bfloat16')
  np.testing.assert_allclose(
      skip_zeros(wide)(listed, x), expected, rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize('precision', [
    None, 'high', 'highest', 'TF32_TF32_F32', ('high', 'highest'),
])
def test_products_and_gradients_have_the_precision_of_dense_ones(precision):
  params, mask, x = simple()
  f = lambda p, x: jnp.sum(jnp.sin(jnp.dot(x, p['wi'], precision=precision)))

  def precisions(f):
    traced = jax.jit(jax.grad(f, argnums=(0, 1))).trace(params, x)
    text = traced.lower(lowering_platforms=('tpu',)).as_text()
    return sorted(re.findall(r'dot_general .*?(precision = .*?) : ', text))

  fast = functools.partial(skip_zeros(f), mask=mask)
  assert precisions(fast) == precisions(f) and len(precisions(f)) == 3
  is_sparse = 'sparse_matmul[' in str(jax.make_jaxpr(fast)(params, x))
  assert is_sparse == (not isinstance(precision, tuple))


def test_an_argument_selects_the_fast_dense_bfloat16_products(monkeypatch):
  monkeypatch.setattr(bf16_matmul, 'multiplies_bfloat16', lambda: True)
  params, mask, x = simple()
  params, x = jax.tree.map(lambda w: w.astype('bfloat16'), (params, x))
  only = mask | {'wo': None}  # The second product is dense.

  @jax.jit
  def loss(params, x):
    h = jnp.tanh(x @ params['wi'] + params['b'])
    step = lambda h, _: (h @ params['wo'] @ params['wo'].T, None)
    h, _ = jax.lax.scan(step, h, None, length=2)
    scores = jnp.einsum('th,sh->ts', h, h)
    return jnp.mean(scores.astype('float32'))

  fast = skip_zeros(loss, fast_bfloat16=True)
  kept = masked(params, only)
  jaxpr = str(jax.make_jaxpr(fast)(kept, x, mask=only))
  assert jaxpr.count('= bf16_einsum[') == 3 and 'dot_general' not in jaxpr
  actual, expected = (
      to_float32(jax.value_and_grad(f)(kept, x, mask=only))
      for f in (fast, skip_zeros(loss))
  )
  assert_equal_trees(actual, expected, 5e-2)


# Lists of kept weights.


@pytest.mark.parametrize('lowering', ['auto', 'reference'])
def test_listed_matrices_are_used_for_few_tokens(lowering):
  params, mask, x = simple()
  stack = np.random.default_rng(1).normal(size=(3, 8, 8)).astype(np.float32)
  params['stack'], mask['stack'] = stack, stack > 0.5
  params['tied'], mask['tied'] = stack[0], stack[0] > 0.5

  @jax.jit
  def decode(params, x):
    h = jnp.tanh(x @ params['wi'] + params['b'])
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
    h, _ = jax.lax.scan(layer, h, params['stack'])
    h = jax.lax.cond(h.sum() > 0, lambda h: h @ params['tied'], jnp.sin, h)
    return h @ params['tied'].T @ params['wo'].astype('float32')

  listed = list_params(params, mask)
  fast = skip_zeros(decode, lowering=lowering)
  np.testing.assert_allclose(
      jax.jit(fast)(listed, x), decode(masked(params, mask), x), atol=1e-5
  )
  table = explain(decode, lowering=lowering)(listed, x)
  assert table.reached == ('stack', 'tied', 'wi', 'wo')
  kernels = {'auto': 'lists, native', 'reference': 'lists, reference'}
  assert kernels[lowering] in str(table) and 'transpose' in str(table)
  with pytest.raises(ValueError, match='include their mask; omit mask'):
    fast(listed, x, mask=mask)


@pytest.mark.parametrize('use', [
    lambda w, x: x @ (w * 2),
    lambda w, x: w,
    lambda w, x: jax.lax.cond(True, lambda w: w, jnp.sin, w),
    lambda w, x: jax.lax.fori_loop(0, 2, lambda _, w: w + 1, w),
    lambda w, x: x @ w,
])
def test_listed_matrices_have_the_dtype_of_the_program_in_every_use(use):
  params, mask, x = simple()
  only = {name: m if name == 'wi' else None for name, m in mask.items()}
  f = lambda p, x: use(p['wi'].astype('bfloat16'), x.astype('bfloat16'))
  y = skip_zeros(f)(list_params(params, only), x)
  expected = jax.jit(f)(masked(params, only), x)
  assert y.dtype == expected.dtype
  assert_equal_trees(*map(to_float32, (y, expected)), 2e-2)


# Arguments.


def test_weights_may_be_a_bare_array_or_several_arguments():
  params, mask, x = simple()
  bare = lambda x, w: jnp.sum(jnp.sin(x @ w))
  kept = masked(params, mask)
  np.testing.assert_allclose(
      skip_zeros(bare, argnums=1)(x, params['wi'], mask=mask['wi']),
      bare(x, kept['wi']), rtol=1e-5,
  )
  two = lambda wi, x, wo: jnp.sum(jnp.tanh(x @ wi) @ wo)
  actual = skip_zeros(two, argnums=(0, 2))(
      params['wi'], x, params['wo'], mask=(mask['wi'], mask['wo'])
  )
  np.testing.assert_allclose(actual, two(kept['wi'], x, kept['wo']), rtol=1e-5)


def test_arguments_other_than_weights_may_be_bools_and_functions():
  params, mask, x = simple()

  def loss(params, x, *, train, activation):
    h = activation(x @ params['wi']) if train else x @ params['wi']
    return h.sum(), {'mean': h.mean()}

  g = jax.value_and_grad(skip_zeros(loss), has_aux=True)
  (_, aux), _ = g(params, x, train=True, activation=jnp.tanh, mask=mask)
  expected = jnp.tanh(x @ masked(params, mask)['wi']).mean()
  np.testing.assert_allclose(aux['mean'], expected, rtol=1e-5)
  table = str(explain(loss)(
      params, x, train=True, activation=jnp.tanh, mask=mask
  ))
  assert '6 × 8' in table and 'not used' in table


# Either a correct result or an error.


@needs_kernels
def test_the_log_states_once_which_weights_reach_kernels(caplog):
  params, mask, x = simple()
  params['e'] = np.ones((3, SIZE), 'float32')
  mask['e'] = params['e'] > 0
  loss = lambda p, x, i: simple_loss(p, x + p['e'][i])
  step = jax.grad(skip_zeros(loss, lowering='native'))
  with caplog.at_level('INFO', 'spdf_jax'):
    for _ in range(2):
      step(params, x, jnp.zeros(TOKENS, int), mask=mask)
  info, warning = caplog.records
  assert info.getMessage() == (
      'skip_zeros: 2 of 3 sparsified weights reach kernels (native).'
  )
  assert warning.levelname == 'WARNING'
  assert "1 of 3" in warning.getMessage()
  assert "what stops them: 'e' (gather);" in warning.getMessage()


@needs_kernels
def test_explain_has_a_row_for_every_use_of_a_weight():
  layers = [('scan', 'tied'), ('plain', 'decayed'), ('jit', 'own_backward'),
            ('remat', 'heads')]
  params, mask, _, x, _ = draw_arrays(0, len(layers), 0.5, 'none')
  params, x = jax.tree.map(np.float32, (params, x))
  table = explain(program(layers), lowering='native')(
      params, x, mask=mask
  )
  lines = [line.split() for line in str(table).splitlines()]
  assert lines[0][:4] == ['weight', 'product', 'tokens', 'kernels']
  of = lambda name: [line[1:] for line in lines if line[0] == name]
  assert of('0/w') == [['6', '×', '6', '5', 'native']] * 2
  assert of('1/w') == [['6', '×', '6', '5', 'native'], ['–', 'integer_pow']]
  assert of('2/w') == [['–', 'custom_vjp_call']]
  assert of('3/in') == of('3/out') == [['6', '×', '6', '5', 'native']]
  assert of('3/w') == [['–', 'not', 'used']]


@pytest.mark.parametrize('leave, owner', [
    (jax.checkpoint(lambda w: -w), 'checkpoint'),
    (lambda w: jax.lax.cond(True, lambda w: w, lambda w: -w, w), 'cond'),
    (lambda w: jax.lax.scan(lambda _, w: (None, -w), None, w[None])[1][0],
     'scan'),
])
def test_weights_that_leave_control_flow_are_dense_and_explained(leave, owner):
  params, mask, x = simple()
  table = explain(lambda p, x: x @ leave(p['wi']))(params, x, mask=mask)
  assert table.dense['wi'] == f'a result of {owner}'


@needs_kernels
def test_all_weights_that_a_function_returns_or_multiplies_are_explained():
  params, mask, x = simple()
  f = lambda p, x: (x @ (p['wi'] * p['wo'].T), p['wi'])
  table = explain(f, lowering='native')(params, x, mask=mask)
  assert table.reached == ('wi', 'wo')
  assert 'a result of the function' in str(table)


@pytest.mark.parametrize('change, message', [
    (dict(mask={'w': np.ones(2, bool)}), r"'w', but the parameters"),
    (dict(mask={'wi': np.ones((SIZE, 8))}), r"mask of 'wi' has dtype float64"),
    (dict(mask={'wi': np.ones((8, 8), bool)}), r"'wi' is \[8, 8\] and the wei"),
    (dict(mask={'wi': None}), 'selects no weight'),
    (dict(grad_mask={'wi': np.ones((SIZE, 8), bool)}), "only one has 'wo'"),
    (dict(f=lambda p, x: None), 'function that returns None; let it'),
    (dict(f=lambda p, x: 'loss'), 'function that returns str; let it'),
    (dict(f=lambda p, x: x.sum()), "'wi', 'wo', which the function does not"),
    (dict(argnums=2), 'argnums is 2 and the function got 2 positional'),
    (dict(lowering='fast'), "'fast'"),
    (dict(mask=None, grad_mask={}), 'grad_mask is given without mask'),
])
def test_errors_of_skip_zeros_name_the_argument(change, message):
  params, mask, x = simple()
  options = {k: change[k] for k in ('argnums', 'lowering') if k in change}
  masks = {'mask': change.get('mask', mask),
           'grad_mask': change.get('grad_mask')}
  with pytest.raises((ValueError, TypeError), match=message):
    skip_zeros(change.get('f', simple_loss), **options)(params, x, **masks)

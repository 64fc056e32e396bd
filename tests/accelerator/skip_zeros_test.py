"""`skip_zeros(f)` is f at the kept weights, whatever f is.

Programs are drawn: compositions of products, layouts, control flow and
transformations. The oracle is the dense program in float64 on masked weights,
whose tangents are masked by the gradient's mask.
"""

import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.accelerator import bf16_matmul
from spdf_jax.accelerator import explain
from spdf_jax.accelerator import list_params
from spdf_jax.accelerator import skip_zeros
from spdf_jax.accelerator import sparse_matmul

SIZE = 6
TOKENS = 5
HEADS = 2
_AUTO = (jax.sharding.AxisType.Auto,)


def fused(p, x):
  return sum(jnp.split(x @ jnp.concatenate([p['w'], p['v']], 1), 2, axis=1))


def padded(p, x):
  wide = jnp.pad(p['w'], ((0, 2), (0, 0)), constant_values=0.5)
  return jnp.pad(x, ((0, 0), (0, 2)), constant_values=1.0) @ wide


def placed(p, x):
  w = jax.lax.dynamic_update_slice(p['w'], p['v'][:2], (1, 0))
  return x @ w


def experts(p, x):
  x = jnp.stack([x, 2 * x])
  return jnp.einsum('etd,edf->tf', x, p['stack'])


def mixed_batches(p, x):
  w = jnp.stack([p['stack'], -p['stack']])
  return jnp.einsum('atd,badf->tbf', jnp.stack([x, x + 1]), w).sum(1)


def heads(p, x):
  h = jnp.einsum('td,dhk->thk', x, p['in'])
  return jnp.einsum('thk,hkd->td', jnp.tanh(h), p['out'])


def gradient_inside(p, x):
  return jax.grad(lambda x: jnp.sum(jnp.sin(x @ p['w'])))(x)


@jax.custom_vjp
def own_backward(w, x):
  return x @ w


def _forward(w, x):
  return x @ w, (w, x)


def _backward(saved, dy):
  w, x = saved
  return x.T @ dy, dy @ w.T


own_backward.defvjp(_forward, _backward)


@jax.custom_jvp
def own_tangent(w):
  return w * w


own_tangent.defjvp(
    lambda primals, tangents: (primals[0] ** 2, 2 * primals[0] * tangents[0])
)


def with_its_own_mask(p, x):
  mask = jnp.arange(p['w'].size).reshape(p['w'].shape) % 3 > 0
  return sparse_matmul(x, p['w'], mask)


BODIES = {
    'right': lambda p, x: x @ p['w'],
    'left': lambda p, x: (p['w'] @ x.T).T,
    'transposed': lambda p, x: x @ p['w'].T,
    'vectors': lambda p, x: jax.vmap(lambda row: p['w'] @ row)(x),
    'heads': heads,
    'experts': experts,
    'mixed_batches': mixed_batches,
    'fused': fused,
    'padded': padded,
    'placed': placed,
    'sliced': lambda p, x: x[:, 1:4] @ p['w'][1:4] + x[:, ::2] @ p['v'][::2],
    'indexed': lambda p, x: x @ p['stack'][1],
    'looked_up': lambda p, x: x @ p['stack'][jnp.int32(x.sum() > 0)],
    'reversed': lambda p, x: x @ p['w'][::-1],
    'reshaped': lambda p, x: x @ p['in'].reshape(SIZE, SIZE),
    'broadcast': lambda p, x: (
        jnp.stack([x, x]) @ jnp.broadcast_to(p['w'], (2, SIZE, SIZE))
    ).sum(0),
    'times_a_number': lambda p, x: x @ (p['w'] * 0.5),
    'times_a_parameter': lambda p, x: x @ (p['w'] * p['scale'][0]),
    'times_columns': lambda p, x: x @ (p['w'] * p['scale']) / 2,
    'over_rows': lambda p, x: x @ (p['w'] / (2 + p['scale'][:, None] ** 2)),
    'tied': lambda p, x: jnp.tanh(x @ p['w']) @ p['w'].T,
    'both': lambda p, x: x @ (p['w'] @ p['v']),
    'squared': lambda p, x: x @ (p['w'] * p['w']),
    'decayed': lambda p, x: x @ p['w'] + jnp.sum(p['w'] ** 2),
    'added': lambda p, x: x @ (p['w'] + p['scale']),
    'gathered': lambda p, x: x + p['w'][jnp.arange(TOKENS) % SIZE],
    'chosen': lambda p, x: x @ jnp.where(p['scale'] > 0, p['w'], p['v']),
    'divides': lambda p, x: x / (2 + p['w'][0] ** 2),
    'constant': lambda p, x: x @ jax.lax.stop_gradient(p['w']),
    'gradient_inside': gradient_inside,
    'own_backward': lambda p, x: own_backward(p['w'], x),
    'own_tangent': lambda p, x: x @ own_tangent(p['w']),
    'with_its_own_mask': with_its_own_mask,
}


def scanned(body, p, x):
  return jax.lax.scan(lambda x, _: (body(p, x), None), x, None, length=2)[0]


def scanned_weights(body, p, x):
  stacked = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), p)
  step = lambda x, p: (body(p, x), x.sum())
  x, sums = jax.lax.scan(step, x, stacked, reverse=True, unroll=2)
  return x + sums.sum()


def carried_weights(body, p, x):
  step = lambda _, carry: (carry[0], body(*carry))
  return jax.lax.fori_loop(0, 2, step, (p, x))[1]


def changed_weights(body, p, x):
  def step(carry, _):
    p, x = carry
    x = body(p, x)
    return (p | {'w': p['w'] + 0.1 * x[:1]}, x), None

  return jax.lax.scan(step, (p, x), None, length=2)[0][1]


def chosen_branch(body, p, x):
  return jax.lax.cond(
      x.sum() > 0, body, lambda p, x: 2 * body(p, x) + p['v'].sum(), p, x
  )


def mapped(body, p, x):
  xs = jnp.stack([x, x + 1, x - 1])
  return jax.vmap(functools.partial(body, p))(xs).sum(0)


def sharded(body, p, x):
  mesh = jax.make_mesh((1,), ('data',), axis_types=_AUTO)
  specs = jax.P(), jax.P('data')
  return jax.shard_map(
      body, mesh=mesh, in_specs=specs, out_specs=jax.P('data')
  )(p, x)


WRAPPERS = {
    'plain': lambda body, p, x: body(p, x),
    'jit': lambda body, p, x: jax.jit(body)(p, x),
    'remat': lambda body, p, x: jax.checkpoint(body)(p, x),
    'remat_dots': lambda body, p, x: jax.checkpoint(
        body, policy=jax.checkpoint_policies.dots_saveable
    )(p, x),
    'scan': scanned,
    'scanned_weights': scanned_weights,
    'carried_weights': carried_weights,
    'changed_weights': changed_weights,
    'cond': chosen_branch,
    'vmap': mapped,
    'shard_map': sharded,
    'named': lambda body, p, x: jax.named_call(body, name='layer')(p, x),
    'relu': lambda body, p, x: jax.nn.silu(body(p, x)),
}

SHAPES = {
    'w': (SIZE, SIZE), 'v': (SIZE, SIZE), 'stack': (2, SIZE, SIZE),
    'in': (SIZE, HEADS, SIZE // HEADS), 'out': (HEADS, SIZE // HEADS, SIZE),
    'scale': (SIZE,),
}
MASKED = ('w', 'v', 'stack', 'in', 'out')


def program(layers):
  """Returns the loss of a chain of pairs of names of wrappers and bodies."""
  def loss(params, x):
    for (wrapper, body), p in zip(layers, params):
      x = jnp.tanh(WRAPPERS[wrapper](BODIES[body], p, x) / 2)
    return jnp.mean(jnp.square(x - 0.3))

  return loss


def draw_arrays(seed, n_layers, sparsity, kind_of_grad_mask):
  rng = np.random.default_rng(seed)
  layers = [
      {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
      for _ in range(n_layers)
  ]
  bits = lambda keep: [
      {name: rng.random(SHAPES[name]) < keep if name in MASKED else None
       for name in SHAPES}
      for _ in range(n_layers)
  ]
  mask = bits(1 - sparsity)
  grad_mask = {
      'none': None,
      'all': jax.tree.map(np.ones_like, mask),
      'superset': jax.tree.map(np.logical_or, mask, bits(0.3)),
      'any': bits(0.5),
  }[kind_of_grad_mask]
  x = rng.normal(size=(TOKENS, SIZE))
  direction = jax.tree.map(lambda w: rng.normal(size=w.shape), layers)
  return layers, mask, grad_mask, x, direction


def masked_dense(f, mask, grad_mask):
  """Returns f of masked weights with masked tangents: the oracle."""
  grad_mask = mask if grad_mask is None else grad_mask
  stop = jax.lax.stop_gradient

  def keep(w, m, g):
    if m is None:
      return w
    return stop(jnp.where(m, w, 0.0)) + jnp.where(g, w - stop(w), 0.0)

  def g(params, x):
    leaves, treedef = jax.tree.flatten(params)
    of = lambda m: jax.tree.leaves(m, is_leaf=lambda x: x is None)
    kept = map(keep, leaves, of(mask), of(grad_mask))
    return f(jax.tree.unflatten(treedef, kept), x)

  return g


def derivatives(f):
  """Returns the value of f, its gradients, and a Hessian-vector product."""
  def all_of(params, x, direction):
    gradient = jax.grad(f, argnums=(0, 1))
    value, grads = f(params, x), gradient(params, x)
    products = jax.jvp(lambda p: gradient(p, x), (params,), (direction,))[1]
    return value, grads, products

  return jax.jit(all_of)


def assert_equal_trees(actual, expected, tolerance=1e-9):
  for one, other in zip(
      jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def check_program(layers, seed, sparsity, kind_of_grad_mask):
  with jax.enable_x64(True):
    params, mask, grad_mask, x, direction = draw_arrays(
        seed, len(layers), sparsity, kind_of_grad_mask
    )
    f = program(layers)
    g = functools.partial(
        skip_zeros(f, lowering='reference'), mask=mask, grad_mask=grad_mask
    )
    actual = derivatives(g)(params, x, direction)
    oracle = masked_dense(f, mask, grad_mask)
    assert_equal_trees(actual, derivatives(oracle)(params, x, direction))


LAYER = st.tuples(st.sampled_from([*WRAPPERS]), st.sampled_from([*BODIES]))
GRAD_MASKS = st.sampled_from(['none', 'all', 'superset', 'any'])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.lists(LAYER, min_size=1, max_size=3), st.integers(0, 99),
    st.floats(0, 0.95), GRAD_MASKS,
)
def test_drawn_programs_equal_the_dense_ones_on_masked_weights(
    layers, seed, sparsity, kind_of_grad_mask
):
  check_program(layers, seed, sparsity, kind_of_grad_mask)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(LAYER, min_size=1, max_size=3), st.integers(0, 99),
    st.floats(0, 0.95), GRAD_MASKS,
)
def test_many_drawn_programs_equal_the_dense_ones(
    layers, seed, sparsity, kind_of_grad_mask
):
  check_program(layers, seed, sparsity, kind_of_grad_mask)


@pytest.mark.parametrize('body', BODIES)
def test_every_use_of_a_weight_equals_the_dense_computation(body):
  check_program([('plain', body)], 1, 0.5, 'any')


@pytest.mark.parametrize('wrapper', WRAPPERS)
def test_every_wrapper_of_jax_equals_the_dense_computation(wrapper):
  layers = [(wrapper, 'right'), (wrapper, 'times_a_parameter')]
  check_program(layers, 2, 0.5, 'superset')


# Transformations of JAX around skip_zeros.


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


def masked(params, mask):
  return {
      name: w if mask[name] is None else np.where(mask[name], w, 0)
      for name, w in params.items()
  }


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
    value, grads = jax.value_and_grad(simple_loss)(masked(p, m), x)
    batched_i = jax.tree.map(lambda a, i=i: a[i], batched)
    assert_equal_trees(batched_i, (value, masked(grads, m)), 1e-5)


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
  damaged = {
      name: w if mask[name] is None else np.where(mask[name], w, np.nan)
      for name, w in params.items()
  }
  both = lambda p, x: simple_loss(p, x) + jnp.sum(p['wi'] ** 2)
  value, grads = jax.value_and_grad(skip_zeros(both))(damaged, x, mask=mask)
  expected = jax.value_and_grad(both)(masked(params, mask), x)
  assert_equal_trees((value, grads), (expected[0], masked(expected[1], mask)),
                     1e-5)


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
  expected = jax.value_and_grad(simple_loss)(masked(params, mask), x)
  assert value.dtype == grads['wi'].dtype == dtype
  assert_equal_trees(
      jax.tree.map(lambda a: a.astype('float32'), (value, grads)),
      jax.tree.map(lambda a: np.asarray(a, 'float32'),
                   (expected[0], masked(expected[1], mask))),
      3e-2,
  )


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
  value, grads = jax.value_and_grad(fast)(kept, x, mask=only)
  expected = jax.value_and_grad(skip_zeros(loss))(kept, x, mask=only)
  assert_equal_trees(
      jax.tree.map(lambda a: a.astype('float32'), (value, grads)),
      jax.tree.map(lambda a: a.astype('float32'), expected), 5e-2,
  )


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

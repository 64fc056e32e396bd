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
drawn = given(
    st.lists(LAYER, min_size=1, max_size=3), st.integers(0, 99),
    st.floats(0, 0.95), st.sampled_from(['none', 'all', 'superset', 'any']),
)


@settings(max_examples=12, deadline=None, derandomize=True)
@drawn
def test_drawn_programs_equal_the_dense_ones_on_masked_weights(
    layers, seed, sparsity, kind_of_grad_mask
):
  check_program(layers, seed, sparsity, kind_of_grad_mask)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@drawn
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

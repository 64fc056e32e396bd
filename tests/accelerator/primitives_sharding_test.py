"""The sparse matmul is right on eight devices, however sharded."""

import textwrap

import pytest

from tests.child import run_python

pytestmark = pytest.mark.sharding

PRELUDE = textwrap.dedent('''
    import jax
    jax.config.update('jax_num_cpu_devices', 8)
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from spdf_jax.accelerator import sparse_matmul

    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 8, 16)).astype(np.float32)
    w = rng.normal(size=(16, 32)).astype(np.float32)
    vx, vw = (rng.normal(size=a.shape).astype(np.float32) for a in (x, w))
    mask, grad_mask = rng.random(w.shape) < 0.3, rng.random(w.shape) < 0.6
    w[~mask] = np.nan

    def gradient(multiply):
      # sum(y^2) / 2, so that the second derivative is not zero.
      return jax.grad(
          lambda x, w: (multiply(x, w) ** 2).sum() / 2, (0, 1)
      )

    def everything(multiply, x, w, vx, vw):
      value = multiply(x, w)
      grads = gradient(multiply)
      out = value, grads(x, w), jax.jvp(grads, (x, w), (vx, vw))[1]
      return out

    def oracle():
      flat = lambda a: a.reshape(-1, a.shape[-1]).astype(np.float64)
      W, V = np.where(mask, w, 0), np.where(grad_mask, vw, 0)
      X, U = flat(x), flat(vx)
      Y, D = X @ W, U @ W + X @ V
      like_x = lambda a: a.reshape(x.shape)
      return Y.reshape(4, 8, 32), (
          like_x(Y @ W.T), grad_mask * (X.T @ Y)
      ), (like_x(D @ W.T + Y @ V.T), grad_mask * (U.T @ Y + X.T @ D))

    def check(actual, wanted=None):
      actual = jax.block_until_ready(actual)
      wanted = oracle() if wanted is None else wanted
      for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted)):
        assert a.shape == b.shape
        np.testing.assert_allclose(
            a, b, rtol=0, atol=2e-6 * max(1, abs(b).max())
        )

    def mesh(axis_type):
      return jax.make_mesh(
          (4, 2), ('data', 'model'), axis_types=(axis_type,) * 2
      )
''')

AUTOMATIC = '''
    auto = mesh(AxisType.Auto)
    put = lambda a, spec: jax.device_put(a, NamedSharding(auto, spec))
    for spec in (P(), P(None, 'model'), P('model', None), P('data', 'model')):
      for x_spec in (P('data'), P(None, 'data', 'model')):
        masks = put(mask, spec), put(grad_mask, spec)
        f = lambda x, w, vx, vw, m, g: everything(
            lambda x, w: sparse_matmul(x, w, m, grad_mask=g), x, w, vx, vw
        )
        check(jax.jit(f)(
            put(x, x_spec), put(w, spec), put(vx, x_spec), put(vw, spec),
            *masks,
        ))
'''

EXPLICIT = '''
    with jax.set_mesh(mesh(AxisType.Explicit)):
      put = jax.device_put
      cases = [
          (P('data'), P(), None),
          (P('data'), P(None, 'model'), None),
          (P(None, 'data'), P(None, 'model'), None),
          # Sums over a sharded axis: the caller says how y is laid out.
          (P('data', None, 'model'), P('model'), P('data', None, None)),
      ]
      for x_spec, w_spec, out in cases:
        m, g = put(mask, w_spec), put(grad_mask, w_spec)
        f = lambda x, w: sparse_matmul(x, w, m, grad_mask=g, out_sharding=out)
        args = [
            put(a, s) for a, s in
            ((x, x_spec), (w, w_spec), (vx, x_spec), (vw, w_spec))
        ]
        actual = jax.jit(lambda *args: everything(f, *args))(*args)
        check(actual)
        # A gradient is laid out as what it is the gradient of.
        for grad, arg in zip(actual[1], args):
          assert jax.typeof(grad).sharding == jax.typeof(arg).sharding
        check(everything(f, *args))  # And outside of jit.

      # Batches: more tokens, and stacks of matrices, sharded or not.
      m, g = put(mask, P(None, 'model')), put(grad_mask, P(None, 'model'))
      f = lambda x, w: sparse_matmul(x, w, m, grad_mask=g)
      value, (dx, dw), _ = oracle()
      args = put(x, P('data')), put(w, P(None, 'model'))
      check(jax.vmap(f, (0, None))(*args), value)
      actual = jax.vmap(gradient(f), (0, None))(*args)
      check(actual[0], dx)
      check(actual[1].sum(0), dw)
      stack = lambda a: np.stack([a] * 4)
      args = put(x, P()), put(stack(w), P('data', None, 'model'))
      actual = jax.vmap(gradient(f), (None, 0))(*args)
      check(actual, (stack(dx), stack(dw)))
      text = str(jax.make_jaxpr(jax.vmap(gradient(f), (None, 0)))(*args))
      assert 'f32[4@data,16,32@model] = sampled_matmul' in text
      assert 'f32[4@data,4,8,16] = sparse_matmul' in text
      args = put(x, P()), put(w, P(None, 'model'))
      f = lambda m: gradient(lambda x, w: sparse_matmul(
          x, w, m, grad_mask=g
      ))(*args)
      check(
          jax.vmap(f)(put(stack(mask), P('data', None, 'model'))),
          (stack(dx), stack(dw)),
      )
'''

SHARD_MAP = '''
    auto = mesh(AxisType.Auto)
    for w_spec, axes in ((P(), 'data'), (P(None, 'model'), ('data', 'model'))):
      def loss(x, w, m, g):
        y = sparse_matmul(x, w, m, grad_mask=g)
        return jax.lax.psum((y ** 2).sum() / 2, axes)
      sharded = jax.shard_map(
          loss, mesh=auto, in_specs=(P('data'), w_spec, w_spec, w_spec),
          out_specs=P(),
      )
      grads = jax.grad(sharded, (0, 1))
      args = mask, grad_mask
      check(jax.jit(grads)(x, w, *args), oracle()[1])
      hvp = jax.jit(lambda x, w, vx, vw: jax.jvp(
          lambda x, w: grads(x, w, *args), (x, w), (vx, vw)
      )[1])
      check(hvp(x, w, vx, vw), oracle()[2])
'''


def test_sharding_changes_nothing():
  scripts = map(textwrap.dedent, (AUTOMATIC, EXPLICIT, SHARD_MAP))
  code = PRELUDE + ''.join(scripts)
  run_python(code, '-W', 'error::DeprecationWarning')

"""Sparse optimizers on sharded parameters: where things lie, what is sent."""

import subprocess
import sys
import textwrap

import pytest

PRELUDE = textwrap.dedent('''
    import math
    import re
    import jax
    jax.config.update('jax_num_cpu_devices', 8)
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    import spdf_jax as spdf

    TIMES = dict(update_every=2, update_until=6)
    ALGORITHMS = {
        'rigl': lambda: spdf.rigl(0.75, **TIMES),
        'set': lambda: spdf.sparse_evolution(0.75, update_every=2),
        'gmp': lambda: spdf.gmp(spdf.cubic(0.0, 0.75, 6), **TIMES),
        'granet': lambda: spdf.granet(spdf.cubic(0.5, 0.75, 6), **TIMES),
        'static-join': lambda: spdf.join(
            [spdf.static(0.75), spdf.dense(), spdf.static(0.5)], [2, 4]
        ),
    }
    mesh = jax.make_mesh(
        (4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2
    )

    def on_mesh(tree, specs):
      return jax.tree.map(
          lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
          tree, specs,
      )

    def optimizer(algorithm):
      return spdf.sparsify(
          optax.adamw(1e-2), ALGORITHMS[algorithm](), key=0,
          where=lambda path, leaf: len(leaf.shape) > 1,
      )

    def shard_bytes(tree):
      shape = lambda x: x.sharding.shard_shape(x.shape)
      return sum(
          math.prod(shape(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
      )
''')

# Sharded by rows, columns, both, with layers apart; ties and signed zeros.
ARRAYS = '''
    SHAPES = {
        'rows': (256, 512), 'columns': (256, 512), 'both': (256, 512),
        'bias': (512,), 'stack': (4, 128, 256), 'layers': (4, 128, 256),
    }
    SPECS = {
        'rows': P('data', None), 'columns': P(None, ('data', 'model')),
        'both': P('data', 'model'), 'bias': P('model'),
        'stack': P(None, 'model', 'data'), 'layers': P('data', 'model', None),
    }

    def arrays(seed):
      rng = np.random.default_rng(seed)
      return {
          name: np.round(rng.normal(size=shape) * 64).astype(np.float32) / 64
          for name, shape in SHAPES.items()
      }

    params = arrays(0)
    sharded = on_mesh(params, SPECS)

    def sharded_state(tx):
      like = spdf.state_shardings(jax.eval_shape(tx.init, sharded), sharded)
      init = jax.jit(tx.init, out_shardings=like)
      return jax.block_until_ready(init(sharded))
'''

COMPILED = '''
    tx = optimizer(NAME)
    state = sharded_state(tx)
    adam = state.inner_state[0]
    for tree in (state.mask, adam.mu, adam.nu):
      for name, x in tree.items():
        assert x is None or x.sharding.is_equivalent_to(
            sharded[name].sharding, x.ndim
        ), (name, x.sharding)

    update = jax.jit(tx.update, donate_argnums=1)
    compiled = update.lower(sharded, state, sharded).compile()
    text = compiled.as_text()
    for sent in ('all-gather', 'all-to-all', 'collective-permute'):
      assert sent not in text, re.findall(f'.*{sent}.*', text)[:3]
    sizes = dict(f32=4, s32=4, u32=4, pred=1, bf16=2, u8=1)
    # One all-reduce may take several tensors; each counts for itself.
    reduced = [
        sizes[kind] * math.prod(int(d) for d in dims.split(',') if d)
        for results in re.findall(r'= (.*?) all-reduce(?:-start)?\\(', text)
        for kind, dims in re.findall(r'(\\w+)\\[([\\d,]*)\\]', results)
    ]
    assert reduced and max(reduced) <= 64 * 1024, max(reduced)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary <= 3 * shard_bytes(sharded), (
        temporary / shard_bytes(sharded)
    )
    print(NAME, max(reduced), temporary / shard_bytes(sharded))
'''

EQUAL = '''
    tx = optimizer(NAME)
    update = jax.jit(tx.update)
    grads = [arrays(1 + i) for i in range(7)]

    def train(params, state, grads):
      params = spdf.apply_mask(params, spdf.get_mask(state))
      for g in grads:
        updates, state = jax.block_until_ready(update(g, state, params))
        params = jax.block_until_ready(optax.apply_updates(params, updates))
      return jax.tree.map(np.asarray, (params, state))

    one = train(params, tx.init(params), grads)
    eight = train(
        sharded, sharded_state(tx), [on_mesh(g, SPECS) for g in grads]
    )
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(eight)
    ):
      np.testing.assert_array_equal(a, b, jax.tree_util.keystr(path))
'''

# Each device has its own share of a batch. Whole numbers, so that sums come
# out the same in any order.
BATCHES = '''
    rng = np.random.default_rng(0)
    whole = lambda *shape: rng.integers(-3, 4, shape).astype(np.float32)
    params = {'h_0': {'kernel': whole(16, 32)}}
    x, y = whole(7, 64, 16), whole(7, 64, 32)
    tx = spdf.sparsify(optax.sgd(0.5), ALGORITHMS[NAME](), key=0)

    @jax.jit
    def step(params, state, x, y):
      # What is gained where a product is large: whole gradients, any weights.
      loss = lambda p: jnp.sum((x @ p['h_0']['kernel']) * y)
      updates, state = tx.update(jax.grad(loss)(params), state, params)
      return optax.apply_updates(params, updates), state

    def train(put):
      state = tx.init(params)
      p = spdf.apply_mask(params, spdf.get_mask(state))
      p, state = put((p, state), P())
      masks = []
      for i in range(7):
        p, state = step(p, state, *put((x[i], y[i]), P('data')))
        jax.block_until_ready(state)
        masks.append(np.asarray(spdf.get_mask(state)['h_0']['kernel']))
      return masks, np.asarray(p['h_0']['kernel'])

    one = train(lambda tree, spec: tree)
    eight = train(lambda tree, spec: jax.device_put(
        tree, NamedSharding(mesh, spec)
    ))
    np.testing.assert_array_equal(one[0], eight[0])
    np.testing.assert_array_equal(one[1], eight[1])
    assert (one[0][0] != one[0][-1]).any()
'''


def run(name, *parts):
  code = ''.join(textwrap.dedent(part) for part in parts)
  done = subprocess.run(
      [sys.executable, '-c', PRELUDE + f'NAME = {name!r}\n' + code],
      capture_output=True, text=True, timeout=600, check=False,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


ALGORITHMS = ['rigl', 'set', 'gmp', 'granet', 'static-join']


@pytest.mark.parametrize('name', ALGORITHMS)
def test_updates_of_sharded_arrays_gather_nothing(name):
  run(name, ARRAYS, COMPILED)


@pytest.mark.parametrize('name', ALGORITHMS)
def test_sharding_changes_no_mask_moment_or_parameter(name):
  run(name, ARRAYS, EQUAL)


@pytest.mark.parametrize('name', ['rigl', 'granet'])
def test_growth_uses_the_gradients_of_the_whole_batch(name):
  run(name, BATCHES)

"""Meshes with Auto and with Explicit axes, JAX's default: the same masks.

On 8 simulated devices, in a process of their own.
"""

import functools
import json
import subprocess
import sys
import textwrap

import pytest
from tiers import slow_except

pytestmark = pytest.mark.sharding

SCRIPT = textwrap.dedent('''
    import json
    import jax
    jax.config.update('jax_num_cpu_devices', 8)
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    import spdf_jax as spdf

    TIMES = dict(update_every=2, update_until=6)
    ALGORITHMS = {
        'rigl': lambda: spdf.rigl(0.75, **TIMES),
        'variable-spdf': lambda: spdf.join(
            [spdf.static(0.75), spdf.static(0.5), spdf.dense()], [2, 4]
        ),
        'blocks': lambda: spdf.sparse_evolution(
            0.75, structure=spdf.structures.block(4, 4), update_every=2
        ),
        '2:4': lambda: spdf.rigl(0.5, structure='2:4', **TIMES),
        'gmp-model-wide': lambda: spdf.gmp(
            spdf.cubic(0.0, 0.75, 6), distribution='model_wide', **TIMES
        ),
    }
    SPECS = {
        'rows': P(('data', 'model'), None), 'columns': P(None, 'data'),
        'both': P('data', 'model'), 'bias': P('model'),
        'stack': P(None, 'model', 'data'),
    }
    SHAPES = {name: (64, 32) for name in SPECS} | {
        'bias': (32,), 'stack': (2, 32, 64)
    }
    WHERE = {'*': True}

    def arrays(seed):
      rng = np.random.default_rng(seed)
      return {
          name: np.round(rng.normal(size=shape) * 64).astype(np.float32) / 64
          for name, shape in SHAPES.items()
      }

    def train(algorithm, place, jitted=True, steps=7):
      tx = spdf.sparsify(optax.adamw(1e-2), algorithm, where=WHERE, key=0)
      init, update, params = tx.init, tx.update, place(arrays(0))
      if jitted:
        like = None
        if hasattr(params['rows'], 'sharding'):
          like = spdf.state_shardings(jax.eval_shape(tx.init, params), params)
        init, update = jax.jit(init, out_shardings=like), jax.jit(update)
      state = jax.block_until_ready(init(params))
      params = spdf.apply_mask(params, spdf.get_mask(state))
      masks = []
      for i in range(steps):
        grads = place(arrays(1 + i))
        updates, state = jax.block_until_ready(update(grads, state, params))
        params = jax.block_until_ready(optax.apply_updates(params, updates))
        masks.append(jax.tree.map(np.asarray, spdf.get_mask(state)))
      spdf.check(params, state)
      mask = spdf.get_mask(state)
      summary = str(spdf.summarize(mask, params, where=WHERE))
      spdf.check(params, spdf.densify(state))
      changes = spdf.mask_changes(mask, mask, params, where=WHERE)
      return masks, jax.tree.map(np.asarray, params), summary, changes

    def same(one, two):
      pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
      return all(np.array_equal(a, b) for a, b in pairs)

    algorithm = ALGORITHMS[NAME]()
    one = train(algorithm, lambda tree: tree)
    found = {}
    for kind in (AxisType.Auto, AxisType.Explicit):
      mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(kind,) * 2)
      place = lambda tree: jax.tree.map(
          lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
          tree, SPECS,
      )
      eight = train(algorithm, place)
      found[kind.name] = [same(one[0], eight[0]), same(one[1], eight[1]),
                          one[2:] == eight[2:]]
    mesh = jax.make_mesh((8,), ('x',))
    place = lambda tree: jax.tree.map(
        lambda x: jax.device_put(
            x, NamedSharding(mesh, P(*(None,) * (x.ndim - 1), 'x'))
        ), tree
    )
    with jax.set_mesh(mesh):
      eager = train(algorithm, place, jitted=False, steps=3)
    found['eager'] = [same(one[0][:3], eager[0])]
    print(json.dumps(found))
''')


@functools.cache
def run(name):
  done = subprocess.run(
      [sys.executable, '-c', f'NAME = {name!r}\n' + SCRIPT],
      capture_output=True, text=True, timeout=600, check=False,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


each = pytest.mark.parametrize('name', slow_except(
    ['rigl'], ['rigl', 'variable-spdf', 'blocks', '2:4', 'gmp-model-wide']
))


@each
@pytest.mark.parametrize('axes', ['Auto', 'Explicit'])
def test_masks_and_weights_on_8_devices_are_those_on_one(name, axes):
  assert run(name)[axes] == [True, True, True]


@each
def test_the_default_mesh_works_without_jit(name):
  assert run(name)['eager'] == [True]

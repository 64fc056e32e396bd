"""Sparse optimizers on sharded parameters: masks, shardings, communication.

On 8 simulated devices, in a process of their own.
"""

import functools
import json
import os
import textwrap

import pytest

from tests.child import run_python
from tests.tiers import slow_except

pytestmark = pytest.mark.sharding

PRELUDE = textwrap.dedent('''
    import json
    import math
    import re
    import jax
    jax.config.update('jax_num_cpu_devices', 8)
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    import spdf_jax as spdf
    from spdf_jax.sparsity import like_params
    from spdf_jax.sparsity import statistics

    TIMES = dict(update_every=2, update_until=6)

    def same(one, two):
      pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
      return all(np.array_equal(a, b) for a, b in pairs)
''')

# Weights and gradients have ties, and both zeros.
UPDATES = textwrap.dedent('''
    algorithm = {
        'mixed': lambda: spdf.partition({
            'rows': spdf.rigl(0.5, structure='2:4', **TIMES),
            'columns': spdf.rigl(0.75, grow='balanced', **TIMES),
            'both': spdf.sparse_evolution(
                0.75, structure=spdf.structures.block(4, 4), update_every=2
            ),
            'stack': spdf.granet(
                spdf.cubic(0.5, 0.75, 6), grow='balanced', **TIMES
            ),
        }, [(name, name) for name in ('rows', 'columns', 'both', 'stack')]),
        'static-join': lambda: spdf.join(
            [spdf.static(0.75), spdf.dense(), spdf.static(0.5)], [2, 4]
        ),
        'gmp-model-wide': lambda: spdf.gmp(
            spdf.cubic(0.0, 0.75, 6), distribution='model_wide', **TIMES
        ),
        'hard-threshold': lambda: None,
    }[NAME]()
    SPECS = {
        'rows': P(('data', 'model'), None), 'columns': P(None, 'data'),
        'both': P('data', 'model'), 'bias': P('model'),
        'stack': P(None, 'model', 'data'),
    }
    SHAPES = {name: (256, 512) for name in SPECS} | {
        'bias': (512,), 'stack': (2, 256, 256)
    }
    WHERE = {'*': True}
    if algorithm is None:
      tx = spdf.hard_threshold(
          optax.adamw(1e-1), spdf.cubic(0.0, 0.75, 4), update_until=4,
          where=WHERE,
      )
    else:
      tx = spdf.sparsify(optax.adamw(1e-2), algorithm, where=WHERE, key=0)

    def arrays(seed):
      rng = np.random.default_rng(seed)
      return {
          name: np.round(rng.normal(size=shape) * 64).astype(np.float32) / 64
          for name, shape in SHAPES.items()
      }

    def train(init, update, place, steps=7):
      params = place(arrays(0))
      state = jax.block_until_ready(init(params))
      params = spdf.apply_mask(params, spdf.get_mask(state))
      for i in range(steps):
        grads = place(arrays(1 + i))
        updates, state = jax.block_until_ready(update(grads, state, params))
        params = jax.block_until_ready(optax.apply_updates(params, updates))
      spdf.check_zeros(params, state)
      spdf.check_zeros(params, spdf.densify(state))
      mask = spdf.get_mask(state)
      summary = str(spdf.summarize(mask, params, where=WHERE))
      changes = statistics.mask_changes(mask, mask, params, where=WHERE)
      return params, state, summary, changes

    one = train(jax.jit(tx.init), jax.jit(tx.update), lambda tree: tree)
    outcomes = {}
    kinds = [AxisType.Auto, AxisType.Explicit]
    for kind in kinds[:1 if NAME == 'gmp-model-wide' else 2]:
      mesh = jax.make_mesh((4, 2), ('data', 'model'), axis_types=(kind,) * 2)
      put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
      place = lambda tree: jax.tree.map(put, tree, SPECS)
      params = place(arrays(0))
      shapes = jax.eval_shape(tx.init, params)
      like = like_params.state_shardings(shapes, params)
      init = jax.jit(tx.init, out_shardings=like)
      state = jax.block_until_ready(init(params))
      program = jax.jit(tx.update).lower(params, state, params).compile()
      adam = state.inner_state[0]
      text = program.as_text()
      sizes = dict(f32=4, s32=4, u32=4, pred=1)
      shards = [x.sharding.shard_shape(x.shape) for x in params.values()]
      eight = train(init, program, place)
      outcomes[kind.name] = dict(
          misplaced=[
              (name, str(x.sharding))
              for tree in (state.mask, adam.mu, adam.nu)
              for name, x in tree.items() if x is not None
              and not x.sharding.is_equivalent_to(params[name].sharding, x.ndim)
          ],
          same=[same(a, b) for a, b in zip(one[:2], eight[:2])],
          reads_the_same=one[2:] == eight[2:],
          gathers=re.findall(
              '.* (?:all-gather|all-to-all|collective-permute).*', text
          ),
          # One all-reduce may take several tensors; each counts for itself.
          reduced=[
              sizes[kind] * math.prod(int(d) for d in dims.split(',') if d)
              for results in re.findall(
                  r'= (.*?) all-reduce(?:-start)?\\(', text
              )
              for kind, dims in re.findall(r'(\\w+)\\[([\\d,]*)\\]', results)
          ],
          temporary=program.memory_analysis().temp_size_in_bytes,
          shard=sum(4 * math.prod(shape) for shape in shards),
      )

    print(json.dumps(outcomes))
''')


BATCHES = textwrap.dedent('''
    # Each device has its own share of a batch. Whole numbers, so that sums
    # come out the same in any order.
    rng = np.random.default_rng(0)
    whole = lambda *shape: rng.integers(-3, 4, shape).astype(np.float32)
    params = {'h_0': {'kernel': whole(16, 32)}}
    x, y = whole(7, 64, 16), whole(7, 64, 32)
    tx = spdf.sparsify(optax.sgd(0.5), spdf.rigl(0.75, **TIMES), key=0)

    @jax.jit
    def step(params, state, x, y):
      loss = lambda p: jnp.sum((x @ p['h_0']['kernel']) * y)
      updates, state = tx.update(jax.grad(loss)(params), state, params)
      return optax.apply_updates(params, updates), state

    def train_on_batches(place):
      state = tx.init(params)
      p = spdf.apply_mask(params, spdf.get_mask(state))
      p, state = place((p, state), P())
      masks = []
      for i in range(7):
        p, state = step(p, state, *place((x[i], y[i]), P('data')))
        jax.block_until_ready(state)
        masks.append(np.asarray(spdf.get_mask(state)['h_0']['kernel']))
      return masks, np.asarray(p['h_0']['kernel'])

    mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    one = train_on_batches(lambda tree, spec: tree)
    eight = train_on_batches(lambda tree, spec: put(tree, spec))
    outcomes = dict(
        same=same(one, eight), moved=bool((one[0][0] != one[0][-1]).any()),
    )

    # Without jit, on a mesh with the default axes.
    mesh = jax.make_mesh((8,), ('data',))
    place = lambda p: {'h_0': {'kernel': put(p, P(None, 'data'))}}
    states = []
    for put_kernel in (lambda p: {'h_0': {'kernel': p}}, place):
      p = put_kernel(params['h_0']['kernel'])
      with jax.set_mesh(mesh):
        state = tx.init(p)
        p = spdf.apply_mask(p, spdf.get_mask(state))
        for i in range(3):
          updates, state = tx.update(put_kernel(y[i, :16]), state, p)
          p = jax.block_until_ready(optax.apply_updates(p, updates))
      states.append((p, spdf.get_mask(state)))
    outcomes['eager'] = same(*states)
    print(json.dumps(outcomes))
''')


ADAPTERS = textwrap.dedent('''
    w = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    w[:, ::2] = 0
    tx = spdf.sparsify(
        spdf.lora(optax.adam(0.1), 2, key=0),
        spdf.static(0.5, init='nonzero'), key=0,
    )

    @jax.jit
    def train(params):
      state = tx.init(params)
      for _ in range(3):
        grads = {'w': jnp.cos(params['w'])}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
      adapters = spdf.create_adapters(jax.random.key(0), params, 2)
      merged = spdf.merge_adapters(params, adapters, spdf.get_mask(state))
      return params['w'], merged['w']

    expected = train({'w': w})
    outcomes = {}
    for axes in ('Auto', 'Explicit'):
      mesh = jax.make_mesh((4, 2), ('a', 'b'), (getattr(AxisType, axes),) * 2)
      sharding = NamedSharding(mesh, P('a', 'b'))
      with jax.set_mesh(mesh):
        trained = train({'w': jax.device_put(w, sharding)})
      outcomes[axes] = all(
          np.allclose(x, y, atol=1e-6) and bool(((x == 0) == (w == 0)).all())
          and x.sharding.spec == P('a', 'b')
          for x, y in zip(trained, expected)
      )
    print(json.dumps(outcomes))
''')


MASKS = textwrap.dedent('''
    import zlib

    w = jnp.round(jax.random.normal(jax.random.key(0), (3, 64, 128)) * 4)
    drawn = spdf.init.random(
        jax.random.key(2), {'a/w': jnp.ones((64, 128)), 'b': w[0]}, 0.7
    )
    mesh = jax.make_mesh((8,), ('x',), axis_types=(AxisType.Auto,))
    equal = []
    for spec in (P(None, 'x', None), P(None, None, 'x')):
      sharded = {'w': jax.device_put(w, NamedSharding(mesh, spec))}
      for make in (
          lambda p: spdf.init.magnitude(None, p, 0.7),
          lambda p: spdf.init.magnitude(jax.random.key(1), p, 0.7),
          lambda p: spdf.init.random(jax.random.key(2), p, 0.7),
      ):
        one = jax.block_until_ready(jax.jit(make)({'w': w}))
        equal.append(same(one, jax.block_until_ready(jax.jit(make)(sharded))))
    digests = [zlib.crc32(np.packbits(m)) for m in jax.tree.leaves(drawn)]
    print(json.dumps(dict(equal=equal, digests=digests)))
''')


@functools.cache
def run(name, script=UPDATES):
  # Communication and memory do not depend on the last stage of compilation.
  flags = os.environ.get('XLA_FLAGS', '')
  flags += ' --xla_backend_optimization_level=0'
  code = f'NAME = {name!r}\n' + PRELUDE + script
  return json.loads(run_python(code, XLA_FLAGS=flags))


NAMES = ['mixed', 'gmp-model-wide', 'hard-threshold']
MESHES = [
    ('mixed', 'Auto'), ('mixed', 'Explicit'), ('gmp-model-wide', 'Auto'),
    ('hard-threshold', 'Auto'), ('hard-threshold', 'Explicit'),
]
each = pytest.mark.parametrize('name', slow_except(
    NAMES, [*NAMES, 'static-join']
))
each_mesh = pytest.mark.parametrize('name, axes', slow_except(
    MESHES, [*MESHES, ('static-join', 'Auto'), ('static-join', 'Explicit')],
))


@each_mesh
def test_masks_and_moments_are_sharded_like_their_parameters_from_the_start(
    name, axes
):
  assert not run(name)[axes]['misplaced']


@each
def test_mask_updates_communicate_counts_only(name):
  outcomes = run(name)['Auto']
  assert not outcomes['gathers']
  assert outcomes['reduced'] and max(outcomes['reduced']) <= 64 * 1024


@each
def test_updates_take_at_most_three_times_the_shard(name):
  outcomes = run(name)['Auto']
  assert outcomes['temporary'] <= 3 * outcomes['shard']


@each_mesh
def test_sharding_changes_no_mask_moment_or_parameter(name, axes):
  outcomes = run(name)[axes]
  assert outcomes['same'] == [True, True] and outcomes['reads_the_same']


def test_growth_uses_the_gradients_of_the_whole_batch():
  outcomes = run('rigl', BATCHES)
  assert outcomes['same'] and outcomes['moved']


def test_the_default_mesh_works_without_jit():
  assert run('rigl', BATCHES)['eager']


@pytest.mark.parametrize('axes', ['Auto', 'Explicit'])
def test_adapters_of_sharded_matrices_train_as_on_one_device(axes):
  assert run('adapters', ADAPTERS)[axes]


def test_masks_are_equal_on_one_and_on_eight_devices():
  outcomes = run('masks', MASKS)
  assert outcomes['equal'] == [True] * 6
  # By the code at which this test was written, on one device.
  assert outcomes['digests'] == [4222556292, 1164945805]

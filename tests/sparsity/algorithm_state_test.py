"""Algorithms with a state: the guide's examples against NumPy, and wrappers."""

import functools
import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity import like_params
from spdf_jax.sparsity import storage
from tests.sparse_loop import trajectory

GUIDES = pathlib.Path(__file__).parents[2] / 'experiments' / 'guides'
PARAMS = {
    'h': {
        'w': jax.random.normal(jax.random.key(0), (8, 16)), 'b': jnp.ones(16),
    },
    'o': jax.random.normal(jax.random.key(1), (16, 8)),
}


@functools.cache
def examples():
  """The functions of the guide, by name."""
  functions = {}
  text = (GUIDES / 'algorithm_state.md').read_text()
  pattern = r'<!-- file: \S+ -->\n```python\n(.*?)```'
  for script in re.findall(pattern, text, re.S):
    exec(script, functions)
  return functions


def grads_at(step, params):
  return jax.tree.map(lambda p: jnp.sin(3 * p + step) + 0.1, params)


def train(algorithm, steps, params=PARAMS):
  """Yields (params, state, grads) before each step, and after the last."""
  tx = spdf.sparsify(optax.sgd(0.1), algorithm, key=0)
  pairs = trajectory(tx, params, grads_at, steps)
  for step, (params, state) in enumerate(pairs):
    spdf.check_zeros(params, state)
    yield params, state, grads_at(step, params)


def largest(scores, count):
  mask = np.zeros(scores.size, bool)
  mask[np.argsort(-scores.ravel(), kind='stable')[:count]] = True
  return mask.reshape(scores.shape)


def test_sparse_momentum_grows_by_averaged_gradients():
  algorithm = examples()['snfs'](0.75, update_every=3, update_until=7)
  runs = list(train(algorithm, 9))
  momentum = np.zeros((16, 8))
  for step, ((params, state, grads), (_, after, _)) in enumerate(
      zip(runs, runs[1:])
  ):
    momentum = 0.9 * momentum + 0.1 * np.asarray(grads['o'], np.float64)
    np.testing.assert_allclose(
        after.algorithm_state['momentum']['o'], momentum, atol=1e-6
    )
    mask = np.asarray(state.mask['o'])
    if step in (3, 6):
      weights = np.where(mask, np.abs(params['o']), -1)
      survivors = largest(weights, 128 - round(128 * (1 - 0.25 * 0.8)))
      mask = largest(np.where(survivors, np.inf, np.abs(momentum)), 32)
    np.testing.assert_array_equal(after.mask['o'], mask)
  assert runs[-1][1].algorithm_state['momentum']['h']['b'] is None


def test_pruning_by_importance_follows_its_schedule():
  make = examples()['importance_pruning']
  algorithm = make(0.75, update_every=2, update_until=6)
  runs = list(train(algorithm, 8))
  importance = np.zeros((16, 8))
  for step, ((params, state, grads), (_, after, _)) in enumerate(
      zip(runs, runs[1:])
  ):
    product = np.asarray(params['o'] * grads['o'], np.float64)
    importance = 0.9 * importance + 0.1 * product**2
    mask = np.asarray(state.mask['o'])
    if step in (2, 4, 6):
      sparsity = 0.75 - 0.75 * (1 - step / 6) ** 3
      mask = largest(
          np.where(mask, importance, -1), 128 - round(sparsity * 128)
      )
    np.testing.assert_array_equal(after.mask['o'], mask)
  assert spdf.summarize(runs[-1][1], PARAMS).sparsity == 0.75


@pytest.mark.parametrize('backward', [0.5, 0.0])
def test_top_kast_keeps_a_forward_and_a_wider_backward_mask(backward):
  algorithm = examples()['top_kast'](0.9, backward)
  for _, state, _ in train(algorithm, 4):
    assert state.mask['o'].all()
    masks = state.algorithm_state
    assert masks['forward']['o'].sum() == 128 - round(0.9 * 128)
    assert masks['backward']['o'].sum() == 128 - round(backward * 128)
    assert not (masks['forward']['o'] & ~masks['backward']['o']).any()


def averaging(sparsity=0.5):
  return examples()['snfs'](sparsity, update_every=2, update_until=4)


def test_members_of_join_and_partition_have_states_of_their_own():
  joined = spdf.join([averaging(), averaging(0.75), spdf.dense()], [3, 6])
  states = [state for _, state, _ in train(joined, 8)]
  sums = [
      [float(jnp.abs(s.algorithm_state[f'{i}.momentum']['o']).sum())
       for s in states] for i in (0, 1)
  ]
  assert sums[0][3] != sums[0][2] and sums[0][4] == sums[0][3]
  assert sums[1][:5] == [0.0] * 5 and sums[1][5] > 0
  assert sums[1][7] == sums[1][8]
  parts = spdf.partition(
      {'a': averaging(), 'b': spdf.static(0.5)}, [('h/*', 'a'), ('*', 'b')]
  )
  *_, (_, state, _) = train(parts, 6)
  (momentum,) = state.algorithm_state.values()
  assert list(state.algorithm_state) == ['a.momentum']
  assert momentum['o'] is None and momentum['h']['w'].shape == (8, 16)
  *_, (_, own, _) = train(averaging(), 6, {'h': PARAMS['h']})
  np.testing.assert_array_equal(
      own.algorithm_state['momentum']['h']['w'], momentum['h']['w']
  )


def test_the_first_member_of_join_counts_every_step():
  joined = spdf.join([averaging(), spdf.dense()], [9])
  alone, joined = (
      [state for _, state, _ in train(algorithm, 4)]
      for algorithm in (averaging(), joined)
  )
  for one, other in zip(alone, joined):
    np.testing.assert_array_equal(
        one.algorithm_state['momentum']['o'],
        other.algorithm_state['0.momentum']['o'],
    )


def test_a_state_is_sharded_like_the_parameters_and_never_packed():
  tx = spdf.sparsify(optax.adam(0.1), averaging(), key=0)
  state = tx.init(PARAMS)
  mesh = jax.make_mesh((1,), ('data',))
  spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  params = jax.device_put(PARAMS, spec)
  shapes = jax.eval_shape(tx.init, params)
  shardings = like_params.state_shardings(shapes, params)
  momentum = shardings.algorithm_state['momentum']
  assert momentum['o'].is_equivalent_to(spec, 2)
  with pytest.raises(ValueError, match='the algorithm has a state'):
    storage.pack_state(PARAMS, state)
  plain = spdf.sparsify(optax.adam(0.1), spdf.static(0.5), key=0).init(PARAMS)
  assert plain.algorithm_state == ()


def test_a_traced_sparsity_keeps_the_exact_count():
  rise = spdf.cubic(0.1, 0.8, 10)
  mask = jax.jit(
      lambda count, scores: spdf.sparsity.masks.mask_from_scores(
          scores, spdf.uniform(scores, rise(count))
      )
  )
  for step in range(12):
    kept = mask(step, PARAMS)['o']
    assert int(kept.sum()) == 128 - round(float(rise(step)) * 128)


def test_a_mask_of_another_dtype_is_refused_in_one_sentence():
  floats = lambda tree: jax.tree.map(lambda p: jnp.ones(p.shape), tree)
  first = spdf.static(0.5)._replace(init=lambda key, params: floats(params))
  with pytest.raises(TypeError, match="mask of dtype float32 for 'h/w'"):
    spdf.sparsify(optax.sgd(0.1), first, key=0).init(PARAMS)
  later = averaging()._replace(update=lambda *args: floats(args[3]))
  with pytest.raises(TypeError, match='the algorithm returned a mask of dtype'):
    list(train(later, 3))


def test_gradients_of_pruned_weights_are_seen_on_request_only():
  def watched(is_dense):
    algorithm = averaging()
    return algorithm._replace(
        dense_grads_at=lambda count: is_dense & (count % 2 == 0),
        update=lambda key, count, mask, params, grads, state: mask,
    )

  for is_dense in (True, False):
    *_, (_, state, _) = train(watched(is_dense), 4)
    inner = state.algorithm_state
    for tree in inner.values():
      off = jax.tree.map(
          lambda x, m: float(jnp.abs(jnp.where(m, 0, x)).max()),
          tree, spdf.get_mask(state),
      )
      assert all((x > 0) == is_dense for x in jax.tree.leaves(off))


def test_algorithms_print_as_the_calls_that_make_them():
  rise = spdf.cubic(0.0, 0.8, 100)
  assert repr(spdf.gmp(rise, update_every=10, update_until=100)) == (
      'gmp(cubic(0.0, 0.8, 100, start=0), update_every=10, update_until=100)'
  )
  times = dict(update_every=5, update_until=9)
  assert repr(spdf.rigl(0.8, **times, distribution=spdf.erk)) == (
      'rigl(0.8, update_every=5, update_until=9, distribution=erk)'
  )
  flat = functools.partial(spdf.erk, power=0.5)
  block = spdf.structures.block(4, 2)
  assert repr(spdf.static(0.5, distribution=flat, structure=block)) == (
      'static(0.5, distribution=erk(…, power=0.5), structure=block(4, 2))'
  )
  for make in (spdf.rigl, spdf.static, spdf.join, spdf.sparsify, spdf.gmp):
    assert ' at 0x' not in str(inspect.signature(make))

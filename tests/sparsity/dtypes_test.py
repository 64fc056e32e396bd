"""Masks and algorithms in 64 bits, complex numbers and strict promotion."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity import topk
from tests.sparse_loop import trajectory
from tests.tiers import slow_except

TIMES = dict(update_every=2, update_until=6)
ALGORITHMS = {
    'static': lambda: spdf.static(0.75),
    'set': lambda: spdf.sparse_evolution(0.75, update_every=2),
    'rigl': lambda: spdf.rigl(0.75, **TIMES),
    'granet': lambda: spdf.granet(
        spdf.cubic(0.5, 0.75, 6), distribution='model_wide', **TIMES),
    '2:4': lambda: spdf.rigl(0.5, structure='2:4', **TIMES),
    'join': lambda: spdf.join([spdf.static(0.75), spdf.dense()], [3]),
}


@pytest.fixture(name='x64')
def _x64():
  with jax.enable_x64(True):
    yield


def oracle(scores, kept):
  """Keeps the first of a stable argsort, per layer."""
  flat = scores.reshape(len(scores), -1)
  order = np.argsort(-flat, axis=1, kind='stable')[:, :kept]
  mask = np.zeros(flat.shape, bool)
  np.put_along_axis(mask, order, True, axis=1)
  return mask.reshape(scores.shape)


@pytest.mark.parametrize('size', [(1, 3, 4), (2, 70, 60)])
@pytest.mark.parametrize('dtype', ['float64', 'int64', 'int32', 'complex128'])
def test_wide_scores_are_ranked_exactly(x64, size, dtype):
  del x64
  rng = np.random.default_rng(0)
  # Differences far below the resolution of float32, of both signs.
  scores = np.round(rng.normal(size=size) * 8) + 1e-12 * rng.normal(size=size)
  if dtype.startswith('int'):
    scores = rng.integers(-2**31, 2**31, size) + (dtype == 'int64') * 2**40
  scores = scores.astype(dtype)
  ranked = scores
  if dtype == 'complex128':
    scores = scores * np.exp(1j * rng.normal(size=size))
    ranked = np.asarray(jnp.abs(scores))
  kept = scores[0].size // 3
  mask = topk.keep_largest(jnp.asarray(scores), kept)
  np.testing.assert_array_equal(mask, oracle(ranked, kept))


def test_leaves_of_different_dtypes_are_ranked_together(x64):
  del x64
  rng = np.random.default_rng(0)
  values = rng.normal(size=(3, 1, 8, 8)).astype(np.float16)
  scores = [
      jnp.asarray(x, dtype)
      for x, dtype in zip(values, ('float16', 'float64', 'float32'))
  ]
  masks = topk.keep_largest_of_all(scores, 50)
  expected = oracle(values.reshape(1, -1), 50).reshape(values.shape)
  np.testing.assert_array_equal(np.stack(masks), expected)


def train(algorithm, dtype, steps=7, key=0):
  rng = np.random.default_rng(0)
  def draw():
    x = rng.normal(size=(8, 16))
    if np.issubdtype(dtype, np.complexfloating):
      x = x + 1j * rng.normal(size=(8, 16))
    return {'a': jnp.asarray(x, dtype), 'b': jnp.asarray(x.T + 1, dtype)}

  tx = spdf.sparsify(optax.sgd(0.1, momentum=0.9), algorithm, key=key)
  *_, (params, state) = trajectory(tx, draw(), lambda *_: draw(), steps)
  spdf.check_zeros(params, state)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
  return spdf.get_mask(state)


@pytest.mark.parametrize('name', slow_except(['rigl'], ALGORITHMS))
def test_every_algorithm_trains_in_float64_with_strict_promotion(x64, name):
  del x64
  with jax.numpy_dtype_promotion('strict'):
    masks = train(ALGORITHMS[name](), 'float64')
  kept = {'2:4': 128, 'join': 256}.get(name, 64)
  assert sum(int(m.sum()) for m in masks.values()) == kept


OF_ANY_PRECISION = ALGORITHMS | {
    'model-wide': lambda: spdf.static(0.75, distribution='model_wide'),
    'set 2:4': lambda: spdf.sparse_evolution(
        0.5, structure='2:4', update_every=2),
    'balanced': lambda: spdf.rigl(
        0.5, structure=spdf.structures.balanced(None), **TIMES),
    'granet balanced': lambda: spdf.granet(
        spdf.cubic(0.25, 0.5, 6), structure=spdf.structures.balanced(None),
        **TIMES),
}


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg'])
@pytest.mark.parametrize('name', OF_ANY_PRECISION)
def test_masks_of_a_key_are_those_without_x64(name, impl):
  if impl == 'rbg' and name not in ('rigl', 'model-wide', '2:4'):
    pytest.skip('a corner of the two lists')
  make = OF_ANY_PRECISION[name]
  key = jax.random.key(3, impl=impl)
  first, last = (
      [train(make(), 'float32', steps, key) for steps in (0, 7)]
  )
  with jax.enable_x64(True):
    for steps, expected in ((0, first), (7, last)):
      actual = train(make(), 'float32', steps, key)
      jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_values_drawn_by_a_key_are_those_without_x64():
  params = {'w': jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)),
                             jnp.float32)}
  key = jax.random.key(0)
  draw = lambda: (
      spdf.create_adapters(key, params, rank=2),
      spdf.scaled_normal(0.5)(
          key, 0, {'w': params['w'][None]}, {'w': params['w'][None] > 0}
      ),
  )
  expected = draw()
  with jax.enable_x64(True):
    jax.tree.map(np.testing.assert_array_equal, draw(), expected)


def test_complex_weights_are_ranked_by_magnitude():
  masks = train(ALGORITHMS['rigl'](), 'complex64')
  assert sum(int(m.sum()) for m in masks.values()) == 64


def test_drops_by_sign_are_refused_for_complex_weights():
  algorithm = spdf.sparse_evolution(0.75, update_every=2, drop='signed')
  with pytest.raises(ValueError, match="drop is 'signed', .* complex64"):
    train(algorithm, 'complex64')

"""Masks against a NumPy oracle: exact counts, ties, layers, keys."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.counts import number_kept

LEVELS = st.one_of(
    st.sampled_from([0.0, 0.5, 0.75, 0.9, 0.99, 0.999999]),
    st.floats(0, 1, exclude_max=True),
)
SHAPES = st.one_of(
    st.tuples(st.integers(1, 40)),
    st.tuples(st.integers(1, 9), st.integers(1, 30)),
    st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 30)),
)


def oracle(scores, sparsity):
  """Keeps by a stable argsort of every layer, as the definition says."""
  scores = np.asarray(scores, np.float64)
  scores = np.where(np.isnan(scores), -np.inf, scores)
  shape = (1,) * (2 - scores.ndim) + scores.shape
  layers = scores.reshape((-1, shape[-2] * shape[-1]))
  mask = np.zeros(layers.shape, bool)
  kept = max(1, layers.shape[1] - round(sparsity * layers.shape[1]))
  for layer, row in zip(layers, mask):
    row[np.argsort(-layer, kind='stable')[:kept]] = True
  return mask.reshape(scores.shape)


def draw_scores(shape, seed, kind):
  rng = np.random.default_rng(seed)
  normal = rng.standard_normal(shape)
  return {
      'normal': normal,
      'ties': np.round(normal * 2),
      'equal': np.zeros(shape),
      'zeros of both signs': np.where(normal > 0, 0.0, -0.0),
      'tiny': normal * 1e-38,
      'infinite': np.where(normal > 1, np.inf, normal),
      'nan': np.where(normal > 1, np.nan, normal),
  }[kind].astype(np.float32)


@settings(deadline=None, max_examples=30)
@given(
    SHAPES,
    LEVELS,
    st.integers(0, 2**32),
    st.sampled_from([
        'normal', 'ties', 'equal', 'zeros of both signs', 'infinite', 'nan',
    ]),
    st.sampled_from(['float32', 'bfloat16', 'float16']),
)
def test_mask_equals_a_stable_argsort(shape, sparsity, seed, kind, dtype):
  scores = jnp.asarray(draw_scores(shape, seed, kind)).astype(dtype)
  mask = spdf.mask_from_scores(scores, sparsity)
  np.testing.assert_array_equal(mask, oracle(scores, sparsity))


@pytest.mark.parametrize('dtype', ['uint32', 'int8', 'uint16', 'int32'])
def test_integer_scores_are_ranked_exactly(dtype):
  info = np.iinfo(dtype)
  scores = np.random.default_rng(0).integers(
      info.min, info.max, (40, 50), dtype, endpoint=True
  )
  mask = spdf.mask_from_scores(jnp.asarray(scores), 0.7)
  np.testing.assert_array_equal(mask, oracle(scores, 0.7))


@settings(deadline=None, max_examples=25)
@given(SHAPES, LEVELS, st.integers(0, 2**32))
def test_every_layer_keeps_the_exact_count(shape, sparsity, seed):
  mask = spdf.random_mask(
      jax.random.key(seed), {'w': jnp.zeros(shape)}, sparsity
  )['w']
  layers = np.asarray(mask).reshape((-1, int(np.prod(shape[-2:]))))
  assert (layers.sum(1) == number_kept(layers.shape[1], sparsity)).all()


def test_layers_of_a_stack_are_separate_groups():
  scores = jnp.stack([jnp.full((4, 4), 9.0), jnp.ones((4, 4))])
  mask = spdf.mask_from_scores(scores, 0.75)
  assert mask.sum((1, 2)).tolist() == [4, 4]


def test_no_layer_loses_all_its_weights():
  assert number_kept(10, 0.999) == 1


def test_count_is_exact_where_float32_is_not():
  assert number_kept(604_000_000, 0.9) == 60_400_000


def test_random_ties_respect_scores_and_reach_every_index():
  scores = {'w': jnp.array([[1.0, 0, 0, 0, 0, 0, 0, 2.0]])}
  reached = np.zeros(8, int)
  for seed in range(60):
    mask = spdf.mask_from_scores(
        scores, 0.5, tie_break=jax.random.key(seed)
    )['w'][0]
    assert mask.sum() == 4 and mask[0] and mask[7]
    reached += np.asarray(mask)
  assert (reached[1:7] > 5).all()


def test_magnitude_mask_ranks_by_absolute_value():
  params = {'w': jnp.array([[-3.0, 1.0], [2.0, -0.5]]), 'b': None}
  mask = spdf.magnitude_mask(None, params, 0.5)
  assert mask['w'].tolist() == [[True, False], [True, False]]
  assert mask['b'] is None


def test_adding_a_leaf_changes_no_other_mask():
  key = jax.random.key(0)
  one = {'h_0': {'w': jnp.zeros((8, 8))}}
  two = {'a': jnp.zeros((8, 8)), **one}
  first = spdf.random_mask(key, one, 0.5)['h_0']['w']
  second = spdf.random_mask(key, two, 0.5)
  np.testing.assert_array_equal(first, second['h_0']['w'])
  assert (second['a'] != first).any()


def test_random_masks_are_the_same_on_every_version():
  # Golden: to change it is to change every run's masks; say so in CHANGELOG.
  mask = spdf.random_mask(
      jax.random.key(0), {'w': jnp.zeros((4, 8))}, 0.75
  )['w']
  assert np.flatnonzero(mask).tolist() == [1, 3, 5, 9, 13, 17, 20, 29]


def test_random_masks_are_unbiased():
  counts = np.zeros((8, 8))
  for seed in range(200):
    counts += np.asarray(
        spdf.random_mask(jax.random.key(seed), {'w': counts}, 0.75)['w']
    )
  # 200 draws at 1/4: mean 50, deviation 6.1.
  assert counts.min() > 20 and counts.max() < 80


def test_sparsities_may_differ_by_leaf():
  params = {'a': jnp.zeros((4, 4)), 'b': jnp.zeros((4, 4)), 'c': None}
  mask = spdf.random_mask(
      jax.random.key(0), params, {'a': 0.5, 'b': 0.75, 'c': None}
  )
  assert int(mask['a'].sum()) == 8 and int(mask['b'].sum()) == 4


def test_nan_off_the_mask_does_not_spread():
  tree = {'w': jnp.array([[jnp.nan, 1.0]]), 'b': jnp.array([jnp.nan])}
  mask = {'w': jnp.array([[False, True]]), 'b': None}
  masked = spdf.apply_mask(tree, mask)
  assert masked['w'].tolist() == [[0.0, 1.0]]
  assert jnp.isnan(masked['b']).all()


def test_traced_masks_compile_without_sort_or_gather():
  text = jax.jit(lambda s: spdf.mask_from_scores(s, 0.75)).lower(
      jnp.zeros((64, 128))
  ).compile().as_text()
  assert ' sort(' not in text and 'all-gather' not in text


@pytest.mark.parametrize(
    'sparsity', [1.0, -0.1, float('nan'), 'half', None, True]
)
def test_impossible_sparsity_is_named(sparsity):
  with pytest.raises(ValueError, match=r'sparsity is .* \[0, 1\)'):
    spdf.random_mask(jax.random.key(0), {'w': jnp.zeros((2, 2))}, sparsity)


def test_tree_of_sparsities_that_does_not_fit_is_refused():
  with pytest.raises(ValueError, match='does not fit the parameters'):
    spdf.random_mask(
        jax.random.key(0), {'w': jnp.zeros((2, 2))}, {'v': 0.5}
    )

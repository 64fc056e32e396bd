"""Masks against a NumPy oracle, and masks applied to trees."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import storage
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


@settings(deadline=None, max_examples=10)
@given(SHAPES, LEVELS, st.integers(0, 2**32))
def test_every_layer_keeps_the_exact_count(shape, sparsity, seed):
  mask = spdf.init.random(
      jax.random.key(seed), {'w': jnp.zeros(shape)}, sparsity
  )['w']
  layers = np.asarray(mask).reshape((-1, int(np.prod(shape[-2:]))))
  assert (layers.sum(1) == number_kept(layers.shape[1], sparsity)).all()


def test_random_ties_respect_scores_and_reach_every_index():
  scores = {'w': jnp.array([[1.0, 0, 0, 0, 0, 0, 0, 2.0]])}
  reached = np.zeros(8, int)
  for seed in range(60):
    mask = masks.mask_from_scores(
        scores, 0.5, tie_break=jax.random.key(seed)
    )['w'][0]
    assert mask.sum() == 4 and mask[0] and mask[7]
    reached += np.asarray(mask)
  assert (reached[1:7] > 5).all()


def test_adding_a_leaf_changes_no_other_mask():
  key = jax.random.key(0)
  one = {'h_0': {'w': jnp.zeros((8, 8))}}
  two = {'a': jnp.zeros((8, 8)), **one}
  first = spdf.init.random(key, one, 0.5)['h_0']['w']
  second = spdf.init.random(key, two, 0.5)
  np.testing.assert_array_equal(first, second['h_0']['w'])
  assert (second['a'] != first).any()


def test_random_masks_are_the_same_on_every_version():
  # Golden: to change it is to change every run's masks; say so in CHANGELOG.
  mask = spdf.init.random(
      jax.random.key(0), {'w': jnp.zeros((4, 8))}, 0.75
  )['w']
  assert np.flatnonzero(mask).tolist() == [1, 3, 5, 9, 13, 17, 20, 29]


def test_nan_off_the_mask_does_not_spread():
  tree = {'w': jnp.array([[jnp.nan, 1.0]]), 'b': jnp.array([jnp.nan])}
  mask = {'w': jnp.array([[False, True]]), 'b': None}
  masked = spdf.apply_mask(tree, mask)
  assert masked['w'].tolist() == [[0.0, 1.0]]
  assert jnp.isnan(masked['b']).all()


def test_traced_masks_compile_without_sort_or_gather():
  text = jax.jit(lambda s: masks.mask_from_scores(s, 0.75)).lower(
      jnp.zeros((64, 128))
  ).compile().as_text()
  assert ' sort(' not in text and 'all-gather' not in text


PARAMS = {'b': jnp.ones(2), 'w': jnp.array([[1., 2.], [3., 4.]])}
MASK = {'b': None, 'w': jnp.array([[True, False], [False, True]])}


class Wrapped(NamedTuple):
  b: jax.Array
  w: jax.Array


def test_masks_apply_by_paths_to_trees_of_other_types():
  pruned = spdf.apply_mask(Wrapped(**PARAMS), MASK)
  assert pruned.w.tolist() == [[1., 0.], [0., 4.]] and pruned.b is PARAMS['b']


def test_none_may_replace_a_whole_subtree():
  tree = {'h': PARAMS, 'rest': {'w': jnp.ones(3)}}
  pruned = spdf.apply_mask(tree, {'h': MASK, 'rest': None})
  assert pruned['h']['w'].sum() == 5 and pruned['rest']['w'].sum() == 3


def test_map_masked_skips_leaves_that_stay_dense():
  kept = spdf.map_masked(lambda m, p, g: (p * g)[m].tolist(), MASK, PARAMS,
                         jax.tree.map(lambda p: p + 1, PARAMS))
  assert kept == {'b': None, 'w': [2., 20.]}


def test_check_names_leaves_with_pruned_weights_that_are_not_zero():
  tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), key=0)
  state = tx.init(PARAMS)
  params = spdf.apply_mask(PARAMS, spdf.get_mask(state))
  spdf.check_zeros(params, state)
  with pytest.raises(ValueError, match="not zero: 2 in 'w'; mask the initial"):
    spdf.check_zeros(PARAMS, state)
  spdf.check_zeros(*storage.pack_state(params, state))


def test_get_mask_refuses_a_wrapper_that_computes_with_the_state():
  params = {'w': jnp.ones((8, 8))}
  inner = spdf.sparsify(
      optax.adam(0.1), spdf.rigl(0.5, update_every=2, update_until=4), key=0
  )
  tx = optax.contrib.sam(inner, optax.sgd(0.01))
  state = tx.init(params)
  _, state = tx.update(params, state, params)
  with pytest.raises(ValueError, match='put that transformation inside'):
    tx.update(params, state, params)

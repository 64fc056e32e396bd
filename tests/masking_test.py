"""`apply_mask`, `map_masked` and `check`: masks on trees, by paths."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import spdf_jax as spdf

PARAMS = {'b': jnp.ones(2), 'w': jnp.array([[1., 2.], [3., 4.]])}
MASK = {'b': None, 'w': jnp.array([[True, False], [False, True]])}


class Wrapped(NamedTuple):
  b: jax.Array
  w: jax.Array


def test_masks_apply_by_paths_to_trees_of_other_types():
  found = spdf.apply_mask(Wrapped(**PARAMS), MASK)
  assert found.w.tolist() == [[1., 0.], [0., 4.]] and found.b is PARAMS['b']


def test_none_may_replace_a_whole_subtree():
  tree = {'h': PARAMS, 'rest': {'w': jnp.ones(3)}}
  found = spdf.apply_mask(tree, {'h': MASK, 'rest': None})
  assert found['h']['w'].sum() == 5 and found['rest']['w'].sum() == 3


def test_map_masked_passes_over_leaves_that_stay_dense():
  kept = spdf.map_masked(lambda m, p, g: (p * g)[m].tolist(), MASK, PARAMS,
                         jax.tree.map(lambda p: p + 1, PARAMS))
  assert kept == {'b': None, 'w': [2., 20.]}
  with pytest.raises(ValueError, match='no tree beside the mask'):
    spdf.map_masked(lambda m: m, MASK)


def test_a_mask_of_other_parameters_is_refused():
  with pytest.raises(ValueError, match="has a leaf 'w', .* same parameters"):
    spdf.apply_mask({'v': PARAMS['w']}, MASK)


def test_swapped_arguments_are_refused():
  for call in (spdf.apply_mask, lambda p, m: spdf.summarize(p, m)):
    with pytest.raises(TypeError, match="float32 at '.'; give what get_mask"):
      call(MASK if call is spdf.apply_mask else PARAMS,
           PARAMS if call is spdf.apply_mask else MASK)


def test_check_names_leaves_with_pruned_weights_that_are_not_zero():
  tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), key=0)
  state = tx.init(PARAMS)
  params = spdf.apply_mask(PARAMS, spdf.get_mask(state))
  spdf.check(params, state)
  with pytest.raises(ValueError, match="not zero: 2 in 'w'; mask the initial"):
    spdf.check(PARAMS, state)
  spdf.check(*spdf.pack_state(params, state))


def test_a_wrapper_that_computes_with_the_state_is_refused():
  params = {'w': jnp.ones((8, 8))}
  inner = spdf.sparsify(
      optax.adam(0.1), spdf.rigl(0.5, update_every=2, update_until=4), key=0
  )
  tx = optax.contrib.sam(inner, optax.sgd(0.01))
  state = tx.init(params)
  _, state = tx.update(params, state, params)
  with pytest.raises(ValueError, match='put that transformation inside'):
    tx.update(params, state, params)

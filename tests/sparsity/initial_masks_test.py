"""Initial masks: given, of a checkpoint's zeros, by scores."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.counts import sparsities_of
from tests.refusals import refuse

PARAMS = {
    'h_0': {'wi': jnp.ones((8, 16)), 'bias': jnp.ones(16)},
    'h_1': {'wi': jnp.ones((16, 8))},
}
AXES = optax.contrib.MuonDimensionNumbers


def draw(sparsities=(0.75, 0.5), seed=0):
  """A mask with exact counts, as NumPy arrays in the parameters' shapes."""
  rng = np.random.default_rng(seed)

  def leaf(shape, sparsity):
    size = int(np.prod(shape))
    flat = np.arange(size) >= round(sparsity * size)
    return rng.permutation(flat).reshape(shape)

  return {
      'h_0': {'wi': leaf((8, 16), sparsities[0]), 'bias': None},
      'h_1': {'wi': leaf((16, 8), sparsities[1])},
  }


def start(init, sparsity=None, params=PARAMS, algorithm=None, **options):
  algorithm = algorithm or spdf.static(sparsity, init=init)
  tx = spdf.sparsify(optax.sgd(0.1), algorithm, key=0, **options)
  return spdf.get_mask(tx.init(params))


def test_a_given_mask_is_where_training_starts():
  mask = draw()
  actual = start(spdf.init.given(mask), sparsities_of(mask))
  jax.tree.map(np.testing.assert_array_equal, actual, mask)
  assert actual['h_0']['bias'] is None


def test_a_given_mask_uses_the_axes_of_where():
  # Stacked and transposed, with heads: [outputs, layers, heads, inputs].
  axes = AXES(reduction_axis=(3,), output_axis=(2, 0))
  where = lambda path, leaf: axes if leaf.dtype == jnp.bfloat16 else False
  params = {'w': jnp.ones((2, 3, 4, 5), jnp.bfloat16), 'b': jnp.ones((4, 5))}
  mask = {'w': np.random.default_rng(0).random((2, 3, 4, 5)) < 0.3, 'b': None}
  actual = start(
      spdf.init.given(mask, where=where), sparsities_of(mask), params,
      where=where,
  )
  np.testing.assert_array_equal(actual['w'], mask['w'])


def test_sparsities_of_a_mask_reproduce_its_counts():
  kept = 37
  mask = {'w': np.arange(128).reshape(8, 16) < kept}
  sparsity = sparsities_of(mask)
  random = start(spdf.init.random, sparsity, {'w': jnp.ones((8, 16))})
  assert int(random['w'].sum()) == kept
  start(spdf.init.given(mask), sparsity, {'w': jnp.ones((8, 16))})


def test_a_given_mask_under_model_wide_needs_the_count_of_the_model():
  mask = draw((0.875, 0.625))
  wide = lambda s: spdf.static(
      s, distribution=spdf.model_wide, init=spdf.init.given(mask)
  )
  actual = start(None, algorithm=wide(0.75))
  jax.tree.map(np.testing.assert_array_equal, actual, mask)
  refuse('keeps 64 of 256.*requires 128', start, None, algorithm=wide(0.5))


def test_a_given_mask_is_checked_under_jit_as_well():
  init = spdf.init.given(draw())
  tx = spdf.sparsify(optax.sgd(0.1), spdf.static(0.75, init=init), key=0)
  message = "mask of 'h_1/wi' keeps 64 of 128 weights, but sparsity=0.75 req"
  refuse(message, jax.jit(tx.init), PARAMS)
  refuse(r'that of the mask, 0.5 here', jax.eval_shape, tx.init, PARAMS)


@pytest.mark.parametrize('change, message', [
    (lambda m: m['h_1'].update(wi=None),
     r"mask has no leaf 'h_1/wi', .* shape \[1, 16, 8\]; it has h_0/wi"),
    (lambda m: m['h_0'].update(bias=np.ones(16, bool)),
     r"mask has a leaf 'h_0/bias' of shape \[16\] where"),
    (lambda m: m['h_0'].update(wi=m['h_1']['wi']),
     r"mask of 'h_0/wi' has shape \[16, 8\], .* layers of shape \[1, 8, 16\]"),
    (lambda m: m['h_0'].update(wi=np.ones((8, 16))),
     r"mask of 'h_0/wi' is of type float64; give a bool array"),
    (lambda m: m['h_0']['wi'].put(m['h_0']['wi'].argmin(), True),
     "mask of 'h_0/wi' keeps 33 of 128 weights, but sparsity=0.75 requires"),
])
def test_a_mask_that_does_not_fit_is_refused(change, message):
  mask = draw()
  change(mask)
  given = lambda: start(spdf.init.given(mask), {'h_0': 0.75, 'h_1': 0.5})
  refuse(message, given)


@pytest.mark.parametrize('scale', [1, 2.0**-140])  # Also denormal weights.
def test_zeros_of_a_checkpoint_are_its_mask(scale):
  mask = draw()
  params = spdf.apply_mask(
      jax.tree.map(lambda p: np.asarray(p) * np.float32(scale), PARAMS), mask
  )
  actual = start(spdf.init.nonzero, sparsities_of(mask), params)
  jax.tree.map(np.testing.assert_array_equal, actual, mask)
  begin = lambda p: start(spdf.init.nonzero, sparsities_of(mask), p)
  actual = jax.jit(begin)(params)
  jax.tree.map(np.testing.assert_array_equal, actual, mask)


def test_scored_calls_the_function_with_a_key_and_a_shape_per_leaf():
  seen = []

  def scores(key, shape):
    seen.append(shape)
    return jax.random.uniform(key, shape)

  mask = start(spdf.init.scored(scores), 0.75)
  assert seen == [(1, 8, 16), (1, 16, 8)]
  flat = [np.ravel(m) for m in jax.tree.leaves(mask)]
  assert [m.sum() for m in flat] == [32, 32]
  # Every leaf has a key of its own, which other leaves do not change.
  assert (flat[0] != flat[1]).any()
  alone = start(spdf.init.scored(scores), 0.75, {'h_1': PARAMS['h_1']})
  np.testing.assert_array_equal(alone['h_1']['wi'], mask['h_1']['wi'])


def test_the_highest_scores_are_kept():
  column = lambda key, shape: jnp.arange(shape[2])[None, None] * jnp.ones(shape)
  mask = start(spdf.init.scored(column), 0.75)['h_0']['wi']
  assert mask[:, -4:].all() and not mask[:, :-4].any()


def test_masks_in_a_structure_are_taken_and_others_refused():
  structure, sparsity = spdf.structures.n_of_m(2, 4), 0.5
  using = lambda init: start(
      None, algorithm=spdf.static(sparsity, structure=structure, init=init)
  )
  mask = using(spdf.init.scored(jax.random.uniform))
  assert set(jax.tree.leaves(sparsities_of(mask))) == {sparsity}
  actual = using(spdf.init.given(mask))
  jax.tree.map(np.testing.assert_array_equal, actual, mask)
  # As many weights, but in the places of none of the structures.
  other = jax.tree.map(
      lambda m: jnp.sort(m.ravel())[::-1].reshape(m.shape).at[0, 0].set(
          False
      ).at[-1, -1].set(True), mask,
  )
  refuse("mask of 'h_0/wi' keeps", using, spdf.init.given(other))
  params = spdf.apply_mask(PARAMS, other)
  algorithm = spdf.static(sparsity, structure=structure, init=spdf.init.nonzero)
  with pytest.raises(ValueError, match="parameters of 'h_0/wi' keeps"):
    start(None, algorithm=algorithm, params=params)


@pytest.mark.parametrize('make', [
    lambda: spdf.static(
        {'h_0': 0.75, 'h_1': 0.5}, init=spdf.init.given(draw())
    ),
    lambda: spdf.static(0.0, init='nonzero', distribution='model_wide'),
])
def test_optax_map_params_accepts_the_state(make):
  tx = spdf.sparsify(optax.adam(0.1), make(), key=0)
  state = tx.init(PARAMS)
  mapped = optax.tree.map_params(tx, lambda x: x, state)
  assert jax.tree.structure(mapped) == jax.tree.structure(state)

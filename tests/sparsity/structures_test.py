"""Structures against brute force, one group after another."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity import masks
from spdf_jax.sparsity import statistics
from spdf_jax.sparsity import structures
from spdf_jax.sparsity.counts import fixed
from spdf_jax.sparsity.counts import fraction_of
from spdf_jax.sparsity.distributions import ModelWide
from tests.refusals import refuse

SHAPE = (2, 8, 12)


def cells(*slices):
  """Indices of the weights in a slice of a layer."""
  return list(itertools.product(*(range(*s) for s in slices)))


def groups(inputs, outputs):
  """Tiles of a layer, row-major."""
  return [
      cells((i, i + inputs), (o, o + outputs))
      for i in range(0, SHAPE[1], inputs) for o in range(0, SHAPE[2], outputs)
  ]


def alone(group):
  return [[cell] for cell in group]


# Groups of a layer, each a list of units, each a list of weights.
CASES = {
    'unstructured': (
        structures.unstructured(), 0.75, [alone(cells((8,), (12,)))]
    ),
    '2:4 of inputs': (
        structures.n_of_m(2, 4), 0.5, [alone(g) for g in groups(4, 1)]
    ),
    '1:3 of outputs': (
        structures.n_of_m(1, 3, 'outputs'), 2 / 3,
        [alone(g) for g in groups(1, 3)],
    ),
    '3 groups of outputs': (
        structures.balanced(3), 0.75, [alone(g) for g in groups(8, 4)]
    ),
    '2 groups of inputs': (
        structures.balanced(2, 'inputs'), 0.6,
        [alone(g) for g in groups(4, 12)],
    ),
    'every output': (
        structures.balanced(None), 0.7, [alone(g) for g in groups(8, 1)]
    ),
    'every input': (
        structures.balanced(None, 'inputs'), 0.7,
        [alone(g) for g in groups(1, 12)],
    ),
    'blocks': (structures.block(2, 3), 0.6, [groups(2, 3)]),
    'balanced blocks': (
        structures.block(2, 3, balanced=True), 0.6,
        [groups(2, 3)[column::4] for column in range(4)],
    ),
    'inputs': (structures.channel('inputs'), 0.5, [groups(1, 12)]),
    'outputs': (structures.channel('outputs'), 0.75, [groups(8, 1)]),
}


def oracle(scores, sparsity, groups):
  mask = np.zeros(scores.shape, bool)
  for layer, s in zip(mask, scores):
    for units in groups:
      kept = max(1, len(units) - round(sparsity * len(units)))
      totals = [sum(np.float64(s[cell]) for cell in unit) for unit in units]
      for best in np.argsort(-np.asarray(totals), kind='stable')[:kept]:
        for cell in units[best]:
          layer[cell] = True
  return mask


@pytest.mark.parametrize('case, kind', [
    *((case, 'normal') for case in CASES), ('unstructured', 'ties'),
    ('2:4 of inputs', 'ties'), ('blocks', 'ties'),
])
def test_masks_equal_brute_force(case, kind):
  structure, sparsity, groups = CASES[case]
  scores = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
  if kind == 'ties':
    scores = np.round(2 * scores)
  mask = masks.mask_from_scores(
      jnp.asarray(scores), sparsity, structure=structure
  )
  np.testing.assert_array_equal(mask, oracle(scores, sparsity, groups))


@pytest.mark.parametrize('case', CASES)
def test_random_masks_have_the_exact_count_everywhere(case):
  structure, sparsity, groups = CASES[case]
  params = {'w': jnp.zeros(SHAPE), 'v': None}
  draw = functools.partial(
      spdf.init.random, params=params, sparsity=sparsity, structure=structure
  )
  mask = draw(jax.random.key(0))
  assert mask['v'] is None
  for layer in np.asarray(mask['w']):
    for units in groups:
      states = [{bool(layer[cell]) for cell in unit} for unit in units]
      assert all(len(state) == 1 for state in states)
      kept = sum(state == {True} for state in states)
      assert kept == max(1, len(units) - round(sparsity * len(units)))
  assert (mask['w'] != draw(jax.random.key(1))['w']).any()


@pytest.mark.parametrize('case', CASES)
def test_reduce_and_expand_agree_with_the_shape_of_units(case):
  structure, _, groups = CASES[case]
  number, a, b = structure.unit_shape(SHAPE)
  assert number == SHAPE[0] * len(groups)
  assert a * b == len(groups[0])
  units = structure.reduce(jnp.ones(SHAPE, jnp.bfloat16))
  assert units.shape[0] == SHAPE[0] and units.shape[-2:] == (a, b)
  assert (units == len(groups[0][0])).all()
  # A random mask of units comes back from the weights.
  mask = np.random.default_rng(0).random(units.shape) < 0.5
  weights = structure.expand(mask, SHAPE)
  back = structure.reduce(weights.astype(jnp.float32)) > 0
  np.testing.assert_array_equal(back, mask)
  dense = masks.mask_from_scores(jnp.zeros(SHAPE), 0.0, structure=structure)
  assert dense.all()


def test_model_wide_sparsity_ranks_blocks():
  scores = {'a': jnp.ones((4, 4)).at[:2].set(5.0), 'b': jnp.full((2, 2), 2.0)}
  mask = masks.mask_from_scores(
      scores, ModelWide(0.4), structure=structures.block(2, 2)
  )
  np.testing.assert_array_equal(mask['a'], scores['a'] > 1)
  assert mask['b'].all()


def test_sparsities_that_a_structure_cannot_have_are_named():
  make = lambda sparsity: spdf.init.random(
      jax.random.key(0), jnp.zeros(SHAPE), sparsity,
      structure=structures.n_of_m(1, 3, 'outputs'),
  )
  refuse(r'keeps exactly 1 of 3; give 0.6666667', make, 0.5)
  refuse('ranks the weights of all layers', make, ModelWide(2 / 3))
  make(0.6666667)


def test_model_wide_masks_count_over_all_leaves():
  params = {
      'a': 3 * jnp.ones((3, 5)).at[0, 0].set(0), 'b': jnp.ones((2, 4, 4)),
      'c': None,
  }
  for make in (
      lambda p: spdf.init.magnitude(None, p, ModelWide(0.75)),
      lambda p: spdf.init.random(jax.random.key(0), p, ModelWide(0.75)),
  ):
    mask = jax.jit(make)(params)
    assert mask['c'] is None
    assert mask['a'].sum() + mask['b'].sum() == 47 - 35
  magnitude = spdf.init.magnitude(None, params, ModelWide(1 - 14.4 / 47))
  # The largest 12 of `a`, and one in each layer of `b`.
  assert (magnitude['a'] <= (params['a'] > 0)).all()
  assert magnitude['b'].sum((1, 2)).tolist() == [1, 1]
  assert magnitude['a'].sum() == 12


@pytest.mark.slow
def test_model_wide_channels_count_weights_and_leave_no_layer_dead():
  # Channels of 8 to 64 weights, whose layers have weights of all sizes.
  shapes = {'a': (64, 32), 'b': (32, 64), 'stack': (3, 16, 8)}
  rng = np.random.default_rng(0)
  params = {
      name: jnp.asarray(rng.standard_normal(shape) * 10. ** -i, 'float32')
      for i, (name, shape) in enumerate(shapes.items())
  }
  algorithm = spdf.static(
      0.75, distribution='model_wide', init='magnitude',
      structure=spdf.structures.channel('outputs'),
  )
  tx = spdf.sparsify(optax.sgd(0.1), algorithm, key=0, where={'*': True})
  mask = spdf.get_mask(tx.init(params))
  total = sum(math.prod(shape) for shape in shapes.values())
  kept = sum(int(m.sum()) for m in mask.values())
  assert total // 4 - 64 < kept <= total // 4
  for name, shape in shapes.items():
    assert mask[name].reshape(-1, math.prod(shape[-2:])).any(axis=1).all()


@pytest.mark.parametrize('make', [spdf.rigl, spdf.sparse_evolution])
def test_n_of_m_moves_with_default_drop_fractions(make):
  params = {'w': jax.random.normal(jax.random.key(0), (64, 64))}
  algorithm = make(0.5, structure='2:4', update_every=1, update_until=9)
  tx = spdf.sparsify(optax.sgd(0.0), algorithm, key=0)
  state = tx.init(params)
  before = spdf.get_mask(state)
  params = spdf.apply_mask(params, before)
  grads = {'w': jax.random.normal(jax.random.key(1), (64, 64))}
  _, state = tx.update(grads, state, params)  # Updates start at step 1.
  _, state = tx.update(grads, state, params)
  mask = spdf.get_mask(state)
  assert (mask['w'].reshape(16, 4, 64).sum(1) == 2).all()
  change, = statistics.mask_changes(before, mask, params).values()
  assert change.grown == change.dropped > 2048 * 0.05


def test_small_groups_drop_the_fraction_on_average():
  carry = jax.random.bits(jax.random.key(0), (100_000,)) >> 2
  for number, fraction in ((2, 0.3), (3, 0.9), (7, 0.01)):
    dropped = fraction_of(jnp.full(100_000, number), fixed(fraction), carry)
    exact = number * fraction
    assert abs(float(dropped.mean()) - exact) < 0.01
    assert set(dropped.tolist()) <= {math.floor(exact), math.floor(exact) + 1}


def test_complex_channels_are_ranked_per_weight_as_real_ones():
  rng = np.random.default_rng(0)
  scores = {'a': rng.random((64, 8)), 'b': rng.random((4, 32))}
  channels = structures.channel('outputs')

  def mask_in(dtype):
    return masks.mask_from_scores(
        jax.tree.map(lambda x: jnp.asarray(x, dtype), scores),
        spdf.model_wide(scores, 0.5), structure=channels,
    )

  real, complex_ = mask_in('float32'), mask_in('complex64')
  for name in scores:
    np.testing.assert_array_equal(real[name], complex_[name])

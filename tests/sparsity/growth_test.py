"""Scores of growth, element for element, by an oracle in NumPy."""

import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.algorithms import growth
from tests.sparsity import structures_test

ALL = dict(update_every=10, update_until=10, drop_fraction=lambda step: 1.0)
"""Drops everything, so that the mask is that of the largest scores."""


def balanced(sums):
  """Returns squares over the sums of squares of rows and columns."""
  squares = np.square(sums.astype(np.float64))
  by = np.ones(())
  for axis in (-2, -1):
    if sums.shape[axis] > 1:
      by = by * squares.sum(axis, keepdims=True)
  # An all-zero row or column has scores of zero, and float32 decides ties.
  by = np.where(by > 0, by, 1)
  return squares.astype(np.float32) / by.astype(np.float32)


def scores_of_weights(magnitudes, groups):
  """Returns scores of weights, whose sums rank the units of groups."""
  units = [unit for group in groups for unit in group]
  rows = sorted({min(unit)[0] for unit in units})
  columns = sorted({min(unit)[1] for unit in units})
  sums = np.zeros((len(rows), len(columns)))
  at = lambda unit: (rows.index(min(unit)[0]), columns.index(min(unit)[1]))
  for unit in units:
    sums[at(unit)] = sum(magnitudes[cell] for cell in unit)
  scores, spread = balanced(sums), np.zeros(magnitudes.shape)
  for unit in units:
    spread[min(unit)] = scores[at(unit)]
  return spread


@pytest.mark.parametrize('name, case', [
    *(('rigl', case) for case in (
        'unstructured', '2:4 of inputs', '1:3 of outputs', 'every output',
        'blocks', 'balanced blocks', 'outputs',
    )),
    ('granet', 'unstructured'), ('granet', 'blocks'),
])
def test_balanced_growth_ranks_units_within_their_row_and_column(name, case):
  structure, sparsity, groups = structures_test.CASES[case]
  make = {'rigl': spdf.rigl, 'granet': spdf.granet}[name]
  level = sparsity if name == 'rigl' else lambda step: sparsity
  algorithm = make(level, structure=structure, grow='balanced', **ALL)
  update = jax.jit(algorithm.update)
  mask = algorithm.init(jax.random.key(0), {'w': jnp.ones(SHAPE)})

  @settings(max_examples=8, deadline=None, derandomize=True)
  @given(st.integers(0, 999), st.sampled_from([None, 1, 4]))
  def check(seed, ties):
    rng = np.random.default_rng(seed)
    # Outer products are what concentrates growth by the gradient alone.
    g = rng.normal(size=SHAPE) * rng.normal(size=(2, 8, 1))
    g = (np.round(g * ties) / ties if ties else g).astype(np.float32)
    g[0, 3] = g[1, :, 5] = 0
    new = update(
        jax.random.key(1), jnp.int32(10), mask, {'w': jnp.ones(SHAPE)},
        {'w': g},
    )
    wanted = [
        structures_test.oracle(
            scores_of_weights(np.abs(layer), groups)[None], sparsity, groups
        )[0] for layer in g
    ]
    np.testing.assert_array_equal(new['w'], wanted)

  check()


SHAPE = structures_test.SHAPE


def scores_of(matrices):
  """Returns the library's scores of matrices of gradients."""
  empty = dict.fromkeys(growth.Units._fields)
  return np.asarray(growth.balanced(growth.Units(**empty | {
      'grad_matrices': jnp.abs(matrices), 'group': lambda sums: sums,
  })))


def draw(*shape):
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_balanced_growth_treats_batch_axes_as_separate_layers():
  # Inputs, heads, outputs of a head, and a stack in front of them.
  w = np.random.default_rng(0).normal(size=(2, 8, 3, 6)).astype(np.float32)
  w *= np.random.default_rng(1).normal(size=(2, 1, 3, 1))
  tx = spdf.sparsify(
      optax.sgd(1.0), spdf.rigl(0.5, grow='balanced', **ALL),
      where={'*': spdf.MatrixAxes(1, 3)}, key=0,
  )
  state = tx.init({'w': jnp.ones(w.shape)})
  params = spdf.apply_mask({'w': jnp.ones(w.shape)}, spdf.get_mask(state))
  for _ in range(11):
    _, state = jax.jit(tx.update)({'w': w}, state, params)
  mask = np.asarray(spdf.get_mask(state)['w'])
  for layer in range(2):
    for head in range(3):
      scores = balanced(w[layer, :, head])
      wanted = np.zeros(48, bool)
      wanted[np.argsort(-scores, axis=None, kind='stable')[:24]] = True
      np.testing.assert_array_equal(
          mask[layer, :, head], wanted.reshape(8, 6)
      )


def test_balanced_growth_spreads_over_units():
  # A gradient is a sum of outer products: some units have most of it.
  g = draw(1, 64, 96) * np.exp(draw(64, 1))
  number = g.size // 5
  kept = lambda scores: (scores >= np.sort(scores, None)[-number]).sum(-1)
  assert kept(np.abs(g)).min() == 0
  assert kept(scores_of(g)).min() > 5  # Of 19 on average.


def test_the_order_of_rows_and_columns_does_not_change_scores():
  # Sums in another order, as those of a sharded axis, have other roundings.
  g = np.exp(3 * draw(1, 64, 96))
  rng = np.random.default_rng(1)
  rows, columns = rng.permutation(64), rng.permutation(96)
  np.testing.assert_array_equal(
      scores_of(g)[:, rows][:, :, columns],
      scores_of(g[:, rows][:, :, columns]),
  )


@pytest.mark.parametrize('shape', [(1, 1, 12), (2, 12, 1)])
def test_vectors_are_ranked_by_their_gradients(shape):
  g = draw(*shape)
  for layer, scores in zip(g, scores_of(g)):
    np.testing.assert_array_equal(
        np.argsort(scores, None), np.argsort(np.abs(layer), None)
    )


def test_scores_are_the_same_at_every_scale():
  g = draw(1, 6, 8)
  for exponent in (-120, 125):
    scaled = g * np.float32(2.0) ** np.float32(exponent)
    np.testing.assert_array_equal(scores_of(scaled), scores_of(g))
  # Zero on every processor, with subnormal numbers or without.
  assert not scores_of(np.zeros_like(g)).any()
  assert not scores_of(g * np.float32(1e-42)).any()
  np.testing.assert_array_equal(
      scores_of(jnp.asarray(g, 'bfloat16')),
      scores_of(jnp.asarray(g, 'bfloat16').astype('float32')),
  )


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_gradients_that_are_not_finite_count_as_zero(value):
  g = draw(1, 8, 8)
  zero = g.copy()
  g[0, 2, 3], zero[0, 2, 3] = value, 0
  np.testing.assert_array_equal(scores_of(g), scores_of(zero))
  assert np.isfinite(scores_of(g)).all() and scores_of(g)[0, 2, 3] == 0


def test_own_scores_that_are_not_numbers_rank_last():
  g = draw(1, 4, 4)
  own = lambda units: jnp.where(units.grads > 0.5, jnp.nan, 0.0)
  algorithm = spdf.rigl(0.75, grow=own, **ALL)
  mask = algorithm.init(jax.random.key(0), {'w': g})
  new = algorithm.update(
      jax.random.key(1), jnp.int32(10), mask, {'w': g}, {'w': g}
  )['w']
  wanted = np.flatnonzero(np.abs(g) <= 0.5)[:4]  # Ties by index.
  np.testing.assert_array_equal(np.flatnonzero(new), wanted)


@pytest.mark.parametrize('name', ['rigl', 'granet'])
def test_growth_scores_can_be_named_in_configs(name):
  spec = functools.partial(
      dict, name=name, sparsity=0.75, update_every=10, update_until=70
  )
  make = spdf.sparsity.algorithms.create_algorithm
  params = {'w': jnp.zeros((1, 8, 8))}
  mask = make(spec()).init(jax.random.key(0), params)
  g = np.random.default_rng(0).normal(size=(1, 8, 8)).astype(np.float32)
  update = lambda grow: make(spec(grow=grow)).update(
      jax.random.key(1), jnp.int32(10), mask, params, {'w': g}
  )['w']
  by_name = [update(x) for x in ('gradient', 'random', 'balanced')]
  assert len({int(m.sum()) for m in by_name}) == 1
  assert len({np.asarray(m).tobytes() for m in by_name}) == 3
  assert not make(spec(grow='random')).dense_grads_at(10)
  assert make(spec(grow='balanced')).dense_grads_at(10)

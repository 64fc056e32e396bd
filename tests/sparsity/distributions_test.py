"""Sparsities per leaf: ERK against exact fractions, patterns, model-wide."""

from fractions import Fraction
import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.counts import number_kept
from spdf_jax.sparsity.distributions import by_pattern
from spdf_jax.sparsity.distributions import erk
from spdf_jax.sparsity.distributions import model_wide
from spdf_jax.sparsity.distributions import ModelWide


def leaf(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


def gpt(layers, width):
  return {
      'attn': {name: leaf(layers, width, width) for name in 'qkvo'},
      'mlp': {
          'wi': leaf(layers, width, 4 * width),
          'wo': leaf(layers, 4 * width, width),
      },
      'norm': None,
  }


GPT = gpt(1, 8)


@pytest.mark.parametrize('width, layers', [(768, 12), (12288, 96)])
def test_erk_gives_a_gpt_its_golden_densities(width, layers):
  sparsities = erk(gpt(layers, width), 0.75)
  for sparsity in jax.tree.leaves(sparsities['attn']):
    assert 1 - sparsity == pytest.approx(1 / 3, abs=1e-12)
  for sparsity in jax.tree.leaves(sparsities['mlp']):
    assert 1 - sparsity == pytest.approx(5 / 24, abs=1e-12)


def erk_oracle(shapes, sparsity, power):
  """Takes the densest layer out of the budget, one at a time, in fractions."""
  raw = [Fraction(i + o, i * o) ** power for _, i, o in shapes]
  sizes = [math.prod(shape) for shape in shapes]
  dense = set()
  while len(dense) < len(shapes):
    free = [i for i in range(len(shapes)) if i not in dense]
    left = (1 - Fraction(sparsity)) * sum(sizes) - sum(sizes[i] for i in dense)
    scale = left / sum(raw[i] * sizes[i] for i in free)
    densest = max(free, key=lambda i: raw[i])
    if scale * raw[densest] <= 1:
      return [1 if i in dense else scale * r for i, r in enumerate(raw)]
    dense.add(densest)
  return [1] * len(shapes)


SHAPES = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 60), st.integers(1, 60)),
    min_size=1, max_size=6,
)


@settings(deadline=None, max_examples=200)
@given(SHAPES, st.floats(0, 1, exclude_max=True), st.integers(0, 3))
def test_erk_equals_exact_arithmetic_and_meets_its_budget(
    shapes, sparsity, power
):
  sizes = [math.prod(shape) for shape in shapes]
  budget = (1 - Fraction(sparsity)) * sum(sizes)
  layers = sum(shape[0] for shape in shapes)
  params = [leaf(*shape) for shape in shapes]
  if budget < layers * (1 + 1e-9):
    if budget < layers * (1 - 1e-9):
      with pytest.raises(ValueError, match='erk needs one per layer'):
        erk(params, sparsity, power=power)
    return
  sparsities = erk(params, sparsity, power=power)
  assert all(isinstance(x, float) and 0 <= x < 1 for x in sparsities)
  for value, density in zip(sparsities, erk_oracle(shapes, sparsity, power)):
    assert 1 - value == pytest.approx(float(density), rel=1e-9, abs=1e-12)
  kept = sum(
      shape[0] * number_kept(shape[1] * shape[2], value)
      for shape, value in zip(shapes, sparsities)
  )
  # Half a weight of rounding per layer; up to one where the last is kept.
  assert budget - layers * 0.5 - 1e-6 <= kept <= budget + layers + 1e-6


BLOCK = {
    'conv1': leaf(3, 3, 16, 32), 'conv2': leaf(3, 3, 32, 32),
    'conv3': leaf(3, 3, 32, 64), 'conv4': leaf(3, 3, 64, 64),
    'shortcut': leaf(1, 1, 16, 32),
}
# Evci et al. 2020, equation 1, at a sparsity of 80 %.
PUBLISHED = {
    'conv1': .4367, 'conv2': .2830, 'conv3': .2062, 'conv4': .1354,
    'shortcut': 1.0,
}


ERK = [
    spdf.static(0.8, distribution='erk'),
    spdf.rigl(0.8, update_every=1, update_until=9, distribution=spdf.erk),
    spdf.join([spdf.dense(), spdf.static(0.8, distribution='erk')], [1]),
    spdf.partition(
        {'all': spdf.sparse_evolution(
            0.8, update_every=1, update_until=9, distribution='erk')},
        [('*', 'all')]),
]


@pytest.mark.parametrize('algorithm, layers', [
    *((algorithm, 0) for algorithm in ERK), (ERK[0], 2)
], ids=['static', 'rigl', 'join', 'partition', 'static-stacked'])
def test_erk_counts_the_sizes_of_kernels(algorithm, layers):
  where = spdf.where.convolutions
  where = spdf.where.stacked(where) if layers else where
  shape = (layers,) * bool(layers)
  params = {n: jnp.ones((*shape, *p.shape)) for n, p in BLOCK.items()}
  tx = spdf.sparsify(optax.sgd(0.1), algorithm, where=where, key=0)
  state = tx.init(params)
  for _ in range(2):
    _, state = jax.jit(tx.update)(params, state, params)
  for name, mask in spdf.get_mask(state).items():
    assert mask.mean() == pytest.approx(PUBLISHED[name], abs=2e-4), name


@settings(deadline=None, max_examples=100)
@given(SHAPES, st.floats(0, 0.999))
def test_igq_gives_all_layers_the_same_force(shapes, sparsity):
  sparsities = spdf.igq([leaf(*shape) for shape in shapes], sparsity)
  sizes = [math.prod(shape) for shape in shapes]
  kept = sum(size * (1 - s) for size, s in zip(sizes, sparsities))
  assert kept == pytest.approx((1 - sparsity) * sum(sizes), rel=1e-9)
  # Vysogorets and Kempe: 1 / density - 1 is the force times the weights.
  forces = [s / (1 - s) / (i * o) for s, (_, i, o) in zip(sparsities, shapes)]
  assert forces == pytest.approx([forces[0]] * len(forces), rel=1e-6)


def test_erk_of_sparsity_0_is_dense():
  assert set(jax.tree.leaves(erk(gpt(12, 768), 0.0))) == {0.0}


def test_erk_with_a_high_power_stays_below_one():
  params = {'a': leaf(1, 4, 4), 'b': leaf(1, 400, 400), 'c': leaf(1, 99, 99)}
  sparsities = erk(params, 0.97, power=400.0)
  assert all(0 <= sparsity < 1 for sparsity in sparsities.values())
  assert sparsities['a'] == 0 < sparsities['c'] < sparsities['b']


@pytest.mark.parametrize('empty', [{}, {'w': None}])
def test_distributions_accept_an_empty_tree(empty):
  # optax.tree.map_params initialises a transformation with one.
  assert erk(empty, 0.9) == spdf.igq(empty, 0.9) == empty
  assert by_pattern(empty, {'*/attn/*': 0.5}) == empty
  assert model_wide(empty, 0.5) == ModelWide(0.5)


def test_the_first_matching_pattern_wins():
  params = {'h_0': gpt(1, 8), 'h_1': gpt(1, 8)}
  sparsities = by_pattern(params, {'h_0/*': 0.1, '*/q': 0.2, '*/attn/*': 0.3})
  assert set(jax.tree.leaves(sparsities['h_0'])) == {0.1}
  assert sparsities['h_1']['attn'] == {'q': 0.2, 'k': 0.3, 'v': 0.3, 'o': 0.3}
  # What nothing matches stays dense, what is not sparsified stays None.
  assert sparsities['h_1']['mlp'] == {'wi': 0.0, 'wo': 0.0}
  assert sparsities['h_1']['norm'] is None


def test_pairs_are_patterns_that_match_in_order():
  pairs = [('mlp/*', np.float32(0.5)), ('*', 0.25)]
  sparsities = by_pattern(GPT, pairs)
  assert sparsities['mlp'] == {'wi': 0.5, 'wo': 0.5}
  assert sparsities['attn']['q'] == 0.25

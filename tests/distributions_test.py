"""Sparsities per leaf: ERK against exact fractions, patterns, model-wide."""

from fractions import Fraction
import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.sparsity.counts import number_kept
from spdf_jax.sparsity.distributions import by_pattern
from spdf_jax.sparsity.distributions import erk
from spdf_jax.sparsity.distributions import model_wide
from spdf_jax.sparsity.distributions import ModelWide
from spdf_jax.sparsity.distributions import uniform
from spdf_jax.sparsity.masks import random_mask
from spdf_jax.sparsity.selection import MatrixAxes
from spdf_jax.sparsity.selection import select
from spdf_jax.sparsity.selection import to_layers


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


def check_golden(sparsities):
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


@pytest.mark.parametrize('width, layers', [(64, 1), (768, 12), (12288, 96)])
def test_erk_gives_a_gpt_its_golden_densities(width, layers):
  check_golden(erk(gpt(layers, width), 0.75))


def test_erk_gives_layers_in_a_loop_the_golden_densities():
  sparsities = erk({f'h_{i}': gpt(1, 768) for i in range(12)}, 0.75)
  assert len(sparsities) == 12
  for block in sparsities.values():
    check_golden(block)
    assert block['norm'] is None


def test_erk_gives_per_head_kernels_the_golden_densities():
  params = {
      'attn': {
          **{name: leaf(768, 12, 64) for name in 'qkv'}, 'o': leaf(12, 64, 768)
      },
      'mlp': {'wi': leaf(768, 3072), 'wo': leaf(3072, 768)},
  }

  def where(path, x):
    if len(x.shape) == 2:
      return True
    out = path.endswith('o')
    return MatrixAxes((0, 1), 2) if out else MatrixAxes(0, (1, 2))

  check_golden(erk(to_layers(params, params, select(where, params)), 0.75))


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
  found = erk(params, sparsity, power=power)
  assert all(isinstance(x, float) and 0 <= x < 1 for x in found)
  for value, density in zip(found, erk_oracle(shapes, sparsity, power)):
    assert 1 - value == pytest.approx(float(density), rel=1e-9, abs=1e-12)
  kept = sum(
      shape[0] * number_kept(shape[1] * shape[2], value)
      for shape, value in zip(shapes, found)
  )
  # Half a weight of rounding per layer; up to one where the last is kept.
  assert budget - layers * 0.5 - 1e-6 <= kept <= budget + layers + 1e-6


def test_layers_forced_dense_leave_the_budget():
  params = {'tiny': leaf(3, 2, 2), 'a': leaf(1, 100, 50), 'b': leaf(1, 80, 80)}
  sparsities = erk(params, 0.5)
  assert sparsities['tiny'] == 0
  kept = 12 + 5000 * (1 - sparsities['a']) + 6400 * (1 - sparsities['b'])
  assert kept == pytest.approx(11412 / 2)
  # And the others share the rest in proportion to sum over product.
  ratio = (1 - sparsities['a']) / (1 - sparsities['b'])
  assert ratio == pytest.approx((150 / 5000) / (160 / 6400))


def test_erk_of_no_sparsity_is_dense():
  assert set(jax.tree.leaves(erk(gpt(12, 768), 0.0))) == {0.0}


def test_power_zero_is_uniform():
  sparsities = jax.tree.leaves(erk(gpt(2, 96), 0.7, power=0))
  assert sparsities == pytest.approx([0.7] * 6)


def test_a_high_power_stays_below_one():
  params = {'a': leaf(1, 4, 4), 'b': leaf(1, 400, 400), 'c': leaf(1, 99, 99)}
  sparsities = erk(params, 0.97, power=400.0)
  assert all(0 <= sparsity < 1 for sparsity in sparsities.values())
  assert sparsities['a'] == 0 < sparsities['c'] < sparsities['b']


@pytest.mark.parametrize('empty', [{}, {'w': None}])
def test_an_empty_tree_is_survived(empty):
  # optax.tree.map_params initialises a transformation with one.
  assert erk(empty, 0.9) == empty
  assert by_pattern(empty, {'*/attn/*': 0.5}) == empty
  assert model_wide(empty, 0.5) == ModelWide(0.5)


def test_a_budget_that_cannot_be_met_is_named():
  with pytest.raises(ValueError, match='leaves 3.2 weights for 4 layers'):
    erk({'w': leaf(4, 2, 4)}, 0.9)


@pytest.mark.parametrize('make', [uniform, erk, model_wide])
@pytest.mark.parametrize('sparsity', [1.0, float('nan'), 'half', True])
def test_impossible_sparsities_are_named(make, sparsity):
  with pytest.raises(ValueError, match=r'sparsity is .* \[0, 1\)'):
    make({'w': leaf(1, 4, 4)}, sparsity)


@pytest.mark.parametrize('power', [-1.0, math.nan])
def test_impossible_powers_are_named(power):
  with pytest.raises(ValueError, match=f'power is {power}'):
    erk({'w': leaf(1, 4, 4)}, 0.5, power=power)


def test_the_first_matching_pattern_wins():
  params = {'h_0': gpt(1, 8), 'h_1': gpt(1, 8)}
  sparsities = by_pattern(params, {'h_0/*': 0.1, '*/q': 0.2, '*/attn/*': 0.3})
  assert set(jax.tree.leaves(sparsities['h_0'])) == {0.1}
  assert sparsities['h_1']['attn'] == {'q': 0.2, 'k': 0.3, 'v': 0.3, 'o': 0.3}
  # What nothing matches stays dense, what is not sparsified stays None.
  assert sparsities['h_1']['mlp'] == {'wi': 0.0, 'wo': 0.0}
  assert sparsities['h_1']['norm'] is None


def test_pairs_are_patterns_in_order():
  pairs = [('mlp/*', np.float32(0.5)), ('*', 0.25)]
  sparsities = by_pattern(gpt(1, 8), pairs)
  assert sparsities['mlp'] == {'wi': 0.5, 'wo': 0.5}
  assert sparsities['attn']['q'] == 0.25


def test_patterns_see_the_names_of_lists_too():
  assert by_pattern([leaf(1, 2, 2), leaf(1, 2, 2)], {'1': 0.5}) == [0.0, 0.5]


@pytest.mark.parametrize('pattern', ['*/conv/*', 'MLP/*'])
def test_a_pattern_that_matches_nothing_is_named(pattern):
  with pytest.raises(ValueError, match='matches none.*attn/k.*mlp/wi') as e:
    by_pattern(gpt(1, 8), {'attn/*': 0.5, pattern: 0.25})
  assert repr(pattern) in str(e.value)


def test_a_pattern_behind_a_wider_one_is_named():
  with pytest.raises(ValueError, match=r"'mlp/\*', but patterns before"):
    by_pattern(gpt(1, 8), {'*': 0.5, 'mlp/*': 0.25})


@pytest.mark.parametrize('sparsity', [0.5, [0.5]])
def test_what_is_no_mapping_of_patterns_is_named(sparsity):
  with pytest.raises(ValueError, match='by_pattern needs patterns'):
    by_pattern(gpt(1, 8), sparsity)


def test_patterns_given_to_uniform_point_to_by_pattern():
  with pytest.raises(ValueError, match='distribution=by_pattern'):
    uniform(gpt(1, 8), {'attn/*': 0.5})


def test_a_pattern_given_twice_is_named():
  with pytest.raises(ValueError, match=r"pattern '\*' twice; give it once"):
    by_pattern(gpt(1, 8), [('*', 0.5), ('*', 0.9)])


def test_leaves_without_weights_are_named():
  params = {'w': leaf(1, 4, 4), 'none': leaf(1, 0, 4)}
  message = r"'none' has the shape \(1, 0, 4\), no weights; put None there"
  with pytest.raises(ValueError, match=message):
    erk(params, 0.5)
  with pytest.raises(ValueError, match=message):
    random_mask(jax.random.key(0), params, model_wide(params, 0.5))

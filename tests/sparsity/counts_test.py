"""Counts against Python integers and fractions, far beyond 2^24 and 2^32."""

from fractions import Fraction
import math
from typing import NamedTuple

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spdf_jax.sparsity.counts import fixed
from spdf_jax.sparsity.counts import fraction_of
from spdf_jax.sparsity.counts import kept_table
from spdf_jax.sparsity.counts import number_kept
from spdf_jax.sparsity.distributions import by_pattern
from spdf_jax.sparsity.distributions import model_wide
from spdf_jax.sparsity.distributions import uniform
from spdf_jax.sparsity.schedules import cubic
from spdf_jax.sparsity.schedules import update_times
from spdf_jax.sparsity.structures import channel
from tests.refusals import refuse

LEVELS = st.floats(0, 1, exclude_max=True)
# Where limbs of 15 bits carry, and others.
EDGES = st.sampled_from([0, 1, 2**15 - 1, 2**15, 2**30 - 1, 2**30])
COUNTS = EDGES | st.just(2**31 - 1) | st.integers(0, 2**31 - 1)


def leaf(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)


class Blocks(NamedTuple):
  """A structure of 2 x 4 blocks, grouped by halves of a layer."""

  rows: int = 2

  def unit_shape(self, shape):
    layers, inputs, outputs = shape
    return 2 * layers, inputs // self.rows, outputs // 8


@settings(deadline=None)
@given(st.integers(1, 2**40), LEVELS)
def test_number_kept_is_off_the_exact_fraction_by_a_half_at_most(
    size, sparsity
):
  kept = number_kept(size, sparsity)
  exact = (1 - Fraction(sparsity)) * size
  assert isinstance(kept, int) and 1 <= kept <= size
  # A float64 product of 2^40 is itself off by 2^-13 at most.
  assert kept == 1 or abs(kept - exact) <= Fraction(1, 2) + Fraction(1, 2**12)


@pytest.mark.parametrize('size, sparsity, kept', [
    (604_000_000, 0.9, 60_400_000),
    (604_000_000, 0.75, 151_000_000),
    (2**33 + 4, 0.75, 2**31 + 1),
    (100, 0.99, 1),
    (10, 0.999, 1),
    (5, 0.5, 3),
    (7, 0.0, 7),
])
def test_number_kept_is_exact(size, sparsity, kept):
  assert number_kept(size, sparsity) == kept
  assert number_kept(size, np.float64(sparsity)) == kept


@settings(deadline=None)
@given(st.floats(0, 1))
def test_fixed_is_the_ceiling_of_the_exact_float(fraction):
  assert int(fixed(fraction)) == math.ceil(Fraction(fraction) * 2**30)
  assert fixed(fraction).dtype == np.uint32 and fixed(fraction).shape == ()


@settings(deadline=None)
@given(
    st.lists(COUNTS, min_size=1, max_size=5), EDGES | st.integers(0, 2**30)
)
def test_fraction_of_is_integer_arithmetic(counts, fraction):
  actual = fraction_of(jnp.array(counts, jnp.int32), np.uint32(fraction))
  assert actual.dtype == jnp.int32
  assert actual.tolist() == [n * fraction >> 30 for n in counts]


@settings(deadline=None)
@given(COUNTS, st.integers(0, 1000))
def test_thousandths_of_multiples_of_1000_are_exact(n, thousandths):
  n = n // 1000 * 1000 % 1_000_000
  exact = n // 1000 * thousandths
  assert int(fraction_of(n, fixed(thousandths / 1000))) == exact


@pytest.mark.parametrize('bad', [-0.1, 1.1, math.nan, [0.5, 2.0]])
def test_fractions_outside_zero_to_one_are_named(bad):
  refuse(r'drop_fraction is .* in \[0, 1\]', fixed, bad, 'drop_fraction')


SHAPES = st.tuples(
    st.integers(1, 96), st.integers(1, 2**15), st.integers(1, 2**15)
)


@settings(deadline=None, max_examples=50)
@given(st.lists(SHAPES, min_size=1, max_size=4), LEVELS, LEVELS)
def test_the_table_holds_the_exact_count_of_every_leaf_and_update(
    shapes, initial, final
):
  params = {'none': None, 'list': [leaf(*shape) for shape in shapes]}
  schedule = cubic(initial, final, 40)
  times = update_times([0, 3, 30, 50])
  table = kept_table(params, schedule, uniform, times)
  assert table['none'] is None
  for (_, inputs, outputs), kept in zip(shapes, table['list']):
    assert kept.dtype == np.int32
    assert kept.tolist() == [
        number_kept(inputs * outputs, schedule(t)) for t in (0, 3, 30, 50)
    ]


def test_a_constant_sparsity_has_one_row_and_needs_no_times():
  params = {'w': leaf(2, 10, 10), 'v': leaf(1, 4, 4), 'b': None}
  for times in (None, update_times(100), update_times([5, 9])):
    table = kept_table(params, {'w': 0.9, 'v': 0.5, 'b': None}, uniform, times)
    assert (table['w'].tolist(), table['v'].tolist()) == ([10], [8])


def test_patterns_may_have_schedules_and_keep_their_order():
  params = {'z': leaf(1, 10, 10), 'a': leaf(1, 10, 10)}
  sparsity = {'z': cubic(0.0, 0.8, 10), '*': 0.5}
  table = kept_table(params, sparsity, by_pattern, update_times([0, 10]))
  assert (table['z'].tolist(), table['a'].tolist()) == ([100, 20], [50, 50])


def test_structures_count_units_of_a_group():
  params = {'w': leaf(3, 16, 80)}
  # 3/4 of 8 x 10 blocks are pruned.
  table = kept_table(params, 0.75, uniform, structure=Blocks())
  assert table['w'].tolist() == [20]
  # A model keeps weights, whatever its units are.
  wide = kept_table(params, 0.75, model_wide, structure=channel('outputs'))
  assert wide.rows.tolist() == [[0, 960]]


@settings(deadline=None, max_examples=50)
@given(st.lists(SHAPES, min_size=1, max_size=4), LEVELS)
def test_model_wide_totals_are_exact_in_two_limbs(shapes, sparsity):
  params = [leaf(*shape) for shape in shapes] + [None]
  kept = number_kept(sum(map(math.prod, shapes)), sparsity)
  if kept < sum(layers for layers, *_ in shapes):
    with pytest.raises(ValueError, match='one weight .* in every layer'):
      kept_table(params, sparsity, model_wide)
    return
  table = kept_table(params, sparsity, model_wide).rows
  assert table.dtype == np.uint32 and table.shape == (1, 2)
  high, low = table[0].tolist()
  assert (high << 32) + low == kept


def test_the_table_is_made_while_jax_traces():
  schedule = optax.linear_schedule(0.0, 0.5, 10)
  times = update_times(5, 0, 10)

  @jax.jit
  def step(w, count):
    table = kept_table({'w': w}, schedule, uniform, times)['w']
    assert isinstance(table, np.ndarray)
    return jnp.asarray(table)[times.index(count)]

  kept = [int(step(jnp.ones((2, 10, 10)), t)) for t in (0, 4, 5, 10, 99)]
  assert kept == [100, 100, 75, 50, 50]


def test_a_layer_that_int32_cannot_count_is_named():
  params = {'h': {'w': leaf(1, 2**16, 2**16)}}
  refuse("'h/w' .* split the leaf along an", kept_table, params, 0.25, uniform)
  assert kept_table(params, 0.75, uniform)['h']['w'].tolist() == [2**30]


@pytest.mark.parametrize('returned, message', [
    ({'w': 1.0}, "sparsity of 'w' is 1.0"),
    ({'v': 0.5}, "distribution returns .*'v'.*'w'"),
])
def test_a_distribution_that_returns_no_sparsities_is_named(returned, message):
  with pytest.raises(ValueError, match=message):
    kept_table({'w': leaf(1, 4, 4)}, 0.5, lambda params, sparsity: returned)

"""Counts over many layers against the integers of Python."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.sparsity.topk import radix_select
from spdf_jax.sparsity.topk import whole_model as wide

NUMBERS = st.integers(0, 2**48 - 1)


def to_int(x):
  return int(x.high) * 2**16 + int(x.low)


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_wide_numbers_are_integers(a, b):
  small, large = sorted([a, b])
  x, y = wide.to_wide(large), wide.to_wide(small)
  assert to_int(x) == large
  assert to_int(x - y) == large - small
  assert bool(wide.to_wide(a) < wide.to_wide(b)) == (a < b)
  assert int(wide.to_int32(x)) == min(large, 2**31 - 1)


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_pairs_of_words_are_integers_up_to_the_limit(number):
  pair = np.array(divmod(number, 2**32), np.uint32)
  for given_as in (number, pair, tuple(pair)):
    assert to_int(wide.to_wide(given_as)) == min(number, 2**48 - 1)


def test_totals_over_many_layers_are_exact_beyond_32_bits():
  counts = np.random.default_rng(0).integers(2**31, size=1000, dtype=np.int32)
  want = int(counts.astype(object).sum())
  assert want > 2**39 and to_int(wide.total(jnp.asarray(counts))) == want
  full = jnp.full(2**16, 2**31 - 1, jnp.int32)
  assert to_int(wide.total(full)) == 2**16 * (2**31 - 1)


@pytest.mark.parametrize('bins', [1, 2, 3, 2048])
@pytest.mark.parametrize('need', [0, 1, 2**33, 2**40 + 3, 2**47])
def test_a_rank_is_found_beyond_32_bits(bins, need):
  rng = np.random.default_rng(bins)
  counts = rng.integers(2**20, size=(1000, bins)) * rng.integers(2, size=bins)
  place, rest = jax.jit(lambda c, n: radix_select.nth(c, n, wide.total))(
      jnp.asarray(counts, jnp.int32), wide.to_wide(need)
  )
  reached = np.cumsum(counts.sum(0))
  want = min(int(np.sum(reached < need)), bins - 1)
  assert int(place) == want
  assert to_int(rest) == need - int(counts[:, :want].sum())

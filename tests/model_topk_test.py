"""One competition over a whole model, and its arithmetic beyond 2^32."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.sparsity import topk
from spdf_jax.sparsity.topk import digits
from spdf_jax.sparsity.topk import limbs
from spdf_jax.sparsity.topk import model as model_topk

pytestmark = pytest.mark.usefixtures('masks_by_xla')

NUMBERS = st.integers(0, 2**64 - 1)
SHAPES = {'h_0': (2, 5, 7), 'h_1': (2, 5, 7), 'v': (3, 4, 4), 'w': (1, 1, 9)}
SIZE = 2 * 70 + 48 + 9


def to_int(x):
  object_of = lambda limb: np.asarray(limb, np.uint64).astype(object)
  return object_of(x.high) * 2**32 + object_of(x.low)


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_limbs_are_integers(a, b):
  small, large = sorted([a, b])
  x, y = limbs.to_limbs(large), limbs.to_limbs(small)
  assert to_int(x - y) == large - small
  assert to_int(x + y) == (large + small) % 2**64
  assert to_int(limbs.minimum(x, y)) == to_int(limbs.minimum(y, x)) == small
  assert bool(limbs.to_limbs(a) >= limbs.to_limbs(b)) == (a >= b)
  c, d = a % 2**32, b % 2**32
  assert to_int(limbs.multiply(np.uint32(c), np.uint32(d))) == c * d


@pytest.mark.parametrize('bins', [2, 2048])
@pytest.mark.parametrize('need', [0, 1, 2**33, 2**40 + 3, 2**63])
def test_a_rank_is_found_beyond_32_bits(bins, need):
  rng = np.random.default_rng(bins)
  counts = rng.integers(2**40, size=bins) * rng.integers(2, size=bins)
  digit, of_digit = jax.jit(model_topk._find)(
      limbs.to_limbs(counts), limbs.to_limbs(need)
  )
  need = min(need, int(counts.sum()))
  from_each = np.cumsum(counts[::-1])[::-1]
  want = int(np.nonzero(from_each >= need)[0][-1])
  assert int(digit) == want
  assert to_int(of_digit) == need - (from_each[want] - counts[want])


@pytest.mark.parametrize('number', [-1, 2**64])
def test_numbers_beyond_two_limbs_are_refused(number):
  with pytest.raises(OverflowError):
    limbs.to_limbs(number)


def test_totals_over_many_layers_are_exact_beyond_32_bits():
  rng = np.random.default_rng(0)
  counts = rng.integers(2**31, size=(1000, 3), dtype=np.int32)
  want = counts.astype(object).sum(0)
  assert min(want) > 2**33
  assert to_int(limbs.total(jnp.asarray(counts))).tolist() == want.tolist()


@pytest.mark.parametrize('need', [0, 1, 2**31, 2**33 + 5, 9 * 2**31, 2**62])
def test_places_are_shared_out_in_order_beyond_32_bits(need):
  there = np.int32([2**31 - 1] * 5 + [0, 7, 2**30])
  taken = model_topk._take_in_order(there, limbs.to_limbs(need))
  for number, got in zip(there, taken):
    assert int(got) == min(need, int(number))
    need -= int(got)


def draw(seed, kind):
  rng = np.random.default_rng(seed)
  normal = {name: rng.standard_normal(s) for name, s in SHAPES.items()}
  change = {
      'normal': lambda x: x, 'ties': np.round, 'equal': np.zeros_like,
      'nan': lambda x: np.where(x > 0, np.nan, np.round(x)),
  }[kind]
  return {name: change(x).astype(np.float32) for name, x in normal.items()}


def oracle(scores, kept, among=None, bits=None):
  flat = lambda tree: np.concatenate([np.ravel(tree[name]) for name in SHAPES])
  s = flat(scores)
  a = np.ones(SIZE, bool) if among is None else flat(among)
  b = np.zeros(SIZE) if bits is None else flat(bits).astype(np.int64)
  order = np.lexsort((-b, -np.nan_to_num(s, nan=0), np.isnan(s), ~a))
  mask = np.zeros(SIZE, bool)
  mask[order[:min(kept, a.sum())]] = True
  ends = np.cumsum([np.prod(shape) for shape in SHAPES.values()])[:-1]
  return {
      name: part.reshape(SHAPES[name])
      for name, part in zip(SHAPES, np.split(mask, ends))
  }


plain = jax.jit(lambda s, k: topk.keep_largest_of_all(s, k))
among_ties = jax.jit(
    lambda s, k, a, keys: topk.keep_largest_of_all(
        s, k, among=a, tie_break=keys)
)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, SIZE + 3), st.integers(0, 2**32),
    st.sampled_from(['normal', 'ties', 'equal', 'nan']),
)
def test_mask_equals_a_stable_argsort_of_all_layers(kept, seed, kind):
  scores = draw(seed, kind)
  mask = plain(scores, tuple(limbs.to_limbs(kept)))
  jax.tree.map(np.testing.assert_array_equal, mask, oracle(scores, kept))


@settings(deadline=None, max_examples=20)
@given(
    st.integers(0, SIZE), st.integers(0, 2**32),
    st.sampled_from(['ties', 'equal', 'nan']),
)
def test_candidates_and_random_ties_go_by_the_leaves_keys(kept, seed, kind):
  scores = draw(seed, kind)
  rng = np.random.default_rng(seed + 1)
  among = {name: rng.random(shape) < 0.7 for name, shape in SHAPES.items()}
  keys = {name: jax.random.key(seed + i) for i, name in enumerate(SHAPES)}
  bits = {name: jax.random.bits(keys[name], s) for name, s in SHAPES.items()}
  mask = among_ties(scores, tuple(limbs.to_limbs(kept)), among, keys)
  jax.tree.map(
      np.testing.assert_array_equal, mask, oracle(scores, kept, among, bits)
  )


def test_magnitudes_of_all_layers_are_ranked_as_absolute_values():
  scores = draw(3, 'normal')
  mask = topk.keep_largest_of_all(scores, 100, by_magnitude=True)
  wanted = oracle(jax.tree.map(np.abs, scores), 100)
  jax.tree.map(np.testing.assert_array_equal, mask, wanted)


def test_comparing_counts_as_histograms_do():
  scores = draw(0, 'ties')
  model = model_topk._Model(scores, *(dict.fromkeys(SHAPES) for _ in range(2)))
  keep = jax.jit(
      lambda kept: model_topk._keep_counting(digits.COMPARING, model, kept)
  )
  for kept in (0, 1, 100, SIZE + 1):
    mask = keep(limbs.to_limbs(kept))
    jax.tree.map(np.testing.assert_array_equal, mask, oracle(scores, kept))


def test_lists_ints_none_and_one_key_are_taken():
  scores = [jnp.zeros((1, 4, 4)), None, jnp.zeros((1, 4, 4))]
  first = topk.keep_largest_of_all(scores, 20)
  assert first[1] is None and first[0].all() and first[2].sum() == 4
  some = topk.keep_largest_of_all(scores, 20, tie_break=jax.random.key(0))
  assert 4 < some[0].sum() < 16 and some[0].sum() + some[2].sum() == 20
  assert topk.keep_largest_of_all([None], 3) == [None]


@pytest.mark.parametrize('message, arguments', [
    ('kept is -1', dict(kept=-1)),
    (r'kept has shape \(3,\)', dict(kept=np.ones(3, np.uint32))),
    (r'shape \[4, 5\]', dict(scores=[jnp.ones((4, 5))])),
    (r'shape \[1, 2, 4, 5\]', dict(scores=[jnp.ones((1, 2, 4, 5))])),
    ('among is bool', dict(among=[np.ones((1, 4, 5), bool)])),
    ('key is 7', dict(tie_break=7)),
])
def test_what_does_not_fit_the_scores_is_named(message, arguments):
  arguments = dict(scores=[jnp.ones((2, 4, 5))], kept=1) | arguments
  with pytest.raises(ValueError, match=message):
    topk.keep_largest_of_all(arguments.pop('scores'), **arguments)

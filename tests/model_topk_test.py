"""Top-k masks of a whole model against a stable argsort of all its scores."""

from hypothesis import example
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.sparsity import topk
from spdf_jax.sparsity.topk import whole_model as wide

SHAPES = {'h_0': (2, 5, 7), 'h_1': (2, 5, 7), 'v': (3, 4, 4), 'w': (1, 1, 9)}
SIZE = 2 * 70 + 48 + 9


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
  mask = plain(scores, np.uint32(divmod(kept, 2**32)))
  jax.tree.map(np.testing.assert_array_equal, mask, oracle(scores, kept))


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, SIZE), st.integers(0, 2**32),
    st.sampled_from(['ties', 'equal', 'nan']), st.booleans(),
)
@example(kept=SIZE - 9, seed=0, kind='nan', at_random=False)
def test_candidates_and_random_ties_go_by_the_leaves_keys(
    kept, seed, kind, at_random
):
  scores = draw(seed, kind)
  rng = np.random.default_rng(seed + 1)
  among = {name: rng.random(shape) < 0.7 for name, shape in SHAPES.items()}
  keys = bits = None
  if at_random:
    keys = {name: jax.random.key(seed + i) for i, name in enumerate(SHAPES)}
    bits = {name: jax.random.bits(keys[name], s) for name, s in SHAPES.items()}
  mask = among_ties(scores, np.uint32(divmod(kept, 2**32)), among, keys)
  jax.tree.map(
      np.testing.assert_array_equal, mask, oracle(scores, kept, among, bits)
  )


def test_comparing_counts_as_histograms_do():
  scores = draw(0, 'ties')
  none = dict.fromkeys(SHAPES)
  ones = {name: np.ones(len(x), np.int32) for name, x in scores.items()}
  keep = jax.jit(lambda kept: wide._keep_in_model(
      (scores, none, none, none), ones, kept, digit=1
  ))
  for kept in (0, 1, 100, SIZE + 1):
    mask = keep(wide.to_wide(kept))
    jax.tree.map(np.testing.assert_array_equal, mask, oracle(scores, kept))


@pytest.mark.parametrize('kept', [2**32, 2**47, 2**63])
def test_more_than_there_is_keeps_all(kept):
  scores = draw(0, 'ties')
  for number in (kept, np.uint32(divmod(kept, 2**32))):
    mask = topk.keep_largest_of_all(scores, number)
    assert all(leaf.all() for leaf in mask.values())


def test_lists_ints_and_none_are_taken():
  scores = [jnp.zeros((1, 4, 4)), None, jnp.zeros((1, 4, 4))]
  first = topk.keep_largest_of_all(scores, 20)
  assert first[1] is None and first[0].all() and first[2].sum() == 4
  keys = [jax.random.key(0), None, jax.random.key(1)]
  some = topk.keep_largest_of_all(scores, 20, tie_break=keys)
  assert 4 < some[0].sum() < 16 and some[0].sum() + some[2].sum() == 20
  assert topk.keep_largest_of_all([None], 3) == [None]


@pytest.mark.parametrize('message, arguments', [
    ('kept is -1', dict(kept=-1)),
    (r'kept has shape \(3,\)', dict(kept=np.ones(3, np.uint32))),
    (r'shape \[4, 5\]', dict(scores=[jnp.ones((4, 5))])),
    (r'shape \[1, 2, 4, 5\]', dict(scores=[jnp.ones((1, 2, 4, 5))])),
    ('among is bool', dict(among=[np.ones((1, 4, 5), bool)])),
    ('key is 7', dict(tie_break=[7])),
])
def test_what_does_not_fit_the_scores_is_named(message, arguments):
  arguments = dict(scores=[jnp.ones((2, 4, 5))], kept=1) | arguments
  with pytest.raises(ValueError, match=message):
    topk.keep_largest_of_all(arguments.pop('scores'), **arguments)

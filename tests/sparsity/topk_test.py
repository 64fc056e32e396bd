"""Top-k masks, per layer and of a whole model, against a stable argsort."""

from hypothesis import example
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
from jax.extend import random as jax_random
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.sparsity import topk
from spdf_jax.sparsity.topk import keys
from spdf_jax.sparsity.topk import radix_select
from spdf_jax.sparsity.topk import whole_model

# By comparing bits; by histograms; of one column.
SHAPES = [(7, 3, 5), (3, 5, 7), (2, 70, 60), (1, 9000, 1)]


def oracle(scores, kept, among=None, bits=None):
  """Keeps the first of every layer in a stable order, as documented."""
  scores = np.asarray(scores, np.float64)
  layers = (-1, scores.shape[-2] * scores.shape[-1])
  among = np.ones(scores.shape, bool) if among is None else np.asarray(among)
  bits = np.zeros(scores.shape) if bits is None else np.asarray(bits, np.int64)
  mask = np.zeros(scores.shape, bool).reshape(layers)
  kept = np.broadcast_to(np.asarray(kept), len(mask))
  for row, s, a, b, k in zip(
      mask, scores.reshape(layers), among.reshape(layers),
      bits.reshape(layers), kept,
  ):
    order = np.lexsort((-b, -np.nan_to_num(s, nan=0), np.isnan(s), ~a))
    row[order[:min(k, a.sum())]] = True
  return mask.reshape(scores.shape)


def draw(shape, seed, kind):
  rng = np.random.default_rng(seed)
  normal = rng.standard_normal(shape)
  return {
      'normal': normal,
      'ties': np.round(normal * 2),
      'row by row': normal * 2.0 ** (np.arange(shape[-2]) % 16)[:, None],
      'equal': np.zeros(shape),
      'denormal': normal * 1e-40,
      'mostly zero': np.where(normal > 1, normal, 0),
      'zeros of both signs': np.where(normal > 0, 0.0, -0.0),
      'infinite': np.where(abs(normal) > 1, np.copysign(np.inf, normal), 0),
      'nan': np.where(normal > 0, np.nan, np.where(normal < -1, -np.inf, 1)),
  }[kind].astype(np.float32)


KINDS = st.sampled_from([
    'normal', 'ties', 'row by row', 'equal', 'denormal', 'mostly zero',
    'zeros of both signs', 'infinite', 'nan',
])
keep = jax.jit(topk.keep_largest)
keep_among = jax.jit(lambda s, k, a: topk.keep_largest(s, k, among=a))
keep_tied = jax.jit(
    lambda s, k, a, key: topk.keep_largest(s, k, among=a, tie_break=key)
)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(SHAPES), st.data(), st.integers(0, 2**32), KINDS,
    st.sampled_from(['float32', 'bfloat16', 'float16']),
)
def test_mask_equals_a_stable_argsort(shape, data, seed, kind, dtype):
  scores = jnp.asarray(draw(shape, seed, kind)).astype(dtype)
  kept = data.draw(st.integers(0, shape[1] * shape[2] + 3))
  mask = keep(scores, jnp.int32(kept))
  np.testing.assert_array_equal(mask, oracle(scores, kept))


@pytest.mark.parametrize('kind', ['row by row', 'ties'])
@pytest.mark.parametrize('kept', [500, 65_999])
def test_large_layers_equal_a_stable_argsort(kind, kept):
  scores = draw((1, 300, 220), 0, kind)
  np.testing.assert_array_equal(keep(scores, kept), oracle(scores, kept))
  among = np.random.default_rng(1).random(scores.shape) < 0.3
  np.testing.assert_array_equal(
      keep_among(scores, kept, among), oracle(scores, kept, among)
  )


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(SHAPES), st.data(), st.integers(0, 2**32), KINDS,
    st.sampled_from([0.0, 0.01, 0.5, 0.7, 1.0]), st.booleans(),
)
def test_candidates_are_kept_layer_by_layer_with_ties_by_index_or_bits(
    shape, data, seed, kind, share, at_random
):
  scores, key = draw(shape, seed, kind), jax.random.key(seed)
  among = np.random.default_rng(seed + 1).random(shape) < share
  number = st.integers(0, shape[1] * shape[2])
  kept = np.int32([data.draw(number) for _ in range(shape[0])])
  bits = jax.random.bits(key, shape) if at_random else None
  mask = (
      keep_tied(scores, kept, among, key) if at_random
      else keep_among(scores, kept, among)
  )
  np.testing.assert_array_equal(mask, oracle(scores, kept, among, bits))


@pytest.mark.parametrize('shape', [(2, 70, 60), (2, 3, 5, 7)])
def test_random_masks_rank_by_the_bits_of_the_key(shape):
  key = jax.random.key(3)
  bits = jax.random.bits(key, shape)
  among = np.asarray(bits) % 3 > 0
  mask = topk.keep_random(key, shape, 11, among=among)
  np.testing.assert_array_equal(mask, oracle(bits, 11, among))


@pytest.mark.parametrize('shape', [(2, 71, 60), (2, 1, 71, 60)])
def test_equal_random_bits_are_ranked_by_index(monkeypatch, shape):
  # Equal random bits are rare: here they have 3 values.
  bits = np.random.default_rng(2).integers(3, size=(71, 60)).astype(np.uint32)
  monkeypatch.setattr(keys, 'bits_of_layer', lambda *_: jnp.asarray(bits))
  scores = jnp.asarray(draw(shape, 0, 'ties'))
  among = jnp.asarray(np.random.default_rng(1).random(shape) < 0.7)
  for kept in (100, 2000):
    mask = topk.keep_largest(
        scores, kept, among=among, tie_break=jax.random.key(0)
    )
    expected = oracle(scores, kept, among, np.broadcast_to(bits, shape))
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize('number', [2, 122_713_351, 2**32 - 1])
def test_random_bits_are_those_of_jax(number):
  words = keys.key_words(jax.random.key(2**40 + 7))
  layer = keys.bits_of_layer(words, jnp.uint32(number), (5, 7))
  # The positions of layer 122,713,351 go past 2^32.
  high, low = np.divmod(number * 35 + np.arange(35, dtype=np.uint64), 2**32)
  one, other = jax_random.threefry2x32_p.bind(
      *words, *(jnp.asarray(x, jnp.uint32) for x in (high, low))
  )
  np.testing.assert_array_equal(layer.ravel(), one ^ other)
  if number == 2:
    bits = jax.random.bits(jax.random.key(2**40 + 7), (3, 5, 7))
    np.testing.assert_array_equal(layer, bits[2])


def test_another_number_to_keep_does_not_compile_again(caplog):
  scores = jnp.asarray(draw((2, 70, 60), 0, 'normal'))
  topk.keep_largest(scores, 1)
  with jax.log_compiles():
    for kept in (0, 17, 10**6, np.int64(5)):
      topk.keep_largest(scores, kept)
  assert 'ompiling' not in caplog.text


def scratch_of(f, *arguments):
  program = jax.jit(f).lower(*arguments).compile()
  return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize('with_key', [False, True])
def test_scratch_is_six_bytes_per_score(with_key):
  key = jax.random.key(0) if with_key else None
  scores = jax.ShapeDtypeStruct((1, 1024, 1024), jnp.float32)
  among = jax.ShapeDtypeStruct(scores.shape, bool)
  keep = lambda s, a: topk.keep_largest(s, 1000, among=a, tie_break=key)
  assert scratch_of(keep, scores, among) <= 6.1 * 2**20


@pytest.mark.skipif(
    jax.default_backend() != 'cpu', reason='the bound is that of XLA:CPU'
)
def test_scratch_of_random_masks_is_eleven_bytes_per_entry_of_a_layer():
  among = jax.ShapeDtypeStruct((4, 512, 512), bool)
  keep = lambda a: topk.keep_random(jax.random.key(0), a.shape, 1000, among=a)
  assert scratch_of(keep, among) <= 11.2 * 2**18


@pytest.mark.parametrize('message, arguments', [
    ('kept is -1', dict(kept=-1)),
    (r'kept has shape \(3,\)', dict(kept=np.ones(3, np.int32))),
    (r'scores have shape \[4, 5\]', dict(scores=jnp.ones((4, 5)))),
    ('among is bool', dict(among=np.ones((1, 4, 5), bool))),
    (r'key is uint32\[2\]', dict(tie_break=jax.random.PRNGKey(0))),
    ('key is 7', dict(tie_break=7)),
    (r'2\^31 weights or more', dict(
        scores=jax.ShapeDtypeStruct((1, 2**16, 2**15), jnp.float32))),
])
def test_arguments_that_do_not_fit_the_scores_are_refused(message, arguments):
  arguments = dict(scores=jnp.ones((2, 4, 5)), kept=1) | arguments
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(
        lambda s: topk.keep_largest(s, **arguments), arguments.pop('scores')
    )


MODEL = {'h_0': (2, 5, 7), 'h_1': (2, 5, 7), 'v': (3, 4, 4), 'w': (1, 1, 9)}
SIZE = 2 * 70 + 48 + 9
keep_all = jax.jit(topk.keep_largest_of_all)
keep_all_among = jax.jit(
    lambda s, k, a, keys: topk.keep_largest_of_all(
        s, k, among=a, tie_break=keys
    )
)


def draw_model(seed, kind):
  return {
      name: draw(shape, seed + i, kind)
      for i, (name, shape) in enumerate(MODEL.items())
  }


def oracle_of_all(scores, kept, among=None, bits=None):
  flat = lambda tree: None if tree is None else np.concatenate(
      [np.ravel(tree[name]) for name in MODEL]
  )[None, None]
  mask = oracle(flat(scores), kept, flat(among), flat(bits)).ravel()
  ends = np.cumsum([np.prod(shape) for shape in MODEL.values()])[:-1]
  return {
      name: part.reshape(MODEL[name])
      for name, part in zip(MODEL, np.split(mask, ends))
  }


@settings(deadline=None, max_examples=20)
@given(st.integers(0, SIZE + 3), st.integers(0, 2**32), KINDS)
def test_mask_of_a_model_equals_a_stable_argsort_of_all_layers(
    kept, seed, kind
):
  scores = draw_model(seed, kind)
  mask = keep_all(scores, np.uint32(divmod(kept, 2**32)))
  jax.tree.map(np.testing.assert_array_equal, mask, oracle_of_all(scores, kept))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, SIZE), st.integers(0, 2**32), KINDS, st.booleans())
@example(kept=SIZE - 9, seed=0, kind='nan', at_random=False)
def test_ties_among_candidates_of_a_model_are_broken_by_the_keys_of_leaves(
    kept, seed, kind, at_random
):
  scores = draw_model(seed, kind)
  rng = np.random.default_rng(seed + 1)
  among = {name: rng.random(shape) < 0.7 for name, shape in MODEL.items()}
  leaf_keys = bits = None
  if at_random:
    leaf_keys = {n: jax.random.key(seed + i) for i, n in enumerate(MODEL)}
    bits = {n: jax.random.bits(leaf_keys[n], s) for n, s in MODEL.items()}
  mask = keep_all_among(
      scores, np.uint32(divmod(kept, 2**32)), among, leaf_keys
  )
  jax.tree.map(
      np.testing.assert_array_equal, mask,
      oracle_of_all(scores, kept, among, bits),
  )


def test_comparisons_select_the_same_entries_as_histograms(monkeypatch):
  monkeypatch.setattr(
      radix_select, 'on_this_platform',
      lambda keep, *operands: keep(*operands, digit=1),
  )
  shifted = {name: x[:, ::-1] for name, x in draw_model(0, 'ties').items()}
  scores = shifted | {'extra': np.zeros((1, 3, 3), np.float32)}
  for kept in (0, 1, 100, SIZE + 10):
    mask = topk.keep_largest_of_all(scores, kept + 9)
    flat = np.concatenate([np.ravel(scores[name]) for name in sorted(scores)])
    actual = np.concatenate([np.ravel(mask[name]) for name in sorted(mask)])
    expected = oracle(flat[None, None], kept + 9).ravel()
    np.testing.assert_array_equal(actual, expected)


def test_keep_largest_of_all_accepts_lists_with_none():
  scores = [jnp.zeros((1, 4, 4)), None, jnp.zeros((1, 4, 4))]
  first = topk.keep_largest_of_all(scores, 20)
  assert first[1] is None and first[0].all() and first[2].sum() == 4
  leaf_keys = [jax.random.key(0), None, jax.random.key(1)]
  some = topk.keep_largest_of_all(scores, 20, tie_break=leaf_keys)
  assert 4 < some[0].sum() < 16 and some[0].sum() + some[2].sum() == 20
  assert topk.keep_largest_of_all([None], 3) == [None]


NUMBERS = st.integers(0, 2**48 - 1)


def to_int(x):
  return int(x.high) * 2**16 + int(x.low)


@settings(deadline=None)
@given(NUMBERS, NUMBERS)
def test_wide_numbers_add_and_compare_as_integers(a, b):
  small, large = sorted([a, b])
  x, y = whole_model.to_wide(large), whole_model.to_wide(small)
  assert to_int(x) == large
  assert to_int(x - y) == large - small
  assert bool(whole_model.to_wide(a) < whole_model.to_wide(b)) == (a < b)
  assert int(whole_model.to_int32(x)) == min(large, 2**31 - 1)


@pytest.mark.parametrize('bins, need', [
    (2, 1), (2048, 2**40 + 3), (2048, 2**47),
])
def test_ranks_above_32_bits_are_found(bins, need):
  rng = np.random.default_rng(bins)
  counts = rng.integers(2**20, size=(1000, bins)) * rng.integers(2, size=bins)
  place, rest = jax.jit(
      lambda c, n: radix_select.nth(c, n, whole_model.total)
  )(jnp.asarray(counts, jnp.int32), whole_model.to_wide(need))
  reached = np.cumsum(counts.sum(0))
  want = min(int(np.sum(reached < need)), bins - 1)
  assert int(place) == want
  assert to_int(rest) == need - int(counts[:, :want].sum())


@pytest.mark.parametrize('message, arguments', [
    (r'kept has shape \(3,\)', dict(kept=np.ones(3, np.uint32))),
    (r'shape \[1, 2, 4, 5\]', dict(scores=[jnp.ones((1, 2, 4, 5))])),
    ('among is bool', dict(among=[np.ones((1, 4, 5), bool)])),
])
def test_arguments_that_do_not_fit_all_scores_are_refused(message, arguments):
  arguments = dict(scores=[jnp.ones((2, 4, 5))], kept=1) | arguments
  with pytest.raises(ValueError, match=message):
    topk.keep_largest_of_all(arguments.pop('scores'), **arguments)

"""Top-k masks against a stable argsort: counts, ties, candidates, keys."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.sparsity import topk
from spdf_jax.sparsity.topk import keys
from spdf_jax.sparsity.topk import per_layer

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
      'mostly zero': np.where(normal > 1, normal, 0),
      'zeros of both signs': np.where(normal > 0, 0.0, -0.0),
      'infinite': np.where(abs(normal) > 1, np.copysign(np.inf, normal), 0),
      'nan': np.where(normal > 0, np.nan, np.where(normal < -1, -np.inf, 1)),
  }[kind].astype(np.float32)


def typed(scores, dtype):
  """Casts scores; integers reach down to the least one."""
  if dtype == 'int16':
    scores = np.nan_to_num(scores, posinf=9, neginf=-9) * 2**13
    scores = np.clip(scores, -(2**15), 2**15 - 1)
  return jnp.asarray(scores).astype(dtype)


KINDS = st.sampled_from([
    'normal', 'ties', 'row by row', 'equal', 'mostly zero',
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


@pytest.mark.parametrize('kind', ['normal', 'row by row', 'ties'])
@pytest.mark.parametrize('kept', [1, 500, 30_000, 65_999])
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
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_only_candidates_are_kept_layer_by_layer(
    shape, data, seed, kind, share
):
  scores = draw(shape, seed, kind)
  among = np.random.default_rng(seed + 1).random(shape) < share
  number = st.integers(0, shape[1] * shape[2])
  kept = np.int32([data.draw(number) for _ in range(shape[0])])
  mask = keep_among(scores, kept, among)
  np.testing.assert_array_equal(mask, oracle(scores, kept, among))


@pytest.mark.parametrize('dtype', ['float32', 'int32', 'uint32'])
@pytest.mark.parametrize('kept', [0, 1, 3000, 7000])
def test_more_than_there_is_keeps_all_candidates(kept, dtype):
  lowest = np.nan if dtype == 'float32' else np.iinfo(dtype).min
  scores = np.full((1, 70, 100), lowest, dtype)
  scores[:, ::2] = 5
  among = np.random.default_rng(1).random(scores.shape) < 0.3
  np.testing.assert_array_equal(
      keep_among(scores, kept, among), oracle(scores, kept, among)
  )


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(SHAPES), st.data(), st.integers(0, 2**32), KINDS)
def test_random_ties_go_by_the_bits_of_the_key(shape, data, seed, kind):
  scores, key = draw(shape, seed, kind), jax.random.key(seed)
  among = np.random.default_rng(seed + 1).random(shape) < 0.7
  kept = data.draw(st.integers(0, shape[1] * shape[2]))
  mask = keep_tied(scores, jnp.int32(kept), among, key)
  bits = jax.random.bits(key, shape)
  np.testing.assert_array_equal(mask, oracle(scores, kept, among, bits))


@pytest.mark.parametrize('shape', [(7, 3, 5), (2, 70, 60), (2, 3, 5, 7)])
def test_random_masks_rank_by_the_bits_of_the_key(shape):
  key = jax.random.key(3)
  bits = jax.random.bits(key, shape)
  among = np.asarray(bits) % 3 > 0
  mask = topk.keep_random(key, shape, 11, among=among)
  np.testing.assert_array_equal(mask, oracle(bits, 11, among))


def test_every_tied_unit_is_equally_likely():
  counts = np.zeros((8, 8))
  pick = jax.jit(
      lambda key: topk.keep_largest(jnp.zeros((1, 8, 8)), 16, tie_break=key)[0]
  )
  for seed in range(200):
    counts += np.asarray(pick(jax.random.key(seed)))
  # 200 draws at 1/4: mean 50, deviation 6.1.
  assert counts.min() > 20 and counts.max() < 80


@pytest.mark.parametrize('digit', [1, 11])
def test_equal_random_bits_go_by_index(monkeypatch, digit):
  # Equal random bits are rare: here they have 3 values.
  bits = np.random.default_rng(2).integers(3, size=(70, 60)).astype(np.uint32)
  monkeypatch.setattr(
      keys, 'bits_of_layer', lambda *_: jnp.asarray(bits)
  )
  scores = jnp.asarray(draw((2, 70, 60), 0, 'ties'))
  among = jnp.asarray(np.random.default_rng(1).random((2, 70, 60)) < 0.7)
  words = jnp.zeros(2, jnp.uint32)
  for i, kept in enumerate((100, 2000)):
    layer = keys.Layers(scores[i], among[i], words, jnp.uint32(i))
    mask = per_layer._keep_in_layer((70, 60), digit, layer, jnp.int32(kept))
    expected = oracle(scores[i:i + 1], kept, among[i:i + 1], bits[None])
    np.testing.assert_array_equal(mask, expected[0])


@pytest.mark.parametrize('ties', [None, 5])
def test_comparing_counts_as_histograms_do(ties):
  scores = jnp.asarray(draw((2, 70, 60), 0, 'ties'))
  key = None if ties is None else jax.random.key(ties)
  words = None if key is None else keys.key_words(key)
  compare = jax.jit(jax.vmap(
      lambda scores, number, kept: per_layer._keep_in_layer(
          (70, 60), 1, keys.Layers(scores, None, words, number), kept
      ),
      in_axes=(0, 0, None),
  ))
  for kept in (0, 1, 999, 4200):
    np.testing.assert_array_equal(
        compare(scores, jnp.arange(2, dtype='uint32'), np.int32(kept)),
        topk.keep_largest(scores, kept, tie_break=key),
    )


def test_batches_and_derivatives_treat_masks_as_constants():
  scores = jnp.asarray(draw((3, 1, 70, 60), 0, 'ties'))
  run = lambda x: topk.keep_largest(x, 1000)
  batch = jax.jit(jax.vmap(run))(scores)
  np.testing.assert_array_equal(batch, [run(x) for x in scores])
  kept_sum = lambda x: jnp.sum(jnp.where(run(x), x, 0))
  np.testing.assert_array_equal(
      jax.jit(jax.grad(kept_sum))(scores[0]), run(scores[0])
  )


@pytest.mark.parametrize(
    'dtype', ['uint32', 'int8', 'uint16', 'int16', 'int32']
)
def test_integers_are_ranked_exactly(dtype):
  info = np.iinfo(dtype)
  scores = np.random.default_rng(0).integers(
      info.min, info.max, (2, 70, 60), dtype, endpoint=True
  )
  scores[0, :9] = info.max
  for kept in (0, 1, 1000):
    mask = topk.keep_largest(jnp.asarray(scores), kept)
    np.testing.assert_array_equal(mask, oracle(scores, kept))


def test_random_bits_are_those_of_jax():
  key = jax.random.key(2**40 + 7)
  words = keys.key_words(key)
  bits = jax.random.bits(key, (3, 5, 7))
  layer = jax.vmap(lambda i: keys.bits_of_layer(words, i, (5, 7)))
  np.testing.assert_array_equal(layer(jnp.arange(3, dtype='uint32')), bits)


@pytest.mark.parametrize('x, y', [
    (2**32 - 1, 2**31 - 1), (2**16, 2**16), (3, 5), (2**31 + 12345, 2**30 + 7),
])
def test_positions_beyond_32_bits_are_exact(x, y):
  high, low = keys._product(jnp.uint32(x), y)
  assert int(high) * 2**32 + int(low) == x * y


@pytest.mark.parametrize('impl', ['rbg', 'unsafe_rbg'])
def test_keys_of_any_implementation_break_ties(impl):
  masks = [
      topk.keep_random(jax.random.key(seed, impl=impl), (1, 8, 8), 32)
      for seed in (0, 0, 1)
  ]
  assert (masks[0] == masks[1]).all() and (masks[0] != masks[2]).any()


def test_no_layer_is_an_empty_mask():
  assert topk.keep_largest(jnp.zeros((0, 4, 4)), 3).shape == (0, 4, 4)
  assert topk.keep_largest(jnp.zeros((2, 0, 4)), 3).shape == (2, 0, 4)


def test_numbers_to_keep_do_not_compile_anew():
  scores = jnp.asarray(draw((2, 70, 60), 0, 'normal'))
  topk.keep_largest(scores, 1)
  before = per_layer._keep_in_layers._cache_size()
  for kept in (0, 17, 10**6, np.int64(5)):
    topk.keep_largest(scores, kept)
  assert per_layer._keep_in_layers._cache_size() == before


@pytest.mark.parametrize('with_key', [False, True])
def test_scratch_is_six_bytes_per_score(with_key):
  key = jax.random.key(0) if with_key else None
  scores = jax.ShapeDtypeStruct((1, 1024, 1024), jnp.float32)
  among = jax.ShapeDtypeStruct(scores.shape, bool)
  program = jax.jit(
      lambda s, a: topk.keep_largest(s, 1000, among=a, tie_break=key)
  ).lower(scores, among).compile()
  scratch = program.memory_analysis().temp_size_in_bytes
  assert scratch <= 6.1 * 2**20


@pytest.mark.skipif(
    jax.default_backend() != 'cpu', reason='the bound is that of XLA:CPU'
)
def test_scratch_of_random_masks_is_eleven_bytes_per_entry_of_a_layer():
  among = jax.ShapeDtypeStruct((4, 512, 512), bool)
  program = jax.jit(
      lambda a: topk.keep_random(jax.random.key(0), a.shape, 1000, among=a)
  ).lower(among).compile()
  scratch = program.memory_analysis().temp_size_in_bytes
  assert scratch <= 11.2 * 2**18


@pytest.mark.parametrize('message, arguments', [
    ('kept is -1', dict(kept=-1)),
    (r'kept has shape \(3,\)', dict(kept=np.ones(3, np.int32))),
    (r'scores have shape \[4, 5\]', dict(scores=jnp.ones((4, 5)))),
    ('among is bool', dict(among=np.ones((1, 4, 5), bool))),
    ('among is float32', dict(among=np.ones((2, 4, 5), np.float32))),
    (r'key is uint32\[2\]', dict(tie_break=jax.random.PRNGKey(0))),
    (r'key is key<fry>\[2\]', dict(
        tie_break=jax.random.split(jax.random.key(0)))),
    ('key is 7', dict(tie_break=7)),
])
def test_what_does_not_fit_the_scores_is_named(message, arguments):
  arguments = dict(scores=jnp.ones((2, 4, 5)), kept=1) | arguments
  with pytest.raises(ValueError, match=message):
    topk.keep_largest(arguments.pop('scores'), **arguments)


def test_layers_too_large_to_count_are_refused():
  with pytest.raises(ValueError, match=r'2\^31 weights or more'):
    jax.eval_shape(
        lambda s: topk.keep_largest(s, 1),
        jax.ShapeDtypeStruct((1, 2**16, 2**15), jnp.float32),
    )

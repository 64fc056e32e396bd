"""Masks that kernels choose are those of a stable argsort, bit for bit."""

import functools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import model_topk_test
import numpy as np
import pytest
import topk_test

from spdf_jax.accelerator import native
from spdf_jax.accelerator.native import library
from spdf_jax.sparsity import topk
from spdf_jax.sparsity.topk import limbs

pytestmark = pytest.mark.skipif(
    not native.is_available(),
    reason='there are no native kernels here (is a C++ compiler installed?)',
)

# Two layers; several parts of one layer.
SHAPES = [(2, 70, 60), (1, 300, 220)]
KINDS = topk_test.KINDS
few = settings(deadline=None, max_examples=15)


@pytest.fixture(scope='module', autouse=True)
def masks_by_kernels():
  """Forgets what was compiled before kernels were loaded."""
  jax.clear_caches()


keep = jax.jit(
    lambda s, k, a, key, **options: topk.keep_largest(
        s, k, among=a, tie_break=key, **options
    ),
    static_argnames='by_magnitude',
)
keep_random = jax.jit(
    lambda key, k, a: topk.keep_random(key, a.shape, k, among=a)
)
keep_of_all = jax.jit(
    lambda s, k, a, key, **options: topk.keep_largest_of_all(
        s, k, among=a, tie_break=key, **options
    ),
    static_argnames='by_magnitude',
)


@few
@given(
    st.sampled_from(SHAPES), st.data(), st.integers(0, 2**32), KINDS,
    st.sampled_from(['float32', 'bfloat16', 'float16', 'int16']),
    st.sampled_from([None, 0.01, 0.5]), st.booleans(), st.booleans(),
)
def test_mask_equals_a_stable_argsort(
    shape, data, seed, kind, dtype, share, random_ties, by_magnitude
):
  scores = topk_test.typed(topk_test.draw(shape, seed, kind), dtype)
  number = st.integers(0, shape[1] * shape[2] + 3)
  kept = np.int32([data.draw(number) for _ in range(shape[0])])
  rng = np.random.default_rng(seed)
  among = None if share is None else rng.random(shape) < share
  key = jax.random.key(seed) if random_ties else None
  bits = jax.random.bits(key, shape) if random_ties else None
  np.testing.assert_array_equal(
      keep(scores, kept, among, key, by_magnitude=by_magnitude),
      topk_test.oracle(
          topk_test.magnitudes(scores) if by_magnitude else scores,
          kept, among, bits,
      ),
  )


@few
@given(
    st.sampled_from(SHAPES), st.data(), st.integers(0, 2**32),
    st.sampled_from([0.01, 0.5, 1.0]),
)
def test_random_masks_are_those_of_random_bits(shape, data, seed, share):
  key = jax.random.key(seed)
  kept = data.draw(st.integers(0, shape[1] * shape[2]))
  among = np.random.default_rng(seed).random(shape) < share
  wanted = topk_test.oracle(jax.random.bits(key, shape), kept, among)
  np.testing.assert_array_equal(
      keep_random(key, jnp.int32(kept), among), wanted
  )
  by_score = keep(jax.random.bits(key, shape), jnp.int32(kept), among, None)
  np.testing.assert_array_equal(by_score, wanted)


@few
@given(
    st.integers(0, model_topk_test.SIZE + 3), st.integers(0, 2**32),
    st.sampled_from(['normal', 'ties', 'equal', 'nan']), st.booleans(),
    st.booleans(),
)
def test_a_model_is_one_competition(
    kept, seed, kind, random_ties, by_magnitude
):
  scores = model_topk_test.draw(seed, kind)
  rng = np.random.default_rng(seed + 1)
  among = {name: rng.random(x.shape) < 0.7 for name, x in scores.items()}
  keys = bits = None
  if random_ties:
    keys = {name: jax.random.key(seed + i) for i, name in enumerate(scores)}
    bits = {n: jax.random.bits(keys[n], x.shape) for n, x in scores.items()}
  mask = keep_of_all(
      scores, tuple(limbs.to_limbs(kept)), among, keys,
      by_magnitude=by_magnitude,
  )
  if by_magnitude:
    scores = jax.tree.map(np.abs, scores)
  jax.tree.map(
      np.testing.assert_array_equal,
      mask, model_topk_test.oracle(scores, kept, among, bits),
  )


@pytest.mark.parametrize('kept', [1, 500, 30_000, 65_999])
@pytest.mark.parametrize('kind', ['row by row', 'mostly zero', 'sorted'])
def test_no_sample_misleads(kind, kept):
  if kind == 'sorted':
    scores = np.arange(66_000, dtype=np.float32).reshape(1, 300, 220)
  else:
    scores = topk_test.draw((1, 300, 220), 0, kind)
  np.testing.assert_array_equal(
      keep(scores, jnp.int32(kept), None, None), topk_test.oracle(scores, kept)
  )


def compiled_text(shape):
  scores = jax.ShapeDtypeStruct(shape, jnp.float32)
  return jax.jit(topk.keep_largest, static_argnums=1).lower(
      scores, 7
  ).as_text()


def test_kernels_choose_where_they_are_loaded(monkeypatch):
  assert 'spdf_keep_largest' in compiled_text((1, 96, 96))
  monkeypatch.setattr(library, 'is_loaded', lambda: False)
  assert 'spdf_keep_largest' not in compiled_text((1, 96, 97))


def test_batches_and_derivatives_are_the_references():
  scores = topk_test.draw((3, 1, 70, 60), 0, 'ties')
  run = functools.partial(topk.keep_largest, kept=1000)
  batch = jax.jit(jax.vmap(run))(scores)
  np.testing.assert_array_equal(batch, [run(x) for x in scores])
  kept_sum = lambda x: jnp.sum(jnp.where(run(x), x, 0))
  np.testing.assert_array_equal(
      jax.jit(jax.grad(kept_sum))(scores[0]), run(scores[0])
  )

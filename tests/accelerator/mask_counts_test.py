"""Kept weights of masks are counted as NumPy does, and exactly."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spdf_jax.accelerator import auto
from spdf_jax.accelerator import mask_counts


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from([(), (3,), (2, 2)]),
    st.sampled_from([1, 7, 20, 64, 96]),
    st.sampled_from([5, 64]),
    st.sampled_from([1, 32]),
    st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)
def test_counts_and_blocks_are_those_of_numpy(
    stack, inputs, outputs, side, density, seed
):
  rng = np.random.default_rng(seed)
  blocks = rng.random((*stack, -(-inputs // side), -(-outputs // side)))
  mask = (blocks < density).repeat(side, -2).repeat(side, -1)
  mask = mask[..., :inputs, :outputs]
  bands = jax.jit(mask_counts.kept_in_bands)(mask)
  np.testing.assert_array_equal(
      mask_counts.count_kept(bands), mask.sum((-2, -1))
  )
  whole = inputs % 32 == outputs % 32 == 0 and all(
      tile.all() or not tile.any()
      for matrix in mask.reshape(-1, inputs, outputs)
      for band in np.split(matrix, inputs // 32)
      for tile in np.split(band, outputs // 32, axis=1)
  )
  assert bool(mask_counts.are_in_blocks(bands, inputs)) == whole


@pytest.mark.parametrize('pruned, way', [
    (0, auto.DENSE), (1, auto.MASKED), (2**25, auto.FAST),
])
def test_a_mask_of_fifty_million_weights_that_prunes_one_is_used(pruned, way):
  shape = 12, 1024, 4096
  mask = jnp.arange(12 * 2**22).reshape(shape) >= pruned
  choice = auto.Crossovers(0.5, 0.5)
  assert int(jax.jit(lambda mask: auto._fastest(choice, mask))(mask)) == way

"""Packed matrices are unpacked bit for bit; NumPy checks the layout."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import packing

few = settings(max_examples=6, deadline=None, derandomize=True)


def draw(seed, stack, rows, columns, sparsity):
  """A mask and every kind of float under it, NaN, infinity and -0 too."""
  rng = np.random.default_rng(seed)
  mask = rng.random((*stack, rows, columns)) >= sparsity
  bits = rng.integers(2**32, size=mask.shape, dtype=np.uint32)
  w = bits.view(np.float32)
  w[rng.random(w.shape) < 0.2] = -0.0
  return mask, np.where(mask, w, np.float32(0))


cases = st.builds(
    draw,
    seed=st.integers(0, 99),
    stack=st.sampled_from([(), (2,), (3, 2)]),
    rows=st.sampled_from([1, 7]),
    columns=st.sampled_from([1, 8, 19]),
    sparsity=st.sampled_from([0.0, 0.5, 0.9, 1.1]),
)


def same_bits(a, b):
  return np.asarray(a).tobytes() == np.asarray(b).tobytes()


@few
@given(cases)
def test_a_mask_is_restored_from_an_eighth_of_its_bytes(case):
  mask, _ = case
  packed = packing.pack_mask(jnp.asarray(mask))
  assert packed.shape == mask.shape
  assert packed.bits.nbytes == mask[..., 0].size * -(-mask.shape[-1] // 8)
  np.testing.assert_array_equal(packing.unpack_mask(packed), mask)
  np.testing.assert_array_equal(
      packed.bits, np.packbits(mask, axis=-1, bitorder='little')
  )


@few
@given(cases, st.integers(0, 3), st.booleans())
def test_matrices_are_restored_bit_for_bit(case, spare, jitted):
  mask, w = case
  counts = mask.sum((-2, -1))
  size = int(counts.max(initial=0)) + spare
  packed = packing.pack_mask(jnp.asarray(mask))

  def there_and_back(w, packed):
    values = packing.gather_kept(w, packed, size)
    return values, packing.scatter_kept(values, packed)

  run = jax.jit(there_and_back) if jitted else there_and_back
  values, unpacked = run(jnp.asarray(w), packed)
  assert same_bits(unpacked, w)
  wanted = np.zeros((*mask.shape[:-2], size), np.float32)
  for i in np.ndindex(mask.shape[:-2]):
    wanted[i][:counts[i]] = w[i][mask[i]]
  assert same_bits(values, wanted)


def test_a_packed_mask_is_a_tree_of_its_bits():
  packed = packing.pack_mask(jnp.ones((2, 3, 10), bool))
  leaves, treedef = jax.tree.flatten(packed)
  assert [leaf.shape for leaf in leaves] == [(2, 3, 2)]
  first = jax.tree.map(lambda x: x[0], packed)
  assert first.shape == (3, 10)
  assert treedef.unflatten(leaves).columns == 10

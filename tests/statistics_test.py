"""Changes between masks and their overlap, per layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.statistics import mask_changes
from spdf_jax.sparsity.statistics import overlap

PARAMS = {
    'h_0': {'wi': jnp.ones((8, 16)), 'bias': jnp.ones(16)},
    'h_1': {'wi': jnp.ones((3, 16, 8))},
}
WHERE = lambda path, leaf: path.endswith('wi')


def draw(seed, density):
  rng = np.random.default_rng(seed)
  return {
      'h_0': {'wi': rng.random((8, 16)) < density, 'bias': None},
      'h_1': {'wi': rng.random((3, 16, 8)) < density},
  }


def sets(mask):
  """Returns the indices of the kept weights of every layer."""
  found = {'h_0/wi': mask['h_0']['wi']}
  found |= {f'h_1/wi[{i}]': m for i, m in enumerate(mask['h_1']['wi'])}
  return {name: set(np.flatnonzero(m)) for name, m in found.items()}


@pytest.mark.parametrize('seed', range(3))
def test_changes_are_the_differences_of_sets(seed):
  one, other = draw(seed, 0.3), draw(seed + 100, 0.6)
  before, after = sets(one), sets(other)
  found = mask_changes(one, other, PARAMS, where=WHERE)
  assert list(found) == ['h_0/wi', 'h_1/wi[0]', 'h_1/wi[1]', 'h_1/wi[2]']
  likeness = overlap(one, other, PARAMS, where=WHERE)
  for name, change in found.items():
    old, new = before[name], after[name]
    assert change == (len(new - old), len(old - new), len(old & new))
    assert likeness[name] == len(old & new) / len(old | new)


def test_a_mask_overlaps_wholly_with_itself_and_not_with_its_inverse():
  mask = draw(0, 0.5)
  inverse = jax.tree.map(np.logical_not, mask)
  empty = jax.tree.map(np.zeros_like, mask)
  for other, wanted in ((mask, 1.0), (inverse, 0.0)):
    assert set(overlap(mask, other, PARAMS, where=WHERE).values()) == {wanted}
  assert set(overlap(empty, empty, PARAMS, where=WHERE).values()) == {1.0}


def test_random_masks_overlap_as_their_density_says():
  params = {'w': jnp.ones((200, 200))}
  one, other = (
      spdf.random_mask(jax.random.key(i), params, 0.75) for i in range(2)
  )
  found = overlap(one, other, params)['w']
  np.testing.assert_allclose(found, 0.25 / 1.75, rtol=0.05)


def test_masks_of_other_parameters_are_not_compared():
  one, other = draw(0, 0.5), draw(1, 0.5)
  other['h_0']['wi'] = None
  message = r"layer 'h_0/wi' \(8, 16\) where the other has 'h_1/wi\[0\]'"
  with pytest.raises(ValueError, match=message):
    mask_changes(one, other, PARAMS, where=WHERE)
  with pytest.raises(ValueError, match="the other has 'h_0/wi'"):
    mask_changes(other, one, PARAMS, where=WHERE)


def test_leaves_that_where_does_not_select_are_named():
  mask = draw(0, 0.5)
  message = "the mask has a leaf 'h_1/wi', which where does not select; pass"
  with pytest.raises(ValueError, match=message):
    spdf.summarize(mask, PARAMS)
  with pytest.raises(ValueError, match=message):
    mask_changes(mask, mask, PARAMS)

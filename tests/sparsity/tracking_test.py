"""Statistics of masks, tracked and compared, against NumPy and sets."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.statistics import count_units
from spdf_jax.sparsity.statistics import mask_changes
from spdf_jax.sparsity.tracking import mask_statistics
from tests.sparse_loop import main_computation
from tests.sparse_loop import trajectory

PARAMS = {
    'h_0': {'wi': jnp.ones((8, 16)), 'bias': jnp.ones(16)},
    'h_1': {'wi': jnp.ones((16, 8))},
}
# A schedule of updates that is neither regular nor starts at 0.
UPDATES = (1, 4, 5)
NAMES = (
    'grown', 'dropped', 'surviving', 'overlap', 'exploration', 'cut_off',
    'row_variation', 'column_variation',
)


def coin(key, params):
  """Returns random masks without exact counts."""
  fold = lambda p: jax.random.fold_in(key, p.shape[1])
  return jax.tree.map(
      lambda p: jax.random.bernoulli(fold(p), 0.3, p.shape), params
  )


def tossing(update_at=None):
  """Draws a random mask at every update."""
  at = lambda count: jnp.any(jnp.asarray(count) == jnp.asarray(UPDATES))
  return spdf.Algorithm(
      sparsity_at=lambda count, params: jax.tree.map(lambda p: 0.7, params),
      init=coin,
      update=lambda key, count, mask, params, grads: coin(key, params),
      update_at=update_at or at,
      dense_grads_at=lambda count: False,
  )


def train(tx, steps, params=PARAMS):
  """Returns the state after 0, 1, … steps."""
  pairs = trajectory(tx, params, lambda _, params: params, steps)
  return [state for _, state in pairs]


def tracked(algorithm, inner=None):
  return spdf.sparsify(inner or optax.adam(0.1), algorithm, key=0, track=True)


def flat(mask):
  return np.concatenate([np.ravel(m) for m in jax.tree.leaves(mask)])


def oracle(masks):
  """Computes the statistics of a list of flat masks, one per change."""
  ever = np.logical_or.reduce(masks)
  if len(masks) == 1:
    return 0, 0, masks[0].sum(), 1.0, ever.mean()
  old, new = masks[-2:]
  return (
      (new & ~old).sum(), (old & ~new).sum(), (old & new).sum(),
      (old & new).sum() / (old | new).sum(), ever.mean(),
  )


def test_statistics_equal_a_numpy_oracle_at_every_step():
  states = train(tracked(tossing()), 8)
  changes = [flat(spdf.get_mask(states[0]))]
  for step, state in enumerate(states):
    if step - 1 in UPDATES:
      changes.append(flat(spdf.get_mask(state)))
    numbers = mask_statistics(state)
    assert tuple(numbers) == NAMES
    for value, wanted in zip(numbers.values(), oracle(changes)):
      assert value.shape == () and value.dtype == jnp.float32
      np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_array_equal(
        flat(state.explored), np.logical_or.reduce(changes)
    )
  assert len(changes) == 4
  shares = [float(mask_statistics(s)['exploration']) for s in states]
  assert shares == sorted(shares) and shares[0] < shares[-1]


def test_masks_are_found_in_the_state_of_track_masks():
  state = train(tracked(tossing()), 0)[0]
  assert spdf.get_mask(state)['h_0']['bias'] is None
  assert state.explored['h_0']['bias'] is None
  assert not spdf.get_dense_grads(state)
  full = spdf.get_mask(spdf.densify(state))
  assert full['h_1']['wi'].all()


def test_counts_are_exact_where_float32_sums_are_not():
  # Adding ones in float32 sticks at 2**24 in the worst order.
  algorithm = tossing(lambda count: count == 0)._replace(
      init=lambda key, params: jax.tree.map(
          lambda p: jnp.ones(p.shape, bool), params
      ),
      update=lambda key, count, mask, params, grads: jax.tree.map(
          lambda m: m.at[..., 0].set(False), mask
      ),
  )
  params = {'w': jnp.ones((4099, 4099), jnp.bfloat16)}
  states = train(tracked(algorithm, optax.sgd(1.0)), 1, params)
  numbers = mask_statistics(states[1])
  assert int(numbers['surviving']) == 4099 * 4098
  assert int(numbers['dropped']) == 4099


def test_a_model_may_have_more_weights_than_an_int32_counts():
  layer = jax.ShapeDtypeStruct((48, 4096, 16384), jnp.bfloat16)
  tx = spdf.sparsify(
      optax.sgd(1.0), spdf.static(0.5), where={'w': True}, track=True, key=0
  )
  state = jax.eval_shape(tx.init, {'w': layer})
  assert jax.eval_shape(mask_statistics, state)['exploration'].shape == ()
  count = lambda mask: count_units(mask, spdf.MatrixAxes((0, 1), 2))
  units = jax.eval_shape(count, state.history['w'])
  assert units.row_variation.shape == (1, 1, 1)


def test_static_masks_cost_nothing():
  tx = tracked(spdf.static(0.75))
  state = tx.init(PARAMS)
  step = lambda s: tx.update(PARAMS, s, PARAMS)[1]
  text = str(jax.make_jaxpr(step)(state))
  assert 'cond' not in text
  after = step(state)
  jax.tree.map(np.testing.assert_array_equal, after.history, state.history)
  assert float(mask_statistics(after)['exploration']) == 0.25


def test_ordinary_steps_copy_neither_masks_nor_history():
  params = {'w': jnp.ones((128, 256)), 'v': jnp.ones((128, 256))}
  tx = tracked(tossing(lambda count: count % 7 == 3))
  main = main_computation(tx, params)
  assert len([x for x in main if ' conditional(' in x]) == 2
  assert not [x for x in main if '[128,256]' in x and ' copy(' in x]


def test_trackers_under_partition_are_added_up():
  tx = optax.partition(
      {'a': tracked(spdf.static(0.5)), 'b': tracked(spdf.static(0.75))},
      {'h_0': 'a', 'h_1': 'b'},
  )
  state = tx.init(PARAMS)
  numbers = mask_statistics(state)
  assert float(numbers['surviving']) == 64 + 32
  assert float(numbers['exploration']) == 96 / 256


STACKED = {
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
  layers = {'h_0/wi': mask['h_0']['wi']}
  layers |= {f'h_1/wi[{i}]': m for i, m in enumerate(mask['h_1']['wi'])}
  return {name: set(np.flatnonzero(m)) for name, m in layers.items()}


@pytest.mark.parametrize('seed', range(3))
def test_mask_changes_equal_differences_of_sets(seed):
  one, other = draw(seed, 0.3), draw(seed + 100, 0.6)
  before, after = sets(one), sets(other)
  changes = mask_changes(one, other, STACKED, where=WHERE)
  assert list(changes) == ['h_0/wi', 'h_1/wi[0]', 'h_1/wi[1]', 'h_1/wi[2]']
  for name, change in changes.items():
    old, new = before[name], after[name]
    assert change == (len(new - old), len(old - new), len(old & new))
    assert change.overlap == len(old & new) / len(old | new)


def overlaps(one, other):
  return {c.overlap for c in mask_changes(one, other, STACKED).values()}


def test_a_mask_overlaps_wholly_with_itself_and_not_with_its_inverse():
  mask = draw(0, 0.5)
  inverse = jax.tree.map(np.logical_not, mask)
  empty = jax.tree.map(np.zeros_like, mask)
  for other, wanted in ((mask, 1.0), (inverse, 0.0)):
    assert overlaps(mask, other) == {wanted}
  assert overlaps(empty, empty) == {1.0}


def test_masks_of_other_parameters_are_not_compared():
  one, other = draw(0, 0.5), draw(1, 0.5)
  other['h_0']['wi'] = None
  message = r"layer 'h_0/wi' \(8, 16\) where the other has 'h_1/wi\[0\]'"
  with pytest.raises(ValueError, match=message):
    mask_changes(one, other, STACKED, where=WHERE)
  with pytest.raises(ValueError, match="the other has 'h_0/wi'"):
    mask_changes(other, one, STACKED, where=WHERE)


def test_leaves_that_where_does_not_select_are_named():
  mask = draw(0, 0.5)
  message = "the mask has a leaf 'h_1/wi', which where does not select; pass"
  with pytest.raises(ValueError, match=message):
    spdf.summarize(mask, STACKED, where=spdf.where.hidden_matrices)
  with pytest.raises(ValueError, match=message):
    mask_changes(mask, mask, STACKED, where=spdf.where.hidden_matrices)

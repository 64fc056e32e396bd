"""`sparsify` around an optimizer: full masks, partitions, revived weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from tests.sparse_loop import trajectory

SHAPES = {
    'h_0': {'wi': {'kernel': (8, 16), 'bias': (16,)}},
    'h_1': {'wi': {'kernel': (16, 8), 'bias': (8,)}},
    'wte': {'embedding': (10, 8)},
}


def make_params(dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda shape: jnp.asarray(rng.standard_normal(shape), dtype), SHAPES,
      is_leaf=lambda x: isinstance(x, tuple),
  )


def make_grads(step, params):
  """Gradients of a parabola around fixed targets: dense, never zero."""
  target = make_params(seed=1)
  return jax.tree.map(
      lambda p, t: (p - t.astype(p.dtype)) * (1 + step), params, target
  )


def test_partition_around_sparsify_merges_the_masks():
  one = spdf.sparsify(optax.adam(1e-2), spdf.static(0.5), key=0)
  two = spdf.sparsify(optax.sgd(1e-2), spdf.static(0.75), key=0)
  tx = optax.partition(
      {'one': one, 'two': two, 'rest': optax.sgd(1e-2)},
      {'h_0': 'one', 'h_1': 'two', 'wte': 'rest'},
  )
  *_, (params, state) = trajectory(tx, make_params(), make_grads, 3)
  mask = spdf.get_mask(state)
  summary = spdf.summarize(mask, params)
  assert {n: s.sparsity for n, s in summary.layers.items()} == {
      'h_0/wi/kernel': 0.5, 'h_1/wi/kernel': 0.75
  }
  spdf.check_zeros(params, state)
  assert mask['wte'] is None


@pytest.mark.parametrize('inner', [
    optax.adamw(1e-2),
    optax.contrib.schedule_free_adamw(1e-2),
    optax.chain(
        spdf.reset_state(optax.scale_by_adam(), [3]),
        optax.scale_by_learning_rate(1e-2),
    ),
], ids=['adamw', 'schedule_free', 'restarted'])
def test_with_a_full_mask_sparsify_equals_the_inner_optimizer_bit_for_bit(
    inner
):
  inner = optax.with_extra_args_support(inner)
  tx = spdf.sparsify(inner, spdf.dense(), key=0)
  ours = theirs = make_params()
  state, inner_state = tx.init(ours), inner.init(theirs)
  for step in range(4):
    grads = make_grads(step, theirs)
    updates, state = tx.update(grads, state, ours)
    ours = optax.apply_updates(ours, updates)
    updates, inner_state = inner.update(grads, inner_state, theirs)
    theirs = optax.apply_updates(theirs, updates)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
  jax.tree.map(
      np.testing.assert_array_equal, state.inner_state, inner_state
  )


@pytest.mark.parametrize('odd', [-np.inf, np.nan])
def test_masks_change_at_their_step_whatever_the_gradients_are(odd):
  algorithm = spdf.sparse_evolution(0.5, update_every=1, drop_fraction=0.5)
  tx = spdf.sparsify(optax.sgd(1e-2), algorithm, key=7)
  params = make_params()
  state = tx.init(params)._replace(count=jnp.int32(1))
  update = jax.jit(tx.update)
  after = lambda grads: update(grads, state, params)[1].mask
  wanted = after(make_grads(0, params))
  got = after(jax.tree.map(lambda p: jnp.full_like(p, odd), params))
  jax.tree.map(np.testing.assert_array_equal, got, wanted)
  before, changed = jax.tree.leaves(state.mask), jax.tree.leaves(wanted)
  assert any((a != b).any() for a, b in zip(before, changed))


def test_donating_the_state_leaves_the_users_key_alive():
  key = jax.random.key(3)
  tx = spdf.sparsify(optax.sgd(1e-2), spdf.static(0.5), key=key)
  params = make_params()
  state = tx.init(params)
  update = jax.jit(tx.update, donate_argnums=1)
  update(make_grads(0, params), state, params)
  assert jax.random.bits(key).dtype == jnp.uint32


def test_densify_continues_with_every_weight():
  tx = spdf.sparsify(optax.adam(1e-2), spdf.static(0.75), key=0)
  *_, (params, state) = trajectory(tx, make_params(), make_grads, 2)
  moments = state.inner_state
  state = spdf.densify(state)
  jax.tree.map(np.testing.assert_array_equal, moments, state.inner_state)
  updates, state = tx.update(make_grads(2, params), state, params)
  params = optax.apply_updates(params, updates)
  assert (params['h_0']['wi']['kernel'] != 0).all()


def layers_to_revive(layers=3, size=(200, 100)):
  """Layers of different means and widths, half of them pruned to junk."""
  rng = np.random.default_rng(0)
  widths = 10.0 ** -np.arange(layers)[:, None, None]
  weights = 0.5 * widths + widths * rng.standard_normal((layers, *size))
  mask = rng.random(weights.shape) < 0.5
  weights[~mask] = 99.0
  return (
      {'w': jnp.asarray(weights, jnp.float32), 'b': None},
      {'w': jnp.asarray(mask), 'b': None},
  )


def test_revived_values_have_the_given_deviation_in_every_layer():
  params, mask = layers_to_revive()
  values = spdf.scaled_normal(0.5)(jax.random.key(0), 0, params, mask)
  assert values['b'] is None
  for revived, weights, kept in zip(values['w'], params['w'], mask['w']):
    wanted = 0.5 * np.std(np.asarray(weights, np.float64)[np.asarray(kept)])
    # 20,000 draws: the deviation is known to 0.5 %, the mean to 0.7 %.
    np.testing.assert_allclose(np.std(revived), wanted, rtol=0.02)
    assert abs(np.mean(revived)) < 0.03 * wanted


def test_values_of_pruned_weights_do_not_change_revived_ones():
  params, mask = layers_to_revive()
  other = {'w': jnp.where(mask['w'], params['w'], jnp.nan), 'b': None}
  draw = lambda p: spdf.scaled_normal(1.0)(jax.random.key(0), 0, p, mask)['w']
  np.testing.assert_array_equal(draw(params), draw(other))


def test_every_leaf_draws_numbers_of_its_own_whatever_the_others():
  draw = lambda params, mask: spdf.scaled_normal(1.0)(
      jax.random.key(0), 0, params, mask
  )
  params, mask = (dict.fromkeys('uv', x['w']) for x in layers_to_revive(1))
  both, alone = draw(params, mask), draw({'u': params['u']}, {'u': mask['u']})
  assert (both['u'] != both['v']).any()
  np.testing.assert_array_equal(alone['u'], both['u'])


def test_a_layer_without_kept_weights_gets_zeros():
  params, mask = layers_to_revive(2)
  mask = {'w': mask['w'].at[1].set(False), 'b': None}
  values = spdf.scaled_normal(1.0)(jax.random.key(0), 0, params, mask)['w']
  assert (values[1] == 0).all() and (values[0] != 0).any()

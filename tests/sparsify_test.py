"""The conformance suite of `sparsify`, with every optimizer."""

import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import slow_except

import spdf_jax as spdf

SHAPES = {
    'h_0': {'wi': {'kernel': (8, 16), 'bias': (16,)}},
    'h_1': {'wi': {'kernel': (16, 8), 'bias': (8,)}},
    'wte': {'embedding': (10, 8)},
}
OPTIMIZERS = {
    'adamw': lambda: optax.adamw(1e-2),
    'sgd': lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    'lion': lambda: optax.lion(1e-3),
    'adafactor': lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    'adafactor_full': lambda: optax.adafactor(1e-2, factored=False),
    'rmsprop': lambda: optax.rmsprop(1e-2, momentum=0.9),
    'lamb': lambda: optax.lamb(1e-2),
    'muon': lambda: optax.contrib.muon(1e-2),
    'schedule_free': lambda: optax.contrib.schedule_free_adamw(1e-2),
    'prodigy': lambda: optax.contrib.prodigy(1e-1),
    'noisy': lambda: optax.chain(
        optax.sgd(1e-2), optax.add_noise(1e-2, 0.5, key=0)
    ),
    'clipped': lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(1e-2)
    ),
    'inject_hyperparams': lambda: optax.inject_hyperparams(optax.adamw)(1e-2),
    'adabelief': lambda: optax.adabelief(1e-2),
    'novograd': lambda: optax.novograd(1e-2),
    'restarted': lambda: optax.chain(
        spdf.reset_state(optax.scale_by_adam(), [3]),
        optax.scale_by_learning_rate(1e-2),
    ),
}
def coin_mask(key, params, sparsities):
  """A mask without exact counts, quick to compile."""
  draw = lambda p, sparsity: jax.random.uniform(key, p.shape) >= sparsity
  return jax.tree.map(draw, params, sparsities)


ALGORITHMS = {
    'static': lambda: spdf.static(0.75),
    'join': lambda: spdf.join(
        [spdf.static(0.5), spdf.dense(), spdf.static(0.75)],
        [2, 4],
        enter=coin_mask,
    ),
}


def make_params(dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda shape: jnp.asarray(rng.standard_normal(shape), dtype), SHAPES,
      is_leaf=lambda x: isinstance(x, tuple),
  )


def make_grads(params, step):
  """Gradients of a parabola around fixed targets: dense, never zero."""
  target = make_params(seed=1)
  return jax.tree.map(
      lambda p, t: (p - t.astype(p.dtype)) * (1 + step), params, target
  )


class SpyState(NamedTuple):
  inner_state: Any
  seen: Any


def spying_on(inner):
  """Records in its state the arguments of the inner transformation."""
  def update(updates, state, params=None, **extra):
    seen = updates, state.inner_state, params
    updates, inner_state = inner.update(
        updates, state.inner_state, params, **extra
    )
    return updates, SpyState(inner_state, seen)

  def init(params):
    inner_state = inner.init(params)
    return SpyState(inner_state, (params, inner_state, params))

  return optax.GradientTransformationExtraArgs(init, update)


def off_mask_is_zero(tree, mask):
  zero = jax.tree.map(
      lambda m, x: m is None or bool(jnp.all(jnp.where(m, 0, x) == 0)),
      mask, tree, is_leaf=lambda x: x is None,
  )
  return all(jax.tree.leaves(zero))


@pytest.mark.parametrize('optimizer, algorithm', [
    ('adamw', 'static'),
    *slow_except(
        [('adamw', 'join'), ('adafactor', 'join'), ('clipped', 'join')],
        [(optimizer, 'join') for optimizer in OPTIMIZERS],
    ),
])
def test_pruned_weights_and_their_state_stay_exactly_zero(optimizer, algorithm):
  inner = optax.with_extra_args_support(OPTIMIZERS[optimizer]())
  tx = spdf.sparsify(spying_on(inner), ALGORITHMS[algorithm](), key=0)
  params = make_params()
  state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(state))
  update = jax.jit(tx.update)
  matched = 0
  for step in range(6):
    updates, state = update(make_grads(params, step), state, params)
    params = optax.apply_updates(params, updates)
    mask = spdf.get_mask(state)
    assert off_mask_is_zero(params, mask)
    grads_in, state_in, params_in = state.inner_state.seen
    assert off_mask_is_zero(grads_in, mask)
    assert off_mask_is_zero(params_in, mask)
    held = []
    spdf.map_like_params(
        lambda x, m, held=held: held.append((x, m)), state_in, params, mask
    )
    matched += len(held)
    for x, m in held:
      assert off_mask_is_zero([x], [m])
  if optimizer not in ('sgd', 'noisy', 'adafactor', 'novograd'):
    assert matched  # Otherwise nothing was checked.
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(params))


@pytest.mark.parametrize('dtype, algorithm', [
    ('bfloat16', 'join'), ('float16', 'static'),
])
def test_zeros_are_exact_in_low_precision(algorithm, dtype):
  tx = spdf.sparsify(optax.adamw(1e-2), ALGORITHMS[algorithm](), key=0)
  params = make_params(dtype)
  state = tx.init(params)
  update = jax.jit(tx.update)
  for step in range(6):  # Unmasked at first: the first step removes them.
    updates, state = update(make_grads(params, step), state, params)
    params = optax.apply_updates(params, updates)
    assert off_mask_is_zero(params, spdf.get_mask(state))
  assert jax.tree.leaves(params)[0].dtype == dtype


@pytest.mark.parametrize('wrapper', ['MultiSteps', 'apply_if_finite'])
def test_zeros_hold_inside_wrappers_of_whole_steps(wrapper):
  tx = spdf.sparsify(optax.adamw(1e-2), ALGORITHMS['join'](), key=0)
  tx = {
      'MultiSteps': lambda: optax.MultiSteps(tx, 2),
      'apply_if_finite': lambda: optax.apply_if_finite(tx, 5),
  }[wrapper]()
  params = make_params()
  state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(state))
  kept = []
  update = jax.jit(tx.update)
  for step in range(12):
    grads = make_grads(params, step)
    if wrapper == 'apply_if_finite' and step % 2:
      grads = jax.tree.map(lambda g: g * jnp.nan, grads)
    before = params, spdf.get_mask(state)
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    mask = spdf.get_mask(state)
    assert off_mask_is_zero(params, mask)
    kept.append(spdf.summarize(mask, params).kept)
    if wrapper == 'apply_if_finite' and step % 2:
      jax.tree.map(np.testing.assert_array_equal, before, (params, mask))
  # A change of the mask waits for a whole step.
  assert [n == kept[0] for n in kept[:4]] == [True] * 4
  assert kept[5] == kept[6] == 256 and kept[-1] < 128


def test_partition_around_sparsify_merges_the_masks():
  one = spdf.sparsify(optax.adam(1e-2), spdf.static(0.5), key=0)
  two = spdf.sparsify(optax.sgd(1e-2), spdf.static(0.75), key=0)
  label = lambda params: {
      'h_0': 'one', 'h_1': 'two', 'wte': 'rest'
  }
  tx = optax.partition(
      {'one': one, 'two': two, 'rest': optax.sgd(1e-2)}, label
  )
  params = make_params()
  state = tx.init(params)
  for step in range(3):
    updates, state = tx.update(make_grads(params, step), state, params)
    params = optax.apply_updates(params, updates)
  mask = spdf.get_mask(state)
  summary = spdf.summarize(mask, params)
  assert {n: s.sparsity for n, s in summary.layers.items()} == {
      'h_0/wi/kernel': 0.5, 'h_1/wi/kernel': 0.75
  }
  assert off_mask_is_zero(params, mask)
  assert mask['wte'] is None


@pytest.mark.parametrize('optimizer', slow_except(
    ['adamw', 'sgd', 'schedule_free'],
    ['adamw', 'sgd', 'schedule_free', 'adafactor', 'muon', 'prodigy',
     'restarted'],
))
def test_full_mask_is_the_inner_optimizer_bit_for_bit(optimizer):
  inner = optax.with_extra_args_support(OPTIMIZERS[optimizer]())
  tx = spdf.sparsify(inner, spdf.dense(), key=0)
  ours = theirs = make_params()
  state, inner_state = tx.init(ours), inner.init(theirs)
  for step in range(4):
    grads = make_grads(theirs, step)
    updates, state = tx.update(grads, state, ours)
    ours = optax.apply_updates(ours, updates)
    updates, inner_state = inner.update(grads, inner_state, theirs)
    theirs = optax.apply_updates(theirs, updates)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
  for one, other in zip(
      jax.tree.leaves(state.inner_state), jax.tree.leaves(inner_state)
  ):
    assert bool(jnp.all(one == other))


def test_full_mask_under_jit_stays_within_a_millionth():
  inner = optax.adamw(1e-2)
  tx = spdf.sparsify(inner, spdf.dense(), key=0)
  params = make_params()
  grads = make_grads(params, 0)
  ours, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  theirs, _ = jax.jit(inner.update)(grads, inner.init(params), params)
  jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-6), ours, theirs
  )


def test_one_compilation_for_all_sparsities():
  traces = []
  tx = spdf.sparsify(optax.adamw(1e-2), ALGORITHMS['join'](), key=0)

  @jax.jit
  def step(params, state, grads):
    traces.append(1)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = make_params()
  state = tx.init(params)
  for i in range(8):
    params, state = step(params, state, make_grads(params, i))
  assert len(traces) == 1


def test_jit_and_eager_give_the_same_masks():
  tx = spdf.sparsify(optax.sgd(1e-2), ALGORITHMS['join'](), key=7)
  params = make_params()
  eager, jitted = tx.init(params), jax.jit(tx.init)(params)
  jax.tree.map(np.testing.assert_array_equal, eager, jitted)


@pytest.mark.parametrize('odd', [np.inf, -np.inf, np.nan])
def test_masks_change_at_their_step_whatever_the_gradients_are(odd):
  algorithm = spdf.sparse_evolution(0.5, update_every=1, drop_fraction=0.5)
  tx = spdf.sparsify(optax.sgd(1e-2), algorithm, key=7)
  params = make_params()
  state = tx.init(params)._replace(count=jnp.int32(1))
  update = jax.jit(tx.update)
  after = lambda grads: update(grads, state, params)[1].mask
  wanted = after(make_grads(params, 0))
  got = after(jax.tree.map(lambda p: jnp.full_like(p, odd), params))
  jax.tree.map(np.testing.assert_array_equal, got, wanted)
  before, changed = jax.tree.leaves(state.mask), jax.tree.leaves(wanted)
  assert any((a != b).any() for a, b in zip(before, changed))


def test_init_works_from_shapes_alone():
  tx = spdf.sparsify(optax.adamw(1e-2), spdf.static(0.5), key=0)
  shapes = jax.eval_shape(tx.init, jax.eval_shape(make_params))
  assert shapes.mask['h_0']['wi']['kernel'].dtype == bool
  assert shapes.mask['h_0']['wi']['bias'] is None


def test_donating_the_state_leaves_the_users_key_alive():
  key = jax.random.key(3)
  tx = spdf.sparsify(optax.sgd(1e-2), spdf.static(0.5), key=key)
  params = make_params()
  state = tx.init(params)
  update = jax.jit(tx.update, donate_argnums=1)
  update(make_grads(params, 0), state, params)
  assert jax.random.bits(key).dtype == jnp.uint32


def test_map_params_survives_its_placeholder():
  tx = spdf.sparsify(optax.adam(1e-2), spdf.static(0.5), key=0)
  state = tx.init(make_params())
  doubled = optax.tree.map_params(tx, lambda x: 2 * x, state)
  assert jax.tree.structure(doubled) == jax.tree.structure(state)


def test_a_transformation_after_sparsify_loses_the_zeros():
  # Why the docstring says: last. Noise after it reaches pruned weights.
  tx = optax.chain(
      spdf.sparsify(optax.sgd(1e-2), spdf.static(0.5), key=0),
      optax.add_noise(1.0, 0.5, key=0),
  )
  params = make_params()
  state = tx.init(params)
  updates, state = tx.update(make_grads(params, 0), state, params)
  params = optax.apply_updates(params, updates)
  assert not off_mask_is_zero(params, spdf.get_mask(state))


def test_densify_continues_with_every_weight():
  tx = spdf.sparsify(optax.adam(1e-2), spdf.static(0.75), key=0)
  params = make_params()
  state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(state))
  for step in range(2):
    updates, state = tx.update(make_grads(params, step), state, params)
    params = optax.apply_updates(params, updates)
  moments = state.inner_state
  state = spdf.densify(state)
  jax.tree.map(np.testing.assert_array_equal, moments, state.inner_state)
  updates, state = tx.update(make_grads(params, 2), state, params)
  params = optax.apply_updates(params, updates)
  assert (params['h_0']['wi']['kernel'] != 0).all()


def test_parabola_converges_to_the_masked_target():
  tx = spdf.sparsify(optax.adam(5e-2), spdf.static(0.75), key=0)
  params = make_params()
  state = tx.init(params)
  target = make_params(seed=1)

  @jax.jit
  def step(params, state):
    grads = jax.tree.map(lambda p, t: p - t, params, target)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for _ in range(400):
    params, state = step(params, state)
  wanted = spdf.apply_mask(target, spdf.get_mask(state))
  jax.tree.map(
      functools.partial(np.testing.assert_allclose, atol=1e-2), params, wanted
  )


def test_where_that_selects_nothing_lists_the_paths():
  tx = spdf.sparsify(
      optax.sgd(1e-2), spdf.static(0.5), where=lambda p, x: False, key=0
  )
  with pytest.raises(ValueError, match=r'selects no leaf.*h_0/wi/kernel \(8'):
    tx.init(make_params())


def test_update_without_params_says_what_to_pass():
  tx = spdf.sparsify(optax.sgd(1e-2), spdf.static(0.5), key=0)
  params = make_params()
  with pytest.raises(ValueError, match='needs params'):
    tx.update(params, tx.init(params))


def test_an_untyped_key_is_refused():
  with pytest.raises(TypeError, match='give an int or a typed key'):
    spdf.sparsify(
        optax.sgd(1e-2), spdf.static(0.5), key=jax.random.PRNGKey(0)
    )


@pytest.mark.parametrize('read', [
    spdf.get_mask, spdf.densify, spdf.get_dense_grads,
])
def test_state_without_sparsify_is_refused(read):
  with pytest.raises(ValueError, match='holds no SparsifyState'):
    read(optax.adam(1e-2).init(make_params()))


@pytest.mark.parametrize('sparsity', [1.0, -0.5, float('nan'), 'cosine', True])
def test_static_refuses_an_impossible_sparsity_before_any_step(sparsity):
  with pytest.raises(ValueError, match=r'\[0, 1\)'):
    spdf.static(sparsity)


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


def test_values_are_as_wide_as_asked_in_every_layer():
  params, mask = layers_to_revive()
  values = spdf.scaled_normal(0.5)(jax.random.key(0), 0, params, mask)
  assert values['b'] is None
  for found, weights, kept in zip(values['w'], params['w'], mask['w']):
    wanted = 0.5 * np.std(np.asarray(weights, np.float64)[np.asarray(kept)])
    # 20,000 draws: the deviation is known to 0.5 %, the mean to 0.7 %.
    np.testing.assert_allclose(np.std(found), wanted, rtol=0.02)
    assert abs(np.mean(found)) < 0.03 * wanted


def test_pruned_weights_do_not_count():
  params, mask = layers_to_revive()
  other = {'w': jnp.where(mask['w'], params['w'], jnp.nan), 'b': None}
  draw = lambda p: spdf.scaled_normal(1.0)(jax.random.key(0), 0, p, mask)['w']
  np.testing.assert_array_equal(draw(params), draw(other))


def test_leaves_and_keys_draw_different_numbers():
  params, mask = layers_to_revive(1)
  params, mask = ({'u': t['w'], 'v': t['w']} for t in (params, mask))
  draw = lambda seed: spdf.scaled_normal(1.0)(
      jax.random.key(seed), 0, params, mask
  )
  one, other = draw(0), draw(1)
  assert (one['u'] != one['v']).any() and (one['u'] != other['u']).any()
  # Another leaf in the tree changes nothing.
  alone = spdf.scaled_normal(1.0)(
      jax.random.key(0), 0, {'u': params['u']}, {'u': mask['u']}
  )
  np.testing.assert_array_equal(alone['u'], one['u'])


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_values_have_the_dtype_of_the_parameters(dtype):
  params, mask = layers_to_revive()
  params = {'w': (params['w'] / 100).astype(dtype), 'b': None}
  values = spdf.scaled_normal(1.0)(jax.random.key(0), 0, params, mask)['w']
  assert values.dtype == dtype and jnp.isfinite(values).all()


def test_a_layer_without_kept_weights_gets_zeros():
  params, mask = layers_to_revive(2)
  mask = {'w': mask['w'].at[1].set(False), 'b': None}
  values = spdf.scaled_normal(1.0)(jax.random.key(0), 0, params, mask)['w']
  assert (values[1] == 0).all() and (values[0] != 0).any()


@pytest.mark.parametrize('scale', [0, float('nan')])
def test_a_scale_that_is_not_positive_is_refused(scale):
  with pytest.raises(ValueError, match='scale is .* positive'):
    spdf.scaled_normal(scale)

"""Bias correction of moments from every weight's own revival."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf

PARAMS = {
    'w': jnp.asarray(np.random.default_rng(0).standard_normal((8, 6)), 'f'),
    'b': jnp.zeros(6),
}
REVIVAL, STEPS = 5, 12
VARIABLE = spdf.join([spdf.static(0.5), spdf.dense()], [REVIVAL])


def grads_of(step, magnitude=None):
  rng = np.random.default_rng(step)
  draw = lambda p: jnp.asarray(
      rng.standard_normal(p.shape) if magnitude is None
      else magnitude * rng.choice([-1, 1], p.shape), 'f'
  )
  return jax.tree.map(draw, PARAMS)


def run(inner, steps=STEPS, algorithm=VARIABLE, draw=grads_of, jit=False):
  """Yields the mask before each step, its updates and the state after it."""
  tx = spdf.sparsify(inner, algorithm, key=0)
  update = jax.jit(tx.update) if jit else tx.update
  state = tx.init(PARAMS)
  for step in range(steps):
    mask = spdf.get_mask(state)
    params = spdf.apply_mask(PARAMS, mask)
    updates, state = update(draw(step), state, params)
    yield mask, updates, state


def age_of(state):
  return np.asarray(state.inner_state.age['w'])


@pytest.mark.parametrize('make', [
    optax.scale_by_adam,
    functools.partial(optax.scale_by_adam, nesterov=True),
    optax.scale_by_amsgrad, optax.scale_by_belief,
])
def test_a_revived_weight_is_updated_as_by_adam_from_its_revival(make):
  inner = make(b2=0.999)

  def started(name):
    # One leaf, with its count in its shape: XLA compiles leaves together with
    # other roundings, and divides by a scalar with its reciprocal.
    state = inner.init(PARAMS[name])
    if name == 'b':
      return state
    return state._replace(count=jnp.zeros(PARAMS[name].shape, jnp.int32))

  plain = {name: started(name) for name in PARAMS}
  late, whole = started('w'), inner.init(PARAMS)
  aged = run(spdf.with_age(inner))
  for step, (mask, updates, _) in enumerate(aged):
    grads, want = grads_of(step), {}
    for name in PARAMS:
      want[name], plain[name] = inner.update(grads[name], plain[name])
    if step < REVIVAL:
      kept = np.asarray(mask['w'])
    else:
      new, late = inner.update(grads['w'], late)
      np.testing.assert_array_equal(updates['w'][~kept], new[~kept])
    np.testing.assert_array_equal(updates['w'][kept], want['w'][kept])
    np.testing.assert_array_equal(updates['b'], want['b'])
    ordinary, whole = inner.update(grads, whole)
    np.testing.assert_allclose(
        updates['w'][kept], ordinary['w'][kept], rtol=1e-6
    )


@pytest.mark.parametrize('b2', [0.95, 0.99, 0.999])
def test_no_update_of_equally_large_gradients_exceeds_the_rate(b2):
  adam = optax.scale_by_adam(b2=b2)
  draw = functools.partial(grads_of, magnitude=0.01)
  late = spdf.join([spdf.static(0.5), spdf.dense()], [150])
  largest = lambda inner: max(
      float(jnp.abs(updates['w']).max())
      for _, updates, _ in itertools.islice(
          run(inner, 160, late, draw, jit=True), 150, None
      )
  )
  assert largest(spdf.with_age(adam)) <= 1
  # Without ages, the first update of a revived weight is this large.
  first = 0.1 / np.sqrt((1 - b2) / (1 - b2**151))
  assert largest(adam) >= 0.999 * first
  assert (largest(adam) > 1) == (b2 > 0.95)


def test_the_age_of_a_weight_that_is_pruned_again_begins_again():
  algorithm = spdf.sparse_evolution(0.5, drop_fraction=0.5, update_every=3)
  kept_before, want = None, np.zeros(PARAMS['w'].shape, int)
  for _, _, state in run(
      spdf.with_age(optax.scale_by_adam()), 20, algorithm
  ):
    kept = np.asarray(spdf.get_mask(state)['w'])
    want = np.where(kept, want + 1, 0)
    np.testing.assert_array_equal(age_of(state), want)
    assert age_of(state).dtype == np.int16
    kept_before = kept
  assert kept_before.any() and len(np.unique(want[kept_before])) > 2


def test_only_revived_weights_are_warmed_up():
  adam = optax.scale_by_adam()
  warm, plain = run(spdf.with_age(adam, warmup=3)), run(spdf.with_age(adam))
  for step, ((mask, got, _), (_, want, _)) in enumerate(zip(warm, plain)):
    if step < REVIVAL:
      kept, factor = np.asarray(mask['w']), 1
    else:
      factor = np.where(kept, 1, min((step - REVIVAL + 1) / 4, 1))
    np.testing.assert_allclose(got['w'], factor * want['w'], rtol=1e-6)
    np.testing.assert_array_equal(got['b'], want['b'])


def test_an_age_beyond_int16_counts_as_all_steps():
  adam = optax.scale_by_adam(b2=0.99999)
  tx = spdf.sparsify(spdf.with_age(adam), spdf.static(0.5), key=0)
  state = tx.init(PARAMS)
  inner = state.inner_state
  late = inner.inner_state._replace(count=jnp.int32(50_000))
  for age, count in ((2**15 - 2, 2**15 - 2), (2**15 - 1, 50_000)):
    ages = {'w': jnp.full((8, 6), age, jnp.int16), 'b': None}
    given = state._replace(inner_state=inner._replace(
        age=ages, inner_state=late
    ))
    updates, after = tx.update(PARAMS, given, PARAMS)
    kept = np.asarray(state.mask['w'])
    assert set(age_of(after)[kept].tolist()) == {2**15 - 1}
    want, _ = adam.update(PARAMS, late._replace(count=jnp.int32(count)))
    np.testing.assert_array_equal(updates['w'][kept], want['w'][kept])


def test_leaves_are_those_that_sparsify_selects():
  params = {'w': jnp.ones((4, 4)), 'none': jnp.zeros((0, 4))}
  where = lambda path, leaf: len(leaf.shape) == 2
  tx = spdf.sparsify(
      spdf.with_age(optax.scale_by_adam(), where=where), spdf.static(0.5),
      where=where, key=0,
  )
  updates, _ = tx.update(params, tx.init(params), params)
  assert updates['w'].any() and updates['none'].shape == (0, 4)


@pytest.mark.parametrize('wrap', [
    lambda tx: optax.masked(tx, {'w': True, 'v': False, 'b': True}),
    lambda tx: optax.partition(
        {'own': tx, 'rest': optax.sgd(1.0)},
        {'w': 'own', 'v': 'rest', 'b': 'own'},
    ),
])
@pytest.mark.parametrize('inner', [
    spdf.with_age(optax.scale_by_adam()), spdf.scale_by_density(1.0),
])
def test_some_of_the_parameters_are_scaled_as_all_are(wrap, inner):
  params = {**PARAMS, 'v': jnp.ones((8, 6))}
  states = [
      spdf.sparsify(tx, spdf.static(0.5), key=0) for tx in (inner, wrap(inner))
  ]
  want, got = (
      tx.update(params, tx.init(params), params)[0] for tx in states
  )
  np.testing.assert_array_equal(got['w'], want['w'])


def test_a_reset_of_the_moments_resets_the_ages():
  inner = spdf.reset_state(spdf.with_age(optax.scale_by_adam()), [3])
  *_, (_, _, state) = run(inner, 5, spdf.dense())
  assert set(state.inner_state.inner_state.age['w'].ravel().tolist()) == {2}


@pytest.mark.parametrize('inner, name', [
    (optax.scale_by_lion(), 'ScaleByLionState'),
    (optax.adamw(1e-3), 'tuple'),
    (optax.scale_by_novograd(), 'ScaleByNovogradState'),
])
def test_an_optimizer_without_second_moments_of_weights_is_refused(inner, name):
  with pytest.raises(ValueError, match=f'state {name}, which lacks a count'):
    spdf.with_age(inner).init(PARAMS)

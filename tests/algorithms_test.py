"""Algorithms inside `sparsify`, and bad input that they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import structures

TIMES = dict(update_every=3, update_until=12)
PARAMS = {
    f'h_{i}': {
        'kernel': jax.random.normal(jax.random.key(i), (16, 24)),
        'bias': jnp.ones(24),
    }
    for i in range(2)
}


def train(tx, steps, params=PARAMS):
  """Yields parameters, state and gradients at every step."""
  state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(state))

  @jax.jit
  def step(params, state, key):
    grads = jax.tree.map(lambda p: jax.random.normal(key, p.shape), params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, grads

  yield params, state, None
  for i in range(steps):
    params, state, grads = step(params, state, jax.random.key(100 + i))
    yield params, state, grads
  assert step._cache_size() == 1


def kernel(tree):
  return np.asarray(tree['h_0']['kernel'])


ALGORITHMS = {
    'gmp': spdf.gmp(spdf.cubic(0.0, 0.8, 9), **TIMES),
    'set': spdf.sparse_evolution(0.8, update_every=3),
    'rigl': spdf.rigl(0.8, **TIMES),
    'rigl, scheduled': spdf.rigl(spdf.cubic(0.5, 0.8, 9), **TIMES),
    'rigl, erk': spdf.rigl(0.8, distribution=spdf.erk, **TIMES),
    'rigl, 4 x 4': spdf.rigl(0.5, structure=structures.block(4, 4), **TIMES),
    'granet': spdf.granet(spdf.cubic(0.0, 0.8, 9), **TIMES),
    'granet, model': spdf.granet(
        spdf.cubic(0.5, 0.8, 9), distribution=spdf.model_wide, **TIMES
    ),
    'iterative': spdf.iterative([spdf.Round(4), spdf.Round(9, 0.3)]),
}


@pytest.mark.parametrize('name', ALGORITHMS)
def test_counts_are_those_asked_for_at_every_step(name):
  algorithm = ALGORITHMS[name]
  tx = spdf.sparsify(optax.adamw(1e-2), algorithm, key=0)
  layers = {'h_0': {'kernel': jnp.ones((1, 16, 24)), 'bias': None}}
  layers['h_1'] = layers['h_0']
  for i, (params, state, _) in enumerate(train(tx, 14)):
    mask = spdf.get_mask(state)
    sparsities = algorithm.sparsity_at(max(i - 1, 0), layers)
    if name == 'granet, model':
      found = sum(int(np.sum(m)) for m in jax.tree.leaves(mask))
      assert found == 768 - round(768 * sparsities.sparsity)
      continue
    assert kernel(mask).sum() == 384 - round(384 * sparsities['h_0']['kernel'])
    assert (kernel(params)[~kernel(mask)] == 0).all()


def test_rigl_keeps_the_number_of_weights_exactly():
  tx = spdf.sparsify(optax.adamw(1e-2), ALGORITHMS['rigl'], key=0)
  masks = [kernel(spdf.get_mask(s)) for _, s, _ in train(tx, 14)]
  assert {int(m.sum()) for m in masks} == {77}
  changed = [i for i in range(14) if (masks[i] != masks[i + 1]).any()]
  assert changed == [3, 6, 9]  # At 12 the drop fraction is zero.


def test_blocks_live_and_die_together():
  tx = spdf.sparsify(optax.adamw(1e-2), ALGORITHMS['rigl, 4 x 4'], key=0)
  *_, (_, state, _) = train(tx, 8)
  blocks = kernel(spdf.get_mask(state)).reshape(4, 4, 6, 4)
  kept = blocks.mean(axis=(1, 3))
  assert sorted(kept.ravel()) == [0] * 12 + [1] * 12


def test_grown_weights_start_at_zero_with_zero_moments():
  """Their first step is the first step of a fresh Adam, bias correction aside.
  """
  tx = spdf.sparsify(optax.sgd(0.1, momentum=0.9), ALGORITHMS['rigl'], key=0)
  states = list(train(tx, 4))
  (_, before, _), (params, after, grads) = states[3], states[4]
  grown = kernel(spdf.get_mask(after)) & ~kernel(spdf.get_mask(before))
  assert grown.any()
  np.testing.assert_allclose(
      kernel(params)[grown], -0.1 * kernel(grads)[grown], rtol=1e-6
  )


def test_a_skipped_gradient_step_moves_the_mask_only():
  algorithm = spdf.rigl(0.8, skip_gradient_step=True, **TIMES)
  tx = spdf.sparsify(optax.adamw(1e-2), algorithm, key=0)
  states = list(train(tx, 5))
  for i in range(5):
    (p, s, _), (q, t, _) = states[i], states[i + 1]
    both = kernel(spdf.get_mask(s)) & kernel(spdf.get_mask(t))
    same = (kernel(p)[both] == kernel(q)[both]).all()
    assert same == (i == 3)
    moments = s.inner_state[0].mu, t.inner_state[0].mu
    kept = [kernel(m)[both] for m in moments]
    assert (kept[0] == kept[1]).all() == (i == 3)
    # Its count goes on, or the learning rate would lag behind.
    assert int(t.inner_state[0].count) == i + 1
    if i == 3:
      assert (np.asarray(p['h_0']['bias']) == q['h_0']['bias']).all()
      assert (kernel(q)[~kernel(spdf.get_mask(t))] == 0).all()


def test_gradients_of_pruned_weights_are_asked_for_at_updates_only():
  tx = spdf.sparsify(optax.adamw(1e-2), ALGORITHMS['rigl'], key=0)
  asked = [bool(spdf.get_dense_grads(s)) for _, s, _ in train(tx, 14)]
  assert [i for i, a in enumerate(asked) if a] == [3, 6, 9, 12]


def test_rigl_under_multi_steps_grows_by_the_mean_gradient():
  inner = spdf.sparsify(
      optax.sgd(0.0), spdf.rigl(0.8, update_every=1, update_until=9), key=0
  )
  tx = optax.MultiSteps(inner, 2)
  state = tx.init(PARAMS)
  params = spdf.apply_mask(PARAMS, spdf.get_mask(state))
  rng = np.random.default_rng(0)
  batches = [
      jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), params)
      for _ in range(4)
  ]
  alone = inner.init(PARAMS)
  update = jax.jit(tx.update)
  for i in (0, 2):
    assert bool(spdf.get_dense_grads(state)) == (i == 2)
    for grads in batches[i:i + 2]:
      _, state = update(grads, state, params)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *batches[i:i + 2])
    _, alone = jax.jit(inner.update)(mean, alone, params)
    np.testing.assert_array_equal(
        kernel(spdf.get_mask(state)), kernel(spdf.get_mask(alone))
    )


def test_rigl_joins_into_dense_training():
  algorithm = spdf.join([ALGORITHMS['rigl'], spdf.dense()], [7])
  tx = spdf.sparsify(optax.adamw(1e-2), algorithm, key=0)
  kept = [int(kernel(spdf.get_mask(s)).sum()) for _, s, _ in train(tx, 9)]
  assert kept == [77] * 8 + [384] * 2


def test_ac_dc_falls_and_rises_by_magnitude():
  algorithm = spdf.gmp(
      spdf.periodic([0.0, 0.75], 3), update_every=3, update_until=12
  )
  tx = spdf.sparsify(optax.adamw(1e-2), algorithm, key=0)
  kept = [int(kernel(spdf.get_mask(s)).sum()) for _, s, _ in train(tx, 12)]
  assert kept == [384] * 4 + [96] * 3 + [384] * 3 + [96] * 3


@pytest.mark.parametrize('make, words', [
    (lambda: spdf.rigl(0.8, update_every=0, update_until=9), 'every is 0'),
    (lambda: spdf.rigl(1.0, **TIMES), 'sparsity is 1.0; it is the fraction'),
    (lambda: spdf.rigl(0.8, drop_fraction=1.5, **TIMES), 'fraction is 1.5'),
    (
        lambda: spdf.rigl(0.8, drop_fraction=lambda step: 1.5, **TIMES),
        r'drop_fraction is 1.5; give a number in \[0, 1\]',
    ),
    (
        lambda: spdf.rigl(lambda step: step / 10, **TIMES),
        'sparsity at step 12 is 1.2',
    ),
    (
        lambda: spdf.sparse_evolution(
            0.8, update_every=3, drop_fraction=spdf.cosine(0.3, 9)
        ),
        'update_until is None',
    ),
    (
        lambda: spdf.sparse_evolution(spdf.cubic(0, 0.5, 9), update_every=3),
        'have no last one',
    ),
    (
        lambda: spdf.sparse_evolution(0.8, update_every=3, drop='sign'),
        "drop is 'sign'; give 'magnitude' or 'signed'",
    ),
    (
        lambda: spdf.sparse_evolution(
            0.5, update_every=3, drop='signed',
            structure=structures.n_of_m(2, 4),
        ),
        'have no sign',
    ),
    (lambda: spdf.iterative([]), 'round'),
    (lambda: spdf.iterative([spdf.Round(9), spdf.Round(9, 1.0)]), 'fraction'),
    (
        lambda: spdf.iterative([spdf.Round(9)], distribution='erk'),
        "distribution is 'erk', but iterative prunes by 'uniform' or 'model_w",
    ),
])
def test_arguments_that_cannot_be_are_refused(make, words):
  with pytest.raises(ValueError, match=words):
    make()


@pytest.mark.parametrize('algorithm, words', [
    (
        spdf.rigl(0.99, drop_fraction=1e-3, **TIMES),
        'drops none of the .* kept per group',
    ),
    (
        spdf.rigl(0.75, structure=structures.n_of_m(2, 4), **TIMES),
        'sparsity is 0.75',
    ),
    (spdf.gmp(0.5, structure=structures.block(5, 8), **TIMES), 'block.* 5'),
    (spdf.rigl(0.9999, distribution=spdf.erk, **TIMES), 'erk needs one'),
    (
        spdf.iterative(
            [spdf.Round(9)], distribution='model_wide', structure='2:4'
        ),
        'one group of all layers, but the structure has groups with counts',
    ),
    (
        spdf.iterative(
            [spdf.Round(9), spdf.Round(9, 0.9999)], distribution='model_wide'
        ),
        'but one unit in every layer has',
    ),
    (
        spdf.rigl({'no/*': 0.5}, distribution=spdf.by_pattern, **TIMES),
        "'no/\\*'",
    ),
])
def test_what_does_not_fit_the_parameters_is_refused_at_init(algorithm, words):
  tx = spdf.sparsify(optax.adamw(1e-2), algorithm, key=0)
  with pytest.raises(ValueError, match=words):
    tx.init(PARAMS)


@pytest.mark.parametrize('drop', ['magnitude', 'signed'])
def test_no_weight_is_lost_where_few_are_pruned_and_none_regrows(drop):
  algorithm = spdf.sparse_evolution(
      0.1, update_every=1, drop=drop, regrow_dropped=False
  )
  tx = spdf.sparsify(optax.sgd(1e-2), algorithm, key=0)
  kept = [int(kernel(spdf.get_mask(s)).sum()) for _, s, _ in train(tx, 4)]
  assert kept == [384 - 38] * 5


@pytest.mark.parametrize('update_from', [0, 6])
def test_a_falling_model_wide_sparsity_is_refused(update_from):
  algorithm = spdf.gmp(
      spdf.periodic([0.9, 0.5], 6), update_every=6, update_from=update_from,
      update_until=6, distribution='model_wide',
  )
  tx = spdf.sparsify(optax.sgd(1e-2), algorithm, key=0)
  with pytest.raises(ValueError, match='model-wide sparsity falls'):
    tx.init(PARAMS)


@pytest.mark.parametrize('fractions', [(0.25,), (0.0, 0.25), (0.5, 0.5)])
def test_rounds_that_a_structure_cannot_have_are_refused(fractions):
  rounds = [spdf.Round(9, fraction) for fraction in fractions]
  algorithm = spdf.iterative(rounds, structure='2:4')
  tx = spdf.sparsify(optax.sgd(1e-2), algorithm, key=0)
  message = 'which keeps exactly 2 of 4'
  with pytest.raises(ValueError, match=message):
    tx.init(PARAMS)
  joined = spdf.join([spdf.dense(), algorithm], [1])
  with pytest.raises(ValueError, match=message):
    list(train(spdf.sparsify(optax.sgd(1e-2), joined, key=0), 1))


def test_rounds_may_end_at_the_sparsity_of_a_structure():
  algorithm = spdf.iterative(
      [spdf.Round(2), spdf.Round(2, 0.5)], structure='2:4'
  )
  tx = spdf.sparsify(optax.sgd(1e-2), algorithm, key=0)
  kept = [int(kernel(spdf.get_mask(s)).sum()) for _, s, _ in train(tx, 3)]
  assert kept == [384, 384, 384, 192]

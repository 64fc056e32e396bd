"""Algorithms inside `sparsify`, and integers of all kinds."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import structures
from tests import sparse_parabola as parabola
from tests.sparse_loop import trajectory

TIMES = parabola.TIMES
INTEGERS = [np.int64, np.uint8, np.array, jnp.array]
MADE_OF_INTEGERS = {
    'update_every': lambda i: dict(
        algorithm=spdf.rigl(0.5, update_every=i(2), update_until=i(6))),
    'boundaries': lambda i: dict(
        algorithm=spdf.join([spdf.static(0.5), spdf.dense()], [i(3)])),
    'steps': lambda i: dict(
        algorithm=spdf.gmp(spdf.cubic(0.1, 0.5, i(5)), update_every=2,
                           update_until=6)),
    'structure': lambda i: dict(
        algorithm=spdf.static(0.5, structure=spdf.structures.n_of_m(2, i(4)))),
    'groups': lambda i: dict(
        algorithm=spdf.static(0.5, structure=spdf.structures.balanced(i(4)))),
    'key': lambda i: dict(key=i(3)),
    'axes': lambda i: dict(where={'w': spdf.MatrixAxes(i(1), i(0))}),
    'stacked': lambda i: dict(where=spdf.where.stacked(
        spdf.where.hidden_matrices, axis=i(0)), stack=1),
    'lora': lambda i: dict(inner=spdf.lora(optax.sgd(0.1), 1, key=i(3))),
}


@pytest.mark.parametrize('name', MADE_OF_INTEGERS)
def test_integers_of_all_kinds_are_read_as_ints_and_bools_are_refused(name):
  def train(kind):
    given = dict(algorithm=spdf.static(0.5), key=0, inner=optax.sgd(0.1))
    given |= MADE_OF_INTEGERS[name](kind)
    w = jnp.asarray(np.random.default_rng(0).normal(size=(8, 12)))
    params = {'w': w[None] if given.pop('stack', 0) else w}
    tx = spdf.sparsify(given.pop('inner'), given.pop('algorithm'), **given)
    *_, (params, state) = trajectory(
        tx, params, lambda _, params: params, 7, jit=lambda update: update
    )
    return params, spdf.get_mask(state)

  expected = train(int)
  for kind in INTEGERS:
    jax.tree.map(np.testing.assert_array_equal, train(kind), expected)
  if name not in ('axes', 'stacked'):
    with pytest.raises((TypeError, ValueError), match=' is True; give '):
      train(bool)


def optimizer(name, inner=None, key=0):
  algorithm = parabola.CASES[name].make() if isinstance(name, str) else name
  return spdf.sparsify(inner or optax.adamw(0.1), algorithm, key=key)


def train(tx, steps):
  """Returns parameters and states: the first, and those after each step."""
  return list(parabola.train(tx, parabola.make_params(), steps))


def mask_of(state):
  return next(parabola.kernels(spdf.get_mask(state)))


def counts(algorithm, steps):
  """Returns how many weights of the first kernel are kept at every step."""
  states = train(optimizer(algorithm, optax.sgd(1e-2)), steps)
  return [int(mask_of(state).sum()) for _, state in states]


def test_a_loop_needs_no_call_besides_update():
  tx = optimizer('rigl')
  params = parabola.make_params()

  def body(carry, _):
    params, state = carry
    grads = jax.tree.map(jnp.subtract, params, parabola.TARGET)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  (params, state), _ = jax.jit(
      lambda carry: jax.lax.scan(body, carry, length=8)
  )((params, tx.init(params)))
  mask = spdf.get_mask(state)
  parabola.assert_zero_off_mask(params, mask)
  assert [int(m.sum()) for m in parabola.kernels(mask)] == [19, 19]


SCHEDULED = {
    'gmp': spdf.gmp,
    'set': spdf.sparse_evolution,
    'rigl': spdf.rigl,
    'granet': spdf.granet,
}


@pytest.mark.parametrize('name, every, until', [
    *((name, 5, 11) for name in SCHEDULED), ('rigl', 3, 12), ('gmp', 8, 12),
])
def test_the_last_mask_has_the_scheduled_sparsity(name, every, until):
  algorithm = SCHEDULED[name](
      spdf.cubic(0.0, 0.8, until), update_every=every, update_until=until
  )
  first = counts(algorithm, 0)[0]
  assert counts(algorithm, until + 2)[-1] == first - round(first * 0.8)
  regular = range(0 if name == 'gmp' else every, until + 1, every)
  steps = [t for t in range(until + 3) if algorithm.update_at(t)]
  assert steps == sorted({*regular, until})


@pytest.mark.parametrize('name', ['gmp', 'granet'])
def test_a_constant_sparsity_is_reached_by_a_cubic_schedule(name):
  times = dict(update_every=5, update_until=12)
  number, scheduled = (
      SCHEDULED[name](sparsity, **times)
      for sparsity in (0.8, spdf.cubic(0.0, 0.8, 12))
  )
  assert counts(number, 15) == counts(scheduled, 15)
  assert counts(number, 15)[0] > counts(number, 15)[6] > counts(number, 15)[15]


@pytest.mark.parametrize('name', SCHEDULED)
def test_no_update_is_added_where_the_sparsity_has_not_changed(name):
  for sparsity, every, steps in (
      (lambda step: 0.8, 5, [5, 10]),
      (spdf.cubic(0.0, 0.8, 9), 5, [5, 10]),
      (spdf.periodic([0.0, 0.8], 4), 10, [5]),
      (spdf.cubic(0.0, 0.8, 12), [5, 10], [5, 10]),  # A list of steps.
      (spdf.cubic(0.0, 0.8, 12), lambda t: t in (5, 10), [5, 10]),
  ):
    algorithm = SCHEDULED[name](
        sparsity, update_every=every, update_from=5, update_until=12
    )
    assert [t for t in range(15) if algorithm.update_at(t)] == steps


@pytest.mark.parametrize('name, dtype', [
    ('set', 'float32'), ('rigl', 'bfloat16'), ('granet', 'float32'),
])
def test_no_gradient_takes_the_place_of_a_surviving_weight(name, dtype):
  algorithm = {
      'set': lambda: spdf.sparse_evolution(0.5, **TIMES),
      'rigl': lambda: spdf.rigl(0.5, **TIMES),
      'granet': lambda: spdf.granet(
          lambda step: 0.5, drop_fraction=0.3, **TIMES
      ),
  }[name]()
  rng = np.random.default_rng(0)
  w = jnp.asarray(rng.normal(size=(1, 64, 64)), dtype)
  params = {'w': w}
  mask = algorithm.init(jax.random.key(0), params)
  grads = {'w': jnp.full_like(w, 3e38)}
  new = algorithm.update(jax.random.key(1), 3, mask, params, grads)
  old, new = (np.asarray(m['w']) for m in (mask, new))
  assert old.sum() == new.sum() == 2048
  # floor(f 2048) are dropped, f = 0.3 (1 + cos(pi / 4)) / 2.
  dropped = 614 if name == 'set' else 524
  magnitudes = np.sort(np.abs(np.asarray(w, np.float32))[old])
  safe = old & (np.abs(np.asarray(w, np.float32)) > magnitudes[dropped])
  assert safe.sum() > 1400 and new[safe].all()


def test_weights_of_a_block_are_pruned_and_grown_together():
  algorithm = spdf.rigl(0.5, structure=structures.block(2, 2), **TIMES)
  *_, (_, state) = train(optimizer(algorithm), 8)
  blocks = mask_of(state).reshape(4, 2, 6, 2).mean(axis=(1, 3))
  assert sorted(blocks.ravel()) == [0] * 12 + [1] * 12


def test_grown_weights_start_at_zero_with_zero_momentum():
  states = train(optimizer('rigl', optax.sgd(0.1, momentum=0.9)), 4)
  (_, before), (params, after) = states[3:5]
  grown = mask_of(after) & ~mask_of(before)
  assert grown.any()
  target = next(parabola.kernels(parabola.TARGET))
  np.testing.assert_allclose(
      next(parabola.kernels(params))[grown], 0.1 * target[grown], rtol=1e-6
  )


@pytest.mark.parametrize('inner', [
    optax.adafactor(0.1, factored=False, momentum=0.9),
    optax.contrib.muon(0.1),
], ids=['adafactor', 'muon'])
def test_moments_of_grown_weights_are_zero(inner):
  seen = []

  def spy(updates, state, params=None, **extra):
    jax.debug.callback(
        lambda *args: seen.append(args), state, params, ordered=True
    )
    return inner.update(updates, state, params, **extra)

  spied = optax.GradientTransformationExtraArgs(inner.init, spy)
  steps = train(optimizer('rigl', spied), 4)
  jax.effects_barrier()
  masks = [list(parabola.kernels(spdf.get_mask(s))) for _, s in steps]
  checked = 0
  for i, layer in enumerate(('h_0', 'h_1')):
    grown = masks[4][i] & ~masks[3][i]
    assert grown.any()
    for path, x in jax.tree_util.tree_leaves_with_path(seen[3]):
      if np.shape(x) == (8, 12) and layer in jax.tree_util.keystr(path):
        # Adafactor makes 1e-30 of zero gradients.
        assert (np.abs(np.asarray(x)[grown]) < 1e-29).all(), path
        checked += 1
  assert checked >= 4


def test_a_skipped_gradient_step_moves_the_mask_only():
  algorithm = spdf.rigl(0.8, skip_gradient_step=True, **TIMES)
  states = train(optimizer(algorithm), 5)
  kernel = lambda tree: next(parabola.kernels(tree))
  for i in range(5):
    (p, s), (q, t) = states[i:i + 2]
    both = mask_of(s) & mask_of(t)
    assert (kernel(p)[both] == kernel(q)[both]).all() == (i == 3)
    one, other = (kernel(x.inner_state[0].mu)[both] for x in (s, t))
    assert (one == other).all() == (i == 3)
    # The count goes on, or the learning rate would lag behind.
    assert int(t.inner_state[0].count) == i + 1
    if i == 3:
      assert (p['h_0']['bias'] == q['h_0']['bias']).all()
      assert (kernel(q)[~mask_of(t)] == 0).all()


def test_gradients_of_pruned_weights_are_requested_at_updates_only():
  states = train(optimizer('rigl'), 14)
  wanted = [bool(spdf.get_dense_grads(s)) for _, s in states]
  assert [i for i, dense in enumerate(wanted) if dense] == [3, 6, 9, 12]


@pytest.mark.parametrize('name, bad', [('gmp', np.nan), ('set', np.inf)])
def test_gradients_of_pruned_weights_may_be_anything_between_updates(name, bad):
  tx = optimizer(name)
  step = parabola.make_step(tx)
  clean = spoilt = train(tx, 0)[0]
  for i in range(6):
    off_mask = jax.tree.map(np.copy, parabola.ZERO)
    if i not in parabola.CASES[name].updates:
      masks = parabola.kernels(spdf.get_mask(spoilt[1]))
      for x, m in zip((off_mask['h_0'], off_mask['h_1']), masks):
        x['kernel'][~m] = bad
    clean, spoilt = step(*clean, parabola.ZERO), step(*spoilt, off_mask)
    parabola.assert_equal(spoilt, clean)


def test_masks_are_computed_at_updates_only():
  algorithm = parabola.CASES['rigl'].make()
  calls = []

  def update(key, count, *trees):
    jax.debug.callback(lambda count: calls.append(int(count)), count)
    return algorithm.update(key, count, *trees)

  train(optimizer(algorithm._replace(update=update)), 8)
  jax.effects_barrier()
  assert calls == [step for step in parabola.CASES['rigl'].updates if step < 8]


def test_a_restored_state_grows_the_same_under_another_seed():
  whole = train(optimizer('set'), 8)
  other = optimizer('set', key=1)
  blank = parabola.make_params(seed=5)
  saved = flax.serialization.to_bytes(whole[2])
  params, state = flax.serialization.from_bytes(
      (blank, other.init(blank)), saved
  )
  step = parabola.make_step(other)
  for wanted in whole[3:]:
    params, state = step(params, state, parabola.ZERO)
    parabola.assert_equal((params, state), wanted)


def test_rigl_under_multi_steps_grows_by_the_mean_gradient():
  algorithm = spdf.rigl(0.8, update_every=1, update_until=9)
  inner = optimizer(algorithm, optax.sgd(0.0))
  params = parabola.make_params()
  state, alone = optax.MultiSteps(inner, 2).init(params), inner.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(alone))
  update = jax.jit(optax.MultiSteps(inner, 2).update)
  update_alone = jax.jit(inner.update)
  batches = [parabola.make_params(seed=seed) for seed in range(10, 14)]
  for i in (0, 2):
    assert bool(spdf.get_dense_grads(state)) == (i == 2)
    for grads in batches[i:i + 2]:
      _, state = update(grads, state, params)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *batches[i:i + 2])
    _, alone = update_alone(mean, alone, params)
    np.testing.assert_array_equal(mask_of(state), mask_of(alone))


@pytest.mark.parametrize('name', ['rigl', 'granet, model'])
def test_gradients_that_are_not_finite_change_nothing(name):
  """Neither at updates of the mask nor between them."""
  tx = optax.apply_if_finite(optimizer(name), 2)
  once = jax.tree.map(np.copy, parabola.ZERO)
  once['h_1']['kernel'][7, 11] = np.inf
  everywhere = jax.tree.map(lambda x: x + np.float32('nan'), parabola.ZERO)
  step = parabola.make_step(tx)
  plain = params, state = train(tx, 0)[0]
  for i in range(7):
    before = parabola.to_host((params, state.inner_state))
    for number, bad in enumerate((everywhere, once)):
      params, state = step(params, state, bad)
      parabola.assert_equal((params, state.inner_state), before)
      assert int(state.notfinite_count) == number + 1
    params, state = step(params, state, parabola.ZERO)
    plain = step(*plain, parabola.ZERO)
    parabola.assert_equal(
        (params, state.inner_state), (plain[0], plain[1].inner_state)
    )
    assert int(state.total_notfinite) == 2 * (i + 1)


@pytest.mark.parametrize('drop', ['magnitude', 'signed'])
def test_counts_stay_exact_if_dropped_weights_may_not_regrow(drop):
  algorithm = spdf.sparse_evolution(
      0.1, update_every=1, drop=drop, regrow_dropped=False
  )
  assert counts(algorithm, 4) == [96 - 10] * 5


def test_rounds_may_end_at_the_sparsity_of_a_structure():
  algorithm = spdf.iterative(
      [spdf.Round(2), spdf.Round(2, 0.5)], structure='2:4'
  )
  assert counts(algorithm, 3) == [96, 96, 96, 48]


def test_the_last_step_of_int32_is_a_boundary():
  last = 2**31 - 1
  algorithm = spdf.join([spdf.static(0.5), spdf.dense()], [last])
  at = lambda step: algorithm.sparsity_at(step, {'w': np.ones((2, 2))})['w']
  assert (at(last - 1), at(last)) == (0.5, 0.0)

"""`join`: sparsities, masks and trajectories across boundaries."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf

PARAMS = {'w': jnp.linspace(-1, 1, 64).reshape(8, 8), 'b': jnp.zeros(8)}


def run(algorithm, steps, learning_rate=0.1, optimizer=optax.adam):
  """Trains a parabola; returns parameters and masks after every step."""
  tx = spdf.sparsify(optimizer(learning_rate), algorithm, key=3)
  params, state = PARAMS, tx.init(PARAMS)
  params = spdf.apply_mask(params, spdf.get_mask(state))
  update = jax.jit(tx.update)
  history = []
  for _ in range(steps):
    grads = jax.tree.map(lambda p: p - 2.0, params)
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    history.append((params, spdf.get_mask(state)['w'], state))
  return history


def test_kept_weights_are_exact_in_every_segment():
  sparsities = [0.75, 0.0, 0.5, 0.25]
  algorithm = spdf.join([spdf.static(s) for s in sparsities], [2, 4, 6])
  kept = [int(mask.sum()) for _, mask, _ in run(algorithm, 8)]
  assert kept == [16, 16, 64, 64, 32, 32, 48, 48]


def test_rising_sparsity_prunes_the_smallest_weights():
  algorithm = spdf.join([spdf.dense(), spdf.static(0.75)], [3])
  history = run(algorithm, 4)
  before, after = history[2][0]['w'], history[3][1]
  threshold = jnp.sort(jnp.abs(before).ravel())[-16]
  np.testing.assert_array_equal(after, jnp.abs(before) >= threshold)


def test_falling_sparsity_keeps_what_is_there_and_revives_the_rest():
  algorithm = spdf.join([spdf.static(0.75), spdf.static(0.5)], [3])
  history = run(algorithm, 4)
  old, new = history[2][1], history[3][1]
  assert int((old & ~new).sum()) == 0 and int((new & ~old).sum()) == 16
  # Revived at random, not the first zeros of the matrix.
  revived = np.flatnonzero(np.asarray(new & ~old))
  zeros = np.flatnonzero(np.asarray(~old))
  assert revived.tolist() != zeros[:16].tolist()


def test_dense_phase_equals_training_the_sparse_weights_densely():
  # Oracle: static to the boundary, then the plain inner optimizer, whose
  # state it takes over.
  joined = run(spdf.join([spdf.static(0.75), spdf.dense()], [3]), 6)
  params, _, state = run(spdf.static(0.75), 3)[-1]
  inner, inner_state = optax.adam(0.1), state.inner_state
  update = jax.jit(inner.update)
  for step in range(3, 6):
    grads = jax.tree.map(lambda p: p - 2.0, params)
    updates, inner_state = update(grads, inner_state, params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(joined[step][0]['w'], params['w'], rtol=1e-6)


def test_boundary_steps_ask_for_dense_gradients_beforehand():
  algorithm = spdf.join([spdf.static(0.75), spdf.dense()], [3])
  asked = [bool(spdf.get_dense_grads(s)) for _, _, s in run(algorithm, 5)]
  assert asked == [False, False, True, False, False]


def test_members_see_steps_since_their_start():
  seen = []

  def watcher(name):
    return spdf.Algorithm(
        sparsity_at=lambda count, params: {'w': 0.5, 'b': None},
        init=lambda key, params: {'w': jnp.ones((1, 8, 8), bool), 'b': None},
        update=lambda key, count, mask, params, grads: mask,
        update_at=lambda count: seen.append((name, int(count))) or False,
        dense_grads_at=lambda count: False,
    )

  algorithm = spdf.join([watcher('a'), watcher('b')], [5])
  algorithm.update_at(7)
  assert seen == [('a', 7), ('b', 2)]


def test_sparsities_are_known_on_the_host():
  algorithm = spdf.join([spdf.static(0.9), spdf.dense()], [5])
  for count, sparsity in ((0, 0.9), (4, 0.9), (5, 0.0), (9, 0.0)):
    assert algorithm.sparsity_at(count, PARAMS)['w'] == sparsity


def test_joins_nest():
  inner = spdf.join([spdf.static(0.5), spdf.dense()], [2])
  algorithm = spdf.join([spdf.static(0.75), inner], [2])
  kept = [int(mask.sum()) for _, mask, _ in run(algorithm, 6)]
  assert kept == [16, 16, 32, 32, 64, 64]


@pytest.mark.parametrize('boundaries', [[5, 5], [5, 3], [0, 3], [-1, 3], [3]])
def test_boundaries_that_do_not_rise_or_match_are_refused(boundaries):
  members = [spdf.static(0.5), spdf.dense(), spdf.static(0.5)]
  with pytest.raises(ValueError, match='boundar'):
    spdf.join(members, boundaries)


def test_algorithms_are_made_by_name():
  spec = {'algorithm': 'static', 'sparsity': 0.5}
  assert spdf.create_algorithm(spec).sparsity_at(0, PARAMS)['w'] == 0.5
  assert spdf.create_algorithm(0.25).sparsity_at(0, PARAMS)['w'] == 0.25


def test_an_unknown_algorithm_is_refused_with_the_nearest_name():
  with pytest.raises(ValueError, match="did you mean 'static'"):
    spdf.create_algorithm({'algorithm': 'statics', 'sparsity': 0.5})


@pytest.mark.parametrize('wrap', [
    lambda member: member,
    lambda member: spdf.partition({'all': member}, [('*', 'all')]),
    lambda member: spdf.join([member, spdf.dense()], [9]),
])
@pytest.mark.parametrize('make', [
    lambda: spdf.static(0.5, structure='2:4'),
    lambda: spdf.rigl(
        0.5, structure='2:4', update_every=5, update_until=9,
        drop_fraction=lambda step: 0.5,
    ),
    lambda: spdf.iterative(
        [spdf.Round(9, 0.5)], structure=spdf.structures.n_of_m(2, 4)
    ),
])
def test_the_mask_at_a_boundary_has_the_structure_of_its_member(make, wrap):
  algorithm = spdf.join([spdf.dense(), wrap(make())], [2])
  mask = np.asarray(run(algorithm, 4)[-1][1])
  assert (mask.reshape(2, 4, 8).sum(1) == 2).all()


def test_steps_of_updates_are_bools_on_the_host():
  algorithm = spdf.join([spdf.dense(), spdf.static(0.5)], [2])
  for at in (algorithm.update_at, algorithm.dense_grads_at):
    assert [at(count) for count in (1, 2, 3)] == [False, True, False]
    assert all(type(at(count)) is bool for count in (1, 2, 3))

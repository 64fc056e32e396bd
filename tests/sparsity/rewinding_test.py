"""Rewinding: rounds, the sawtooth of learning rates, weights set back."""

import itertools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.algorithms.iterative import Round
from spdf_jax.sparsity.algorithms.iterative import round_starts
from spdf_jax.sparsity.counts import number_kept
from spdf_jax.sparsity.rewinding import rewind_schedule
from spdf_jax.sparsity.rewinding import rewind_weights
from tests.sparse_loop import main_computation
from tests.sparse_loop import trajectory

ROUNDS = (Round(5), Round(4, 0.25, 2), Round(3, 0.5, 1))
STARTS = round_starts(ROUNDS)[1:]
PARAMS = {
    'w': jnp.linspace(-1, 1, 64).reshape(8, 8), 'b': jnp.linspace(1, 2, 8)
}
MANY_ROUNDS = st.lists(
    st.builds(Round, st.integers(1, 9), st.just(0.2), st.integers(0, 9)),
    min_size=1, max_size=6,
)


def train(tx, steps, params=PARAMS):
  """Trains weights towards two; returns those before and after each step."""
  pull = lambda _, params: jax.tree.map(lambda p: p - 2, params)
  pairs = itertools.pairwise(trajectory(tx, params, pull, steps))
  return [(before, *after) for (before, _), after in pairs]


def rewound(steps=12, rounds=ROUNDS, snapshot_at=2, params=PARAMS, **options):
  inner = options.pop('inner', optax.adam(0.1))
  tx = spdf.sparsify(inner, spdf.iterative(rounds), key=0)
  tx = rewind_weights(tx, round_starts(rounds)[1:], snapshot_at=snapshot_at)
  return train(tx, steps, params)


def test_learning_rate_is_an_exact_sawtooth():
  base = [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.125]
  schedule = rewind_schedule(lambda step: jnp.asarray(base)[step], ROUNDS)
  wanted = [0.0, 0.5, 1.0, 0.75, 0.5]
  wanted += [1.0, 0.75, 0.5, 0.25] + [0.5, 1.0, 0.75]
  assert [float(schedule(t)) for t in range(12)] == wanted
  assert jax.jit(jax.vmap(schedule))(jnp.arange(12)).tolist() == wanted


@settings(deadline=None, max_examples=50)
@given(MANY_ROUNDS)
def test_a_rewound_schedule_repeats_the_steps_of_each_round(rounds):
  wanted = [r.rewind_to + i for r in rounds for i in range(r.steps)]
  wanted += [wanted[-1] + 1, wanted[-1] + 2]  # The last round goes on.
  schedule = rewind_schedule(lambda step: step, rounds)
  assert [schedule(t) for t in range(len(wanted))] == wanted


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_weights_go_back_to_the_snapshot_when_a_round_begins(dtype):
  history = rewound(params=jax.tree.map(lambda p: p.astype(dtype), PARAMS))
  snapshot = history[2][0]
  for start, sparsity in ((5, 0.25), (9, 0.625)):
    before, after, state = history[start]
    mask = spdf.get_mask(state)
    assert int(mask['w'].sum()) == number_kept(64, sparsity)
    # Chosen by the trained weights, not by the snapshot.
    np.testing.assert_array_equal(
        mask['w'], spdf.init.magnitude(None, before, sparsity)['w']
    )
    wanted = spdf.apply_mask(snapshot, mask)
    assert after['w'].dtype == dtype
    for name in PARAMS if dtype == 'float32' else ():
      larger = np.maximum(np.abs(before[name]), np.abs(wanted[name]))
      error = np.abs(np.float64(after[name]) - np.float64(wanted[name]))
      assert (error <= np.spacing(larger)).all()
    assert (np.asarray(after['w'])[~np.asarray(mask['w'])] == 0).all()


def test_the_snapshot_is_taken_once_and_stays_bit_for_bit():
  history = rewound(snapshot_at=3)
  for i, (_, _, state) in enumerate(history):
    source = history[0][0] if i < 3 else history[3][0]
    jax.tree.map(np.testing.assert_array_equal, state.snapshot, source)


def test_no_gradient_of_weights_that_are_gone_enters_the_moments():
  moment = lambda state: state.inner_state.inner_state[0].mu['b']
  history = rewound(inner=optax.adam(0.1, b1=0.5))
  before, after = moment(history[4][2]), moment(history[5][2])
  np.testing.assert_allclose(after, before / 2, rtol=1e-6)
  # And `restart` clears them.
  starts = round_starts(ROUNDS)
  history = rewound(inner=optax.chain(
      spdf.reset_state(optax.scale_by_adam(), starts), optax.scale(-0.1)
  ))
  state = history[5][2].inner_state.inner_state[0].inner_state
  assert (state.mu['b'] == 0).all() and (state.nu['b'] == 0).all()


def test_a_rewound_run_does_not_depend_on_what_is_jitted_or_donated():
  tx = rewind_weights(
      spdf.sparsify(optax.sgd(0.1), spdf.iterative(ROUNDS), key=0), STARTS,
      snapshot_at=2,
  )
  runs = []
  for jit in (lambda f: f, lambda f: jax.jit(f, donate_argnums=(0, 1))):
    def step(params, state):
      grads = jax.tree.map(lambda p: p - 2, params)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    step = jit(step)
    for _ in range(10):
      params, state = step(params, state)
    runs.append((params, spdf.get_mask(state)))
  (one, mask), (other, other_mask) = runs
  np.testing.assert_array_equal(mask['w'], other_mask['w'])
  np.testing.assert_allclose(one['w'], other['w'], rtol=1e-5, atol=1e-7)


def test_ordinary_steps_copy_no_parameters():
  tx = rewind_weights(
      spdf.sparsify(optax.sgd(0.1), spdf.static(0.5), key=0), STARTS,
      snapshot_at=2,
  )
  main = main_computation(tx, {'w': jnp.ones((128, 256))})
  assert [x for x in main if 'conditional(' in x]
  assert not [x for x in main if '[128,256]' in x and 'copy(' in x]

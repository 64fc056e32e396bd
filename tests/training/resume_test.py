"""Runs that are stopped at any step resume bit for bit from checkpoints."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.algorithms import iterative
from tests.sparse_parabola import assert_equal
from tests.sparse_parabola import CASES
from tests.sparse_parabola import make_params
from tests.sparse_parabola import make_step
from tests.sparse_parabola import TIMES
from tests.sparse_parabola import train
from tests.sparse_parabola import ZERO
from tests.tiers import slow_except

STEPS = 14
ROUNDS = [spdf.Round(4), spdf.Round(5, 0.3, 2), spdf.Round(9, 0.25, 2)]
RATE = optax.linear_schedule(0.1, 0.0, 20)


def rewinding(key):
  inner = optax.chain(
      spdf.reset_state(optax.scale_by_adam(), [4, 9]),
      optax.scale_by_learning_rate(spdf.rewind_schedule(RATE, ROUNDS)),
  )
  tx = spdf.sparsify(inner, spdf.iterative(ROUNDS), key=key)
  starts = iterative.round_starts(ROUNDS)
  return spdf.rewind_weights(tx, starts[1:], snapshot_at=2)


def cycling(key):
  algorithm = spdf.gmp(spdf.periodic([0.0, 0.5, 0.8], 3), **TIMES)
  return spdf.sparsify(optax.adamw(RATE), algorithm, key=key)


def tracked(key):
  algorithm = CASES['rigl'].make()
  return spdf.sparsify(optax.adamw(RATE), algorithm, key=key, track=True)


def revived_at_random(key):
  return spdf.sparsify(
      optax.adamw(RATE), CASES['join'].make(), key=key,
      revive=spdf.scaled_normal(0.5),
  )


def of_case(name):
  case = CASES[name]
  return lambda key: case.wrap(optax.adamw(RATE), case.make(), key=key)


OPTIMIZERS = {name: of_case(name) for name in CASES} | {
    'rewind_weights': rewinding,
    'cycle': cycling,
    'track': tracked,
    'revive': revived_at_random,
    'MultiSteps': lambda key: optax.MultiSteps(of_case('rigl')(key), 2),
}


@pytest.mark.parametrize('name', slow_except(
    ['static', 'rigl', 'granet, model', 'rewind_weights', 'revive', 'join',
     'hard_threshold'],
    OPTIMIZERS,
))
def test_a_run_continues_bit_for_bit_wherever_it_was_stopped(name):
  make = OPTIMIZERS[name]
  whole = list(train(make(0), make_params(), STEPS))
  saved = [flax.serialization.to_bytes(pair) for pair in whole]
  # Another process knows nothing of the first: not its key, nor its weights.
  tx = make(1)
  other = make_params(seed=5)
  blank = other, tx.init(other)
  step = make_step(tx)
  # Each step from what was saved before it is the step that was taken: then
  # so are all steps from anywhere, at updates and between them.
  for i, before in enumerate(saved[:-1]):
    restored = jax.tree.map(
        jnp.asarray, flax.serialization.from_bytes(blank, before)
    )
    assert_equal(step(*restored, ZERO), whole[i + 1])
  assert step._cache_size() == 1


@pytest.mark.parametrize('name', ['set', 'rigl'])
def test_a_state_is_restored_from_numpy_with_every_leaf(name):
  tx = OPTIMIZERS[name](0)
  params, state = list(train(tx, make_params(), 4))[-1]
  host = jax.tree.map(np.asarray, (params, state))
  assert_equal(host, (params, state))
  again = make_step(tx)(*jax.tree.map(jnp.asarray, host), ZERO)
  assert_equal(again, make_step(tx)(params, state, ZERO))

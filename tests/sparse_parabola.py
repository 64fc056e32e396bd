"""Sparse training of a parabola with every algorithm.

Shared by the tests of what holds for all algorithms.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spdf_jax as spdf
from spdf_jax.sparsity.algorithms import largest
from spdf_jax.sparsity.hard_threshold import threshold_by

SHAPES = {
    'h_0': {'kernel': (8, 12), 'bias': (12,)},
    'h_1': {'kernel': (8, 12), 'bias': (12,)},
    'wte': {'embedding': (5, 8)},
}
SIZE = 96  # Weights of each of the two sparsified kernels.
TIMES = dict(update_every=3, update_until=12)


class Case(NamedTuple):
  """An algorithm, and the number of weights that it keeps."""

  make: Callable[[], spdf.Algorithm]

  kept: Callable[[int], tuple[int, int]]
  """Of both kernels together and of the first, `None` where that is free,
  after the step that has this number."""

  updates: tuple[int, ...]
  """The steps that change the mask."""

  wrap: Callable[..., optax.GradientTransformationExtraArgs] = spdf.sparsify
  """`(inner, algorithm, *, key) -> optimizer`."""


def evenly(kept):
  return lambda step: (2 * kept(step), kept(step))


def cubic(initial, final, step):
  """The sparsity of the last of the updates at 0, 3, 6 … 12; it rises to 9."""
  left = 1 - min(step // 3 * 3, 9) / 9
  return final + (initial - final) * left ** 3


def at(sparsity, size=SIZE):
  return size - round(size * sparsity)


CASES = {
    'static': Case(lambda: spdf.static(0.8), evenly(lambda _: 19), ()),
    'gmp': Case(
        lambda: spdf.gmp(spdf.cubic(0.0, 0.8, 9), **TIMES),
        evenly(lambda step: at(cubic(0.0, 0.8, step))), (0, 3, 6, 9, 12),
    ),
    'set': Case(
        lambda: spdf.sparse_evolution(0.8, **TIMES),
        evenly(lambda _: 19), (3, 6, 9, 12),
    ),
    'set, signed': Case(
        lambda: spdf.sparse_evolution(0.8, drop='signed', **TIMES),
        evenly(lambda _: 19), (3, 6, 9, 12),
    ),
    'rigl': Case(
        lambda: spdf.rigl(0.8, **TIMES), evenly(lambda _: 19), (3, 6, 9, 12)
    ),
    'rigl, scheduled': Case(
        lambda: spdf.rigl(spdf.cubic(0.5, 0.8, 9), **TIMES),
        evenly(lambda step: at(cubic(0.5, 0.8, step))), (3, 6, 9, 12),
    ),
    'rigl, 2 of 4': Case(
        lambda: spdf.rigl(
            0.5, structure=spdf.structures.n_of_m(2, 4),
            drop_fraction=lambda _: 0.5,
            **TIMES,
        ),
        evenly(lambda _: 48), (3, 6, 9, 12),
    ),
    'granet': Case(
        lambda: spdf.granet(spdf.cubic(0.5, 0.8, 9), **TIMES),
        evenly(lambda step: at(cubic(0.5, 0.8, step))), (3, 6, 9, 12),
    ),
    'granet, model': Case(
        lambda: spdf.granet(
            spdf.cubic(0.5, 0.8, 9), distribution=spdf.model_wide, **TIMES
        ),
        lambda step: (at(cubic(0.5, 0.8, step), 2 * SIZE), None),
        (3, 6, 9, 12),
    ),
    'iterative': Case(
        lambda: spdf.iterative([
            spdf.Round(4), spdf.Round(5, 0.3), spdf.Round(9, 0.25)
        ]),
        evenly(lambda step: 96 if step < 4 else 67 if step < 9 else 50),
        (4, 9),
    ),
    'join': Case(
        lambda: spdf.join([
            spdf.rigl(0.8, update_every=3, update_until=6), spdf.dense(),
            spdf.static(0.5),
        ], [8, 11]),
        evenly(lambda step: 19 if step < 8 else 96 if step < 11 else 48),
        (3, 6, 8, 11),
    ),
    'partition': Case(
        lambda: spdf.partition(
            {
                'moving': spdf.rigl(0.8, **TIMES),
                'pruned': spdf.gmp(spdf.cubic(0.0, 0.8, 9), **TIMES),
            },
            [('h_0/*', 'moving'), ('*', 'pruned')],
        ),
        lambda step: (19 + at(cubic(0.0, 0.8, step)), 19),
        (0, 3, 6, 9, 12),
    ),
    'hard_threshold': Case(
        lambda: largest.largest(spdf.cubic(0.0, 0.8, 9), **TIMES),
        evenly(lambda step: at(cubic(0.0, 0.8, step))), tuple(range(14)),
        lambda inner, rule, *, key: threshold_by(inner, rule),
    ),
}


def make_params(seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda shape: jnp.asarray(rng.normal(size=shape), dtype), SHAPES,
      is_leaf=lambda x: isinstance(x, tuple),
  )


TARGET = make_params(seed=1)


def make_step(tx):
  """Returns `(params, state, noise) -> (params, state)`, jitted.

  The noise is added to the gradients: `ZERO`, or what is to be found there.
  """
  @jax.jit
  def step(params, state, noise):
    grads = jax.tree.map(
        lambda p, t, n: p - t.astype(p.dtype) + n.astype(p.dtype),
        params, TARGET, noise,
    )
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return step


ZERO = jax.tree.map(lambda t: np.zeros(t.shape, np.float32), TARGET)


def start(tx, params):
  """Returns the masked parameters and the first state."""
  state = tx.init(params)
  return spdf.apply_mask(params, spdf.get_mask(state)), state


def train(tx, params, steps):
  """Yields parameters and state, from the initial ones on."""
  step = make_step(tx)
  params, state = start(tx, params)
  yield params, state
  for _ in range(steps):
    params, state = step(params, state, ZERO)
    yield params, state


def to_host(tree: Any) -> Any:
  return jax.tree.map(np.asarray, tree)


def kernels(tree):
  """Yields a kernel of a tree after the other; masks, weights, gradients."""
  for layer in ('h_0', 'h_1'):
    yield np.asarray(tree[layer]['kernel'])


def assert_zero_off_mask(tree, mask):
  for x, m in zip(kernels(tree), kernels(mask)):
    assert (x[~m] == 0).all()


def assert_equal(one, other):
  """Asserts that two trees are bit for bit the same."""
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

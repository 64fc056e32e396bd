"""The conformance suite: every algorithm with every optimizer, in any wrapper.

In the manner of the suite that optax's own optimizers pass. Each pair of an
optimizer and an algorithm is compiled and trained once; the tests then look at
that run.
"""

import functools
import re
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sparse_parabola import assert_equal
from sparse_parabola import assert_zero_off_mask
from sparse_parabola import CASES
from sparse_parabola import kernels
from sparse_parabola import make_params
from sparse_parabola import make_step
from sparse_parabola import SHAPES
from sparse_parabola import start
from sparse_parabola import TARGET
from sparse_parabola import to_host
from sparse_parabola import train
from sparse_parabola import ZERO

import spdf_jax as spdf

WATCHED, ALL = 14, 400  # Steps; masks rest after the watched ones.
RATE = optax.cosine_decay_schedule(0.1, ALL)
INNER = {
    'adamw': lambda: optax.adamw(RATE),
    'sgd': lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    'lion': lambda: optax.lion(RATE),
    'adafactor': lambda: optax.adafactor(
        RATE, min_dim_size_to_factor=4, momentum=0.9
    ),
    'rmsprop': lambda: optax.rmsprop(RATE, momentum=0.9),
    'lamb': lambda: optax.lamb(RATE),
    'muon': lambda: optax.contrib.muon(RATE),
    'schedule_free_adamw': lambda: optax.contrib.schedule_free_adamw(0.1),
    'prodigy': lambda: optax.contrib.prodigy(
        optax.cosine_decay_schedule(1.0, ALL), estim_lr0=1e-2
    ),
    'clipped': lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(RATE)
    ),
    'inject_hyperparams': lambda: optax.inject_hyperparams(optax.adamw)(RATE),
}
MATRICES = jax.tree.map(
    lambda shape: 'matrix' if shape == (8, 12) else 'other', SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
)
AROUND = {
    'MultiSteps': lambda tx: optax.MultiSteps(tx, 2),
    'apply_if_finite': lambda tx: optax.apply_if_finite(tx, 3),
    'partition': lambda tx: optax.partition(
        {'matrix': tx, 'other': optax.adamw(RATE)}, MATRICES
    ),
}
OPTIMIZERS = [*INNER, *AROUND]
PAIRS = [(optimizer, algorithm) for optimizer in OPTIMIZERS for algorithm in (
    CASES if optimizer in ('adamw', 'MultiSteps') else ('rigl', 'gmp')
)]
each_pair = pytest.mark.parametrize('optimizer, algorithm', PAIRS)


class SpyState(NamedTuple):
  """State of `spying_on`."""

  inner_state: Any
  seen: Any


def spying_on(inner):
  """Keeps in its state what the inner transformation is handed."""
  inner = optax.with_extra_args_support(inner)

  def init(params):
    inner_state = inner.init(params)
    return SpyState(inner_state, (params, inner_state, params))

  def update(updates, state, params=None, **extra):
    seen = updates, state.inner_state, params
    updates, inner_state = inner.update(
        updates, state.inner_state, params, **extra
    )
    return updates, SpyState(inner_state, seen)

  return optax.GradientTransformationExtraArgs(init, update)


def build(optimizer, algorithm):
  inner = INNER[optimizer if optimizer in INNER else 'adamw']()
  tx = spdf.sparsify(spying_on(inner), CASES[algorithm].make(), key=0)
  return AROUND.get(optimizer, lambda tx: tx)(tx)


def find(kind, state):
  is_kind = lambda x: isinstance(x, kind)
  leaves = jax.tree.leaves(state, is_leaf=is_kind)
  return next(leaf for leaf in leaves if is_kind(leaf))


class Run(NamedTuple):
  """What became of a pair."""

  steps: list[tuple[Any, Any]]
  """Parameters and state: the first, and after each of the watched steps."""

  end: Any
  """Parameters after all steps."""

  compilations: int

  shapes: Any
  """Of the parameters and the state, by `eval_shape` of a step."""


@functools.cache
def run(optimizer, algorithm):
  tx = build(optimizer, algorithm)
  step = make_step(tx)
  params, state = start(tx, make_params())
  shapes = step.eval_shape(params, state, ZERO)
  often = 2 if optimizer == 'MultiSteps' else 1
  steps = [to_host((params, state))]
  for i in range(often * ALL):
    params, state = step(params, state, ZERO)
    if i < often * WATCHED:
      steps.append(to_host((params, state)))
  result = Run(steps, to_host(params), step._cache_size(), shapes)
  return result


@pytest.fixture(autouse=True, scope='module')
def _free_compiled_programs():
  # A process may hold some 65,000 memory maps, and each program takes a few.
  yield
  print('MAPS', len(open('/proc/self/maps').readlines()))
  jax.clear_caches()


@each_pair
def test_pruned_weights_are_exactly_zero_after_every_step(optimizer, algorithm):
  for params, state in run(optimizer, algorithm).steps:
    assert_zero_off_mask(params, spdf.get_mask(state))


@each_pair
def test_inner_transformations_see_nothing_of_pruned_weights(
    optimizer, algorithm
):
  found = 0
  for _, state in run(optimizer, algorithm).steps:
    masks = dict(zip(('h_0', 'h_1'), kernels(spdf.get_mask(state))))
    seen = find(SpyState, state).seen
    for path, x in jax.tree_util.tree_leaves_with_path(seen):
      # Whatever has a kernel's shape belongs to the one in its path.
      if np.shape(x) == (8, 12):
        owner = re.search(r'h_\d', jax.tree_util.keystr(path))[0]
        assert (x[~masks[owner]] == 0).all(), path
        found += 1
  least = 2 if optimizer == 'adafactor' else 3  # Gradients, weights, moments.
  assert found >= least * 2 * len(run(optimizer, algorithm).steps)


@each_pair
def test_kept_weights_are_counted_exactly(optimizer, algorithm):
  for _, state in run(optimizer, algorithm).steps:
    last_step = max(int(find(spdf.SparsifyState, state).count) - 1, 0)
    both, first = CASES[algorithm].kept(last_step)
    counts = [int(m.sum()) for m in kernels(spdf.get_mask(state))]
    assert sum(counts) == both
    assert first is None or counts[0] == first


@each_pair
def test_masks_change_at_updates_only(optimizer, algorithm):
  changed = set()
  steps = run(optimizer, algorithm).steps
  for (_, before), (_, after) in zip(steps, steps[1:]):
    pairs = zip(kernels(spdf.get_mask(before)), kernels(spdf.get_mask(after)))
    if any((one != other).any() for one, other in pairs):
      changed.add(int(find(spdf.SparsifyState, before).count))
  updates = CASES[algorithm].updates
  assert changed <= set(updates) and bool(changed) == bool(updates)


@each_pair
def test_a_run_compiles_once(optimizer, algorithm):
  assert run(optimizer, algorithm).compilations == 1


@each_pair
def test_steps_keep_structure_shapes_and_dtypes(optimizer, algorithm):
  result = run(optimizer, algorithm)
  tx = build(optimizer, algorithm)
  for shapes in (result.shapes[1], jax.eval_shape(tx.init, make_params())):
    assert jax.tree.structure(shapes) == jax.tree.structure(result.steps[0][1])
  for found in (*result.steps, result.steps[0]):
    for x, like in zip(jax.tree.leaves(found), jax.tree.leaves(result.shapes)):
      assert (x.shape, x.dtype) == (like.shape, like.dtype)


def excess(params, mask):
  """Returns the squared distance from the masked optimum."""
  target = spdf.apply_mask(TARGET, mask)
  return sum(
      float(np.sum((p - t) ** 2))
      for p, t in zip(jax.tree.leaves(params), jax.tree.leaves(target))
  )


@each_pair
def test_a_parabola_converges_to_its_masked_optimum(optimizer, algorithm):
  result = run(optimizer, algorithm)
  mask = spdf.get_mask(result.steps[-1][1])
  assert excess(result.end, mask) < 1e-2 * excess(result.steps[0][0], mask)

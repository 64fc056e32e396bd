"""The conformance suite: every algorithm, every optimizer, every wrapper.

In the manner of the suite that optax's own optimizers pass. Every
algorithm is paired with AdamW, and every optimizer with RigL and with
`hard_threshold`; each pair is compiled and trained once, and the tests then
check that run.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from tests.sparse_parabola import assert_equal
from tests.sparse_parabola import assert_zero_off_mask
from tests.sparse_parabola import CASES
from tests.sparse_parabola import kernels
from tests.sparse_parabola import make_params
from tests.sparse_parabola import make_step
from tests.sparse_parabola import SHAPES
from tests.sparse_parabola import start
from tests.sparse_parabola import TARGET
from tests.sparse_parabola import to_host
from tests.sparse_parabola import train
from tests.sparse_parabola import ZERO
from tests.tiers import slow_except

# Numbers of steps; masks are fixed after the first of them.
WATCHED, ALL = 14, 400
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
# Two edges of the table of optimizers and algorithms, and two corners.
PAIRS = [('adamw', algorithm) for algorithm in CASES]
PAIRS += [
    (optimizer, algorithm) for algorithm in ('rigl', 'hard_threshold')
    for optimizer in OPTIMIZERS[1:]
]
PAIRS += [('MultiSteps', 'gmp'), ('partition', 'gmp')]
# The inner optimizer of `hard_threshold` is dense.
MASKED = [pair for pair in PAIRS if pair[1] != 'hard_threshold']


def each(pairs):
  return pytest.mark.parametrize('optimizer, algorithm', slow_except(
      [pair for pair in pairs if pair[0] in (
          'adamw', 'sgd', 'muon', 'schedule_free_adamw', 'MultiSteps',
      )],
      pairs,
  ))


each_pair = each(PAIRS)


class SpyState(NamedTuple):
  """State of `spying_on`."""

  inner_state: Any
  seen: Any


def spying_on(inner):
  """Records in its state the arguments of the inner transformation."""
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
  case = CASES[algorithm]
  tx = case.wrap(spying_on(inner), case.make(), key=0)
  return AROUND.get(optimizer, lambda tx: tx)(tx)


def find(kind, state):
  is_kind = lambda x: isinstance(x, kind)
  leaves = jax.tree.leaves(state, is_leaf=is_kind)
  return next(leaf for leaf in leaves if is_kind(leaf))


class Run(NamedTuple):
  """Outcome of training with a pair of algorithm and optimizer."""

  steps: list[tuple[Any, Any]]
  """Parameters and state: the first, and after each of the watched steps."""

  end: tuple[Any, Any]
  """Parameters and state after all steps."""

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
  result = Run(steps, to_host((params, state)), step._cache_size(), shapes)
  return result


@each_pair
def test_pruned_weights_are_exactly_zero_after_every_step(optimizer, algorithm):
  for params, state in run(optimizer, algorithm).steps:
    assert_zero_off_mask(params, spdf.get_mask(state))


@each(MASKED)
def test_inner_transformations_see_nothing_of_pruned_weights(
    optimizer, algorithm
):
  checked = 0
  for _, state in run(optimizer, algorithm).steps:
    masks = dict(zip(('h_0', 'h_1'), kernels(spdf.get_mask(state))))
    seen = find(SpyState, state).seen
    for path, x in jax.tree_util.tree_leaves_with_path(seen):
      # An array of a kernel's shape belongs to the kernel of its path.
      if np.shape(x) == (8, 12):
        owner = re.search(r'h_\d', jax.tree_util.keystr(path))[0]
        assert (x[~masks[owner]] == 0).all(), path
        checked += 1
  least = 2 if optimizer == 'adafactor' else 3  # Gradients, weights, moments.
  assert checked >= least * 2 * len(run(optimizer, algorithm).steps)


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
  for step in (*result.steps, result.steps[0]):
    for x, like in zip(jax.tree.leaves(step), jax.tree.leaves(result.shapes)):
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
  params, state = result.end
  mask = spdf.get_mask(state)
  assert excess(params, mask) < 1e-2 * excess(result.steps[0][0], mask)


@pytest.mark.parametrize('algorithm', ['gmp', 'rigl', 'hard_threshold'])
def test_bfloat16_parameters_keep_their_dtype_and_exact_zeros(algorithm):
  case = CASES[algorithm]
  tx = case.wrap(optax.adamw(0.1), case.make(), key=0)
  steps = list(train(tx, make_params(dtype=jnp.bfloat16), WATCHED))
  for i, (params, state) in enumerate(steps):
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(params))
    assert_zero_off_mask(params, spdf.get_mask(state))
    counts = sum(m.sum() for m in kernels(spdf.get_mask(state)))
    assert counts == case.kept(max(i - 1, 0))[0]


@pytest.mark.parametrize('algorithm', ['rigl', 'gmp', 'hard_threshold'])
def test_frozen_modules_keep_every_weight(algorithm):
  case = CASES[algorithm]
  tx = optax.partition(
      {
          'trained': case.wrap(optax.adamw(0.1), case.make(), key=0),
          'frozen': optax.set_to_zero(),
      },
      lambda params: {
          name: 'frozen' if name == 'h_0' else 'trained' for name in params
      },
  )
  initial = make_params()
  for i, (params, state) in enumerate(train(tx, initial, WATCHED)):
    assert_equal(params['h_0'], initial['h_0'])
    mask = spdf.get_mask(state)
    assert mask['h_0'] is None
    trained = mask['h_1']['kernel']
    assert int(trained.sum()) == case.kept(max(i - 1, 0))[1]
    assert (params['h_1']['kernel'][~trained] == 0).all()
    moved = params['h_1']['bias'] != initial['h_1']['bias']
    assert bool(moved.all()) == (i > 0)


def train_any(params, loss_fn):
  """Trains parameters of any model library in the same loop."""
  algorithm = spdf.rigl(0.75, update_every=10, update_until=100)
  tx = spdf.sparsify(optax.adamw(1e-2), algorithm, key=0)
  state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(state))

  @jax.jit
  def step(params, state):
    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  losses = []
  for _ in range(150):
    params, state, loss = step(params, state)
    losses.append(float(loss))
  assert step._cache_size() == 1
  return params, spdf.get_mask(state), losses


X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
Y = np.sin(X @ np.random.default_rng(1).normal(size=(8, 4)) / 2)


def linen_model():
  nn = pytest.importorskip('flax.linen')

  class Network(nn.Module):

    @nn.compact
    def __call__(self, x):
      return nn.Dense(4)(nn.relu(nn.Dense(32)(x)))

  params = Network().init(jax.random.key(0), X)
  return params, lambda params: Network().apply(params, X)


def nnx_model():
  nnx = pytest.importorskip('flax.nnx')
  rngs = nnx.Rngs(0)
  model = nnx.Sequential(
      nnx.Linear(8, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 4, rngs=rngs)
  )
  graph, params = nnx.split(model)
  return params, lambda params: nnx.merge(graph, params)(X)


def equinox_model():
  eqx = pytest.importorskip('equinox', reason='needs Equinox')
  model = eqx.nn.MLP(8, 4, 32, 1, key=jax.random.key(0))
  params, rest = eqx.partition(model, eqx.is_inexact_array)
  return params, lambda params: jax.vmap(eqx.combine(params, rest))(X)


@pytest.mark.parametrize('make', [linen_model, nnx_model, equinox_model])
def test_models_of_any_library_train_by_the_same_lines(make):
  params, predict = make()
  params, mask, losses = train_any(
      params, lambda params: jnp.mean((predict(params) - Y) ** 2)
  )
  assert losses[-1] < 0.5 * losses[0]
  # The matrices are 8 x 32 and 32 x 4, or transposed.
  kept = {m.size: int(m.sum()) for m in jax.tree.leaves(mask)}
  assert kept == {256: 64, 128: 32}
  for p, m in zip(
      jax.tree.leaves(params), jax.tree.leaves(spdf.apply_mask(params, mask))
  ):
    np.testing.assert_array_equal(p, m)
  assert predict(params).shape == (64, 4)

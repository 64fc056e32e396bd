"""What optax asks of its optimizers, of every one of them inside `sparsify`.

The optimizers are found in the installed optax, so that those of a new version
are tested too. What an optimizer does not do alone is not expected of it here.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf

pytestmark = [
    pytest.mark.slow, pytest.mark.filterwarnings('ignore'),
]

RATE, STEPS = 1e-2, 20
SHAPES = {'h_0': {'kernel': (8, 12), 'bias': (12,)}, 'h_1': {'kernel': (12, 8)}}


def makers():
  """Returns the functions of optax that make optimizers, by name."""
  optimizers = {}
  for module in (optax, optax.contrib):
    for name in dir(module):
      make = getattr(module, name)
      if name.startswith(('_', 'scale_by')) or not inspect.isfunction(make):
        continue
      parameters = inspect.signature(make).parameters
      needed = [
          p for p in parameters.values()
          if p.default is p.empty and p.name != 'learning_rate'
          and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
      ]
      if 'learning_rate' in parameters and not needed:
        optimizers[f'{module.__name__.removeprefix("optax.")}.{name}'] = make
  return optimizers


MAKERS = makers()


def draw(seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
      lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), SHAPES,
      is_leaf=lambda x: isinstance(x, tuple),
  )


TARGET = draw(1)


def loss_fn(params):
  return sum(
      jnp.sum((p - t) ** 2) / 2
      for p, t in zip(jax.tree.leaves(params), jax.tree.leaves(TARGET))
  )


def step(tx, params, state):
  """Takes a step with traced extra arguments."""
  value, grads = jax.value_and_grad(loss_fn)(params)
  updates, state = optax.with_extra_args_support(tx).update(
      grads, state, params, value=value, grad=grads, value_fn=loss_fn,
      obj_fn=loss_fn, loss=value,
  )
  return optax.apply_updates(params, updates), state


def start(tx, seed=0):
  state = jax.jit(tx.init)(draw(seed))
  return spdf.apply_mask(draw(seed), spdf.get_mask(state)), state


def works(run):
  """Skips a test of what an optimizer does not do without `sparsify`."""
  try:
    run()
  except Exception as error:  # Whatever optax raises.
    pytest.skip(f'optax alone: {type(error).__name__}: {error!s:.80}')


@pytest.fixture(params=MAKERS)
def make(request):
  make = lambda: MAKERS[request.param](learning_rate=RATE)
  inner = make()
  works(lambda: step(inner, draw(0), inner.init(draw(0))))
  return make


@pytest.fixture
def tx(make):
  return spdf.sparsify(make(), spdf.static(0.5), key=0)


def test_the_optimizers_are_found():
  assert len(MAKERS) > 40
  assert {'optax.adamw', 'optax.lbfgs', 'contrib.muon'} <= MAKERS.keys()


def test_zeros_stay_and_the_loss_falls_as_alone(make, tx):
  def train(tx, params, state):
    take = jax.jit(lambda *given: step(tx, *given))
    first = float(loss_fn(params))
    for _ in range(STEPS):
      params, state = take(params, state)
    return params, state, float(loss_fn(params)) < first

  params, state, falls = train(tx, *start(tx))
  spdf.check_zeros(params, state)
  mask = spdf.get_mask(state)
  assert spdf.summarize(mask, params).sparsity == 0.5
  inner = make()
  assert falls or not train(inner, draw(0), inner.init(draw(0)))[2]


def test_a_state_can_be_a_branch_of_a_cond_and_the_carry_of_a_scan(tx):
  params, state = start(tx)

  @jax.jit
  def train(params, state):
    def body(carry, i):
      return jax.lax.cond(
          i % 2 == 0, lambda c: step(tx, *c), lambda c: c, carry
      ), None
    return jax.lax.scan(body, (params, state), jnp.arange(4))[0]

  params, state = train(params, state)
  spdf.check_zeros(params, state)
  assert int(state.count) == 2


def test_maps_over_parameters_keep_the_structure(make, tx):
  params = draw(0)
  double = lambda x: 2 * x if jnp.issubdtype(x.dtype, jnp.inexact) else x
  inner = make()
  works(lambda: optax.tree.map_params(inner, double, inner.init(params)))
  state = tx.init(params)
  mapped = optax.tree.map_params(tx, double, state)
  assert jax.tree.structure(mapped) == jax.tree.structure(state)
  for a, b in zip(jax.tree.leaves(mapped), jax.tree.leaves(state)):
    assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_injected_hyperparameters_change_nothing(make, tx, request):
  constructor = MAKERS[request.node.callspec.params['make']]
  inject = lambda: optax.inject_hyperparams(constructor)(learning_rate=RATE)
  works(lambda: step(inject(), draw(0), jax.jit(inject().init)(draw(0))))
  injected = spdf.sparsify(inject(), spdf.static(0.5), key=0)
  alone = constructor(learning_rate=RATE)
  given, own = (
      step(x, draw(0), x.init(draw(0)))[0] for x in (inject(), alone)
  )
  tolerance = 1e-5
  if not all(
      np.allclose(a, b, rtol=tolerance, atol=tolerance)
      for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(own))
  ):
    pytest.skip('optax alone: injection changes the steps')
  actual, wanted = (step(x, *start(x))[0] for x in (injected, tx))
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(
          a, b, rtol=tolerance, atol=tolerance
      ), actual, wanted,
  )


def test_two_equal_micro_batches_are_one_step(make, tx):
  grads = jax.grad(loss_fn)(draw(0))

  def twice(tx, params):
    around = optax.MultiSteps(tx, 2).gradient_transformation()
    state = around.init(params)
    for _ in range(2):
      updates, state = around.update(grads, state, params)
      params = optax.apply_updates(params, updates)
    return params, state

  works(lambda: twice(make(), draw(0)))
  params, state = start(tx)
  trained, around = twice(tx, params)
  updates, _ = tx.update(grads, state, params)
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      trained, optax.apply_updates(params, updates),
  )
  spdf.check_zeros(trained, around)

"""Compiled optimizers update their state in place; counts of copies show it."""

import functools

import jax.numpy as jnp
import optax
import pytest

from experiments.benchmarks import compiled
import spdf_jax as spdf
from spdf_jax.sparsity import like_params

PARAMS = {
    'layer_0': {'wi': jnp.ones((256, 512)), 'bias': jnp.ones(512)},
    'layer_1': {'wo': jnp.ones((512, 256)), 'bias': jnp.ones(256)},
}
ALGORITHMS = {
    'static': spdf.static(0.75),
    'phases': spdf.join([spdf.static(0.75), spdf.dense()], [10]),
}
COUNTERS = 64  # Bytes; no array of weights is as small.


def compile_optimizer(optimizer):
  """Returns the program of an optimizer; its state is all donated."""

  def step(state, grads):
    params, opt_state = state
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), ()

  return compiled.compile_program(
      step, (PARAMS, optimizer.init(PARAMS)), PARAMS
  )


@functools.cache
def compile_adam(algorithm=None, clip=False):
  """Returns Adam's program, dense or sparse, and the dense state."""
  chain = optax.chain(
      optax.clip_by_global_norm(1.0) if clip else optax.identity(),
      optax.scale_by_adam(),
      optax.scale_by_learning_rate(1e-3),
  )
  if algorithm is None:
    return compile_optimizer(chain), chain.init(PARAMS)
  sparse = spdf.sparsify(chain, ALGORITHMS[algorithm], key=0)
  return compile_optimizer(sparse), chain.init(PARAMS)


def mask_state_afterwards(inner):
  """The mistake that `sparsify` avoids: it copies every moment."""
  right = spdf.sparsify(inner, spdf.static(0.75), key=0)

  def update(grads, state, params):
    updates, inner_state = inner.update(grads, state.inner_state, params)
    inner_state = like_params.map_like_params(
        spdf.apply_mask, inner_state, params, state.mask
    )
    return updates, state._replace(inner_state=inner_state)

  return optax.GradientTransformation(right.init, update)


@pytest.mark.parametrize('clip', [False, True])
@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_the_compiled_optimizer_updates_its_state_in_place(algorithm, clip):
  program, adam_state = compile_adam(algorithm, clip)
  assert compiled.unaliased_bytes(program) <= COUNTERS
  assert compiled.copied_bytes(program, adam_state) <= COUNTERS


@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_the_compiled_optimizer_needs_no_scratch(algorithm):
  program, adam_state = compile_adam(algorithm)
  assert compiled.scratch_bytes(program) < (
      0.01 * compiled.tree_bytes(adam_state)
  )


@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_clipping_adds_scratch_for_one_gradient_and_no_more(algorithm):
  program, adam_state = compile_adam(algorithm, clip=True)
  dense, _ = compile_adam(clip=True)
  gradient = compiled.tree_bytes(PARAMS)
  extra = compiled.scratch_bytes(program) - compiled.scratch_bytes(dense)
  assert extra <= 1.01 * gradient < compiled.tree_bytes(adam_state)


def test_copied_bytes_counts_copies_of_the_state():
  wrong = mask_state_afterwards(optax.scale_by_adam())
  program = compile_optimizer(wrong)
  adam_state = program.state[1].inner_state
  most_of_it = 0.9 * compiled.tree_bytes(adam_state)
  assert compiled.copied_bytes(program, adam_state) > most_of_it
  assert compiled.scratch_bytes(program) > most_of_it


@pytest.mark.filterwarnings('ignore:Some donated buffers')
def test_unaliased_bytes_counts_state_that_is_not_updated_in_place():
  state = {'kept': jnp.ones((8, 8)), 'summed': jnp.ones(5)}
  shrink = lambda state, x: (
      {'kept': state['kept'] + x, 'summed': state['summed'].sum()}, ()
  )
  program = compiled.compile_program(shrink, state, 1.0)
  assert compiled.unaliased_bytes(program) == 5 * 4

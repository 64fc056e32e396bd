"""The loop by which tests train with a transformation of optax."""

import jax
import optax

import spdf_jax as spdf


def trajectory(tx, params, gradients, steps, jit=jax.jit):
  """Yields masked parameters and state: the first, and those after each step.

  Args:
    tx: A transformation with `sparsify` in it.
    params: Parameters, which are masked first.
    gradients: Function of the number of a step and the parameters before it.
    steps: Number of steps.
    jit: Function that compiles `tx.update`.
  """
  state = tx.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(state))
  update = jit(tx.update)
  yield params, state
  for step in range(steps):
    updates, state = update(gradients(step, params), state, params)
    params = optax.apply_updates(params, updates)
    yield params, state


def main_computation(tx, params):
  """Returns the lines of the entry of a compiled step that donates all."""
  def step(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  compiled = jax.jit(step, donate_argnums=(0, 1)).lower(
      params, tx.init(params), params
  ).compile()
  return compiled.as_text().partition('ENTRY')[2].splitlines()

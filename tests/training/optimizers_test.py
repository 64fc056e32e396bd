"""The plan's AdamW is that of the papers, and restarts its moments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax import training
from spdf_jax.training.step.optimizers import matrices
from tests.tiny_run import DENSE
from tests.tiny_run import static

B1, B2, EPS, CLIP, DECAY = 0.9, 0.95, 1e-8, 1.0, 0.1
PHASE = training.Phase(
    name='a', steps=3, data='corpus', batch_size=1, length=1, algorithm=DENSE,
    learning_rate=optax.linear_schedule(0.1, 0.01, 3), weight_decay=DECAY,
    reset_moments=False,
)
NAMES = ('kernel', 'embedding', 'bias', 'scale')


def make_plan(*changes):
  return training.Plan(tuple(
      dataclasses.replace(PHASE, name=str(i), **change)
      for i, change in enumerate(changes)
  ))


def make_params():
  rng = np.random.default_rng(0)
  shapes = dict(kernel=(8, 8), embedding=(9, 4), bias=(8,), scale=(8,))
  return {
      name: jnp.asarray(rng.normal(size=shape), jnp.float32)
      for name, shape in shapes.items()
  }


def make_grads(step, size):
  rng = np.random.default_rng(step + 1)
  draw = lambda x: jnp.asarray(size * rng.normal(size=x.shape), jnp.float32)
  return jax.tree.map(draw, make_params())


def make_optimizer(plan):
  return training.adamw(
      plan,
      where=lambda path, leaf: path == 'kernel',
      key=jax.random.key(0),
      b1=B1, b2=B2, eps=EPS, clip_norm=CLIP,
  )


def run(plan, sizes):
  """Returns parameters and state after a step for each given gradient size."""
  optimizer = make_optimizer(plan)
  update = jax.jit(optimizer.update)
  params = make_params()
  state = optimizer.init(params)
  params = spdf.apply_mask(params, spdf.get_mask(state))
  for step, size in enumerate(sizes):
    updates, state = update(make_grads(step, size), state, params)
    params = optax.apply_updates(params, updates)
  return params, state


def plain_adamw(plan, sizes, clip_first=True):
  """AdamW written out in float64, moments restarted as the plan says."""
  params = {k: np.asarray(v, np.float64) for k, v in make_params().items()}
  rates = [float(plan.learning_rate(s)) for s in range(len(sizes))]
  for step, size in enumerate(sizes):
    if step == 0 or step in plan.restarts:
      mu = {k: 0.0 * v for k, v in params.items()}
      nu = {k: 0.0 * v for k, v in params.items()}
      count = 0
    grads = {
        k: np.asarray(v, np.float64) for k, v in make_grads(step, size).items()
    }
    norm = np.sqrt(sum((g ** 2).sum() for g in grads.values()))
    scale = min(1.0, CLIP / norm)
    count += 1
    for name in NAMES:
      g = grads[name] * scale
      mu[name] = B1 * mu[name] + (1 - B1) * g
      nu[name] = B2 * nu[name] + (1 - B2) * g ** 2
      direction = (mu[name] / (1 - B1 ** count)) / (
          np.sqrt(nu[name] / (1 - B2 ** count)) + EPS
      )
      if name in ('kernel', 'embedding'):
        direction = direction + DECAY * params[name]
      params[name] = params[name] - rates[step] * direction
  return params


@pytest.mark.parametrize('changes, sizes', [
    # Clipped by different factors: Adam before clipping would differ.
    (({},), (100.0, 0.01, 3.0)),
    (({}, {'reset_moments': True}), (100.0, 0.01, 3.0, 0.01, 50.0)),
    (({}, {'reset_moments': False}), (100.0, 0.01, 3.0, 0.01, 50.0)),
])
def test_dense_steps_are_those_of_adamw_written_out(changes, sizes):
  plan = make_plan(*changes)
  params, _ = run(plan, sizes)
  want = plain_adamw(plan, sizes)
  for name in NAMES:
    np.testing.assert_allclose(params[name], want[name], rtol=2e-5, atol=1e-6)


def test_stacked_norms_and_biases_do_not_decay_either():
  layers = {'ln_1': {'scale': jnp.ones((3, 4)), 'bias': jnp.ones((3, 4))}}
  assert matrices(layers) == {'ln_1': {'scale': False, 'bias': False}}


def test_only_what_is_selected_has_a_mask():
  _, state = run(make_plan({'algorithm': static(0.75)}), ())
  mask = spdf.get_mask(state)
  assert {k for k, m in mask.items() if m is not None} == {'kernel'}
  assert int(mask['kernel'].sum()) == 16

"""The plan's AdamW is that of the papers, and restarts its moments."""

import jax.numpy as jnp
import numpy as np
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.trees import by_name
from spdf_jax.training.step.optimizers import matrices
from tests.tiny_run import static
from tests.training.named_optimizers_test import assert_close
from tests.training.named_optimizers_test import make_grads
from tests.training.named_optimizers_test import make_params
from tests.training.named_optimizers_test import make_plan
from tests.training.named_optimizers_test import run

B1, B2, EPS, CLIP, DECAY = 0.9, 0.95, 1e-8, 1.0, 0.1
# Clipped by different factors: Adam before clipping would differ.
SIZES = (100.0, 0.01, 3.0, 0.01, 50.0)


def to_float64(tree):
  return {name: np.asarray(x, np.float64) for name, x in by_name(tree).items()}


def plain_adamw(plan, sizes):
  """AdamW written out in float64, moments restarted as the plan says."""
  params = to_float64(make_params())
  for step, size in enumerate(sizes):
    if step == 0 or step in plan.restarts:
      mu, nu, count = dict.fromkeys(params, 0.0), dict.fromkeys(params, 0.0), 0
    grads = to_float64(make_grads(step, size))
    norm = np.sqrt(sum((g ** 2).sum() for g in grads.values()))
    count += 1
    for name, g in grads.items():
      g = g * min(1.0, CLIP / norm)
      mu[name] = B1 * mu[name] + (1 - B1) * g
      nu[name] = B2 * nu[name] + (1 - B2) * g ** 2
      direction = (mu[name] / (1 - B1 ** count)) / (
          np.sqrt(nu[name] / (1 - B2 ** count)) + EPS
      )
      if name.endswith(('kernel', 'embedding')):
        direction = direction + DECAY * params[name]
      rate = float(plan.learning_rate(step))
      params[name] = params[name] - rate * direction
  return params


@pytest.mark.parametrize('reset_moments', [False, True])
def test_dense_steps_are_those_of_adamw_written_out(reset_moments):
  plan = make_plan({}, {'reset_moments': reset_moments})
  params, _ = run(
      plan, len(SIZES), sizes=SIZES, b1=B1, b2=B2, eps=EPS, clip_norm=CLIP
  )
  want = plain_adamw(plan, SIZES)
  assert_close(by_name(params), want, rtol=2e-5, atol=1e-6)


def test_stacked_norms_and_biases_do_not_decay_either():
  layers = {'ln_1': {'scale': jnp.ones((3, 4)), 'bias': jnp.ones((3, 4))}}
  assert matrices(layers) == {'ln_1': {'scale': False, 'bias': False}}


def test_only_what_is_selected_has_a_mask():
  plan = make_plan({'algorithm': static(0.75)})
  _, state = run(plan, 0, b1=B1, b2=B2, eps=EPS, clip_norm=CLIP)
  mask = by_name(spdf.get_mask(state))
  assert {name: int(m.sum()) for name, m in mask.items()} == {
      'h_0/mlp/wi/kernel': 24, 'h_0/mlp/wo/kernel': 24
  }

"""Gradients that are not finite change nothing under `apply_if_finite`."""

import jax
import numpy as np
import optax
import pytest
from sparse_parabola import assert_equal
from sparse_parabola import CASES
from sparse_parabola import make_params
from sparse_parabola import make_step
from sparse_parabola import start
from sparse_parabola import to_host
from sparse_parabola import ZERO
from tiers import slow_except

import spdf_jax as spdf

STEPS = 11
EVERYWHERE = jax.tree.map(lambda x: x + np.float32('nan'), ZERO)
ONCE = jax.tree.map(np.copy, ZERO)
ONCE['h_1']['kernel'][7, 11] = np.inf


@pytest.mark.parametrize(
    'name', slow_except(['static', 'rigl', 'granet, model', 'join'], CASES)
)
def test_weights_moments_masks_and_counters_stay(name):
  """At updates of the mask and between them; then all goes on as if not there.
  """
  sparse = spdf.sparsify(optax.adamw(0.1), CASES[name].make(), key=0)
  step = make_step(optax.apply_if_finite(sparse, 2))
  params, state = start(optax.apply_if_finite(sparse, 2), make_params())
  plain = params, state
  for i in range(STEPS):
    before = to_host((params, state.inner_state))
    for number, bad in enumerate((EVERYWHERE, ONCE)):
      params, state = step(params, state, bad)
      assert_equal((params, state.inner_state), before)
      assert int(state.notfinite_count) == number + 1
    params, state = step(params, state, ZERO)
    plain = step(*plain, ZERO)
    assert_equal((params, state.inner_state), (plain[0], plain[1].inner_state))
    assert int(state.total_notfinite) == 2 * (i + 1)
  assert step._cache_size() == 1

"""Steps that exceed int32 are refused in one sentence."""

import numpy as np
import optax
import pytest

import spdf_jax as spdf
from spdf_jax.sparsity.rewinding import rewind_weights
from spdf_jax.sparsity.schedules import update_times

MANY = 2**31 + 5
MEMBERS = [spdf.static(0.5), spdf.dense()]


@pytest.mark.parametrize('build', [
    lambda: spdf.join(MEMBERS, [MANY]),
    lambda: spdf.join(MEMBERS, [float('inf')]),
    lambda: spdf.reset_state(optax.scale_by_adam(), [MANY]),
    lambda: spdf.iterative([spdf.Round(MANY), spdf.Round(1, 0.5)]),
    lambda: spdf.iterative([
        spdf.Round(2**30), spdf.Round(2**30, 0.5), spdf.Round(1, 0.5)
    ]),
    lambda: spdf.iterative([spdf.Round(2), spdf.Round(2, 0.5, MANY)]),
    lambda: rewind_weights(
        optax.sgd(1.0), [2], snapshot_at=MANY
    ),
    lambda: spdf.cubic(0.0, 0.5, MANY),
    lambda: spdf.cubic(0.0, 0.5, 1, start=MANY),
    lambda: update_times(MANY),
    lambda: update_times([1, MANY]),
    lambda: update_times(1, start=MANY),
    lambda: spdf.gmp(0.5, update_every=1, update_until=MANY),
])
def test_a_step_beyond_int32_is_refused(build):
  with pytest.raises(ValueError, match='from [01] to 2,147,483,647'):
    build()


def test_the_last_step_of_int32_is_a_boundary():
  last = 2**31 - 1
  algorithm = spdf.join(MEMBERS, [last])
  at = lambda step: algorithm.sparsity_at(step, {'w': np.ones((2, 2))})['w']
  assert (at(last - 1), at(last)) == (0.5, 0.0)

# SPDX-License-Identifier: Apache-2.0
"""`reset_state`: a wrapper that resets optimizer state at given steps."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax.sparsity import schedules

PyTree = Any


class ResetState(NamedTuple):
  """State of `reset_state`."""

  count: jax.Array  # type: ignore[assignment]  # hides tuple.count
  """Number of steps taken, int32."""

  inner_state: PyTree
  """State of the wrapped transformation."""


def reset_state(
    inner: optax.GradientTransformation, boundaries: Sequence[int]
) -> optax.GradientTransformationExtraArgs:
  """Reinitializes the state of `inner` at the steps in `boundaries`.

  Wrap the preconditioner, not the schedule: resetting
  `optax.adamw(schedule)` also rewinds its learning rate, so write
  `chain(reset_state(scale_by_adam(), [1000]),
  scale_by_learning_rate(schedule))`. Inside `sparsify`, a boundary must not be
  a step that the algorithm skips, as with `rigl(skip_gradient_step=True)`:
  counters would be reset there, but not moments.

  Args:
    inner: The transformation whose state is reset.
    boundaries: Increasing steps, counted from 0, at whose start the state is
      reset.

  Returns:
    The transformation; its `update` needs `params`.

  Raises:
    ValueError: the boundaries are not increasing steps from 0 to 2^31 - 1.

  Example:
    >>> tx = reset_state(optax.scale_by_adam(), [1000])
    >>> int(tx.init({'w': jnp.ones(3)}).count)
    0
  """
  schedules.check_boundaries(boundaries)
  inner = optax.with_extra_args_support(inner)
  table = np.asarray(boundaries, np.int32)

  def init_fn(params):
    return ResetState(jnp.zeros([], jnp.int32), inner.init(params))

  def update_fn(updates, state, params=None, **extra_args):
    inner_state = state.inner_state
    if table.size:
      if params is None:
        raise ValueError(
            'reset_state needs params: call '
            'tx.update(grads, opt_state, params).'
        )
      # A select fuses with the reads of the inner update; a cond would copy
      # the state at every step.
      again = jnp.any(state.count == table)
      inner_state = jax.tree.map(
          lambda fresh, old: jnp.where(again, fresh, old),
          inner.init(params), inner_state,
      )
    updates, inner_state = inner.update(
        updates, inner_state, params, **extra_args
    )
    return updates, ResetState(
        optax.safe_increment(state.count), inner_state
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)

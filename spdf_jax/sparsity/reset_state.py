# SPDX-License-Identifier: Apache-2.0
"""`reset_state`: a wrapper that resets optimizer state at given steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax.sparsity import like_params
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
  a step at which the algorithm only updates the mask, as
  `rigl(skip_gradient_step=True)` does: counters would be reset there, but not
  moments.

  Args:
    inner: The transformation whose state is reset.
    boundaries: Increasing steps, counted from 0. The state is reset before the
      update of each of these steps.

  Returns:
    The transformation; its `update` needs `params`.

  Raises:
    TypeError: `inner` is not an optimizer.
    ValueError: the boundaries are not increasing steps from 0 to 2^31 - 1; on
      `update`, if `params` is missing.

  Example:
    The trace of gradients starts again at step 2:

    >>> import optax
    >>> tx = reset_state(optax.trace(decay=1.0), [2])
    >>> params = grads = {'w': 1.0}
    >>> state = tx.init(params)
    >>> for step in range(4):
    ...   updates, state = tx.update(grads, state, params)
    ...   print(step, float(updates['w']))
    0 1.0
    1 2.0
    2 1.0
    3 2.0
  """
  like_params.check_optimizer('inner', inner)
  boundaries = schedules.check_boundaries(boundaries)
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

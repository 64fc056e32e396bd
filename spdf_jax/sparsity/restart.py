"""Restarting an optimizer's state at given steps."""

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

PyTree = Any


class RestartState(NamedTuple):
  """State of `restart`."""

  count: jax.Array
  """Steps taken, int32."""

  inner_state: PyTree
  """State of the wrapped transformation."""


def restart(
    inner: optax.GradientTransformation, boundaries: Sequence[int]
) -> optax.GradientTransformationExtraArgs:
  """Initialises `inner` again at the steps in `boundaries`.

  Put it around the preconditioner, not the schedule: restarting
  `optax.adamw(schedule)` also rewinds its learning rate, so write
  `chain(restart(scale_by_adam(), [1000]), scale_by_learning_rate(schedule))`.

  Args:
    inner: The transformation to restart.
    boundaries: Rising steps, counted from 0, before which `inner` starts anew.

  Returns:
    The restarting transformation; its `update` needs `params`.

  Raises:
    ValueError: the boundaries do not rise or are negative.

  Example:
    >>> tx = restart(optax.scale_by_adam(), [1000])
    >>> int(tx.init({'w': jnp.ones(3)}).count)
    0
  """
  check_boundaries(boundaries)
  inner = optax.with_extra_args_support(inner)
  table = np.asarray(boundaries, np.int32)

  def init_fn(params):
    return RestartState(jnp.zeros([], jnp.int32), inner.init(params))

  def update_fn(updates, state, params=None, **extra_args):
    inner_state = state.inner_state
    if table.size:
      if params is None:
        raise ValueError(
            'restart needs params: call tx.update(grads, opt_state, params).'
        )
      # A select, not a cond: it fuses with the reads of the inner update,
      # where a cond would copy the state at every step.
      again = jnp.any(state.count == table)
      inner_state = jax.tree.map(
          lambda fresh, old: jnp.where(again, fresh, old),
          inner.init(params), inner_state,
      )
    updates, inner_state = inner.update(
        updates, inner_state, params, **extra_args
    )
    return updates, RestartState(
        optax.safe_increment(state.count), inner_state
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def check_boundaries(boundaries: Sequence[int]) -> None:
  """Raises ValueError unless the boundaries are rising steps from 0 on."""
  steps = list(boundaries)
  if any(int(b) != b or b < 0 for b in steps) or any(
      b <= a for a, b in zip(steps, steps[1:])
  ):
    raise ValueError(
        f'boundaries are {steps}; give non-negative steps, each larger than '
        'the one before.'
    )

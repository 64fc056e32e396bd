"""Dynamic loss scaling: float16 gradients that neither vanish nor overflow."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

PyTree = Any

_FIRST = 2.0**16
_LEAST = 1.0
_FACTOR = 2.0
_GROWTH_INTERVAL = 2000  # Steps.


class NotFinite(ArithmeticError):
  """Gradients are not finite without any scaling either."""


@flax.struct.dataclass
class LossScale:
  """What the loss is multiplied by, and its gradients are divided by.

  `flax.training.dynamic_scale` has the same rule; it takes gradients itself,
  though, and ours are added up over parts of a batch.

  References:
    Micikevicius et al., `Mixed Precision Training
    <https://arxiv.org/abs/1710.03740>`_, 2018, section 3.2
  """

  scale: jax.Array
  """A power of two, float32."""

  finite_steps: jax.Array
  """Steps since it last changed, int32."""


def create_loss_scale(dtype: str) -> LossScale | None:
  """Returns the first scale of a model that computes in `dtype`.

  Example:
    >>> float(create_loss_scale('float16').scale)
    65536.0
    >>> create_loss_scale('bfloat16') is None
    True
  """
  if dtype != 'float16':
    return None
  return LossScale(jnp.asarray(_FIRST, jnp.float32), jnp.zeros([], jnp.int32))


def adjust(loss_scale: LossScale, finite: jax.Array) -> LossScale:
  """Halves the scale after an overflow, doubles it after 2000 steps without.

  Args:
    loss_scale: What gradients were computed with.
    finite: Whether all of them were finite.

  Returns:
    What the next ones are computed with, at least 1.

  Example:
    >>> scale = create_loss_scale('float16')
    >>> float(adjust(scale, jnp.array(False)).scale)
    32768.0
  """
  steps = loss_scale.finite_steps + 1
  grow = steps == _GROWTH_INTERVAL
  scale = loss_scale.scale
  return LossScale(
      jnp.where(
          finite,
          jnp.where(grow, scale * _FACTOR, scale),
          jnp.maximum(scale / _FACTOR, _LEAST),
      ),
      jnp.where(finite & ~grow, steps, 0),
  )


def take_step(
    step_fn: Callable[[Any, Any], tuple[Any, dict[str, Any]]],
    state: Any,
    batch: Any,
    step: int,
) -> tuple[Any, dict[str, Any]]:
  """Takes a training step; with a loss scale, until its gradients are finite.

  A step that overflows changes nothing but the scale, and is taken again on
  the same batch: data, phases and masks stay together.

  Args:
    step_fn: The jitted `train_step`.
    state: The state before the step; used up.
    batch: Its batch.
    step: Its number, from 0.

  Returns:
    The state after it and its metrics, with the number of attempts,
    `train/attempts`, where there is a scale.

  Raises:
    NotFinite: gradients overflow even with the scale 1.
  """
  if state.loss_scale is None:
    return step_fn(state, batch)
  attempts = 0
  while True:
    attempts += 1
    state, metrics = step_fn(state, batch)
    if int(state.step) > step:
      return state, metrics | {'train/attempts': attempts}
    if metrics['train/loss_scale'] <= _LEAST:
      raise NotFinite(
          f'gradients of step {step + 1} are not finite in float16, with a '
          'loss scale of 1 either; nothing of that step is saved: lower the '
          "learning rate, or set model.dtype to 'bfloat16' or 'float32'."
      )

"""Dense training as a user of optax writes it: the baseline of sparse steps.

The code contains no masks. Losses, metrics and schedules are those of
`spdf_jax.training`.
"""

from collections.abc import Callable

import jax
import optax

from spdf_jax import training
from spdf_jax.training.step import losses
from spdf_jax.training.step import optimizers


def adamw(
    plan: training.Plan,
    *,
    b1: float,
    b2: float,
    eps: float,
    clip_norm: float,
    wrap: Callable[
        [optax.GradientTransformation], optax.GradientTransformation
    ] = lambda adam: adam,
) -> optax.GradientTransformation:
  """Builds AdamW with the plan's schedules; `wrap` changes its Adam."""
  return optax.chain(
      optax.clip_by_global_norm(clip_norm),
      wrap(optax.scale_by_adam(b1, b2, eps)),
      optax.add_decayed_weights(plan.weight_decay, mask=optimizers.matrices),
      optax.scale_by_learning_rate(plan.learning_rate),
  )


def train_step(
    state, batch, *, apply_fn, optimizer, learning_rate,
    loss=losses.CROSS_ENTROPY
):
  """Takes a dense training step."""

  def loss_fn(params):
    sums = loss(apply_fn, {'params': params}, batch)
    return sums.objective / losses.number_of_tokens(batch.weights)

  value, grads = jax.value_and_grad(loss_fn)(state.params)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  metrics = {
      'train/loss': value,
      'train/grad_norm': optax.tree.norm(grads),
      'train/learning_rate': learning_rate(state.step),
  }
  params = optax.apply_updates(state.params, updates)
  return training.TrainState(state.step + 1, params, opt_state), metrics


def update(state, grads, *, optimizer):
  """Takes a step of the optimizer alone, with given gradients."""
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  return training.TrainState(state.step + 1, params, opt_state), ()

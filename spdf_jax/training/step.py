"""The one training step: sparse, dense and fine-tuning alike."""

from collections.abc import Callable
from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spdf_jax import sparsity
from spdf_jax.training.matmul import ApplyFn
from spdf_jax.training.matmul import share_of_zeros
from spdf_jax.training.matmul import SparseSteps
from spdf_jax.training.state import TrainState

PyTree = Any


def token_loss(
    logits_BxLxV: jax.Array, targets_BxL: jax.Array, weights_BxL: jax.Array
) -> jax.Array:
  """Returns the mean cross-entropy over weighted tokens, in nats per token."""
  loss_BxL = optax.softmax_cross_entropy_with_integer_labels(
      logits_BxLxV, targets_BxL
  )
  total = jnp.maximum(weights_BxL.sum(), 1)
  return (loss_BxL * weights_BxL).sum() / total


def train_step(
    state: TrainState,
    batch: Any,
    *,
    apply_fn: ApplyFn,
    optimizer: optax.GradientTransformationExtraArgs,
    learning_rate: optax.Schedule,
    sparse_steps: SparseSteps | None = None,
    statistics: Callable[[PyTree], Mapping[str, jax.Array]] = lambda _: {},
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Takes one optimizer step.

  There is no branch on phase or sparsity: the mask is data, and so is where
  the optimizer needs the gradients of pruned weights. Only with sparse kernels
  there is one `cond`, since dense products are another program.

  Args:
    state: The state; donate it.
    batch: `inputs`, `targets` and `weights`, each [B, L].
    apply_fn: `(variables, tokens) -> logits`, e.g. `model.apply`.
    optimizer: An optimizer that contains `sparsify`.
    learning_rate: For the log, the schedule inside the optimizer.
    sparse_steps: What runs the model where masks are sparse enough and pruned
      weights need no gradient; by default `apply_fn` always does.
    statistics: For the log, `(opt_state) -> values`, e.g. `mask_statistics`.

  Returns:
    The next state, and metrics named `train/…` and, for the statistics,
    `sparsity/…`.
  """
  mask = sparsity.get_mask(state.opt_state)
  dense_grads = sparsity.get_dense_grads(state.opt_state)
  grad_mask = jax.tree.map(lambda m: m | dense_grads, mask)

  def differentiate(apply_fn, grad_mask):
    def loss_fn(params):
      variables = {'params': params, 'masks': mask, 'grad_masks': grad_mask}
      logits_BxLxV = apply_fn(variables, batch.inputs)
      return token_loss(logits_BxLxV, batch.targets, batch.weights)

    return jax.value_and_grad(loss_fn)(state.params)

  dense = functools.partial(differentiate, apply_fn, grad_mask)
  if sparse_steps is None:
    loss, grads = dense()
  else:
    loss, grads = jax.lax.cond(
        (share_of_zeros(mask) > sparse_steps.crossover) & ~dense_grads,
        functools.partial(differentiate, sparse_steps.apply_fn, mask),
        dense,
    )
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  metrics = {
      'train/loss': loss,
      'train/grad_norm': optax.tree.norm(grads),
      'train/learning_rate': learning_rate(state.step),
  } | {f'sparsity/{k}': v for k, v in statistics(opt_state).items()}
  return TrainState(
      state.step + 1, optax.apply_updates(state.params, updates), opt_state
  ), metrics

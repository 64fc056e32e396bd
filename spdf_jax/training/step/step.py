# SPDX-License-Identifier: Apache-2.0
"""The training step, the same for all phases."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spdf_jax import sparsity
from spdf_jax.sparsity import adapters
from spdf_jax.sparsity import state as states
from spdf_jax.training.step import losses
from spdf_jax.training.step import matmul
from spdf_jax.training.step.frozen import keep_frozen
from spdf_jax.training.step.state import TrainState

PyTree = Any


def train_step(
    state: TrainState,
    batch: Any,
    *,
    apply_fn: matmul.ApplyFn,
    optimizer: optax.GradientTransformationExtraArgs,
    learning_rate: optax.Schedule,
    sparse_steps: matmul.SparseSteps | None = None,
    loss: losses.Loss | losses.Distillation = losses.CROSS_ENTROPY,
    micro_batches: int = 1,
    dropout_key: jax.Array | None = None,
    skip_not_finite: bool = False,
    rewinds: Sequence[int] = (),
    frozen: Callable[[jax.Array], PyTree] | None = None,
    statistics: Callable[[PyTree], Mapping[str, jax.Array]] = lambda _: {},
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Takes one optimizer step.

  One function serves all phases: the mask, and whether the optimizer needs the
  gradients of pruned weights, are arrays in the state. It is compiled once for
  each batch shape and kind of step: with `sparse_steps`, a program has one
  `cond` between sparse kernels and dense products; without, it has no branch.
  A compact state, which holds only the values of kept weights, has a program of
  its own, with the model of `storage.compact_apply`; it does not update the
  mask.

  Args:
    state: The state; donate it, if you jit the step. With a loss scale, a step
      whose gradients are not finite changes only the loss scale.
    batch: A `data.Batch`, or another pytree with the fields `inputs`, `targets`
      and `weights`, each [B, L].
    apply_fn: `(variables, tokens) -> logits`, e.g. `model.apply`. It may ignore
      masks, see `training.step.matmul.without_masks`, since pruned weights are
      zero and gradients are masked here.
    optimizer: An optimizer that contains `sparsify`.
    learning_rate: Learning-rate schedule of the optimizer, only for the
      metrics.
    sparse_steps: Result of `sparse_steps`: a model with sparse kernels, used if
      the masks are sparse enough and pruned weights need no gradient; `None`:
      always `apply_fn`. Omit it for a compact state, of which `apply_fn` has
      the kernels.
    loss: Loss to minimize, as the mean over the weighted tokens of the batch.
    micro_batches: Number of micro-batches for gradient accumulation, which
      saves memory of activations; a divisor of B.
    dropout_key: Key of the run's dropout. Each step and each micro-batch calls
      `apply_fn` with a key of its own, `rngs={'dropout': key}`, which is a
      function of this key and the step; `None`: without dropout.
    skip_not_finite: Whether a step whose loss or gradient norm is not finite
      leaves the kept weights unchanged. The optimizer then updates its state
      with gradients of zero, so that counts, masks and schedules advance; a
      mask that grows by gradients grows by the order of weights then. Adapters
      stay unchanged too. Ignored with a loss scale.
    rewinds: Steps at which `rewind_weights` sets the parameters. It does so
      even if the loss or gradient norm of the step is not finite.
    frozen: Function from the step to the flags of parameters that are not
      trained, see `frozen.frozen_at`; `None`: all are trained.
    statistics: Function from the optimizer state to a mapping of metrics, e.g.
      `mask_statistics`. By default there are none.

  Returns:
    The next state, and a dict of scalar metrics: `train/loss`,
    `train/grad_norm`, `train/learning_rate`, `train/loss_scale` with a loss
    scale, `train/objective` if the loss is not plain cross-entropy, and
    `sparsity/…` for the statistics.
  """
  mask = states.stored_mask(state.opt_state)

  tokens = losses.number_of_tokens(batch.weights)
  scale = state.loss_scale.scale if state.loss_scale is not None else None

  keys = None
  if dropout_key is not None:
    key = jax.random.fold_in(dropout_key, state.step)
    keys = jax.random.split(key, micro_batches)

  def differentiate(apply_fn, **grad_masks):
    def loss_fn(params, batch, key):
      variables = {'params': params, 'masks': mask, **grad_masks}
      apply = apply_fn if key is None else functools.partial(
          apply_fn, rngs={'dropout': key}
      )
      sums = loss(apply, variables, batch)
      objective = sums.objective / tokens
      if scale is not None:
        objective *= scale
      return objective, sums.cross_entropy / tokens

    part = functools.partial(
        jax.value_and_grad(loss_fn, has_aux=True), state.params
    )
    if micro_batches == 1:
      return part(batch, None if keys is None else keys[0])
    return _accumulate(part, batch, keys, micro_batches)

  (objective, cross_entropy), grads = _differentiate(
      differentiate, apply_fn, sparse_steps,
      states.dense_mask(state.opt_state),
      sparsity.get_dense_grads(state.opt_state),
  )
  if scale is not None:
    objective, grads = jax.tree.map(lambda x: x / scale, (objective, grads))
  if frozen is not None:
    flags = frozen(state.step)
    grads = keep_frozen(flags, jax.tree.map(jnp.zeros_like, grads), grads)
  grad_norm = optax.tree.norm(grads)
  finite = jnp.isfinite(cross_entropy) & jnp.isfinite(grad_norm)
  if skip_not_finite:
    grads = jax.tree.map(lambda g: jnp.where(finite, g, 0), grads)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, updates)
  if frozen is not None:
    params = keep_frozen(flags, state.params, params)
  if skip_not_finite:
    takes_new = finite | jnp.isin(state.step, jnp.asarray(rewinds, jnp.int32))
    choose = lambda new, old: jnp.where(takes_new, new, old)
    params = jax.tree.map(choose, params, state.params)
    opt_state = adapters.map_adapters(choose, opt_state, state.opt_state)
  # An update of -p leaves NaN where p is NaN.
  params = sparsity.apply_mask(params, states.dense_mask(opt_state))
  metrics = {
      'train/loss': cross_entropy,
      'train/grad_norm': grad_norm,
      'train/learning_rate': learning_rate(state.step),
  }
  new = dataclasses.replace(
      state,
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
  )
  if state.loss_scale is not None:
    metrics['train/loss_scale'] = state.loss_scale.scale
    new = dataclasses.replace(
        _keep_finite(finite, new, state),
        loss_scale=losses.adjust(state.loss_scale, finite),
    )
  metrics |= {
      f'sparsity/{k}': v for k, v in statistics(new.opt_state).items()
  }
  if not loss.is_plain:
    metrics['train/objective'] = objective
  return new, metrics


def _differentiate(
    differentiate: Callable[..., PyTree],
    apply_fn: matmul.ApplyFn,
    sparse_steps: matmul.SparseSteps | None,
    mask: PyTree,
    dense_grads: jax.Array,
) -> PyTree:
  """Returns values and gradients, also of pruned weights if they are needed."""
  def dense():
    grad_masks = jax.tree.map(lambda m: m | dense_grads, mask)
    values, grads = differentiate(apply_fn, grad_masks=grad_masks)
    return values, sparsity.apply_mask(grads, grad_masks)

  if sparse_steps is None:
    return dense()
  return jax.lax.cond(
      (matmul.mask_sparsity(mask) > sparse_steps.crossover) & ~dense_grads,
      functools.partial(
          differentiate, sparse_steps.apply_fn, grad_masks=mask
      ),
      dense,
  )


def _keep_finite(
    finite: jax.Array, new: TrainState, old: TrainState
) -> TrainState:
  """Returns the new state, or the old one if gradients are not finite."""
  return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)


def _accumulate(
    f: Callable[[Any, Any], PyTree],
    batch: Any,
    keys: jax.Array | None,
    micro_batches: int,
) -> PyTree:
  """Returns the sum of a function's results over micro-batches and keys."""
  # Each micro-batch takes every n-th row, so that devices, which hold
  # contiguous rows, share every micro-batch evenly.
  parts = jax.tree.map(
      lambda x: x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1), batch
  )
  zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(f, *jax.tree.map(lambda x: x[0], (parts, keys))),
  )
  add = lambda total, part: (jax.tree.map(jnp.add, total, f(*part)), None)
  return jax.lax.scan(add, zeros, (parts, keys))[0]

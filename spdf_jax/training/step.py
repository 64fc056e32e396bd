# SPDX-License-Identifier: Apache-2.0
"""The training step, the same for all phases, and its state."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import fnmatch
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax import sparsity
from spdf_jax.sparsity import state as states
from spdf_jax.sparsity.rewinding import RewindState
from spdf_jax.sparsity.trees import path_name
from spdf_jax.training import losses
from spdf_jax.training import matmul
from spdf_jax.training.distillation import Distillation
from spdf_jax.training.plan import Plan

PyTree = Any


@flax.struct.dataclass
class TrainState:
  """The state of training, which a step reads and returns."""

  step: jax.Array
  """Steps completed, int32."""

  params: PyTree
  """Dense arrays, exactly zero where the mask is False."""

  opt_state: PyTree
  """Optimizer state, which contains the mask."""

  loss_scale: losses.LossScale | None = None
  """Loss scale in float16; `None` otherwise."""


def create_state(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    loss_scale: losses.LossScale | None = None,
) -> TrainState:
  """Creates the state of step 0 from dense parameters, which it masks.

  Args:
    params: Initial or restored parameters.
    optimizer: An optimizer that contains `sparsify`, e.g. that of `adamw`.
    loss_scale: Result of `training.losses.create_loss_scale`, for a model that
      computes in float16; otherwise `None`.

  Returns:
    The state at step 0, with copies of the parameters.

  Raises:
    ValueError: the optimizer does not contain `sparsify`.
  """
  # Copied, since the step donates the state but not the caller's arrays.
  params = jax.tree.map(jnp.array, params)
  opt_state = optimizer.init(params)
  params = sparsity.apply_mask(params, sparsity.get_mask(opt_state))
  return TrainState(jnp.zeros([], jnp.int32), params, opt_state, loss_scale)


def train_step(
    state: TrainState,
    batch: Any,
    *,
    apply_fn: matmul.ApplyFn,
    optimizer: optax.GradientTransformationExtraArgs,
    learning_rate: optax.Schedule,
    sparse_steps: matmul.SparseSteps | None = None,
    loss: losses.Loss | Distillation = losses.CROSS_ENTROPY,
    micro_batches: int = 1,
    dropout_key: jax.Array | None = None,
    skip_not_finite: bool = False,
    rewinds: Sequence[int] = (),
    frozen: Callable[[jax.Array], PyTree] | None = None,
    statistics: Callable[[PyTree], Mapping[str, jax.Array]] = lambda _: {},
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Takes one optimizer step.

  One compiled step is used in all phases: the mask, and whether the optimizer
  needs the gradients of pruned weights, are arrays in the state. Only with
  `sparse_steps` it contains one `cond`, between sparse kernels and dense
  products. A compact state, which holds only the values of kept weights, is
  traced separately, and its step does not update the mask.

  Args:
    state: The state; donate it, if you jit the step. With a loss scale, a step
      whose gradients are not finite changes only the loss scale.
    batch: A `data.Batch`, or another pytree with the fields `inputs`, `targets`
      and `weights`, each [B, L].
    apply_fn: `(variables, tokens) -> logits`, e.g. `model.apply`. It may ignore
      masks, see `training.matmul.without_masks`, since pruned weights are zero
      and gradients are masked here.
    optimizer: An optimizer that contains `sparsify`.
    learning_rate: Learning-rate schedule of the optimizer, only for the
      metrics.
    sparse_steps: Result of `sparse_steps`: a model with sparse kernels, used if
      the state is compact, or the masks are sparse enough and pruned weights
      need no gradient; `None`: always `apply_fn`.
    loss: Loss to minimize, as the mean over the weighted tokens of the batch.
    micro_batches: Number of micro-batches for gradient accumulation, which
      saves memory of activations; a divisor of B.
    dropout_key: Key of the run's dropout. Each step and each micro-batch calls
      `apply_fn` with a key of its own, `rngs={'dropout': key}`, which is a
      function of this key and the step; `None`: without dropout.
    skip_not_finite: Whether a step whose loss or gradient norm is not finite
      leaves the kept weights unchanged. The optimizer then updates its state
      with gradients of zero, so that counts, masks and schedules advance.
      Ignored with a loss scale.
    rewinds: Steps at which `rewind_weights` sets the parameters. It does so
      even if the loss or gradient norm of the step is not finite.
    frozen: Function from the step to the flags of parameters that are not
      trained, see `training.step.frozen_at`; `None`: all are trained.
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

  if states.is_packed(mask):
    # Kernels at any sparsity: other products would first unpack all weights.
    (objective, cross_entropy), grads = differentiate(
        sparse_steps.apply_fn if sparse_steps else apply_fn
    )
  else:
    (objective, cross_entropy), grads = _differentiate_dense(
        differentiate, apply_fn, sparse_steps, mask,
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
    params = jax.tree.map(
        lambda new, old: jnp.where(takes_new, new, old), params, state.params
    )
  if not states.is_packed(mask):
    # An update of -p leaves NaN where p is NaN.
    params = sparsity.apply_mask(params, sparsity.get_mask(opt_state))
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


def _differentiate_dense(
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


def frozen_at(
    plan: Plan, params: PyTree
) -> Callable[[jax.Array], PyTree] | None:
  """Returns a function from a step to the parameters that are frozen.

  Args:
    plan: The phases.
    params: The parameters, or their shapes.

  Returns:
    `(step) -> flags`, a tree of the parameters' structure: a bool scalar for
    parameters that some phase freezes, `False` for others; `None`: no phase
    freezes any.

  Raises:
    ValueError: a pattern of a phase matches no parameter, or a phase freezes
      all of them.
  """
  if not any(phase.frozen for phase in plan.phases):
    return None
  names = [
      path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)
  ]
  table = np.zeros((len(plan.phases), len(names)), bool)
  for row, phase in zip(table, plan.phases):
    for pattern in phase.frozen or ():
      matches = [fnmatch.fnmatchcase(name, pattern) for name in names]
      if not any(matches):
        raise ValueError(
            f'phase {phase.name!r} has the pattern {pattern!r} in frozen, '
            'which matches the path of no parameter; the paths are '
            f'{", ".join(names)}.'
        )
      row |= matches
    if row.all():
      raise ValueError(
          f'phase {phase.name!r} has all parameters frozen, by the patterns '
          f'{list(phase.frozen or ())}; leave some to train.'
      )

  def flags(step):
    starts = np.asarray(plan.starts[1:], np.int32)
    current = jnp.asarray(table)[jnp.sum(step >= starts)]
    return jax.tree.unflatten(jax.tree.structure(params), [
        current[i] if column.any() else False
        for i, column in enumerate(table.T)
    ])

  return flags


def keep_frozen(flags: PyTree, old: PyTree, new: PyTree) -> PyTree:
  """Returns the old leaves where they are frozen, and the new ones elsewhere.

  Args:
    flags: Flags that the function of `frozen_at` returns.
    old: Parameters.
    new: Parameters of the same structure.

  Returns:
    The parameters.
  """
  return jax.tree.map(
      lambda flag, o, n: n if flag is False else jnp.where(flag, o, n),
      flags, old, new,
  )


def with_dense_grads(
    state: TrainState, algorithm: sparsity.Algorithm
) -> TrainState:
  """Returns a state whose next step has the gradients that a mask needs.

  Each step stores whether the next one needs gradients of pruned weights. This
  is no longer true if the next step has become the first of a phase.

  Args:
    state: The state, with dense arrays.
    algorithm: The algorithm of the next step.
  """
  is_ours = lambda node: isinstance(node, states.SparsifyState)

  def update(node):
    if not is_ours(node):
      return node
    needed = jnp.asarray(algorithm.dense_grads_at(node.count), bool)
    return node._replace(
        dense_grads=jax.device_put(needed, node.dense_grads.sharding)
    )

  return dataclasses.replace(state, opt_state=jax.tree.map(
      update, state.opt_state, is_leaf=is_ours
  ))


def step_values(state: TrainState) -> TrainState:
  """Returns the values of a state that a best state does not replace.

  These are all scalars, such as counts, the loss scale, and the snapshot of
  `rewind_weights`; arrays of the parameters, the masks and the optimizer's
  moments are `None`.
  """
  return dataclasses.replace(
      state, params=_scalars(state.params), opt_state=_scalars(state.opt_state)
  )


def _scalars(tree: PyTree) -> PyTree:
  def keep(node):
    if isinstance(node, RewindState):
      return node._replace(inner_state=_scalars(node.inner_state))
    return node if node.ndim == 0 else None

  return jax.tree.map(
      keep, tree, is_leaf=lambda node: isinstance(node, RewindState)
  )


def at_step(best: TrainState, values: TrainState) -> TrainState:
  """Returns a best state with the `step_values` of a later one.

  Schedules and batches are functions of the step, so that a phase that follows
  with the best weights takes its own learning rates and its own batches.

  Args:
    best: The best state, from which parameters, masks and moments are taken.
    values: Result of `step_values` for the later state.

  Returns:
    The state.
  """
  return dataclasses.replace(
      values,
      params=best.params,
      opt_state=jax.tree.map(
          lambda later, x: x if later is None else later,
          values.opt_state, best.opt_state, is_leaf=lambda x: x is None,
      ),
  )

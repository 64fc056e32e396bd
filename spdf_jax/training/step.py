"""The training step, one for all phases, and the state that it changes."""

from collections.abc import Callable
from collections.abc import Mapping
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from spdf_jax import sparsity
from spdf_jax.sparsity.storage import is_packed
from spdf_jax.training.losses import adjust
from spdf_jax.training.losses import CROSS_ENTROPY
from spdf_jax.training.losses import Loss
from spdf_jax.training.losses import LossScale
from spdf_jax.training.losses import number_of_tokens
from spdf_jax.training.matmul import ApplyFn
from spdf_jax.training.matmul import choose_packed
from spdf_jax.training.matmul import share_of_zeros
from spdf_jax.training.matmul import SparseSteps

PyTree = Any


@flax.struct.dataclass
class TrainState:
  """What a training step reads and returns."""

  step: jax.Array
  """Steps completed, int32."""

  params: PyTree
  """Dense arrays, exactly zero where the mask is False."""

  opt_state: PyTree
  """Optimizer state; holds the mask."""

  loss_scale: LossScale | None = None
  """In float16: what the loss is multiplied by."""


def create_state(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    loss_scale: LossScale | None = None,
) -> TrainState:
  """Starts training from dense parameters: they are masked here.

  Args:
    params: Initial or restored parameters.
    optimizer: An optimizer that contains `sparsify`.
    loss_scale: Of a model that computes in float16, `create_loss_scale`.

  Returns:
    The state at step 0.
  """
  # A copy: the state is donated to the step, the caller's arrays must not be.
  params = jax.tree.map(jnp.array, params)
  opt_state = optimizer.init(params)
  params = sparsity.apply_mask(params, sparsity.get_mask(opt_state))
  return TrainState(jnp.zeros([], jnp.int32), params, opt_state, loss_scale)


def train_step(
    state: TrainState,
    batch: Any,
    *,
    apply_fn: ApplyFn,
    optimizer: optax.GradientTransformationExtraArgs,
    learning_rate: optax.Schedule,
    sparse_steps: SparseSteps | None = None,
    loss: Loss = CROSS_ENTROPY,
    micro_batches: int = 1,
    statistics: Callable[[PyTree], Mapping[str, jax.Array]] = lambda _: {},
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Takes one optimizer step.

  There is no branch on phase or sparsity: the mask is data, and so is where
  the optimizer needs the gradients of pruned weights. Only with sparse kernels
  there is one `cond`, since dense products are another program. A state that is
  stored compactly is another program too: its mask does not change.

  Args:
    state: The state; donate it. With a loss scale, a step whose gradients are
      not finite changes that alone.
    batch: `inputs`, `targets` and `weights`, each [B, L].
    apply_fn: `(variables, tokens) -> logits`, e.g. `model.apply`. Weights are
      zero off the mask and gradients are masked here, so it need not know of
      masks: see `without_masks`.
    optimizer: An optimizer that contains `sparsify`.
    learning_rate: For the log, the schedule inside the optimizer.
    sparse_steps: What runs the model where masks are sparse enough and pruned
      weights need no gradient; by default `apply_fn` always does.
    loss: What is minimized: its mean over the weighted tokens of the batch.
    micro_batches: In how many parts, one after another, gradients of the batch
      are computed: the less memory for activations. They divide B.
    statistics: For the log, `(opt_state) -> values`, e.g. `mask_statistics`.

  Returns:
    The next state, and metrics named `train/…` and, for the statistics,
    `sparsity/…`.
  """
  mask = sparsity.stored_mask(state.opt_state)

  tokens = number_of_tokens(batch.weights)
  scale = state.loss_scale.scale if state.loss_scale is not None else None

  def differentiate(apply_fn, **grad_masks):
    def loss_fn(params, batch):
      variables = {'params': params, 'masks': mask, **grad_masks}
      sums = loss(apply_fn, variables, batch)
      objective = sums.objective / tokens
      if scale is not None:
        objective *= scale
      return objective, sums.cross_entropy / tokens

    part = functools.partial(
        jax.value_and_grad(loss_fn, has_aux=True), state.params
    )
    return part(batch) if micro_batches == 1 else _add_up(
        part, batch, micro_batches
    )

  if is_packed(mask):
    (objective, cross_entropy), grads = differentiate(
        choose_packed(apply_fn, sparse_steps, state.params, mask)
    )
  else:
    (objective, cross_entropy), grads = _differentiate_dense(
        differentiate, apply_fn, sparse_steps, mask,
        sparsity.get_dense_grads(state.opt_state),
    )
  if scale is not None:
    objective, grads = jax.tree.map(lambda x: x / scale, (objective, grads))
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  grad_norm = optax.tree.norm(grads)
  metrics = {
      'train/loss': cross_entropy,
      'train/grad_norm': grad_norm,
      'train/learning_rate': learning_rate(state.step),
  }
  new = state.replace(
      step=state.step + 1,
      params=optax.apply_updates(state.params, updates),
      opt_state=opt_state,
  )
  if scale is not None:
    metrics['train/loss_scale'] = scale
    new = _unless_overflown(jnp.isfinite(grad_norm), new, state)
  metrics |= {
      f'sparsity/{k}': v for k, v in statistics(new.opt_state).items()
  }
  if not loss.is_plain:
    metrics['train/objective'] = objective
  return new, metrics


def _differentiate_dense(
    differentiate: Callable[..., PyTree],
    apply_fn: ApplyFn,
    sparse_steps: SparseSteps | None,
    mask: PyTree,
    dense_grads: jax.Array,
) -> PyTree:
  """Differentiates in matrices, also in pruned weights where asked."""
  def dense():
    grad_masks = jax.tree.map(lambda m: m | dense_grads, mask)
    values, grads = differentiate(apply_fn, grad_masks=grad_masks)
    return values, sparsity.apply_mask(grads, grad_masks)

  if sparse_steps is None:
    return dense()
  return jax.lax.cond(
      (share_of_zeros(mask) > sparse_steps.crossover) & ~dense_grads,
      functools.partial(
          differentiate, sparse_steps.apply_fn, grad_masks=mask
      ),
      dense,
  )


def _unless_overflown(
    finite: jax.Array, new: TrainState, old: TrainState
) -> TrainState:
  """Keeps the old state where gradients are not finite, but for the scale."""
  kept = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
  return kept.replace(loss_scale=adjust(old.loss_scale, finite))


def _add_up(
    f: Callable[[Any], PyTree], batch: Any, micro_batches: int
) -> PyTree:
  """Adds up what a function of a batch gives for its parts."""
  # Every n-th row each: a device that holds neighbouring rows has its share of
  # every part.
  parts = jax.tree.map(
      lambda x: x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1), batch
  )
  zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      jax.eval_shape(f, jax.tree.map(lambda x: x[0], parts)),
  )
  add = lambda total, part: (jax.tree.map(jnp.add, total, f(part)), None)
  return jax.lax.scan(add, zeros, parts)[0]

"""The optimizer of a training plan."""

from typing import Any

import jax
import optax

from spdf_jax import sparsity
from spdf_jax.sparsity.paths import path_name
from spdf_jax.sparsity.tracking import track_masks
from spdf_jax.training.plan import Plan

PyTree = Any

# A step that is never reached. Without any restart, XLA would compile the step
# of a single phase differently from that of a run of all phases, and their
# results would differ in rounding.
_NEVER = 2**31 - 1


def adamw(
    plan: Plan,
    *,
    where: Any,
    key: jax.Array,
    b1: float,
    b2: float,
    eps: float,
    clip_norm: float,
) -> optax.GradientTransformationExtraArgs:
  """Builds sparse AdamW with the plan's learning rate, decay and masks.

  Gradients are clipped by their global norm, and weight decay applies to
  matrices only. Moments are reset at the start of phases with `restart`; the
  learning rate is not. Mask updates within phases are tracked.

  Args:
    plan: The phases.
    where: Selection of sparsified leaves, as `sparsify` takes it.
    key: Typed PRNG key of the masks.
    b1: Decay rate of the first moment.
    b2: Decay rate of the second moment.
    eps: Term added to the square root of the second moment.
    clip_norm: Largest global norm of the gradient.

  Returns:
    The optimizer, wrapped in `sparsify`, and in `track_masks` if
    `plan.updates_masks`.

  References:
    Loshchilov and Hutter, `AdamW <https://arxiv.org/abs/1711.05101>`_, 2019
    Thangarasa et al., `SPDF <https://arxiv.org/abs/2303.10464>`_, 2023
  """
  inner = optax.chain(
      optax.clip_by_global_norm(clip_norm),
      sparsity.reset_state(
          optax.scale_by_adam(b1, b2, eps), plan.restarts or (_NEVER,)
      ),
      optax.add_decayed_weights(plan.weight_decay, mask=matrices),
      optax.scale_by_learning_rate(plan.learning_rate),
  )
  tx = sparsity.sparsify(inner, plan.algorithm, where=where, key=key)
  return track_masks(tx, plan.algorithm) if plan.updates_masks else tx


def matrices(params: PyTree) -> PyTree:
  """Returns the mask of leaves with weight decay: all but norms and biases.

  Example:
    >>> import jax.numpy as jnp
    >>> matrices({'wi': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}})
    {'wi': {'bias': False, 'kernel': True}}
  """
  return jax.tree_util.tree_map_with_path(
      lambda path, _: path_name(path[-1:]) not in ('bias', 'scale'),
      params,
  )

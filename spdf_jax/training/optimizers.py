"""The optimizer of a training plan."""

from typing import Any

import jax
import optax

from spdf_jax import sparsity
from spdf_jax.sparsity.selection import path_name
from spdf_jax.sparsity.tracking import track_masks
from spdf_jax.training.plan import Plan

PyTree = Any

# A step that never comes. Compiled without any restart, a sparse launch would
# round otherwise than the launch of all phases that it is a part of.
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

  Gradients are clipped by their global norm; only matrices decay. Moments
  restart where a phase asks, the learning rate never does. Where masks move
  within phases, their changes are tracked.

  Args:
    plan: The phases.
    where: The selection of `sparsify`.
    key: Typed PRNG key of the masks.
    b1: Decay of the first moment.
    b2: Decay of the second moment.
    eps: Added to the root of the second moment.
    clip_norm: Largest global norm of the gradient.

  Returns:
    The optimizer, wrapped in `sparsify`, and in `track_masks` where
    `plan.moves_masks`.

  References:
    Loshchilov and Hutter, `AdamW <https://arxiv.org/abs/1711.05101>`_, 2019
    Thangarasa et al., `SPDF <https://arxiv.org/abs/2303.10464>`_, 2023
  """
  inner = optax.chain(
      optax.clip_by_global_norm(clip_norm),
      sparsity.restart(
          optax.scale_by_adam(b1, b2, eps), plan.restarts or (_NEVER,)
      ),
      optax.add_decayed_weights(plan.weight_decay, mask=matrices),
      optax.scale_by_learning_rate(plan.learning_rate),
  )
  tx = sparsity.sparsify(inner, plan.algorithm, where=where, key=key)
  return track_masks(tx, plan.algorithm) if plan.moves_masks else tx


def matrices(params: PyTree) -> PyTree:
  """Marks the leaves that decay: all but norms and biases, scanned or not.

  Example:
    >>> import jax.numpy as jnp
    >>> matrices({'wi': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}})
    {'wi': {'bias': False, 'kernel': True}}
  """
  return jax.tree_util.tree_map_with_path(
      lambda path, _: path_name(path[-1:]) not in ('bias', 'scale'),
      params,
  )

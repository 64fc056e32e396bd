# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a training plan."""

import dataclasses
from typing import Any

import jax
import optax

from spdf_jax import sparsity
from spdf_jax.sparsity.tracking import track_masks
from spdf_jax.training.named_optimizers import Constructor
from spdf_jax.training.named_optimizers import matrices
from spdf_jax.training.named_optimizers import NamedOptimizer
from spdf_jax.training.named_optimizers import takes_decay
from spdf_jax.training.plan import Plan
from spdf_jax.training.settings import OptimizerConfig

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
  learning rate is not. Weights are revived and rewound as the phases describe.
  Mask updates within phases are tracked.

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
  return _sparse(inner, plan, where, key)


def create_optimizer(
    config: OptimizerConfig | NamedOptimizer,
    plan: Plan,
    *,
    where: Any,
    key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
  """Builds the sparse optimizer of a config.

  It clips gradients, decays matrices, restarts and tracks mask updates as
  `adamw` does, whatever the optimizer.

  Args:
    config: Settings of AdamW, or another optimizer by its name.
    plan: The phases.
    where: Selection of sparsified leaves, as `sparsify` takes it.
    key: Typed PRNG key of the masks.

  Returns:
    The optimizer, as `adamw` returns it.

  Raises:
    ValueError: a user's own optimizer cannot be imported.
  """
  if isinstance(config, OptimizerConfig):
    return adamw(plan, where=where, key=key, **dataclasses.asdict(config))
  make = config.constructor(where)
  inner = [optax.clip_by_global_norm(config.clip_norm), _scheduled(make, plan)]
  if not takes_decay(make):
    inner.append(optax.add_decayed_weights(
        lambda step: -plan.learning_rate(step) * plan.weight_decay(step),
        mask=matrices,
    ))
  return _sparse(optax.chain(*inner), plan, where, key)


def _scheduled(
    make: Constructor, plan: Plan
) -> optax.GradientTransformationExtraArgs:
  """Constructs an optimizer anew at every step, for the step's learning rate.

  A schedule inside the optimizer would begin again with each restart.
  """
  def at(step):
    hyperparams = {'learning_rate': plan.learning_rate(step)}
    if takes_decay(make):
      hyperparams['weight_decay'] = plan.weight_decay(step)
    return sparsity.reset_state(
        make(**hyperparams), plan.restarts or (_NEVER,)
    )

  def update_fn(updates, state, params=None, **extra_args):
    return at(state.count).update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(
      lambda params: at(0).init(params), update_fn
  )


def _sparse(
    inner: optax.GradientTransformation, plan: Plan, where: Any, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
  revive = plan.revive and sparsity.scaled_normal(plan.revive)
  tx = sparsity.sparsify(
      inner, plan.algorithm, where=where, key=key, revive=revive
  )
  if plan.rewinds:
    tx = sparsity.rewind_weights(
        tx, plan.rewinds, snapshot_at=plan.rewind_to
    )
  return track_masks(tx, plan.algorithm) if plan.updates_masks else tx

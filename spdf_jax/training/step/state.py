# SPDX-License-Identifier: Apache-2.0
"""The state of training, and how it passes from one phase to the next."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from spdf_jax import sparsity
from spdf_jax.sparsity import state as states
from spdf_jax.sparsity.age import AgeState
from spdf_jax.sparsity.rewinding import RewindState
from spdf_jax.training.step import losses

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
    loss_scale: Result of `training.step.losses.create_loss_scale`, for a model
      that computes in float16; otherwise `None`.

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


def with_dense_grads(
    state: TrainState, algorithm: sparsity.Algorithm
) -> TrainState:
  """Updates whether the next step computes gradients of pruned weights.

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
  """Returns the values of a state that stay when best weights are restored.

  These are all scalars, such as counts, the loss scale, and the snapshot of
  `rewind_weights`; arrays of the parameters, the masks and the optimizer's
  moments are `None`, and so is the count of `with_age`, which belongs to ages.
  """
  return dataclasses.replace(
      state, params=_scalars(state.params), opt_state=_scalars(state.opt_state)
  )


def _scalars(tree: PyTree) -> PyTree:
  def keep(node):
    if isinstance(node, RewindState):
      return node._replace(inner_state=_scalars(node.inner_state))
    if isinstance(node, AgeState):
      return None
    return node if node.ndim == 0 else None

  return jax.tree.map(
      keep, tree, is_leaf=lambda node: isinstance(node, RewindState | AgeState)
  )


def at_step(best: TrainState, values: TrainState) -> TrainState:
  """Returns the state of the best evaluation with later `step_values`.

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

"""The state of training: everything that a step changes."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from spdf_jax import sparsity
from spdf_jax.training.loss_scale import LossScale

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

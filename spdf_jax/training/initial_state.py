# SPDX-License-Identifier: Apache-2.0
"""The state at step 0, from initial parameters or those of another run."""

import dataclasses
import functools
from typing import Any

import jax
import optax

from spdf_jax import data
from spdf_jax.training import initial_mask
from spdf_jax.training.programs import Programs
from spdf_jax.training.step import losses
from spdf_jax.training.step import state as states
from spdf_jax.training.step.state import TrainState

PyTree = Any


def create(programs: Programs) -> TrainState:
  """Creates the state at step 0 from initial parameters, sharded.

  Args:
    programs: Programs of the run.

  Raises:
    ValueError: the initial mask does not fit the parameters or the plan.
  """
  if programs.plan.phases[0].initial_mask:
    return programs.scale_init(from_params(programs, programs.init_params()))
  return jax.jit(programs.first_state, out_shardings=programs.shardings)()


def from_params(programs: Programs, params: PyTree) -> TrainState:
  """Creates the state at step 0 from parameters, sharded as in this run.

  Args:
    programs: Programs of the run.
    params: Dense parameters.

  Raises:
    ValueError: a given mask does not fit the parameters or the plan.
  """
  create_state = functools.partial(
      states.create_state,
      optimizer=_first_optimizer(programs, params),
      loss_scale=losses.create_loss_scale(programs.model.config.dtype),
  )
  if jax.process_count() == 1:
    # Not jitted, since checks of given masks need concrete values.
    return jax.device_put(create_state(params), programs.shardings)
  return jax.jit(create_state, out_shardings=programs.shardings)(params)


def _first_optimizer(
    programs: Programs, params: PyTree
) -> optax.GradientTransformationExtraArgs:
  """Returns the optimizer whose initial mask is that of the config."""
  config, model = programs.config, programs.model

  def mean_loss(params: PyTree, batch: data.Batch) -> jax.Array:
    sums = config.loss(model.apply, {'params': params}, batch)
    return sums.objective / losses.number_of_tokens(batch.weights)

  init = initial_mask.first_init(
      programs.plan, mean_loss, params, programs.batch_at, where=model.where,
      are_trained=bool(config.init_from),
  )
  if init is None:
    return programs.optimizer
  return programs.optimizer_of(dataclasses.replace(programs.plan, init=init))

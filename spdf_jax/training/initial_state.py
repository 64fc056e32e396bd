# SPDX-License-Identifier: Apache-2.0
"""The state that a run begins with: its latest, another run's, or a new one."""

from collections.abc import Mapping
import dataclasses
import functools
import logging
import pathlib
import types
from typing import Any, NamedTuple

import jax
import optax

from spdf_jax import data
from spdf_jax import files
from spdf_jax.training import initial_mask
from spdf_jax.training.checkpoints import files as checkpoint_files
from spdf_jax.training.checkpoints import workdir as workdirs
from spdf_jax.training.checkpoints.manager import Checkpoints
from spdf_jax.training.configs.early_stop import Best
from spdf_jax.training.programs import Programs
from spdf_jax.training.step import losses
from spdf_jax.training.step import state as states
from spdf_jax.training.step.state import TrainState

PyTree = Any

logger = logging.getLogger('spdf_jax')


class Start(NamedTuple):
  """The state that a run begins with, and the phases before it."""

  state: TrainState
  """The state."""

  ends: Mapping[str, int] = types.MappingProxyType({})
  """Recorded ends of the phases that have begun, by name."""

  best: Mapping[str, Best] = types.MappingProxyType({})
  """Best evaluations of the phases, by name."""


def find_start(
    programs: Programs,
    checkpoints: Checkpoints,
    workdir: pathlib.Path,
    fingerprints: Mapping[str, str],
) -> Start:
  """Restores the state of a run, or creates it.

  The first that exists is used: the latest checkpoint of the workdir, the
  checkpoint of `resume`, a new state from the parameters of `init_from`, and
  one from initial parameters.

  Args:
    programs: Programs of the run.
    checkpoints: Checkpoints of the workdir.
    workdir: The workdir.
    fingerprints: Fingerprints of the data, by source.

  Returns:
    The state, and what is recorded of the phases before it.

  Raises:
    ValueError: a checkpoint is of another config, data or model, or that of
      `resume` leaves nothing to train.
  """
  config = programs.config
  state = checkpoints.restore_latest(programs.abstract_state)
  if state is not None:
    step = int(state.step)
    logger.info('resuming from step %d of this workdir', step)
    with files.reading(workdir, 'restore its checkpoints from a copy.'):
      ends = checkpoints.ends_until(step)
      programs.plan.with_ends(ends)  # Raises for the ends of other phases.
      return Start(state, ends, checkpoints.best_until(step))
  if (workdir / workdirs.CONFIG).exists():
    logger.info(
        'this workdir has no checkpoint yet, so the run begins again; it '
        'writes one every %d steps', config.checkpoints.every,
    )
  if config.resume:
    read_state = functools.partial(_resume, programs, fingerprints)
    return workdirs.read_source(config.resume, read_state)
  if config.init_from:
    read_params = functools.partial(_read_params, programs)
    params = workdirs.read_source(config.init_from, read_params)
    return Start(from_params(programs, params))
  return Start(create(programs))


def _resume(
    programs: Programs,
    fingerprints: Mapping[str, str],
    checkpoint: pathlib.Path,
) -> Start:
  """Returns the state of a checkpoint, and the ends of its phases."""
  ends = workdirs.past_ends(checkpoint)
  last = programs.plan.with_ends(ends).total_steps
  if int(checkpoint.name) >= last:
    raise ValueError(
        f'resume: {checkpoint} is at step {checkpoint.name} of {last}, '
        'which leaves nothing to train; add a phase to phases.order, or give '
        'an earlier checkpoint.'
    )
  logger.info('resuming from %s', checkpoint)
  state = checkpoint_files.read_checkpoint(
      checkpoint, programs.abstract_state, config=programs.config,
      fingerprints=fingerprints,
  )
  return Start(state, ends)


def _read_params(programs: Programs, checkpoint: pathlib.Path) -> PyTree:
  logger.info('starting from the parameters of %s', checkpoint)
  return checkpoint_files.read_params(
      checkpoint, programs.abstract_state.params
  )


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

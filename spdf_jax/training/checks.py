# SPDX-License-Identifier: Apache-2.0
"""Checks of a run, in the order in which `Run.create` makes them."""

import math
import os
from typing import Any, NamedTuple

import jax

from spdf_jax.training import initial_mask
from spdf_jax.training.checkpoints import workdir as workdirs
from spdf_jax.training.configs.config import RunConfig
from spdf_jax.training.plan import Plan
from spdf_jax.training.programs import Programs
from spdf_jax.training.step import frozen
from spdf_jax.training.step import matmul
from spdf_jax.training.step import mesh as meshes
from spdf_jax.training.step import optimizers
from spdf_jax.training.step import storage
from spdf_jax.training.step import teacher

PyTree = Any


class Draft(NamedTuple):
  """The parts of a run that are known before its data is read.

  Attributes:
    config: The config.
    mesh: Mesh of all devices.
    model: The model.
    params: Shapes and dtypes of the parameters.
    plan: The phases; those in epochs have `math.inf` steps.
    workdir: Working directory; `None`: it is not known yet.
  """

  config: RunConfig
  mesh: jax.sharding.Mesh
  model: Any
  params: PyTree
  plan: Plan
  workdir: str | os.PathLike[str] | None


def _check_batches(draft: Draft) -> None:
  for phase in draft.plan.phases:
    try:
      meshes.check_batches(
          draft.mesh, phase.batch_size, draft.config.micro_batches
      )
    except ValueError as error:
      raise ValueError(f'phase {phase.name!r}: {error}') from error


def _check_devices(draft: Draft) -> None:
  matmul.check_devices(draft.config.matmul, draft.mesh.size)


def _check_workdir(draft: Draft) -> None:
  if draft.workdir is not None:
    workdirs.check_workdir(draft.workdir, draft.config, draft.params)


def _check_optimizer(draft: Draft) -> None:
  config, where = draft.config, draft.model.where
  optimizers.check_optimizer(config.optimizer, draft.params, where)
  optimizers.check_adapter(config.adapter, draft.params, where)
  if config.parameterization is not None:
    config.parameterization.width_multiplier(draft.model.config.d_model)


def _check_teacher(draft: Draft) -> None:
  if draft.config.loss.teacher is not None:
    teacher.check_teacher(
        draft.config.loss.teacher, draft.model.config.vocab_size,
        max(phase.length for phase in draft.config.phases),
    )


def _check_algorithms(draft: Draft) -> None:
  initial_mask.check_algorithms(draft.plan, draft.params, draft.model.where)


def _check_first_mask(draft: Draft) -> None:
  if draft.workdir is None or not workdirs.saved_steps(draft.workdir):
    initial_mask.check_first_mask(
        draft.plan, draft.params, draft.model.where,
        are_trained=bool(draft.config.init_from or draft.config.resume),
    )


def _check_frozen(draft: Draft) -> None:
  frozen.frozen_at(draft.plan, draft.params)


def _check_storage(draft: Draft) -> None:
  if math.isfinite(draft.plan.total_steps):
    storage.check_storage(draft.config, draft.plan, draft.mesh)


BEFORE_DATA = (
    _check_batches, _check_devices, _check_workdir, _check_optimizer,
    _check_teacher, _check_algorithms, _check_first_mask, _check_frozen,
    _check_storage,
)
"""Functions of a `Draft` that raise ValueError."""


def _check_storage_of_epochs(programs: Programs) -> None:
  if any(phase.counts_epochs for phase in programs.config.phases):
    storage.check_storage(programs.config, programs.plan, programs.mesh)


def _check_amount_of_data(programs: Programs) -> None:
  _ = programs.batch_at  # Raises if the data does not suffice for the plan.


def _check_kernels(programs: Programs) -> None:
  _ = programs.sparse_steps  # Raises if the native library cannot be built.


WITH_DATA = (_check_storage_of_epochs, _check_amount_of_data, _check_kernels)
"""Functions of the `Programs` of a run that raise ValueError."""

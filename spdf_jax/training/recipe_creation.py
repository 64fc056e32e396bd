# SPDX-License-Identifier: Apache-2.0
"""Creation of a recipe from a config, with checks before data is read."""

from collections.abc import Mapping
import dataclasses
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spdf_jax import data
from spdf_jax import models
from spdf_jax.sparsity import sparsify
from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.sparsity.selection import Where
from spdf_jax.training import stored_state
from spdf_jax.training.config import parse
from spdf_jax.training.first_mask import check_first_mask
from spdf_jax.training.frozen import frozen_at
from spdf_jax.training.inputs import create_sources
from spdf_jax.training.inputs import open_corpus
from spdf_jax.training.inputs import open_task
from spdf_jax.training.matmul import check_devices
from spdf_jax.training.matmul import dense_apply
from spdf_jax.training.mesh import check_batches
from spdf_jax.training.mesh import create_mesh
from spdf_jax.training.named_optimizers import check_optimizer
from spdf_jax.training.own_models import create_own_model
from spdf_jax.training.own_models import OwnModel
from spdf_jax.training.own_models import OwnSizes
from spdf_jax.training.plan import create_plan
from spdf_jax.training.plan import draft_plan
from spdf_jax.training.plan import Plan
from spdf_jax.training.recipe import assemble
from spdf_jax.training.recipe import PARAMS
from spdf_jax.training.recipe import Recipe
from spdf_jax.training.settings import DataConfig
from spdf_jax.training.settings import ModelConfig
from spdf_jax.training.workdir import check_workdir
from spdf_jax.training.workdir import saved_steps

PyTree = Any


def create_recipe(
    config: Any,
    *,
    planning: bool = False,
    workdir: str | os.PathLike[str] | None = None,
) -> Recipe:
  """Builds model, plan, optimizer and data from a config, and checks them.

  All that does not depend on the data is checked before the data is read.

  Args:
    config: A ConfigDict, or mapping, as `configs/quickstart.py` documents it.
    planning: Whether the recipe is used for planning only. If so, a corpus or
      the files of a task need not exist; their sizes are then those of
      `config.data.planned`.
    workdir: Working directory of the run, which is checked and not written;
      `None`: it is not known yet.

  Returns:
    The recipe.

  Raises:
    ValueError: the config is not valid, see `parse`, or does not fit the
      devices, the data or the workdir, see `check_workdir`.
  """
  config = parse(config)
  mesh = create_mesh(**dataclasses.asdict(config.mesh))
  for phase in config.phases:
    phase.create_algorithm()  # Checks user-defined algorithms too.
    try:
      check_batches(mesh, phase.batch_size, config.micro_batches)
    except ValueError as error:
      raise ValueError(f'phase {phase.name!r}: {error}') from error
  model = _create_model(config.model)
  check_devices(config.matmul, mesh.size)
  dense_apply(config.matmul, model)  # Checks the user's own model.
  where = _where(model)
  root = jax.random.key(config.seed)
  tokens = jnp.zeros((1, 2), jnp.int32)
  init = lambda: model.init(jax.random.fold_in(root, PARAMS), tokens)['params']
  params = jax.eval_shape(init)
  parameters = sum(x.size for x in jax.tree.leaves(params))
  draft = draft_plan(config.phases, parameters)
  _check_masks(draft, params, where)
  if workdir is None or not saved_steps(workdir):
    check_first_mask(draft, params, where)
  frozen_at(draft, params)  # Checks the patterns.
  check_optimizer(config.optimizer, params, where)
  if math.isfinite(draft.total_steps):
    stored_state.check_storage(config.storage, draft, mesh)
  if workdir is not None:
    check_workdir(workdir, config, params)

  task = _open_task(config.data, planning)
  corpus = open_corpus(config.data, model.config.vocab_size, planning)
  sources = create_sources(corpus, task, config.phases)
  plan = create_plan(
      config.phases,
      tokens_per_epoch={
          name: functools.partial(_tokens_per_epoch, source)
          for name, source in sources.items()
      },
      parameters=parameters,
  )
  stored_state.check_storage(config.storage, plan, mesh)
  return assemble(
      config, model, where, plan, corpus, task, sources, jax.jit(init)
  )


def _tokens_per_epoch(source: data.Source, length: int) -> int:
  return length * source.num_blocks(length)


def _create_model(config: ModelConfig) -> Any:
  if isinstance(config.sizes, OwnSizes):
    return create_own_model(config.preset, config.sizes)
  return models.model_of(config.sizes)


def _where(model: Any) -> Where:
  return model.where if isinstance(model, OwnModel) else models.sparsifiable


def _check_masks(plan: Plan, params: PyTree, where: Where) -> None:
  """Raises ValueError if an algorithm has no masks for the parameters."""
  for span in plan.spans:
    if not isinstance(span.sparsity, Mapping):
      continue
    masked = sparsify(
        optax.identity(), create_algorithm(span.sparsity),
        where=where, key=0,
    )
    try:
      jax.eval_shape(masked.init, params)
    except ValueError as error:
      raise ValueError(f'phase {span.names[0]!r}: {error}') from error


def _open_task(
    config: DataConfig, planning: bool
) -> data.Task | data.PlannedExamples | None:
  try:
    return open_task(config, planning)
  except ValueError as error:
    raise ValueError(
        f'data.task is {config.task!r} and data.task_dir {config.task_dir!r}: '
        f'{error}'
    ) from error

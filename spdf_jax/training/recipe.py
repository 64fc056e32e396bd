# SPDX-License-Identifier: Apache-2.0
"""The recipe of a run: model, data, optimizer and step."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax import data
from spdf_jax.sparsity.selection import Where
from spdf_jax.sparsity.tracking import mask_statistics
from spdf_jax.training import stored_state
from spdf_jax.training.config import RunConfig
from spdf_jax.training.first_mask import init_with
from spdf_jax.training.first_mask import mask_by_saliency
from spdf_jax.training.first_mask import mask_of_run
from spdf_jax.training.first_mask import SALIENCIES
from spdf_jax.training.frozen import frozen_at
from spdf_jax.training.losses import create_loss_scale
from spdf_jax.training.losses import Loss
from spdf_jax.training.losses import LossScale
from spdf_jax.training.losses import number_of_tokens
from spdf_jax.training.matmul import dense_apply
from spdf_jax.training.matmul import sparse_steps
from spdf_jax.training.matmul import SparseSteps
from spdf_jax.training.mesh import batch_sharding
from spdf_jax.training.mesh import create_mesh
from spdf_jax.training.mesh import place_batch
from spdf_jax.training.mesh import shard_shapes
from spdf_jax.training.optimizers import create_optimizer
from spdf_jax.training.plan import Plan
from spdf_jax.training.step import create_state
from spdf_jax.training.step import train_step
from spdf_jax.training.step import TrainState

PyTree = Any
PARAMS, _MASKS, _DROPOUT = range(3)  # Folded into the key of the seed.


@dataclasses.dataclass(frozen=True)
class Recipe:
  """All parts of a run; built by `create_recipe`.

  Attributes:
    config: The config.
    model: The Flax module of a preset, or an `OwnModel`.
    where: The model's selection of sparsified leaves.
    plan: The phases.
    optimizer: Optimizer inside `sparsify`, with mask updates tracked if there
      are any within phases.
    corpus: Text to pre-train on.
    task: Task to fine-tune on; `None`: there is none.
    sources: Sources of batches, by name.
    batch_at: Pure function from a step to its batch.
    init_params: Function that creates the initial parameters, dense.
  """

  config: RunConfig
  model: Any
  where: Where
  plan: Plan
  optimizer: optax.GradientTransformationExtraArgs
  corpus: data.Corpus | data.PlannedCorpus
  task: data.Task | data.PlannedExamples | None
  sources: Mapping[str, data.Source]
  batch_at: data.BatchAt
  init_params: Callable[[], PyTree]

  @property
  def fingerprints(self) -> dict[str, str]:
    """Fingerprints of the data, by source."""
    return {name: s.fingerprint for name, s in self.sources.items()}

  @functools.cached_property
  def mesh(self) -> jax.sharding.Mesh:
    """Mesh of all devices."""
    return create_mesh(**dataclasses.asdict(self.config.mesh))

  @property
  def first_loss_scale(self) -> LossScale | None:
    """Initial loss scale; `None` unless the model computes in float16."""
    return create_loss_scale(self.model.config.dtype)

  @functools.cached_property
  def abstract_state(self) -> TrainState:
    """Shapes, dtypes and shardings of the state."""
    return shard_shapes(self.mesh, jax.eval_shape(self._first_state))

  @property
  def _shardings(self) -> TrainState:
    return jax.tree.map(lambda x: x.sharding, self.abstract_state)

  def _first_state(self) -> TrainState:
    return create_state(
        self.init_params(), self.optimizer, self.first_loss_scale
    )

  def create_state(self) -> TrainState:
    """Creates the state at step 0, sharded from the start."""
    if self.plan.phases[0].initial_mask:
      return self.state_from(self.init_params())
    return jax.jit(self._first_state, out_shardings=self._shardings)()

  def state_from(self, params: PyTree) -> TrainState:
    """Creates the state at step 0 from parameters, sharded as by this recipe.

    Raises:
      ValueError: a given mask does not fit the parameters or the plan.
    """
    create = functools.partial(
        create_state,
        optimizer=self._first_optimizer(params),
        loss_scale=self.first_loss_scale,
    )
    if jax.process_count() == 1:
      # Not jitted, since checks of given masks need concrete values.
      return jax.device_put(create(params), self._shardings)
    return jax.jit(create, out_shardings=self._shardings)(params)

  def _first_optimizer(
      self, params: PyTree
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer whose initial mask is that of the config."""
    name = self.plan.phases[0].initial_mask
    if not name:
      return self.optimizer
    if name in SALIENCIES:
      mask = mask_by_saliency(
          self.plan, self._mean_loss, params, self.batch_at(0),
          where=self.where,
      )
    else:
      mask = mask_of_run(name, params)
    init = init_with(self.plan, mask, where=self.where)
    return create_optimizer(
        self.config.optimizer,
        dataclasses.replace(self.plan, init=init),
        where=self.where,
        key=_mask_key(self.config),
    )

  def _mean_loss(self, params: PyTree, batch: data.Batch) -> jax.Array:
    sums = self.loss(self.model.apply, {'params': params}, batch)
    return sums.objective / number_of_tokens(batch.weights)

  def device_batch_at(self, step: int) -> data.Batch:
    """Places the batch of a step on the mesh; processes read their own rows."""
    phase = self.plan.phase_at(step)
    return place_batch(
        self.mesh,
        functools.partial(self.batch_at, step),
        (phase.batch_size, phase.length),
    )

  @functools.cached_property
  def sparse_steps(self) -> SparseSteps | None:
    """Model and threshold of sparse steps; `None`: dense products only."""
    phases = [p for p in self.plan.phases if p.sparsity != 0]
    if not phases:
      return None
    return sparse_steps(
        self.config.matmul,
        self.model,
        tokens=min(p.batch_size * p.length for p in phases),
    )

  @property
  def loss(self) -> Loss:
    """Loss to minimize."""
    return self.config.loss

  @property
  def dropout_key(self) -> jax.Array | None:
    """Key of the dropout of all steps; `None`: the model has no dropout."""
    if not self.model.config.dropout:
      return None
    return jax.random.fold_in(jax.random.key(self.config.seed), _DROPOUT)

  @functools.cached_property
  def step(self) -> Any:
    """Jitted training step, which donates its first argument, the state."""
    return self._jit_step(self._shardings)

  @functools.cached_property
  def compact_step(self) -> Any:
    """Jitted training step of compact states, which hold kept values only."""
    return self._jit_step(self._replicated)

  @property
  def _replicated(self) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(self.mesh, jax.P())

  def _jit_step(self, shardings: Any) -> Any:
    step = functools.partial(
        train_step,
        apply_fn=dense_apply(self.config.matmul, self.model),
        optimizer=self.optimizer,
        learning_rate=self.plan.learning_rate,
        sparse_steps=self.sparse_steps,
        loss=self.loss,
        micro_batches=self.config.micro_batches,
        dropout_key=self.dropout_key,
        skip_not_finite=self.config.max_skipped_steps > 0,
        rewinds=self.plan.rewinds,
        frozen=frozen_at(self.plan, self.abstract_state.params),
    )
    if self.plan.updates_masks:
      step = functools.partial(step, statistics=mask_statistics)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

  def prepare_step(
      self, state: TrainState, step: int
  ) -> tuple[Any, TrainState]:
    """Returns the jitted function of a step, and the state converted for it.

    Args:
      state: The state, dense or compact.
      step: The step, from 0.

    Returns:
      The jitted step and the state, which the step donates.
    """
    if stored_state.is_compact_at(self.config.storage, self.plan, step):
      if not stored_state.is_compact(state):
        state = stored_state.to_compact(state, self._replicated)
      return self.compact_step, state
    return self.step, self.to_dense(state)

  def to_dense(self, state: TrainState) -> TrainState:
    """Converts a state to dense arrays, for checkpoints and evaluations."""
    if not stored_state.is_compact(state):
      return state
    return stored_state.to_dense(state, self._shardings)

  def compile_step(self, batch_size: int, length: int) -> Any:
    """Compiles the step for a batch shape, without any arrays."""
    shape = functools.partial(
        jax.ShapeDtypeStruct, (batch_size, length),
        sharding=batch_sharding(self.mesh, batch_size),
    )
    batch = data.Batch(shape(jnp.int32), shape(jnp.int32), shape(jnp.float32))
    return self.step.lower(self.abstract_state, batch).compile()

  def with_ends(self, ends: Mapping[str, int]) -> 'Recipe':
    """Returns the recipe with the recorded ends of its first phases.

    Args:
      ends: Steps completed at the ends of the first phases, by name.

    Returns:
      The recipe of the plan with these ends; this recipe if they are as
      planned.
    """
    plan = self.plan.with_ends(ends)
    if plan is self.plan:
      return self
    return assemble(
        self.config, self.model, self.where, plan, self.corpus, self.task,
        self.sources, self.init_params,
    )

  @property
  def parameters(self) -> int:
    """Number of parameters of the model."""
    leaves = jax.tree.leaves(self.abstract_state.params)
    return sum(int(np.prod(x.shape)) for x in leaves)


def _mask_key(config: RunConfig) -> jax.Array:
  return jax.random.fold_in(jax.random.key(config.seed), _MASKS)


def assemble(
    config: RunConfig,
    model: Any,
    where: Where,
    plan: Plan,
    corpus: data.Corpus | data.PlannedCorpus,
    task: data.Task | data.PlannedExamples | None,
    sources: Mapping[str, data.Source],
    init_params: Callable[[], PyTree],
) -> Recipe:
  """Creates the optimizer and the batches of a plan, and the recipe of all.

  Args:
    config: The config.
    model: The Flax module of a preset, or an `OwnModel`.
    where: The model's selection of sparsified leaves.
    plan: The phases.
    corpus: Text to pre-train on.
    task: Task to fine-tune on; `None`: there is none.
    sources: Sources of batches, by name.
    init_params: Function that creates the initial parameters, dense.

  Returns:
    The recipe.
  """
  batch_at = data.schedule_batches(
      sources,
      [
          data.Allotment(p.data, p.batch_size, p.length, p.steps, p.reshuffle)
          for p in plan.phases
      ],
      seed=config.seed,
      max_epochs=dataclasses.asdict(config.data.max_epochs),
  )
  optimizer = create_optimizer(
      config.optimizer,
      plan,
      where=where,
      key=_mask_key(config),
  )
  return Recipe(
      config, model, where, plan, optimizer, corpus, task, sources, batch_at,
      init_params,
  )

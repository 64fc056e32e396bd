# SPDX-License-Identifier: Apache-2.0
"""Programs: all that follows from a plan, which is replaced as one value."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spdf_jax import data
from spdf_jax import sparsity
from spdf_jax.data import batches
from spdf_jax.sparsity import tracking
from spdf_jax.training import plan as plans
from spdf_jax.training.configs.config import RunConfig
from spdf_jax.training.plan import Plan
from spdf_jax.training.step import losses
from spdf_jax.training.step import matmul
from spdf_jax.training.step import mesh as meshes
from spdf_jax.training.step import optimizers
from spdf_jax.training.step import state as states
from spdf_jax.training.step import storage
from spdf_jax.training.step.frozen import frozen_at
from spdf_jax.training.step.state import TrainState
from spdf_jax.training.step.step import train_step

PyTree = Any

PARAMS, MASKS, DROPOUT = range(3)
"""Folded into the key of the seed: for initial weights, masks and dropout."""


@dataclasses.dataclass(frozen=True)
class Programs:
  """Batches, optimizer, state shapes and jitted steps of a plan.

  One step function serves all phases. It is compiled once for each batch shape
  and kind of step: with kernels, dense, and on kept values only. A branch
  between the kinds inside one program costs 2 to 4 % of a step.

  Attributes:
    config: The config.
    model: The model, a `models.Model`.
    mesh: Mesh of all devices.
    sources: Sources of batches, by name.
    init_params: Function that creates the initial parameters, dense.
    open_loss: Function that returns the loss of a step, with the teacher if
      there is one; a teacher is read at the first call.
    plan: The phases.

  Example:
    >>> ended = dataclasses.replace(programs, plan=plan)  # doctest: +SKIP
  """

  config: RunConfig
  model: Any
  mesh: jax.sharding.Mesh
  sources: Mapping[str, data.Source]
  init_params: Callable[[], PyTree]
  open_loss: Callable[[], losses.Loss | losses.Distillation]
  plan: Plan

  @functools.cached_property
  def batch_at(self) -> batches.BatchAt:
    """Pure function from a step to its batch."""
    return data.schedule_batches(
        self.sources,
        [
            data.Allotment(p.data, p.batch_size, p.length, p.steps, p.new_epoch)
            for p in self.plan.phases
        ],
        seed=self.config.seed,
        max_epochs=dataclasses.asdict(self.config.data.max_epochs),
    )

  def device_batch_at(self, step: int) -> data.Batch:
    """Places the batch of a step on the mesh; processes read their own rows."""
    phase = self.plan.phase_at(step)
    return meshes.place_batch(
        self.mesh,
        functools.partial(self.batch_at, step),
        (phase.batch_size, phase.length),
    )

  @functools.cached_property
  def optimizer(self) -> optax.GradientTransformationExtraArgs:
    """Optimizer inside `sparsify`; it tracks mask updates within phases."""
    return self.optimizer_of(self.plan)

  def optimizer_of(
      self, plan: Plan
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer of another plan of this config."""
    config = self.config.parameterization
    return optimizers.create_optimizer(
        self.config.optimizer, plan, where=self.model.where,
        key=self._key(MASKS),
        adapter=self.config.adapter,
        revival_warmup=self.config.revival_warmup,
        scale_layers=config and sparsity.scale_by_density(
            config.base_density,
            width_multiplier=config.width_multiplier(self.model.config.d_model),
            where=self.model.where,
        ),
    )

  def _key(self, use: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(self.config.seed), use)

  @functools.cached_property
  def abstract_state(self) -> TrainState:
    """Shapes, dtypes and shardings of the state."""
    return meshes.shard_shapes(self.mesh, jax.eval_shape(self.first_state))

  @property
  def shardings(self) -> TrainState:
    """Shardings of the state."""
    return jax.tree.map(lambda x: x.sharding, self.abstract_state)

  @property
  def first_state(self) -> Callable[[], TrainState]:
    """Function that creates the state at step 0 from initial parameters."""
    optimizer = self.optimizer  # Created here, not while the state is traced.
    return lambda: self.scale_init(states.create_state(
        self.init_params(), optimizer,
        losses.create_loss_scale(self.model.config.dtype),
    ))

  def scale_init(self, state: TrainState) -> TrainState:
    """Scales initial weights as the parameterization needs."""
    config = self.config.parameterization
    if config is None:
      return state
    return dataclasses.replace(state, params=sparsity.scale_init(
        state.params, sparsity.get_mask(state.opt_state), config.base_density,
        width_multiplier=config.width_multiplier(self.model.config.d_model),
        where=self.model.where,
    ))

  @functools.cached_property
  def sparse_steps(self) -> matmul.SparseSteps | None:
    """Kernels of sparse steps, and from which sparsity; `None`: XLA only."""
    phases = [p for p in self.plan.phases if not p.is_dense]
    if not phases:
      return None
    steps = matmul.sparse_steps(
        self.config.matmul,
        self.model,
        tokens=min(p.batch_size * p.length for p in phases)
        // self.config.micro_batches,
        in_blocks=matmul.are_in_blocks(
            [p.algorithm for p in phases], self.model.config.d_model
        ),
    )
    # The branch makes a step that can use kernels slower than one that cannot.
    # Schedules are read where phases begin and end.
    if steps is None or not any(
        plans.mean_sparsity(plans.planned_sparsities(
            self.plan, step, self.abstract_state.params, self.model.where
        )) > steps.crossover
        for phase, start in zip(self.plan.phases, self.plan.starts)
        for step in (start, start + phase.steps - 1)
    ):
      return None
    return steps

  @functools.cached_property
  def storage(self) -> str:
    """Storage of the state in sparse phases, `'dense'` or `'compact'`."""
    return storage.choose_storage(
        self.config, self.plan, self.mesh, self.sparse_steps,
        self.abstract_state.params, self.model.where,
    )

  @functools.cached_property
  def step(self) -> Any:
    """Jitted training step, which donates its first argument, the state."""
    return self._jit_dense(self._branch)

  @functools.cached_property
  def dense_step(self) -> Any:
    """Jitted step of dense phases, without a branch to kernels."""
    return self.step if self._branch is None else self._jit_dense(None)

  @functools.cached_property
  def compact_step(self) -> Any:
    """Jitted training step of compact states, which hold kept values only."""
    return self._jit_step(
        self._replicated, storage.compact_apply(self.model, self.sparse_steps)
    )

  @property
  def _replicated(self) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(self.mesh, jax.P())

  @property
  def dropout_key(self) -> jax.Array | None:
    """Key of the dropout of all steps; `None`: the model has no dropout."""
    return self._key(DROPOUT) if self.model.config.dropout else None

  @property
  def _branch(self) -> matmul.SparseSteps | None:
    """Kernels of steps on dense states; `None`: XLA only, without a branch."""
    # With compact storage kernels run in `compact_step`; the branch between
    # them and dense products would slow the other steps down.
    return None if self.storage == 'compact' else self.sparse_steps

  def _jit_dense(self, sparse_steps: matmul.SparseSteps | None) -> Any:
    apply_fn = matmul.dense_apply(self.config.matmul, self.model)
    return self._jit_step(self.shardings, apply_fn, sparse_steps)

  def _jit_step(
      self,
      shardings: Any,
      apply_fn: matmul.ApplyFn,
      sparse_steps: matmul.SparseSteps | None = None,
  ) -> Any:
    step = functools.partial(
        train_step,
        apply_fn=apply_fn,
        optimizer=self.optimizer,
        learning_rate=self.plan.learning_rate,
        sparse_steps=sparse_steps,
        loss=self.open_loss(),
        micro_batches=self.config.micro_batches,
        dropout_key=self.dropout_key,
        skip_not_finite=self.config.max_skipped_steps > 0,
        rewinds=self.plan.rewinds,
        frozen=frozen_at(self.plan, self.abstract_state.params),
    )
    if self.plan.updates_masks:
      step = functools.partial(step, statistics=tracking.mask_statistics)
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
    if storage.is_compact_at(self.storage, self.plan, step):
      return self.compact_step, storage.convert(
          state, 'compact', self._replicated
      )
    is_dense = self.plan.phase_at(step).is_dense
    return self.dense_step if is_dense else self.step, self.to_dense(state)

  def to_dense(self, state: TrainState) -> TrainState:
    """Converts a state to dense arrays, for checkpoints and evaluations."""
    return storage.convert(state, 'dense', self.shardings)

  def compile_step(self, batch_size: int, length: int) -> Any:
    """Compiles the step for a batch shape, without any arrays."""
    shape = functools.partial(
        jax.ShapeDtypeStruct, (batch_size, length),
        sharding=meshes.batch_sharding(self.mesh, batch_size),
    )
    batch = data.Batch(shape(jnp.int32), shape(jnp.int32), shape(jnp.float32))
    return self.step.lower(self.abstract_state, batch).compile()

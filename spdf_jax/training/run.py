# SPDX-License-Identifier: Apache-2.0
"""A run: its config, model, data and plan, and once open its state."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import logging
import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax import data
from spdf_jax import files
from spdf_jax import models
from spdf_jax import sparsity
from spdf_jax.sparsity import tracking
from spdf_jax.sparsity.selection import Where
from spdf_jax.training import checkpoint_files
from spdf_jax.training import checkpoints
from spdf_jax.training import config as configs
from spdf_jax.training import distillation
from spdf_jax.training import initial_mask
from spdf_jax.training import inputs
from spdf_jax.training import losses
from spdf_jax.training import matmul
from spdf_jax.training import mesh as meshes
from spdf_jax.training import optimizers
from spdf_jax.training import own_models
from spdf_jax.training import plan as plans
from spdf_jax.training import processes
from spdf_jax.training import storage
from spdf_jax.training import workdir as workdirs
from spdf_jax.training.config import RunConfig
from spdf_jax.training.early_stop import Best
from spdf_jax.training.own_models import OwnSizes
from spdf_jax.training.plan import Plan
from spdf_jax.training.settings import ModelConfig
from spdf_jax.training.step import create_state
from spdf_jax.training.step import frozen_at
from spdf_jax.training.step import train_step
from spdf_jax.training.step import TrainState
from spdf_jax.training.step import with_dense_grads

PyTree = Any

logger = logging.getLogger('spdf_jax')

_PARAMS, _MASKS, _DROPOUT = range(3)  # Folded into the key of the seed.


@dataclasses.dataclass
class Run:
  """A run, from its config to its state.

  `Run.create` checks a config and builds all parts that do not need a workdir;
  `open` then locks the workdir, and creates or restores the state that `train`
  consumes. A phase that ends early replaces `plan`, in `end_phase`.

  Attributes:
    config: The config.
    model: The model, a `models.Model`.
    plan: The phases.
    corpus: Text to pre-train on.
    task: Task to fine-tune on; `None`: there is none.
    sources: Sources of batches, by name.
    init_params: Function that creates the initial parameters, dense.
    state: State to train from; `None` until the run is open, and once training
      has started.
    best: Best evaluations of the phases so far, by name of the phase.

  Example:
    >>> run = Run.create(config, 'runs/a').open()  # doctest: +SKIP
    >>> train(run)  # doctest: +SKIP
  """

  config: RunConfig
  model: Any
  plan: Plan
  corpus: data.Corpus | data.PlannedCorpus
  task: data.Task | data.PlannedExamples | None
  sources: Mapping[str, data.Source]
  init_params: Callable[[], PyTree]
  state: TrainState | None = None
  best: dict[str, Best] = dataclasses.field(default_factory=dict)
  _workdir: pathlib.Path | None = None
  _checkpoints: checkpoints.Checkpoints | None = None
  _release: Callable[[], None] = lambda: None

  @classmethod
  def create(
      cls,
      config: Any,
      workdir: str | os.PathLike[str] | None = None,
      *,
      planning: bool = False,
  ) -> 'Run':
    """Builds a run from a config and checks it, without writing anything.

    All that does not depend on the data is checked before the data is read.

    Args:
      config: A ConfigDict, or mapping, as `configs/base.py` documents it.
      workdir: Working directory of the run; `None`: it is not known yet.
      planning: Whether the run is only planned. If so, a corpus or the files of
        a task need not exist; their sizes are then those of
        `config.data.planned`.

    Returns:
      The run.

    Raises:
      ValueError: the config is not valid, see `parse`, or does not fit the
        devices, the data or the workdir, see `check_workdir`.
    """
    config = configs.parse(config)
    mesh = meshes.create_mesh(**dataclasses.asdict(config.mesh))
    _check_batches(config, mesh)
    model = _create_model(config.model)
    matmul.check_devices(config.matmul, mesh.size)
    matmul.dense_apply(config.matmul, model)  # Checks the user's own model.
    where = model.where
    init = jax.jit(functools.partial(_init_params, model, config.seed))
    params = jax.eval_shape(init)
    parameters = _number_of_parameters(params)
    begins = workdir is None or not workdirs.saved_steps(workdir)
    if workdir is not None:
      workdirs.check_workdir(workdir, config, params)
    optimizers.check_optimizer(config.optimizer, params, where)
    optimizers.check_adapter(config.adapter, params, where)
    if config.loss.teacher is not None:
      distillation.check_teacher(
          config.loss.teacher, model.config.vocab_size,
          max(phase.length for phase in config.phases),
      )
    plan = plans.create_plan(config.phases, parameters=parameters)
    initial_mask.check_algorithms(plan, params, where)
    if begins:
      initial_mask.check_first_mask(
          plan, params, where,
          are_trained=bool(config.init_from or config.resume),
      )
    frozen_at(plan, params)  # Checks the patterns.
    if math.isfinite(plan.total_steps):
      storage.check_storage(config, plan, mesh)

    corpus, task, sources = inputs.open_data(
        config.data, config.phases, model.config.vocab_size, planning
    )
    if any(phase.counts_epochs for phase in config.phases):
      plan = plans.create_plan(
          config.phases,
          tokens_per_epoch={
              name: functools.partial(inputs.tokens_per_epoch, source)
              for name, source in sources.items()
          },
          parameters=parameters,
      )
      storage.check_storage(config, plan, mesh)
    run = cls(
        config, model, plan, corpus, task, sources, init,
        _workdir=None if workdir is None else pathlib.Path(workdir),
    )
    _ = run._width_multiplier  # Checks the base width.
    _ = run.batch_at  # Checks that the data suffices for the plan.
    _ = run.sparse_steps  # Checks the environment of the native kernels.
    if not planning:
      inputs.check_validation(*run.real_data, run.validation_length)
    return run

  def open(self, workdir: str | os.PathLike[str] | None = None) -> 'Run':
    """Opens the workdir and creates or restores the state, with all checks.

    The state is the first of these that exists: the workdir's own latest
    checkpoint; the whole checkpoint of `config.resume`; a new state from the
    parameters of `config.init_from`; a new state from initial parameters. With
    the first, the `resume` and `init_from` that the workdir records are kept.

    Args:
      workdir: Working directory; by default that of `create`.

    Returns:
      This run, ready to train; nothing is left of a new workdir if it is
      refused.

    Raises:
      ValueError: the workdir or a checkpoint is of another config, data or
        model, another process has the workdir open, or the run to resume has
        ended.
      OSError: the workdir cannot be written, or has too little space.
    """
    if workdir is not None:
      workdirs.check_workdir(workdir, self.config)
      self._workdir = pathlib.Path(workdir)
    with workdirs.created(self.workdir):
      workdirs.check_free_space(
          self.workdir, self.abstract_state, self.most_checkpoints
      )
      if processes.is_main_process():
        self._release = files.lock_folder(self.workdir, 'workdir')
      try:
        self._restore()
      except BaseException:
        self.close()
        raise
    return self

  def _restore(self) -> None:
    """Creates or restores the state, and records the config of the run."""
    self.config = workdirs.with_recorded_start(self.config, self.workdir)
    state = self.checkpoints.restore_latest(self.abstract_state)
    if state is None and (self.workdir / workdirs.CONFIG).exists():
      logger.info(
          'this workdir has no checkpoint yet, so the run begins again; it '
          'writes one every %d steps', self.config.checkpoints.every,
      )
    self.best = {}
    ends: Mapping[str, int] = {}
    if state is not None:
      step = int(state.step)
      logger.info('resuming from step %d of this workdir', step)
      ends = self.checkpoints.ends_until(step)
      self.best = self.checkpoints.best_until(step)
    elif self.config.resume:
      state, ends = workdirs.read_source(self.config.resume, self._resume)
    elif self.config.init_from:
      state = self.state_from(workdirs.read_source(
          self.config.init_from, self._read_params
      ))
    else:
      state = self.create_state()
    self._follow(ends)
    # The next phase may be another than that for which the state was saved.
    self.state = with_dense_grads(state, self.plan.algorithm)
    # Written last, so that a run refused above leaves no config in the workdir.
    if processes.is_main_process():
      workdirs.write_workdir_config(self.workdir, self.config)

  def _resume(
      self, checkpoint: pathlib.Path
  ) -> tuple[TrainState, Mapping[str, int]]:
    """Returns the state of a checkpoint, and the ends of its phases."""
    ends = workdirs.past_ends(checkpoint)
    last = self.plan.with_ends(ends).total_steps
    if int(checkpoint.name) >= last:
      raise ValueError(
          f'resume: {checkpoint} is at step {checkpoint.name} of {last}, '
          'which leaves nothing to train; add a phase to phases.order, or give '
          'an earlier checkpoint.'
      )
    logger.info('resuming from %s', checkpoint)
    return self.read_checkpoint(checkpoint), ends

  def _read_params(self, checkpoint: pathlib.Path) -> PyTree:
    logger.info('starting from the parameters of %s', checkpoint)
    return checkpoint_files.read_params(checkpoint, self.abstract_state.params)

  def close(self) -> None:
    """Completes the saves that have begun, and releases the workdir."""
    try:
      self._close_checkpoints()
    finally:
      self._release()

  def _close_checkpoints(self) -> None:
    if self._checkpoints is not None:
      self._checkpoints.close()
      self._checkpoints = None

  def end_phase(self, step: int) -> None:
    """Ends the current phase early, so that the next one starts here.

    Args:
      step: Steps completed.
    """
    logger.info('phase %r ends early', self.plan.phase_at(step - 1).name)
    self._follow({
        phase.name: min(start + phase.steps, step)
        for phase, start in zip(self.plan.phases, self.plan.starts)
        if start < step
    })

  def _follow(self, ends: Mapping[str, int]) -> None:
    """Applies the recorded ends of phases, see `Plan.with_ends`."""
    plan = self.plan.with_ends(ends)
    if plan is self.plan:
      return
    self.plan = plan
    self._close_checkpoints()
    for name, value in vars(Run).items():
      if isinstance(value, functools.cached_property):
        vars(self).pop(name, None)  # Computed again for the new plan.

  @property
  def workdir(self) -> pathlib.Path:
    """Directory of config, metrics and checkpoints.

    Raises:
      ValueError: it is not known.
    """
    if self._workdir is None:
      raise ValueError(
          'run has no workdir; give one to Run.create or run.open.'
      )
    return self._workdir

  @property
  def checkpoints(self) -> checkpoints.Checkpoints:
    """Checkpoints of the workdir of an open run."""
    if self._checkpoints is None:
      self._checkpoints = checkpoints.Checkpoints(
          self.workdir,
          phase_ends=self.plan.ends,
          keep=self.config.checkpoints.keep,
          config=self.config,
          fingerprints=self.fingerprints,
      )
    return self._checkpoints

  def read_checkpoint(self, checkpoint: pathlib.Path) -> TrainState:
    """Restores the state of a checkpoint of this config and data."""
    return checkpoint_files.read_checkpoint(
        checkpoint, self.abstract_state, config=self.config,
        fingerprints=self.fingerprints,
    )

  @property
  def where(self) -> Where:
    """The model's selection of sparsified leaves."""
    return self.model.where

  @property
  def most_checkpoints(self) -> int:
    """Largest number of checkpoints in the workdir at one time."""
    phases = self.plan.phases
    best = sum(phase.early_stop is not None for phase in phases)
    # One more, since a new one is written before an old one is deleted.
    return self.config.checkpoints.keep + len(phases) + best + 1

  @property
  def real_data(self) -> tuple[data.Corpus, data.Task | None]:
    """The corpus and the task.

    Raises:
      ValueError: one of them has a planned size only.
    """
    corpus, task = self.corpus, self.task
    if isinstance(corpus, data.PlannedCorpus) or isinstance(
        task, data.PlannedExamples
    ):
      raise ValueError(
          f'run was created with planning=True, so the data, of corpus '
          f'{corpus.name!r}, is not read; create it with planning=False.'
      )
    return corpus, task

  @property
  def fingerprints(self) -> dict[str, str]:
    """Fingerprints of the data, by source, and of the tokenizer."""
    return {name: s.fingerprint for name, s in self.sources.items()} | {
        'tokenizer': self.corpus.tokenizer.fingerprint
    }

  @functools.cached_property
  def batch_at(self) -> data.BatchAt:
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

  @functools.cached_property
  def optimizer(self) -> optax.GradientTransformationExtraArgs:
    """Optimizer inside `sparsify`; it tracks mask updates within phases."""
    return self._optimizer_of(self.plan)

  def _optimizer_of(
      self, plan: Plan
  ) -> optax.GradientTransformationExtraArgs:
    found = self.config.parameterization
    return optimizers.create_optimizer(
        self.config.optimizer, plan, where=self.where, key=self._key(_MASKS),
        adapter=self.config.adapter,
        revival_warmup=self.config.revival_warmup,
        scale_layers=found and sparsity.scale_by_density(
            found.base_density, width_multiplier=self._width_multiplier,
            where=self.where,
        ),
    )

  @property
  def _width_multiplier(self) -> float:
    found = self.config.parameterization
    return found.width_multiplier(self.model.config.d_model) if found else 1.0

  def _scale_init(self, state: TrainState) -> TrainState:
    """Scales initial weights as the parameterization needs."""
    found = self.config.parameterization
    if found is None:
      return state
    return dataclasses.replace(state, params=sparsity.scale_init(
        state.params, sparsity.get_mask(state.opt_state), found.base_density,
        width_multiplier=self._width_multiplier, where=self.where,
    ))

  def _key(self, use: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(self.config.seed), use)

  @functools.cached_property
  def mesh(self) -> jax.sharding.Mesh:
    """Mesh of all devices."""
    return meshes.create_mesh(**dataclasses.asdict(self.config.mesh))

  @functools.cached_property
  def abstract_state(self) -> TrainState:
    """Shapes, dtypes and shardings of the state."""
    return meshes.shard_shapes(self.mesh, jax.eval_shape(self._first_state))

  @property
  def _shardings(self) -> TrainState:
    return jax.tree.map(lambda x: x.sharding, self.abstract_state)

  @property
  def _first_loss_scale(self) -> losses.LossScale | None:
    return losses.create_loss_scale(self.model.config.dtype)

  @property
  def _first_state(self) -> Callable[[], TrainState]:
    optimizer = self.optimizer  # Created here, not while the state is traced.
    return lambda: self._scale_init(create_state(
        self.init_params(), optimizer, self._first_loss_scale
    ))

  def create_state(self) -> TrainState:
    """Creates the state at step 0, sharded from the start."""
    if self.plan.phases[0].initial_mask:
      return self._scale_init(self.state_from(self.init_params()))
    return jax.jit(self._first_state, out_shardings=self._shardings)()

  def state_from(self, params: PyTree) -> TrainState:
    """Creates the state at step 0 from parameters, sharded as in this run.

    Raises:
      ValueError: a given mask does not fit the parameters or the plan.
    """
    create = functools.partial(
        create_state,
        optimizer=self._first_optimizer(params),
        loss_scale=self._first_loss_scale,
    )
    if jax.process_count() == 1:
      # Not jitted, since checks of given masks need concrete values.
      return jax.device_put(create(params), self._shardings)
    return jax.jit(create, out_shardings=self._shardings)(params)

  def _first_optimizer(
      self, params: PyTree
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer whose initial mask is that of the config."""
    init = initial_mask.first_init(
        self.plan, self._mean_loss, params, self.batch_at, where=self.where,
        are_trained=bool(self.config.init_from),
    )
    if init is None:
      return self.optimizer
    return self._optimizer_of(dataclasses.replace(self.plan, init=init))

  def _mean_loss(self, params: PyTree, batch: data.Batch) -> jax.Array:
    sums = self.config.loss(self.model.apply, {'params': params}, batch)
    return sums.objective / losses.number_of_tokens(batch.weights)

  def device_batch_at(self, step: int) -> data.Batch:
    """Places the batch of a step on the mesh; processes read their own rows."""
    phase = self.plan.phase_at(step)
    return meshes.place_batch(
        self.mesh,
        functools.partial(self.batch_at, step),
        (phase.batch_size, phase.length),
    )

  @functools.cached_property
  def sparse_steps(self) -> matmul.SparseSteps | None:
    """How and above which sparsity steps use kernels; `None`: XLA runs all."""
    phases = [p for p in self.plan.phases if not p.is_dense]
    if not phases:
      return None
    found = matmul.sparse_steps(
        self.config.matmul,
        self.model,
        tokens=min(p.batch_size * p.length for p in phases)
        // self.config.micro_batches,
        in_blocks=matmul.are_in_blocks(
            [p.algorithm for p in phases], self.model.config.d_model
        ),
    )
    # A step that can use kernels is slower than one that cannot, by its branch.
    # Schedules are read where phases begin and end.
    if found is None or not any(
        plans.mean_sparsity(plans.planned_sparsities(
            self.plan, step, self.abstract_state.params, self.where
        )) > found.crossover
        for phase, start in zip(self.plan.phases, self.plan.starts)
        for step in (start, start + phase.steps - 1)
    ):
      return None
    return found

  @functools.cached_property
  def storage(self) -> str:
    """Storage of the state in sparse phases, `'dense'` or `'compact'`."""
    return storage.choose_storage(
        self.config, self.plan, self.mesh, self.sparse_steps,
        self.abstract_state.params, self.where,
    )

  @property
  def dropout_key(self) -> jax.Array | None:
    """Key of the dropout of all steps; `None`: the model has no dropout."""
    return self._key(_DROPOUT) if self.model.config.dropout else None

  @functools.cached_property
  def loss(self) -> losses.Loss | distillation.Distillation:
    """The loss of a step, with the teacher if there is one."""
    loss = self.config.loss
    if loss.teacher is None:
      return loss
    return distillation.Distillation(
        loss, distillation.open_teacher(loss.teacher, self.mesh)
    )

  @functools.cached_property
  def step(self) -> Any:
    """Jitted training step, which donates its first argument, the state."""
    # With compact storage kernels run in `compact_step`; the branch between
    # them and dense products would slow this one down.
    is_compact = self.storage == 'compact'
    return self._jit_step(
        self._shardings, None if is_compact else self.sparse_steps
    )

  @functools.cached_property
  def dense_step(self) -> Any:
    """The same for dense phases, which need no branch to kernels."""
    if self.storage == 'compact' or self.sparse_steps is None:
      return self.step
    return self._jit_step(self._shardings, None)

  @functools.cached_property
  def compact_step(self) -> Any:
    """Jitted training step of compact states, which hold kept values only."""
    return self._jit_step(self._replicated, self.sparse_steps)

  @property
  def _replicated(self) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(self.mesh, jax.P())

  def _jit_step(
      self, shardings: Any, sparse_steps: matmul.SparseSteps | None
  ) -> Any:
    step = functools.partial(
        train_step,
        apply_fn=matmul.dense_apply(self.config.matmul, self.model),
        optimizer=self.optimizer,
        learning_rate=self.plan.learning_rate,
        sparse_steps=sparse_steps,
        loss=self.loss,
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
      if not storage.is_compact(state):
        state = storage.to_compact(state, self._replicated)
      return self.compact_step, state
    is_dense = self.plan.phase_at(step).is_dense
    return self.dense_step if is_dense else self.step, self.to_dense(state)

  def to_dense(self, state: TrainState) -> TrainState:
    """Converts a state to dense arrays, for checkpoints and evaluations."""
    if not storage.is_compact(state):
      return state
    return storage.to_dense(state, self._shardings)

  def compile_step(self, batch_size: int, length: int) -> Any:
    """Compiles the step for a batch shape, without any arrays."""
    shape = functools.partial(
        jax.ShapeDtypeStruct, (batch_size, length),
        sharding=meshes.batch_sharding(self.mesh, batch_size),
    )
    batch = data.Batch(shape(jnp.int32), shape(jnp.int32), shape(jnp.float32))
    return self.step.lower(self.abstract_state, batch).compile()

  @property
  def parameters(self) -> int:
    """Number of parameters of the model."""
    return _number_of_parameters(self.abstract_state.params)

  @property
  def validation_length(self) -> int:
    """Tokens per sequence of the evaluations on the corpus."""
    return max(
        (p.length for p in self.plan.phases if p.data == 'corpus'),
        default=self.model.config.max_length,
    )


def _check_batches(config: RunConfig, mesh: jax.sharding.Mesh) -> None:
  for phase in config.phases:
    try:
      meshes.check_batches(mesh, phase.batch_size, config.micro_batches)
    except ValueError as error:
      raise ValueError(f'phase {phase.name!r}: {error}') from error


def _create_model(config: ModelConfig) -> models.Model:
  if isinstance(config.sizes, OwnSizes):
    return own_models.create_own_model(config.preset, config.sizes)
  return models.model_of(config.sizes)


def _init_params(model: Any, seed: int) -> PyTree:
  key = jax.random.fold_in(jax.random.key(seed), _PARAMS)
  return model.init(key, jnp.zeros((1, 2), jnp.int32))['params']


def _number_of_parameters(params: PyTree) -> int:
  return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))

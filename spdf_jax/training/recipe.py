"""The recipe: model, data, optimizer and step, built from a config."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import os
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax import data
from spdf_jax import models
from spdf_jax.sparsity.tracking import mask_statistics
from spdf_jax.training import optimizers
from spdf_jax.training import stored_state
from spdf_jax.training.config import parse
from spdf_jax.training.config import RunConfig
from spdf_jax.training.losses import create_loss_scale
from spdf_jax.training.losses import Loss
from spdf_jax.training.losses import LossScale
from spdf_jax.training.matmul import sparse_steps
from spdf_jax.training.matmul import SparseSteps
from spdf_jax.training.matmul import without_masks
from spdf_jax.training.mesh import batch_sharding
from spdf_jax.training.mesh import check_batches
from spdf_jax.training.mesh import create_mesh
from spdf_jax.training.mesh import place_batch
from spdf_jax.training.mesh import shard_shapes
from spdf_jax.training.phases import PhaseConfig
from spdf_jax.training.plan import create_plan
from spdf_jax.training.plan import Plan
from spdf_jax.training.settings import DataConfig
from spdf_jax.training.step import create_state
from spdf_jax.training.step import train_step
from spdf_jax.training.step import TrainState

PyTree = Any
_PARAMS, _MASKS = 0, 1  # What the seed's key is folded with.


@dataclasses.dataclass(frozen=True)
class Recipe:
  """Everything that a run needs; built by `create_recipe`.

  Attributes:
    config: The config.
    model: The Flax module.
    where: The model's selection of sparsified leaves.
    plan: The phases.
    optimizer: AdamW inside `sparsify`; masks that move are tracked.
    corpus: Text to pre-train on.
    task: Task to fine-tune on; `None`: there is none.
    sources: Sources of batches, by name.
    batch_at: The batch of each step, a pure function.
    init_params: Makes the initial parameters, dense.
  """

  config: RunConfig
  model: nn.Module
  where: Callable[[str, Any], Any]
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
    """The devices that train."""
    return create_mesh(**dataclasses.asdict(self.config.mesh))

  @property
  def first_loss_scale(self) -> LossScale | None:
    """What the loss is scaled by at first; `None` but in float16."""
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
    """Makes the state at step 0, no device more of it than it holds."""
    return jax.jit(self._first_state, out_shardings=self._shardings)()

  def state_from(self, params: PyTree) -> TrainState:
    """Makes the state at step 0 from parameters, laid out as ours.

    Raises:
      ValueError: a mask that is given is not as the plan asks.
    """
    create = functools.partial(
        create_state,
        optimizer=self.optimizer,
        loss_scale=self.first_loss_scale,
    )
    if jax.process_count() == 1:
      # Eagerly: masks are checked against the values they are made from.
      return jax.device_put(create(params), self._shardings)
    return jax.jit(create, out_shardings=self._shardings)(params)

  def device_batch_at(self, step: int) -> data.Batch:
    """Reads the batch of a step onto the mesh: each process its own rows."""
    phase = self.plan.phase_at(step)
    return place_batch(
        self.mesh,
        functools.partial(self.batch_at, step),
        (phase.batch_size, phase.length),
    )

  @functools.cached_property
  def sparse_steps(self) -> SparseSteps | None:
    """What runs sparse steps; `None`: the same dense products as all others."""
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
    """The loss to minimize."""
    return self.config.loss

  @functools.cached_property
  def step(self) -> Any:
    """The jitted training step; its first argument, the state, is donated."""
    return self._jit_step(self._shardings)

  @functools.cached_property
  def compact_step(self) -> Any:
    """The same, of states that hold kept values only."""
    return self._jit_step(self._one_place)

  @property
  def _one_place(self) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(self.mesh, jax.P())

  def _jit_step(self, shardings: Any) -> Any:
    step = functools.partial(
        train_step,
        apply_fn=without_masks(self.model.apply),
        optimizer=self.optimizer,
        learning_rate=self.plan.learning_rate,
        sparse_steps=self.sparse_steps,
        loss=self.loss,
        micro_batches=self.config.micro_batches,
    )
    if self.plan.moves_masks:
      step = functools.partial(step, statistics=mask_statistics)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))

  def prepare_step(
      self, state: TrainState, step: int
  ) -> tuple[Any, TrainState]:
    """Returns what takes a step, and the state stored as it asks.

    Args:
      state: The state, stored either way.
      step: The step, from 0.

    Returns:
      The jitted step and the state, which it donates.
    """
    if stored_state.is_compact_at(self.config.storage, self.plan, step):
      if not stored_state.is_compact(state):
        state = stored_state.to_compact(state, self._one_place)
      return self.compact_step, state
    return self.step, self.to_dense(state)

  def to_dense(self, state: TrainState) -> TrainState:
    """Returns a state as dense arrays: that of checkpoints and evaluations."""
    if not stored_state.is_compact(state):
      return state
    return stored_state.to_dense(state, self._shardings)

  def compile_step(self, batch_size: int, length: int) -> Any:
    """Compiles the step for a batch shape, from shapes alone."""
    shape = functools.partial(
        jax.ShapeDtypeStruct, (batch_size, length),
        sharding=batch_sharding(self.mesh, batch_size),
    )
    batch = data.Batch(shape(jnp.int32), shape(jnp.int32), shape(jnp.float32))
    return self.step.lower(self.abstract_state, batch).compile()

  def with_ends(self, ends: Mapping[str, int]) -> 'Recipe':
    """Returns the recipe with phases that have ended at other steps.

    Args:
      ends: Steps completed at the ends of the first phases, by name.

    Returns:
      This recipe if it is as planned, or one whose later phases follow there.
    """
    plan = self.plan.with_ends(ends)
    if plan is self.plan:
      return self
    return _assemble(
        self.config, self.model, plan, self.corpus, self.task, self.sources,
        self.init_params,
    )

  @property
  def parameters(self) -> int:
    """Parameters of the model."""
    leaves = jax.tree.leaves(self.abstract_state.params)
    return sum(int(np.prod(x.shape)) for x in leaves)


def create_recipe(config: Any, *, planning: bool = False) -> Recipe:
  """Builds model, plan, optimizer and data from a config, and checks them.

  Args:
    config: A ConfigDict, or mapping, as `configs/quickstart.py` documents it.
    planning: Nothing will be read: a corpus, or the files of a task, that do
      not exist yet have the sizes in `config.data.planned`.

  Returns:
    The recipe; nothing is trained yet.

  Raises:
    ValueError: the config is not valid, see `parse`, or does not fit the
      devices or the data.
  """
  config = parse(config)
  mesh = create_mesh(**dataclasses.asdict(config.mesh))
  for phase in config.phases:
    phase.create_algorithm()  # Imports it where it is the user's own.
    try:
      check_batches(mesh, phase.batch_size, config.micro_batches)
    except ValueError as error:
      raise ValueError(f'phase {phase.name!r}: {error}') from error
  model = models.model_of(config.model.sizes)
  corpus = _open_corpus(config.data, planning)
  _check_vocabulary(corpus, model.config.vocab_size)
  task = _open_task(config.data, planning)
  sources = _create_sources(corpus, task, config.phases)

  root = jax.random.key(config.seed)
  tokens = jnp.zeros((1, 2), jnp.int32)
  init = lambda: model.init(jax.random.fold_in(root, _PARAMS), tokens)['params']
  sizes = [x.size for x in jax.tree.leaves(jax.eval_shape(init))]
  plan = create_plan(
      config.phases,
      tokens_per_epoch={
          name: lambda length, source=source: length * source.num_blocks(length)
          for name, source in sources.items()
      },
      parameters=sum(sizes),
  )
  stored_state.check_storage(config.storage, plan, mesh)
  return _assemble(
      config, model, plan, corpus, task, sources, jax.jit(init)
  )


def _assemble(
    config: RunConfig,
    model: nn.Module,
    plan: Plan,
    corpus: data.Corpus,
    task: data.Task | data.PlannedExamples | None,
    sources: Mapping[str, data.Source],
    init_params: Callable[[], PyTree],
) -> Recipe:
  """Adds what follows from the plan: the optimizer and the batches."""
  batch_at = data.schedule_batches(
      sources,
      [
          data.Allotment(p.data, p.batch_size, p.length, p.steps, p.reshuffle)
          for p in plan.phases
      ],
      seed=config.seed,
      max_epochs=dataclasses.asdict(config.data.max_epochs),
  )
  where = models.sparsifiable
  optimizer = optimizers.adamw(
      plan,
      where=where,
      key=jax.random.fold_in(jax.random.key(config.seed), _MASKS),
      **dataclasses.asdict(config.optimizer),
  )
  return Recipe(
      config, model, where, plan, optimizer, corpus, task, sources, batch_at,
      init_params,
  )


def _open_corpus(
    config: DataConfig, planning: bool
) -> data.Corpus | data.PlannedCorpus:
  planned = config.planned
  if planning and planned.tokens and not os.path.exists(config.corpus):
    return data.PlannedCorpus(
        config.corpus, int(planned.tokens),
        data.PlannedTokenizer(planned.vocab_size),
    )
  return data.prepare_corpus(
      config.corpus, tokenizer=config.tokenizer, cache_dir=config.cache_dir
  )


def _check_vocabulary(corpus: data.Corpus, vocab_size: int) -> None:
  if corpus.tokenizer.vocab_size > vocab_size:
    raise ValueError(
        f'corpus {corpus.name!r} has token ids up to '
        f'{corpus.tokenizer.vocab_size - 1} and the model a vocabulary of '
        f'{vocab_size}; set model.vocab_size to '
        f'{corpus.tokenizer.vocab_size} or use another tokenizer.'
    )


def _open_task(
    config: DataConfig, planning: bool
) -> data.Task | data.PlannedExamples | None:
  if not config.task:
    return None
  examples = config.planned.examples
  if planning and examples and not os.path.exists(config.task_dir):
    return data.PlannedExamples(config.task, examples)
  return data.load_task(config.task, config.task_dir)


def _create_sources(
    corpus: data.Corpus | data.PlannedCorpus,
    task: data.Task | data.PlannedExamples | None,
    phases: Sequence[PhaseConfig],
) -> dict[str, data.Source]:
  """Returns the sources of batches; planned ones can only be counted."""
  sources = {'corpus': corpus.source}
  if isinstance(task, data.PlannedExamples):
    return sources | {'task': task}
  if task is None:
    return sources
  if not task.train:
    raise ValueError(
        f'task {task.name!r} has no example to train on; add the file of its '
        'training split to data.task_dir.'
    )
  if isinstance(corpus, data.PlannedCorpus):
    # Without the tokenizer, examples can only be counted.
    return sources | {'task': data.PlannedExamples(task.name, len(task.train))}
  lengths = [phase.length for phase in phases if phase.data == 'task']
  # A row of L tokens predicts L targets, so the example has one more.
  examples = data.encode_pairs(
      task.train, corpus.tokenizer, max(lengths, default=127) + 1
  )
  return sources | {'task': examples}

"""A recipe: everything that a config describes, built and checked."""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax import data
from spdf_jax import models
from spdf_jax.sparsity.tracking import mask_statistics
from spdf_jax.training import config_checks
from spdf_jax.training import inputs
from spdf_jax.training import optimizers
from spdf_jax.training import storage
from spdf_jax.training.loss_scale import create_loss_scale
from spdf_jax.training.loss_scale import LossScale
from spdf_jax.training.losses import Loss
from spdf_jax.training.matmul import check_matmul
from spdf_jax.training.matmul import sparse_steps
from spdf_jax.training.matmul import SparseSteps
from spdf_jax.training.matmul import without_masks
from spdf_jax.training.mesh import batch_sharding
from spdf_jax.training.mesh import create_mesh
from spdf_jax.training.mesh import place_batch
from spdf_jax.training.mesh import shard_shapes
from spdf_jax.training.phases import create_plan
from spdf_jax.training.phases import Plan
from spdf_jax.training.state import create_state
from spdf_jax.training.state import TrainState
from spdf_jax.training.step import train_step

PyTree = Any
_PARAMS, _MASKS = 0, 1  # What the seed's key is folded with.


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What a run is made of; built by `create_recipe`.

  Attributes:
    config: The resolved config, JSON-able: the run's identity.
    model: The Flax module.
    where: The model's selection of sparsified leaves.
    plan: The phases.
    optimizer: AdamW inside `sparsify`; masks that move are tracked.
    corpus: What is pre-trained on.
    task: What is fine-tuned on; `None` without.
    sources: What batches are read from, by name.
    batch_at: The batch of each step, a pure function.
    init_params: Makes the initial parameters, dense.
  """

  config: Mapping[str, Any]
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
    return create_mesh(**self.config.get('mesh', {}))

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
        self.config.get('matmul', 'dense'),
        self.model,
        tokens=min(p.batch_size * p.length for p in phases),
    )

  @property
  def loss(self) -> Loss:
    """What is minimized."""
    return Loss(**self.config.get('loss', {}))

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
        micro_batches=self.config.get('micro_batches', 1),
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
    if storage.is_compact_at(
        self.config.get('storage', 'dense'), self.plan, step
    ):
      if not storage.is_compact(state):
        state = storage.to_compact(state, self._one_place)
      return self.compact_step, state
    return self.step, self.to_dense(state)

  def to_dense(self, state: TrainState) -> TrainState:
    """Returns a state as dense arrays: that of checkpoints and evaluations."""
    if not storage.is_compact(state):
      return state
    return storage.to_dense(state, self._shardings)

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
    planning: Nothing will be read: a corpus, or the files of a task, that are
      not there yet are as `config.data.planned` says.

  Returns:
    The recipe; nothing is trained yet.

  Raises:
    ValueError: something in the config cannot be; one sentence says what.
  """
  config = plain(config)
  config_checks.check_counts(config)
  check_matmul(config.get('matmul', 'dense'))
  Loss(**config.get('loss', {}))  # Raises where it cannot be.
  model = models.create_model(
      config['model']['preset'],
      **{k: v for k, v in config['model'].items() if k != 'preset'},
  )
  order = config['phases']['order']
  specs = {k: v for k, v in config['phases'].items() if k != 'order'}
  config_checks.check_lengths(specs, order, model.config.max_length)
  mesh = create_mesh(**config.get('mesh', {}))
  config_checks.check_micro_batches(
      specs, order, config.get('micro_batches', 1), mesh
  )
  corpus = inputs.open_corpus(config['data'], planning)
  config_checks.check_vocabulary(corpus, model.config.vocab_size)
  task = inputs.open_task(config['data'], planning)
  sources = inputs.create_sources(corpus, task, specs, order)

  root = jax.random.key(config['seed'])
  tokens = jnp.zeros((1, 2), jnp.int32)
  init = lambda: model.init(jax.random.fold_in(root, _PARAMS), tokens)['params']
  sizes = [x.size for x in jax.tree.leaves(jax.eval_shape(init))]
  plan = create_plan(
      specs,
      order,
      tokens_per_epoch={
          name: lambda length, source=source: length * source.num_blocks(length)
          for name, source in sources.items()
      },
      parameters=sum(sizes),
  )
  config_checks.check_early_stops(config, plan.phases)
  storage.check_storage(config.get('storage', 'dense'), plan, mesh)
  return _assemble(
      config, model, plan, corpus, task, sources, jax.jit(init)
  )


def _assemble(
    config: Mapping[str, Any],
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
      seed=config['seed'],
      max_epochs=config['data']['max_epochs'],
  )
  where = models.sparsifiable
  optimizer = optimizers.adamw(
      plan,
      where=where,
      key=jax.random.fold_in(jax.random.key(config['seed']), _MASKS),
      **config['optimizer'],
  )
  return Recipe(
      config, model, where, plan, optimizer, corpus, task, sources, batch_at,
      init_params,
  )


def plain(config: Any) -> dict[str, Any]:
  """Returns a config as nested dicts, lists, numbers and text.

  Example:
    >>> plain({'seed': 0, 'order': ('a', 'b')})
    {'seed': 0, 'order': ['a', 'b']}
  """
  as_dict = config.to_dict() if hasattr(config, 'to_dict') else dict(config)
  return json.loads(json.dumps(as_dict))

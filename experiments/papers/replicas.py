"""Replicas: runs of one size that are trained together in one program.

The train states of all replicas are stacked. Masks, weights, batches and
learning rates are data, so dense and static arms, seeds and learning rates
share one vmapped step. Replicas of one seed read the same batches, which are
stored once.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import training
from spdf_jax.runs import lifecycle
from spdf_jax.training.matmul import without_masks

CHUNK = 50
"""Largest number of steps in one dispatch, whose batches are on the device."""

_AXES = training.TrainState(step=None, params=0, opt_state=0, loss_scale=0)


class Chunk(NamedTuple):
  """Batches and learning rates of one dispatch, padded to `CHUNK` steps.

  Attributes:
    batches: Batches, [CHUNK, seeds, B, L].
    rates: Learning rates, float32 [CHUNK, replicas].
    count: Number of steps; the rest is padding.
  """

  batches: data.Batch
  rates: np.ndarray
  count: int


class Replicas:
  """Jitted functions of runs that differ in seed, rate and static mask.

  Args:
    recipes: Recipe of each replica: of the same model, number of steps, batch
      shape and optimizer, with a single phase without mask updates.

  Attributes:
    recipes: The recipes.
    steps: Number of steps of every replica.

  Raises:
    ValueError: a recipe has several phases or mask updates, or differs from the
      others in what they must share.
  """

  def __init__(self, recipes: Sequence[training.Recipe]):
    self.recipes = list(recipes)
    self.steps = recipes[0].plan.total_steps
    for recipe in recipes:
      _check(recipe, like=recipes[0])
    by_seed = {recipe.config.seed: recipe for recipe in recipes}
    self._batches_at = [recipe.batch_at for recipe in by_seed.values()]
    self._first_batch = recipes[0].batch_at(0)
    seeds = list(by_seed)
    self._rows = np.array([seeds.index(r.config.seed) for r in recipes])
    steps = jnp.arange(self.steps)
    self._rates = np.stack([
        jax.vmap(recipe.plan.learning_rate)(steps) for recipe in recipes
    ], axis=1)
    self._run = jax.jit(
        functools.partial(_run_steps, recipe=recipes[0]), donate_argnums=0
    )

  @property
  def shapes(self) -> training.TrainState:
    """Shapes and dtypes of the stacked state."""
    stacked = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((len(self.recipes), *x.shape), x.dtype),
        self.recipes[0].abstract_state,
    )
    return stacked.replace(step=jax.ShapeDtypeStruct((), jnp.int32))

  def create_state(self) -> training.TrainState:
    """Returns the stacked states at step 0, from checkpoints of `init_from`."""
    states = []
    for recipe in self.recipes:
      params = training.read_params(
          training.find_checkpoint(recipe.config.init_from),
          recipe.abstract_state.params,
      )
      # Kept on the host, so that the device stores the stack only.
      states.append(jax.device_get(recipe.state_from(params)))
    stacked = jax.tree.map(lambda *xs: jnp.array(np.stack(xs)), *states)
    return stacked.replace(step=jnp.zeros([], jnp.int32))

  def read(self, step: int, count: int) -> Chunk:
    """Reads the batches and learning rates of `count` steps from `step` on."""
    count = min(count, CHUNK, self.steps - step)
    shape = CHUNK, len(self._batches_at)
    batches = data.Batch(
        *(np.zeros(shape + x.shape, x.dtype) for x in self._first_batch)
    )
    for i in range(count):
      for seed, batch_at in enumerate(self._batches_at):
        for whole, part in zip(batches, batch_at(step + i)):
          whole[i, seed] = part
    rates = np.zeros((CHUNK, len(self.recipes)), np.float32)
    rates[:count] = self._rates[step:step + count]
    return Chunk(batches, rates, count)

  def run(
      self, state: training.TrainState, chunk: Chunk
  ) -> tuple[training.TrainState, jax.Array]:
    """Takes the steps of a chunk, asynchronously.

    The number of steps is data, so chunks of all lengths use one program, and
    the results are bit-identical however training is divided into chunks.

    Args:
      state: The stacked state; donated.
      chunk: Result of `read`; with 0 steps, the call only compiles.

    Returns:
      The next state and training losses [CHUNK, replicas], NaN for padding.
    """
    return self._run(
        state, chunk.batches, self._rows, chunk.rates, chunk.count
    )

  def validation_losses(self, params: Any) -> list[evaluation.Loss]:
    """Evaluates stacked parameters on the batches of ordinary runs.

    Args:
      params: Stacked parameters.

    Returns:
      The loss of each replica.
    """
    model = self.recipes[0].model
    sums = jax.jit(jax.vmap(
        functools.partial(
            evaluation.batch_sums,
            lambda params, tokens: model.apply({'params': params}, tokens),
        ),
        in_axes=(0, None, None, None),
    ))
    total = np.zeros((2, len(self.recipes)))
    for batch in lifecycle.validation_batches(self.recipes[0]):
      total += np.asarray(sums(params, *batch), np.float64)
    return [evaluation.Loss(*map(float, column)) for column in total.T]


def replica_step(
    state: training.TrainState,
    batch: data.Batch,
    rate: jax.Array,
    recipe: training.Recipe,
) -> tuple[training.TrainState, jax.Array]:
  """Takes a step of one replica: `recipe.step` with its learning rate as data.

  Args:
    state: State of the replica.
    batch: Batch of the step.
    rate: Learning rate of the step.
    recipe: Recipe of any replica; replicas differ in data only.

  Returns:
    The next state and the training loss.
  """
  phase, = recipe.plan.phases
  phase = dataclasses.replace(phase, learning_rate=lambda step: rate)
  # `planned` makes the plan take `updates_masks` from the recipe's plan, which
  # computed it outside of this traced function.
  plan = training.Plan((phase,), planned=recipe.plan)
  optimizer = training.adamw(
      plan,
      where=recipe.where,
      key=jax.random.key(0),  # Unused: masks are static and in the state.
      **dataclasses.asdict(recipe.config.optimizer),
  )
  state, metrics = training.train_step(
      state,
      batch,
      apply_fn=without_masks(recipe.model.apply),
      optimizer=optimizer,
      learning_rate=plan.learning_rate,
      loss=recipe.loss,
      micro_batches=recipe.config.micro_batches,
  )
  return state, metrics['train/loss']


def _run_steps(state, batches, rows, rates, count, *, recipe):
  """Takes `count` steps of all replicas; replica r reads batch `rows[r]`."""
  step = jax.vmap(
      functools.partial(replica_step, recipe=recipe),
      in_axes=(_AXES, 0, 0), out_axes=(_AXES, 0),
  )

  def body(i, carry):
    state, losses = carry
    batch = jax.tree.map(lambda x: x[i][rows], batches)
    state, loss = step(state, batch, rates[i])
    return state, losses.at[i].set(loss)

  losses = jnp.full(rates.shape, jnp.nan)
  return jax.lax.fori_loop(0, count, body, (state, losses))


def _check(recipe: training.Recipe, like: training.Recipe) -> None:
  plan = recipe.plan
  if len(plan.phases) > 1 or plan.updates_masks:
    raise ValueError(
        f'phases are {[phase.name for phase in plan.phases]}; runs that train '
        'in one program must have a single phase without mask updates.'
    )
  shared, expected = _shared(recipe), _shared(like)
  for name, value in shared.items():
    if value != expected[name]:
      raise ValueError(
          f'{name} is {value} and {expected[name]}, but runs in one program '
          'must share it; train them in separate groups.'
      )


def _shared(recipe: training.Recipe) -> dict[str, Any]:
  phase, = recipe.plan.phases
  names = ('steps', 'batch_size', 'length', 'weight_decay')
  return {name: getattr(phase, name) for name in names} | {
      'model': recipe.model.config,
      'optimizer': recipe.config.optimizer,
      'data': recipe.fingerprints,
  }

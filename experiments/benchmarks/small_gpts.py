"""Small GPTs for measurements: models, batches and compiled programs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from configs import quickstart
from experiments.benchmarks import compiled
from experiments.benchmarks import dense_training
from experiments.benchmarks import measuring
import spdf_jax as spdf
from spdf_jax import data
from spdf_jax import models
from spdf_jax import training
from spdf_jax.training.configs.config import parse
from spdf_jax.training.configs.phases import Phase
from spdf_jax.training.step import matmul
from spdf_jax.training.step import storage

SPARSITY = 0.75
_TOKENS_PER_EPOCH = 2**24
"""Tokens of an epoch, which determine the lengths of phases, not their cost."""
_LARGEST_UNALIASED = 64
"""Largest number of bytes not updated in place: those of flags and counters."""
_LARGEST_COPIED = 0.01
"""Largest share of the optimizer's state that is copied: its counters."""

PyTree = Any


class Case(NamedTuple):
  """A model and a batch to measure."""

  name: str
  """Name of the case in rows."""

  model: Mapping[str, Any]
  """Fields of the quickstart's model to change."""

  batch_size: int
  """Sequences per step."""

  length: int
  """Tokens per sequence."""

  steps: int
  """Timed steps per repeat."""

  updates: int
  """Timed updates of the optimizer alone per repeat."""


CASES = (
    Case('quickstart', {}, 8, 128, 5, 20),
    # Close to the 4.3M parameters at which other libraries were measured.
    Case(
        'd_model 256',
        dict(n_layers=4, n_heads=8, d_model=256, d_ff=1024, max_length=256),
        4, 256, 2, 20,
    ),
    # Wide enough that matrix products take most of the step. The optimizer
    # alone is limited by memory bandwidth here, and masking the gradient for
    # the clipping norm is an extra pass: some 1.27, above the target of 1.25.
    Case(
        'd_model 512',
        dict(n_layers=4, n_heads=8, d_model=512, d_ff=2048, max_length=256),
        4, 256, 1, 10,
    ),
)


class Subject(NamedTuple):
  """A model that is ready to be trained."""

  model: nn.Module
  """The Flax module."""

  params: PyTree
  """Initial parameters."""

  plan: training.Plan
  """The phases of configs/quickstart.py."""

  settings: Mapping[str, Any]
  """Arguments of AdamW."""

  batch: data.Batch
  """Batch of every training step."""


def create_subject(case: Case, rng: np.random.Generator) -> Subject:
  """Creates the model of a case with random parameters and tokens."""
  config = parse(quickstart.get_config(f'sparsity={SPARSITY}'))
  model = models.model_of(
      dataclasses.replace(config.model.sizes, **case.model)
  )
  key = jax.random.key(config.seed)
  params = jax.jit(model.init)(key, jnp.zeros((1, 2), jnp.int32))['params']
  return Subject(
      model,
      params,
      _create_plan(config.phases, params),
      dataclasses.asdict(config.optimizer),
      _random_batch(case, model.config.vocab_size, rng),
  )


def random_grads(params: PyTree, rng: np.random.Generator) -> PyTree:
  """Returns gradients for steps of the optimizer alone."""
  return jax.tree.map(
      lambda p: 0.01 * rng.standard_normal(p.shape, np.float32), params
  )


def _create_plan(
    phases: Sequence[Phase], params: PyTree
) -> training.Plan:
  tokens = lambda length: _TOKENS_PER_EPOCH
  return training.create_plan(
      phases,
      tokens_per_epoch={'corpus': tokens, 'task': tokens},
      parameters=sum(x.size for x in jax.tree.leaves(params)),
  )


def _random_batch(
    case: Case, vocab_size: int, rng: np.random.Generator
) -> data.Batch:
  shape = (case.batch_size, case.length + 1)
  tokens = jnp.asarray(rng.integers(vocab_size, size=shape, dtype=np.int32))
  weights = jnp.ones((case.batch_size, case.length))
  return data.Batch(tokens[:, :-1], tokens[:, 1:], weights)


def first_state(params: PyTree, optimizer: Any) -> training.TrainState:
  """Creates the state at step 0, with masked parameters."""
  # A step donates the state, and the parameters are used again.
  params = jax.tree.map(jnp.copy, params)
  opt_state = optimizer.init(params)
  if isinstance(opt_state, spdf.SparsifyState):
    params = spdf.apply_mask(params, spdf.get_mask(opt_state))
  return training.TrainState(jnp.zeros([], jnp.int32), params, opt_state)


def chain_of(subject: Subject, **options: Any) -> Any:
  """Returns the dense optimizer of a subject; see `dense_training.adamw`."""
  return dense_training.adamw(subject.plan, **subject.settings, **options)


def sparsified(chain: Any, algorithm: spdf.Algorithm) -> Any:
  """Returns an optimizer whose hidden matrices follow an algorithm."""
  return spdf.sparsify(chain, algorithm, where=models.sparsifiable, key=0)


def compile_update(
    subject: Subject, optimizer: Any, grads: PyTree
) -> compiled.Program:
  """Compiles a step of the optimizer alone, from the state at step 0."""
  return compiled.compile_program(
      functools.partial(dense_training.update, optimizer=optimizer),
      first_state(subject.params, optimizer), grads,
  )


def compile_step(
    subject: Subject,
    optimizer: Any,
    step: Callable[..., Any] = training.train_step,
    *,
    is_compact: bool = False,
    **options: Any,
) -> compiled.Program:
  """Compiles a training step, from the state at step 0.

  Args:
    subject: The model, its plan and its batch.
    optimizer: The optimizer.
    step: `training.train_step`, or that of `dense_training`.
    is_compact: Whether the state has kept values only.
    **options: Further arguments of the step.

  Returns:
    The program.
  """
  state = first_state(subject.params, optimizer)
  return compiled.compile_program(
      functools.partial(
          step,
          apply_fn=matmul.without_masks(subject.model.apply),
          optimizer=optimizer,
          learning_rate=subject.plan.learning_rate,
          **options,
      ),
      storage.to_compact(state) if is_compact else state,
      subject.batch,
  )


def compile_steps(
    subject: Subject, optimizers: Mapping[str, Any]
) -> dict[str, compiled.Program]:
  """Compiles the step of every optimizer; `'dense'` has one without masks."""
  return {
      name: compile_step(
          subject, optimizer,
          dense_training.train_step if name == 'dense'
          else training.train_step,
      )
      for name, optimizer in optimizers.items()
  }


def memory_rows(
    case: str,
    kind: str,
    scratch_target: float | None,
    programs: Mapping[str, compiled.Program],
) -> Iterator[measuring.Row]:
  """Yields rows of the programs' copies and scratch beyond those of `'dense'`.
  """
  dense = programs['dense']
  state_bytes = compiled.tree_bytes(dense.state.opt_state)
  copied = lambda p: compiled.copied_bytes(p, dense.state.opt_state)
  scratch = compiled.scratch_bytes
  for name, program in programs.items():
    if program is dense:
      continue
    row = functools.partial(measuring.counted_row, case)
    yield row(
        f'{name} {kind}: bytes not in place',
        compiled.unaliased_bytes(program),
        target=_LARGEST_UNALIASED,
    )
    yield row(
        f'{name} {kind}: copied / optimizer state',
        (copied(program) - copied(dense)) / state_bytes,
        target=_LARGEST_COPIED,
    )
    yield row(
        f'{name} {kind}: scratch / optimizer state',
        (scratch(program) - scratch(dense)) / state_bytes,
        target=scratch_target,
    )

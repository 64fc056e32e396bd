"""What sparsity costs a training step: time, and copies of the state.

Three optimizers of one model: `dense`, the chain a user of optax would write;
`static`, the same chain in `sparsify` at 75 %; `phases`, what training runs
from configs/quickstart.py, its three phases and restart included.

Targets: the sparse step at most 1.03 of the dense one, the optimizer alone at
most 1.25, and no copy of the optimizer's state. That is counted three ways:
bytes of the donated state that are not updated in place; bytes that XLA copies
to arrays shaped like the dense optimizer's state; and scratch beyond that of
the dense program. In the optimizer alone the last is one masked gradient, up
to half of Adam's state, because clipping reads it twice; a copy of the state
would be twice that. In the step it is the masked weights that the products
read.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import functools
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from configs import quickstart
from experiments import compiled
from experiments import measuring
from experiments.suites import dense_training
import spdf_jax as spdf
from spdf_jax import data
from spdf_jax import models
from spdf_jax import training
from spdf_jax.training import optimizers
from spdf_jax.training.recipe import plain

SPARSITY = 0.75
_TOKENS_PER_EPOCH = 2**24  # Lengths of phases follow from it, costs do not.
_LARGEST_UNALIASED = 64  # Bytes: a flag or counter may be made anew.
# In units of the optimizer state, beyond what the dense program has.
_LARGEST_COPIED = 0.01  # Counters.
_LARGEST_SCRATCH = 0.5  # The masked gradient: half of Adam's state.
_LARGEST_STEP_RATIO = 1.03
_LARGEST_OPTIMIZER_RATIO = 1.25

PyTree = Any


class Case(NamedTuple):
  """A model and a batch to measure."""

  name: str
  """What rows call it."""

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
    # Near the 4.3M parameters at which other libraries were measured.
    Case(
        'd_model 256',
        dict(n_layers=4, n_heads=8, d_model=256, d_ff=1024, max_length=256),
        4, 256, 2, 20,
    ),
    # Wide enough that matrix products take most of the step. The optimizer
    # alone is bound by memory here, and masking the gradient for the norm of
    # the clip is a pass of its own: some 1.27, over the target.
    Case(
        'd_model 512',
        dict(n_layers=4, n_heads=8, d_model=512, d_ff=2048, max_length=256),
        4, 256, 1, 10,
    ),
)


def measure(repeats: int, rng: np.random.Generator) -> Iterator[measuring.Row]:
  """Measures all cases.

  Args:
    repeats: Rounds of timing; quicker cases take several in each.
    rng: Of tokens and the bootstrap.

  Yields:
    Rows.
  """
  for case in CASES:
    yield from measure_case(case, repeats, rng)


def measure_case(
    case: Case, repeats: int, rng: np.random.Generator
) -> Iterator[measuring.Row]:
  """Measures one case; see `measure`."""
  config = plain(quickstart.get_config(f'sparsity={SPARSITY}'))
  sizes = {k: v for k, v in config['model'].items() if k != 'preset'}
  model = models.create_model(
      config['model']['preset'], **sizes | dict(case.model)
  )
  init = jax.jit(model.init)
  key = jax.random.key(config['seed'])
  params = init(key, jnp.zeros((1, 2), jnp.int32))['params']
  plan = _create_plan(config['phases'], params)
  chain = dense_training.adamw(plan, **config['optimizer'])
  with_masks = dict(where=models.sparsifiable, key=key)
  all_optimizers = {
      'dense': chain,
      'static': spdf.sparsify(chain, spdf.static(SPARSITY), **with_masks),
      'phases': optimizers.adamw(plan, **with_masks, **config['optimizer']),
  }
  batch = _random_batch(case, model.config.vocab_size, rng)
  programs = {}
  for name, optimizer in all_optimizers.items():
    function = functools.partial(
        dense_training.train_step if name == 'dense' else training.train_step,
        apply_fn=model.apply,
        optimizer=optimizer,
        learning_rate=plan.learning_rate,
    )
    programs[name] = _compile(function, params, optimizer, batch)
  yield from _time_rows(
      case.name, 'step', _LARGEST_STEP_RATIO, programs,
      repeats * case.steps, rng,
  )
  yield from _memory_rows(case.name, 'step', None, programs)

  grads = jax.tree.map(
      lambda p: 0.01 * rng.standard_normal(p.shape, np.float32), params
  )
  programs = {}
  for name, optimizer in all_optimizers.items():
    function = functools.partial(dense_training.update, optimizer=optimizer)
    programs[name] = _compile(function, params, optimizer, grads)
  yield from _time_rows(
      case.name, 'optimizer', _LARGEST_OPTIMIZER_RATIO, programs,
      repeats * case.updates, rng,
  )
  yield from _memory_rows(
      case.name, 'optimizer', _LARGEST_SCRATCH, programs
  )


def _create_plan(phases: Mapping[str, Any], params: PyTree) -> training.Plan:
  tokens = lambda length: _TOKENS_PER_EPOCH
  return training.create_plan(
      {name: spec for name, spec in phases.items() if name != 'order'},
      phases['order'],
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


def _compile(
    function: Callable[..., Any], params: PyTree, optimizer: Any, argument: Any
) -> compiled.Program:
  # Donated, and the parameters are used again: a copy.
  params = jax.tree.map(jnp.copy, params)
  opt_state = optimizer.init(params)
  if isinstance(opt_state, spdf.SparsifyState):
    params = spdf.apply_mask(params, spdf.get_mask(opt_state))
  state = training.TrainState(jnp.zeros([], jnp.int32), params, opt_state)
  return compiled.compile_program(function, state, argument)


def _time_rows(
    case: str,
    kind: str,
    target: float,
    programs: Mapping[str, compiled.Program],
    repeats: int,
    rng: np.random.Generator,
) -> Iterator[measuring.Row]:
  calls = [compiled.repeated(program) for program in programs.values()]
  timings = measuring.interleave(calls, repeats, warmups=2)
  yield measuring.sampled_row(
      case, f'dense {kind}, wall ms', 1e3 * timings.wall[0], rng
  )
  for i, name in enumerate(programs):
    if name == 'dense':
      continue
    for clock, seconds in (('wall', timings.wall), ('CPU', timings.cpu)):
      yield measuring.sampled_row(
          case,
          f'{name} {kind} / dense, {clock}',
          seconds[i] / seconds[0],
          rng,
          target=target,
      )


def _memory_rows(
    case: str,
    kind: str,
    scratch_target: float | None,
    programs: Mapping[str, compiled.Program],
) -> Iterator[measuring.Row]:
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

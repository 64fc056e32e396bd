"""Phases: a training plan as data, compiled into functions of the step."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax import sparsity
from spdf_jax.names import lookup
from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.training.durations import resolve_duration
from spdf_jax.training.early_stops import EarlyStop
from spdf_jax.training.schedules import phase_schedules
from spdf_jax.training.stretches import check_fits
from spdf_jax.training.stretches import find_stretches
from spdf_jax.training.stretches import Stretch


@dataclasses.dataclass(frozen=True)
class Phase:
  """A stretch of training with one kind of data and one sparsity.

  Attributes:
    name: What the phase is called in logs, checkpoints and reports.
    steps: Optimizer steps.
    data: Name of the source its batches come from.
    batch_size: Sequences per step.
    length: Tokens per sequence.
    sparsity: Fraction of zeros in the sparsified matrices, in [0, 1), or an
      algorithm by name: `{'algorithm': 'static', 'sparsity': 0.75}`.
    learning_rate: An optax schedule of the step within the phase.
    weight_decay: Decoupled weight decay of matrices.
    restart: Whether the optimizer's moments start anew with the phase.
    reshuffle: Whether the phase begins a new epoch of its source, in an order
      of its own: a round of iterative pruning.
    early_stop: What may end the phase before its steps are done.

  Raises:
    ValueError: a field is out of its range.
  """

  name: str
  steps: int
  data: str
  batch_size: int
  length: int
  sparsity: float | Mapping[str, Any]
  learning_rate: optax.Schedule
  weight_decay: float
  restart: bool
  reshuffle: bool = False
  early_stop: EarlyStop | None = None

  def __post_init__(self):
    for field in ('steps', 'batch_size', 'length'):
      if getattr(self, field) < 1:
        raise ValueError(
            f'phase {self.name!r} has {field} {getattr(self, field)}; it must '
            'be at least 1, or take the phase out.'
        )
    try:
      create_algorithm(self.sparsity)
    except (TypeError, ValueError) as error:
      raise ValueError(f'phase {self.name!r}: {error}') from error
    if not callable(self.learning_rate):
      raise ValueError(
          f'phase {self.name!r} has the learning rate {self.learning_rate!r}; '
          'give a schedule, a function of the step such as '
          'optax.constant_schedule(1e-3).'
      )
    if not self.weight_decay >= 0:
      raise ValueError(
          f'phase {self.name!r} has weight_decay {self.weight_decay}; it must '
          'not be negative.'
      )

  @property
  def tokens_per_step(self) -> int:
    """Batch size times length."""
    return self.batch_size * self.length

  @property
  def tokens(self) -> int:
    """Tokens the phase trains on."""
    return self.steps * self.tokens_per_step


@dataclasses.dataclass(frozen=True)
class Plan:
  """Phases in order, and what they say as functions of the global step.

  Attributes:
    phases: At least one phase, names distinct.
    planned: The plan before phases ended early; `None`: none has.

  Raises:
    ValueError: there is no phase, or two have one name, or the updates of an
      algorithm do not fit the steps of its phases.

  Example:
    >>> phase = Phase('sparse', 10, 'corpus', 2, 8, 0.75,
    ...               optax.constant_schedule(0.1), 0.0, False)
    >>> plan = Plan((phase, dataclasses.replace(phase, name='dense',
    ...                                         sparsity=0.0)))
    >>> plan.total_steps, plan.phase_at(10).name, plan.starts
    (20, 'dense', (0, 10))
  """

  phases: tuple[Phase, ...]
  planned: 'Plan | None' = None

  def __post_init__(self):
    names = [phase.name for phase in self.phases]
    if not names or len(set(names)) != len(names):
      raise ValueError(
          f'the phases are named {names}; give at least one, each its own name.'
      )
    if self.planned is None:
      for stretch in self.stretches:
        check_fits(stretch)

  @functools.cached_property
  def starts(self) -> tuple[int, ...]:
    """The first step of each phase."""
    steps = [phase.steps for phase in self.phases[:-1]]
    return tuple(itertools.accumulate(steps, initial=0))

  @property
  def total_steps(self) -> int:
    """Steps of all phases."""
    return sum(phase.steps for phase in self.phases)

  @property
  def ends(self) -> dict[str, int]:
    """Steps completed at the end of each phase, by its name."""
    return {p.name: s + p.steps for p, s in zip(self.phases, self.starts)}

  def with_ends(self, ends: Mapping[str, int]) -> 'Plan':
    """Returns the plan as it goes on where phases have ended.

    Schedules are those of the plan: they see the step within their phase.

    Args:
      ends: Steps completed at the ends of the first phases, by name.

    Returns:
      The plan with these lengths; itself, if they are its own.
    """
    if all(self.ends[name] == end for name, end in ends.items()):
      return self
    start, phases = 0, []
    for phase in self.phases:
      steps = ends.get(phase.name, start + phase.steps) - start
      phases.append(dataclasses.replace(phase, steps=steps))
      start += steps
    return Plan(tuple(phases), self.planned or self)

  def phase_at(self, step: int) -> Phase:
    """Returns the phase that step number `step` (from 0) belongs to."""
    return self.phases[int(np.searchsorted(self.starts, step, 'right')) - 1]

  def learning_rate(self, step: Any) -> jax.Array:
    """Returns the learning rate at a global step."""
    schedules = [phase.learning_rate for phase in self.phases]
    return optax.join_schedules(schedules, self.starts[1:])(step)

  def weight_decay(self, step: Any) -> jax.Array:
    """Returns the weight decay at a global step."""
    schedules = [
        optax.constant_schedule(phase.weight_decay) for phase in self.phases
    ]
    return optax.join_schedules(schedules, self.starts[1:])(step)

  @property
  def restarts(self) -> tuple[int, ...]:
    """Steps before which the optimizer's moments start anew."""
    return tuple(
        start for phase, start in zip(self.phases, self.starts)
        if phase.restart and start
    )

  @functools.cached_property
  def stretches(self) -> tuple[Stretch, ...]:
    """Phases of equal sparsity, in order; those of one stretch share a mask."""
    return find_stretches(self.phases, self.starts)

  @functools.cached_property
  def algorithm(self) -> sparsity.Algorithm:
    """The sparse-training algorithm of the whole plan, by stretches."""
    return sparsity.join(
        [create_algorithm(stretch.sparsity) for stretch in self.stretches],
        [stretch.start for stretch in self.stretches[1:]],
    )

  @functools.cached_property
  def update_steps(self) -> np.ndarray:
    """The steps at which masks change, rising."""
    return self._steps_where(self.algorithm.update_at)

  @functools.cached_property
  def dense_grads_steps(self) -> np.ndarray:
    """The steps that need gradients of pruned weights, rising."""
    return self._steps_where(self.algorithm.dense_grads_at)

  def _steps_where(self, answer: Callable[[Any], Any]) -> np.ndarray:
    # All steps at once: asked one by one, a long plan takes minutes.
    asked = jax.vmap(lambda count: jnp.asarray(answer(count), bool))
    return np.flatnonzero(asked(jnp.arange(self.total_steps)))

  @property
  def moves_masks(self) -> bool:
    """Whether masks change other than where one stretch follows another."""
    if self.planned is not None:
      return self.planned.moves_masks
    starts = [stretch.start for stretch in self.stretches]
    return not np.isin(self.update_steps, starts).all()


def create_plan(
    phases: Mapping[str, Mapping[str, Any]],
    order: Sequence[str],
    *,
    tokens_per_epoch: Mapping[str, Callable[[int], int]],
    parameters: int,
) -> Plan:
  """Builds the plan that a config describes.

  Args:
    phases: By name, the fields of `Phase`, with `duration` (text, see
      `resolve_duration`) for steps, and `learning_rate` as `phase_schedules`
      reads it.
    order: Names of the phases to run, in order.
    tokens_per_epoch: By source, a function from the length of a sequence to
      the tokens of an epoch.
    parameters: Parameters of the model.

  Returns:
    The plan.

  Raises:
    ValueError: a name is unknown, or a value is out of its range.
  """
  specs = [lookup('phase', name, phases) for name in order]
  steps = []
  resolvers = []
  for name, spec in zip(order, specs):
    epoch = lookup(f'data of phase {name!r}:', spec['data'], tokens_per_epoch)
    for field in ('batch_size', 'length'):
      if spec[field] < 1:
        raise ValueError(
            f'phase {name!r} has {field} {spec[field]}; it must be at least 1.'
        )
    resolver = functools.partial(
        resolve_duration,
        tokens_per_step=spec['batch_size'] * spec['length'],
        tokens_per_epoch=epoch(spec['length']),
        parameters=parameters,
    )
    try:
      steps.append(resolver(spec['duration']))
    except ValueError as error:
      raise ValueError(f'phase {name!r}: {error}') from error
    resolvers.append(resolver)
  schedules = phase_schedules(order, specs, steps, resolvers)
  return Plan(
      tuple(
          Phase(
              name=name,
              steps=n,
              data=spec['data'],
              batch_size=spec['batch_size'],
              length=spec['length'],
              sparsity=spec['sparsity'],
              learning_rate=schedule,
              weight_decay=spec['weight_decay'],
              restart=spec['restart'],
              reshuffle=spec['reshuffle'],
              early_stop=_early_stop(name, spec),
          )
          for name, spec, n, schedule in zip(order, specs, steps, schedules)
      )
  )


def _early_stop(name: str, spec: Mapping[str, Any]) -> EarlyStop | None:
  given = spec.get('early_stop') or {}
  if not given.get('metric'):
    return None
  sparse = spec['sparsity']
  if isinstance(sparse, Mapping) and sparse['algorithm'] == 'iterative':
    raise ValueError(
        f'phase {name!r} is of rounds of iterative pruning, which have fixed '
        'lengths, and has early_stop; take it out.'
    )
  try:
    return EarlyStop(**given)
  except (TypeError, ValueError) as error:
    raise ValueError(f'phase {name!r}: {error}') from error

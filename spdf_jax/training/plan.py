# SPDX-License-Identifier: Apache-2.0
"""The plan: phases compiled into functions of the global step."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax import sparsity
from spdf_jax.names import lookup
from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.sparsity.algorithms import member_specs
from spdf_jax.training.durations import resolve_duration
from spdf_jax.training.learning_rates import check_first
from spdf_jax.training.learning_rates import phase_schedules
from spdf_jax.training.mask_spans import MaskSpan
from spdf_jax.training.phases import check_names
from spdf_jax.training.phases import Phase
from spdf_jax.training.phases import PhaseConfig


@dataclasses.dataclass(frozen=True)
class Plan:
  """Phases in order, compiled into functions of the global step.

  Attributes:
    phases: The phases, at least one, with distinct names.
    planned: The original plan, if a phase has ended early; otherwise `None`.
    init: `(key, params, sparsities) -> mask`, in place of the initial mask of
      the first phase's algorithm; `None`: the algorithm's.

  Raises:
    ValueError: there is no phase, two have the same name, the updates of an
      algorithm do not fit the steps of its phases, or moments restart at a step
      that the algorithm skips.

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
  init: Callable[[jax.Array, Any, Any], Any] | None = None

  def __post_init__(self):
    check_names([phase.name for phase in self.phases])
    if self.planned is None:
      for span in self.spans:
        span.check_updates()
      self._check_first()
      self._check_rewinds()
      self._check_restarts()

  def _check_first(self) -> None:
    first, specs = self.phases[0], member_specs(self.phases[0].sparsity)
    if first.initial_mask and specs != [first.sparsity] and any(
        'structure' in spec for spec in specs
    ):
      raise ValueError(
          f'phase {first.name!r} has the initial_mask {first.initial_mask!r} '
          'and groups with a structure, which it would not have; remove one.'
      )
    for phase in self.phases[1:]:
      if phase.initial_mask:
        raise ValueError(
            f'phase {phase.name!r} has the initial_mask '
            f'{phase.initial_mask!r}, but is not the first; it prunes by '
            'magnitude when it begins. Remove initial_mask, or begin a run '
            'with this phase by init_from.'
        )

  def _check_rewinds(self) -> None:
    steps = {
        phase.name: phase.rewind for phase in self.phases
        if phase.rewind is not None
    }
    if len(set(steps.values())) > 1:
      raise ValueError(
          f'phases rewind to the weights of different steps, {steps}, but one '
          'copy of the weights is kept; give one step.'
      )
    if steps and self.rewind_to >= self.rewinds[0]:
      raise ValueError(
          f'phase {next(iter(steps))!r} begins at step {self.rewinds[0]}, '
          f'counted from 0, and rewinds to the weights of step '
          f'{self.rewind_to}; rewind to an earlier step, or remove rewind.'
      )

  def _check_restarts(self) -> None:
    for phase, start in zip(self.phases, self.starts):
      if not (phase.restart and start and math.isfinite(start)):
        continue
      span = [span for span in self.spans if span.start <= start][-1]
      algorithm = create_algorithm(span.sparsity)
      if algorithm.skip_step_at(start - span.start):
        raise ValueError(
            f'phase {phase.name!r} restarts the moments at step {start}, '
            'counted from 0, at which its algorithm skips the gradient step; '
            'remove skip_gradient_step, or update the mask at other steps.'
        )

  @functools.cached_property
  def starts(self) -> tuple[int, ...]:
    """First step of each phase."""
    steps = [phase.steps for phase in self.phases[:-1]]
    return tuple(itertools.accumulate(steps, initial=0))

  @property
  def total_steps(self) -> int:
    """Number of steps of all phases."""
    return sum(phase.steps for phase in self.phases)

  @property
  def ends(self) -> dict[str, int]:
    """Steps completed at the end of each phase, by name."""
    return {p.name: s + p.steps for p, s in zip(self.phases, self.starts)}

  def with_ends(self, ends: Mapping[str, int]) -> 'Plan':
    """Returns the plan with the recorded ends of its first phases.

    Schedules do not change, since they are functions of the step within their
    phase.

    Args:
      ends: Steps completed at the ends of the first phases, by name.

    Returns:
      The plan with these lengths; this plan if it has them already.
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
    """Returns the phase of step number `step`, counted from 0."""
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
  def revive(self) -> optax.Schedule | None:
    """Deviation of revived weights at a step; `None`: they start at zero."""
    if not any(phase.revive for phase in self.phases):
      return None
    return optax.join_schedules(
        [optax.constant_schedule(phase.revive) for phase in self.phases],
        self.starts[1:],
    )

  @property
  def rewinds(self) -> tuple[int, ...]:
    """Steps before which the kept weights are rewound."""
    return tuple(
        start for phase, start in zip(self.phases, self.starts)
        if phase.rewind is not None
    )

  @property
  def rewind_to(self) -> int:
    """Step before which the weights to rewind to are copied; 0: none are."""
    return max(phase.rewind or 0 for phase in self.phases)

  @property
  def restarts(self) -> tuple[int, ...]:
    """Steps before which the optimizer's moments are reset."""
    return tuple(
        start for phase, start in zip(self.phases, self.starts)
        if phase.restart and start
    )

  @functools.cached_property
  def spans(self) -> tuple[MaskSpan, ...]:
    """Spans of consecutive phases of equal sparsity, in order."""
    joined: list[MaskSpan] = []
    for phase, start in zip(self.phases, self.starts):
      last = joined[-1] if joined else None
      if last is None or last.sparsity != phase.sparsity:
        joined.append(
            MaskSpan(phase.sparsity, (phase.name,), start, phase.steps)
        )
      else:
        joined[-1] = last._replace(
            names=(*last.names, phase.name), steps=last.steps + phase.steps
        )
    return tuple(joined)

  @functools.cached_property
  def algorithm(self) -> sparsity.Algorithm:
    """Algorithm of the whole plan, which joins those of the spans."""
    joined = sparsity.join(
        [create_algorithm(span.sparsity) for span in self.spans],
        [span.start for span in self.spans[1:]],
    )
    init = self.init
    return joined if init is None else joined._replace(
        init=lambda key, params: init(
            key, params, joined.sparsity_at(0, params)
        )
    )

  @functools.cached_property
  def update_steps(self) -> np.ndarray:
    """Steps with a mask update, in ascending order."""
    return self._steps_where(self.algorithm.update_at)

  @functools.cached_property
  def dense_grads_steps(self) -> np.ndarray:
    """Steps that need gradients of pruned weights, in ascending order."""
    return self._steps_where(self.algorithm.dense_grads_at)

  def _steps_where(self, answer: Callable[[Any], Any]) -> np.ndarray:
    # Vectorized, since calls for every step of a long plan take minutes.
    answers = jax.vmap(lambda count: jnp.asarray(answer(count), bool))
    return np.flatnonzero(answers(jnp.arange(self.total_steps)))

  @property
  def updates_masks(self) -> bool:
    """Whether there are mask updates within a span of equal sparsity."""
    if self.planned is not None:
      return self.planned.updates_masks
    starts = [span.start for span in self.spans]
    return not np.isin(self.update_steps, starts).all()


def draft_plan(phases: Sequence[PhaseConfig], parameters: int) -> Plan:
  """Creates a plan without the data, to check all that does not depend on it.

  Args:
    phases: The phases, in order.
    parameters: Number of parameters of the model.

  Returns:
    The plan; phases in epochs have `math.inf` steps. If there are none, it is
    the plan that `create_plan` returns.

  Raises:
    ValueError: a duration is shorter than a step, a schedule does not fit its
      phase, or the updates of an algorithm do not fit the steps of its phases.
  """
  unknown = {phase.data: lambda length: math.inf for phase in phases}
  return create_plan(phases, tokens_per_epoch=unknown, parameters=parameters)


def create_plan(
    phases: Sequence[PhaseConfig],
    *,
    tokens_per_epoch: Mapping[str, Callable[[int], float]],
    parameters: int,
) -> Plan:
  """Resolves the phases of a config into a plan.

  Args:
    phases: The phases, in order.
    tokens_per_epoch: Functions from the sequence length to the tokens of an
      epoch, by source.
    parameters: Number of parameters of the model.

  Returns:
    The plan.

  Raises:
    ValueError: the source of a phase is unknown, a duration is shorter than a
      step, or a schedule does not fit its phase.
  """
  names = [phase.name for phase in phases]
  check_names(names)
  check_first(names[0], phases[0].learning_rate)
  steps: list[Any] = []  # int, or `math.inf` before the data is read.
  resolvers: list[Callable[..., Any]] = []
  for phase in phases:
    epoch = lookup(f'data of phase {phase.name!r}:', phase.data,
                   tokens_per_epoch)
    resolver = functools.partial(
        resolve_duration,
        tokens_per_step=phase.batch_size * phase.length,
        tokens_per_epoch=epoch(phase.length),
        parameters=parameters,
    )
    try:
      steps.append(resolver(phase.duration))
    except ValueError as error:
      raise ValueError(f'phase {phase.name!r}: {error}') from error
    resolvers.append(resolver)
  schedules = phase_schedules(
      names, [phase.learning_rate for phase in phases], steps, resolvers
  )
  return Plan(
      tuple(
          Phase(
              name=phase.name,
              steps=n,
              data=phase.data,
              batch_size=phase.batch_size,
              length=phase.length,
              sparsity=phase.sparsity,
              learning_rate=schedule,
              weight_decay=phase.weight_decay,
              restart=phase.restart,
              reshuffle=phase.reshuffle,
              early_stop=phase.early_stop,
              revive=phase.revive or 0.0,
              initial_mask=phase.initial_mask or '',
              rewind=_rewind(phase, resolvers[0]),
              frozen=phase.frozen or (),
          )
          for phase, n, schedule in zip(phases, steps, schedules)
      )
  )


def _rewind(
    phase: PhaseConfig, resolver: Callable[..., float]
) -> int | None:
  if not phase.rewind:
    return None
  try:
    steps = resolver(phase.rewind, least=0)
  except ValueError as error:
    raise ValueError(f'rewind of phase {phase.name!r}: {error}') from error
  return int(steps) if math.isfinite(steps) else 0

# SPDX-License-Identifier: Apache-2.0
"""The plan: phases compiled into functions of the global step."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spdf_jax import sparsity
from spdf_jax.names import lookup
from spdf_jax.sparsity import selection
from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.sparsity.algorithms import member_specs
from spdf_jax.sparsity.algorithms.algorithm import for_kernels
from spdf_jax.sparsity.algorithms.algorithm import sparsity_changes_at
from spdf_jax.sparsity.algorithms.algorithm import with_init
from spdf_jax.sparsity.counts import number_kept
from spdf_jax.sparsity.distributions import ModelWide
from spdf_jax.sparsity.selection import to_layers
from spdf_jax.sparsity.trees import path_name
from spdf_jax.training.configs.learning_rates import phase_schedules
from spdf_jax.training.configs.phases import check_order
from spdf_jax.training.configs.phases import Phase
from spdf_jax.training.configs.phases import resolve_duration


class MaskSpan(NamedTuple):
  """Consecutive phases of equal algorithms, which share a mask."""

  algorithm: Mapping[str, Any]
  """The algorithm of the phases, as `create_algorithm` reads it."""

  names: tuple[str, ...]
  """The names of the phases."""

  start: int
  """The first step, at which the algorithm's count is 0."""

  steps: int
  """The number of steps of all phases."""

  def __str__(self) -> str:
    if len(self.names) == 1:
      return f'phase {self.names[0]!r} has {self.steps} steps'
    first, *_, last = self.names
    return f'phases {first!r} to {last!r} have {self.steps} steps'

  def check_updates(self) -> None:
    """Checks that all mask updates fit the steps of the phases.

    Raises:
      ValueError: an update is after the last step, or the rounds of iterative
        pruning do not add up to the steps of the phases.
    """
    for spec in member_specs(self.algorithm):
      self._check_updates_of(spec)

  def _check_updates_of(self, spec: Mapping[str, Any]) -> None:
    if spec['name'] == 'iterative':
      rounds = [
          r['steps'] if isinstance(r, Mapping) else sparsity.Round(*r).steps
          for r in spec['rounds']
      ]
      if sum(rounds) != self.steps and math.isfinite(self.steps):
        raise ValueError(
            f'{self} and iterative rounds of '
            f'{" + ".join(map(str, rounds))} = {sum(rounds)}; make them equal.'
        )
    every, first, until = (
        spec[name] if name in spec else None
        for name in ('update_every', 'update_from', 'update_until')
    )
    if isinstance(every, (list, tuple)) and every[-1] >= self.steps:
      self._refuse('update_every', f'lists step {every[-1]}')
    if first is not None and first >= self.steps:
      self._refuse('update_from', f'is {first}')
    if until is None or until < self.steps:
      return
    # An end equal to the number of steps is an error only if an update falls
    # on it, so that round numbers are accepted.
    if until > self.steps or create_algorithm(spec).update_at(until):
      self._refuse('update_until', f'is {until}')

  def _refuse(self, name: str, what: str) -> None:
    raise ValueError(
        f'{self}, counted from 0, and {name} {what}; give an earlier step or '
        'more steps.'
    )


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
    >>> phase = Phase('sparse', 10, 'corpus', 2, 8,
    ...               {'name': 'static', 'sparsity': 0.75},
    ...               optax.constant_schedule(0.1), 0.0, False)
    >>> plan = Plan((phase, dataclasses.replace(phase, name='dense',
    ...                                         algorithm={'name': 'dense'})))
    >>> plan.total_steps, plan.phase_at(10).name, plan.starts
    (20, 'dense', (0, 10))
  """

  phases: tuple[Phase, ...]
  planned: 'Plan | None' = None
  init: Callable[[jax.Array, Any, Any], Any] | None = None

  def __post_init__(self):
    check_order(self.phases)
    if self.planned is None:
      for span in self.spans:
        span.check_updates()
      self._check_first()
      self._check_thresholds()
      self._check_rewinds()
      self._check_restarts()

  def _check_first(self) -> None:
    first, specs = self.phases[0], member_specs(self.phases[0].algorithm)
    if first.initial_mask and specs != [first.algorithm] and any(
        'structure' in spec for spec in specs
    ):
      raise ValueError(
          f'phase {first.name!r} has the initial_mask {first.initial_mask!r}, '
          'and its algorithm has groups with a structure, which that mask '
          'would not have; remove the initial_mask, or the structure.'
      )
    for phase in self.phases[1:]:
      if phase.initial_mask:
        raise ValueError(
            f'phase {phase.name!r} has the initial_mask '
            f'{phase.initial_mask!r}, but is not the first; it prunes by '
            'magnitude when it begins. Remove initial_mask, or begin a run '
            'with this phase by init_from.'
        )

  def _check_thresholds(self) -> None:
    for phase in self.phases if self.thresholds else ():
      names = {spec['name'] for spec in member_specs(phase.algorithm)}
      if not (phase.is_dense or names <= {'hard_threshold', 'dense'}):
        raise ValueError(
            f'phase {phase.name!r} has the algorithm {", ".join(names)}, and '
            'another phase, or group, has hard_threshold, whose moments are '
            'those of all weights; use hard_threshold or dense in all phases, '
            'or train them as two runs, the second by init_from.'
        )

  def _check_rewinds(self) -> None:
    steps = {
        phase.name: phase.rewind_weights_to for phase in self.phases
        if phase.rewind_weights_to is not None
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
          f'{self.rewind_to}; rewind to an earlier step, or remove '
          'rewind_weights_to.'
      )

  def _check_restarts(self) -> None:
    for phase, start in zip(self.phases, self.starts):
      if not (phase.reset_moments and start and math.isfinite(start)):
        continue
      span = [span for span in self.spans if span.start <= start][-1]
      algorithm = create_algorithm(span.algorithm)
      if algorithm.skip_step_at(start - span.start):
        raise ValueError(
            f'phase {phase.name!r} resets the moments at step {start}, '
            'counted from 0, at which its algorithm skips the gradient step; '
            'remove skip_gradient_step or reset_moments, or update the mask at '
            'other steps.'
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
    """Standard deviation of revived weights at a step; `None`: zeros."""
    if not any(phase.revive for phase in self.phases):
      return None
    return optax.join_schedules(
        [optax.constant_schedule(phase.revive or 0.0) for phase in self.phases],
        self.starts[1:],
    )

  @property
  def rewinds(self) -> tuple[int, ...]:
    """Steps before which the kept weights are rewound."""
    return tuple(
        start for phase, start in zip(self.phases, self.starts)
        if phase.rewind_weights_to is not None
    )

  @property
  def rewind_to(self) -> int:
    """Step before which the weights to rewind to are copied; 0: none are."""
    return max(int(phase.rewind_weights_to or 0) for phase in self.phases)

  @property
  def restarts(self) -> tuple[int, ...]:
    """Steps before which the optimizer's moments are reset."""
    return tuple(
        start for phase, start in zip(self.phases, self.starts)
        if phase.reset_moments and start
    )

  @functools.cached_property
  def spans(self) -> tuple[MaskSpan, ...]:
    """Spans of consecutive phases of equal algorithms, in order."""
    joined: list[MaskSpan] = []
    for phase, start in zip(self.phases, self.starts):
      last = joined[-1] if joined else None
      if last is None or last.algorithm != phase.algorithm:
        joined.append(
            MaskSpan(phase.algorithm, (phase.name,), start, phase.steps)
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
        [create_algorithm(span.algorithm) for span in self.spans],
        [span.start for span in self.spans[1:]],
    )
    return joined if self.init is None else with_init(joined, self.init)

  @property
  def thresholds(self) -> bool:
    """Whether `hard_threshold` keeps the largest weights, not `sparsify`."""
    return any(phase.thresholds for phase in self.phases)

  @functools.cached_property
  def update_steps(self) -> np.ndarray:
    """Steps with a mask update, in ascending order."""
    return self._steps_where(self.algorithm.update_at)

  @functools.cached_property
  def sparsity_steps(self) -> np.ndarray:
    """Steps at which the planned sparsity may change, in ascending order."""
    return self._steps_where(
        functools.partial(sparsity_changes_at, self.algorithm)
    )

  @functools.cached_property
  def dense_grads_steps(self) -> np.ndarray:
    """Steps that need gradients of pruned weights, in ascending order."""
    return self._steps_where(self.algorithm.dense_grads_at)

  def _steps_where(self, answer: Callable[[Any], Any]) -> np.ndarray:
    # Vectorized, since calls for every step of a long plan take minutes, and
    # compiled as one program instead of one for each operation.
    answers = jax.vmap(lambda count: jnp.asarray(answer(count), bool))
    return np.flatnonzero(jax.jit(answers)(np.arange(self.total_steps)))

  @property
  def updates_masks(self) -> bool:
    """Whether there are mask updates within a span of equal algorithms."""
    if self.planned is not None:
      return self.planned.updates_masks
    starts = [span.start for span in self.spans]
    return not np.isin(self.update_steps, starts).all()


def create_plan(
    phases: Sequence[Phase],
    *,
    tokens_per_epoch: Mapping[str, Callable[[int], float]] | None = None,
    parameters: int,
) -> Plan:
  """Resolves the phases of a config into a plan.

  Args:
    phases: The phases, in order, e.g. those of `parse_phases`.
    tokens_per_epoch: Mapping from the name of each source, the field `data` of
      phases, to a function from the length of blocks to the tokens of an epoch.
      `None` before the data is read: phases in epochs have `math.inf` steps.
    parameters: Number of parameters of the model, for durations in
      tokens/parameter.

  Returns:
    The plan.

  Raises:
    ValueError: two phases have the same name or there is none, the source of a
      phase is unknown, a duration is not valid or shorter than a step, a
      schedule does not fit its phase, or the updates of an algorithm do not fit
      the steps of its phases.
  """
  names = [phase.name for phase in phases]
  rates: list[Any] = [phase.learning_rate for phase in phases]
  check_order(phases)
  if tokens_per_epoch is None:
    tokens_per_epoch = {phase.data: lambda length: math.inf for phase in phases}
  steps: list[Any] = []  # int, or `math.inf` before the data is read.
  resolvers: list[Callable[..., Any]] = []
  for phase in phases:
    epoch = lookup(f'data of phase {phase.name!r}:', phase.data,
                   tokens_per_epoch)
    # Sources are read in blocks of the longest of their phases' lengths.
    longest = max(p.length for p in phases if p.data == phase.data)
    resolver = functools.partial(
        resolve_duration,
        tokens_per_step=phase.batch_size * phase.length,
        tokens_per_epoch=epoch(longest),
        parameters=parameters,
    )
    try:
      steps.append(resolver(phase.duration))
    except ValueError as error:
      raise ValueError(f'phase {phase.name!r}: {error}') from error
    resolvers.append(resolver)
  schedules = phase_schedules(names, rates, steps, resolvers)
  shared: list[Any] = []  # Steps of all phases that share a phase's mask.
  for _, group in itertools.groupby(
      zip(phases, steps), key=lambda pair: pair[0].algorithm
  ):
    lengths = [n for _, n in group]
    shared += [sum(lengths)] * len(lengths)
  return Plan(tuple(
      dataclasses.replace(
          phase, steps=n, learning_rate=schedule,
          algorithm=phase.resolved_algorithm(total),
          rewind_weights_to=_rewind_step(phase, resolvers[0]),
      )
      for phase, n, total, schedule in zip(phases, steps, shared, schedules)
  ))


def _rewind_step(phase: Phase, resolver: Callable[..., float]) -> int | None:
  if phase.rewind_weights_to is None:
    return None
  try:
    steps = resolver(phase.rewind_weights_to, least=0)
  except ValueError as error:
    raise ValueError(
        f'rewind_weights_to of phase {phase.name!r}: {error}'
    ) from error
  return int(steps) if math.isfinite(steps) else 0


class PlannedSparsity(NamedTuple):
  """The planned sparsity of one sparsified layer."""

  size: int
  """Number of weights of the layer, kept and pruned."""

  sparsity: float
  """Sparsity of a whole number of kept weights."""


def planned_sparsities(
    plan: Plan, step: int, params: selection.PyTree, where: selection.Where
) -> dict[str, PlannedSparsity]:
  """Returns the planned sparsity of every layer at a step.

  Args:
    plan: The plan.
    step: The step, counted from 0; its mask update is included.
    params: Shapes of the parameters.
    where: The selection of sparsified leaves.

  Returns:
    Sparsities by the path of the layer, one per stacked layer, named as by
    `summarize`. If the whole model is one group, every layer has the sparsity
    of the model.
  """
  axes = selection.select(where, params)
  stacks = to_layers(params, params, axes)
  # The sparsity of the mask is that of the last update, since schedules also
  # change between updates.
  updates = plan.sparsity_steps
  updated = np.searchsorted(updates, step, side='right')
  count = int(updates[updated - 1]) if updated else 0
  algorithm = for_kernels(
      plan.algorithm, selection.kernel_sizes(params, axes)
  )
  sparsities = algorithm.sparsity_at(count, stacks)
  if isinstance(sparsities, ModelWide):
    sparsities = jax.tree.map(lambda _: sparsities.sparsity, stacks)
  by_layer = {}
  for (path, stack), value in zip(
      jax.tree_util.tree_leaves_with_path(stacks), jax.tree.leaves(sparsities)
  ):
    size = int(np.prod(stack.shape[1:]))
    planned = PlannedSparsity(size, 1 - number_kept(size, value) / size)
    for i in range(stack.shape[0]):
      name = path_name(path)
      by_layer[name + (f'[{i}]' if stack.shape[0] > 1 else '')] = planned
  return by_layer


def mean_sparsity(sparsities: Mapping[str, PlannedSparsity]) -> float:
  """Returns the sparsity over all layers, weighted by their sizes.

  Example:
    >>> mean_sparsity({
    ...     'a': PlannedSparsity(100, 0.5), 'b': PlannedSparsity(300, 0.75)})
    0.6875
  """
  layers = sparsities.values()
  zeros = sum(layer.size * layer.sparsity for layer in layers)
  return zeros / sum(layer.size for layer in layers)

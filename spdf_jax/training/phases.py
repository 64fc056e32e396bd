# SPDX-License-Identifier: Apache-2.0
"""Phases, as a config describes them and as a plan resolves them."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any
from typing import TypeVar

import optax

from spdf_jax.sparsity.algorithm import Algorithm
from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.sparsity.algorithms import member_specs
from spdf_jax.training.durations import check_duration
from spdf_jax.training.early_stop import EarlyStop
from spdf_jax.training.learning_rates import LearningRate

T = TypeVar('T')

@dataclasses.dataclass(frozen=True)
class PhaseConfig:
  """A phase as a config describes it, before its length is known in steps.

  Attributes:
    name: Name of the phase in logs, checkpoints and reports.
    duration: Length of the phase, as `resolve_duration` reads it.
    data: Source of the batches, `'corpus'` or `'task'`.
    batch_size: Sequences per step.
    length: Tokens per sequence.
    sparsity: Sparsity of the sparsified matrices, in [0, 1), or an algorithm as
      `create_algorithm` reads it.
    learning_rate: Learning-rate schedule.
    weight_decay: Decoupled weight decay of matrices.
    restart: Whether the optimizer's moments are reset when the phase begins.
    reshuffle: Whether the phase begins a new epoch of its source, in another
      order, as in a round of iterative pruning.
    early_stop: Condition that ends the phase early; `None`: none.
    revive: Standard deviation of the initial values of weights that the phase
      revives, as a multiple of that of the kept weights; `None`: they start at
      zero. See `sparsity.scaled_normal`.
    initial_mask: Mask of the first phase: `'snip'` or `'grasp'`, by the
      saliency of the weights for the phase's first batch, or the mask of
      `'WORKDIR'` or `'WORKDIR@PHASE'`; `None`: that of the algorithm.
    rewind: Step of the run, a duration in batches of the first phase, to whose
      values the kept weights are rewound when the phase begins; `'0 steps'`:
      the initial ones; `None`: they are not. See `sparsity.rewind_weights`.
    frozen: Patterns of the paths of parameters that the phase does not train;
      masks still apply to them. `None`: there are none.

  Raises:
    ValueError: a field is out of its range. A user-defined algorithm,
      `'package.module:function'`, is not imported or checked here.
  """

  name: str
  duration: str
  data: str
  batch_size: int
  length: int
  sparsity: float | Mapping[str, Any]
  learning_rate: LearningRate
  weight_decay: float
  restart: bool
  reshuffle: bool
  early_stop: EarlyStop | None
  revive: float | None
  initial_mask: str | None
  rewind: str | None
  frozen: tuple[str, ...] | None

  def __post_init__(self):
    _check_fields(self, ('batch_size', 'length'))
    # A user-defined algorithm is not imported here, since reading the
    # config.json of a run must not execute code named in it.
    if not self.user_algorithms:
      self.create_algorithm()
    if self.early_stop is not None and 'iterative' in self._algorithms:
      raise ValueError(
          f'phase {self.name!r} consists of rounds of iterative pruning, which '
          'have fixed lengths, and has early_stop; remove early_stop.'
      )
    if self.revive and not 0 < self.revive < math.inf:
      raise ValueError(
          f'phase {self.name!r} has revive {self.revive}; give a multiple of '
          'the standard deviation of the kept weights, 0 or more.'
      )
    if self.initial_mask and self.sparsity == 0:
      raise ValueError(
          f'phase {self.name!r} has the initial_mask {self.initial_mask!r} and '
          'sparsity 0; give a sparsity, or no initial_mask.'
      )
    try:
      check_duration(self.duration)
      if self.rewind:
        check_duration(self.rewind)
    except ValueError as error:
      raise ValueError(f'phase {self.name!r}: {error}') from error
    try:
      for duration in (self.learning_rate.warmup, self.learning_rate.to):
        if duration:
          check_duration(duration)
    except ValueError as error:
      raise ValueError(
          f'learning rate of phase {self.name!r}: {error}'
      ) from error

  @property
  def counts_epochs(self) -> bool:
    """Whether a length is in epochs, so that it depends on the data."""
    rate = self.learning_rate
    lengths = self.duration, self.rewind, rate.warmup, rate.to
    return any('epoch' in length for length in lengths if length)

  @property
  def _algorithms(self) -> list[str]:
    specs = _read_sparsity(self, member_specs)
    return [str(spec.get('algorithm')) for spec in specs]

  @property
  def user_algorithms(self) -> list[str]:
    """Names `'package.module:function'` of all user-defined algorithms."""
    return [name for name in self._algorithms if ':' in name]

  def create_algorithm(self) -> Algorithm:
    """Creates the algorithm of the phase.

    Raises:
      ValueError: the description of the algorithm is not valid.
    """
    return _read_sparsity(self, create_algorithm)


@dataclasses.dataclass(frozen=True)
class Phase:
  """A part of training with one data source and one sparsity.

  Attributes:
    name: Name of the phase in logs, checkpoints and reports.
    steps: Number of optimizer steps.
    data: Name of the source of the batches.
    batch_size: Sequences per step.
    length: Tokens per sequence.
    sparsity: Sparsity of the sparsified matrices, in [0, 1), or an algorithm by
      name: `{'algorithm': 'static', 'sparsity': 0.75}`.
    learning_rate: Optax schedule, a function of the step within the phase.
    weight_decay: Decoupled weight decay of matrices.
    restart: Whether the optimizer's moments are reset when the phase begins.
    reshuffle: Whether the phase begins a new epoch of its source, in another
      order, as in a round of iterative pruning.
    early_stop: Condition that ends the phase early; `None`: none.
    revive: Standard deviation of the initial values of revived weights, as a
      multiple of that of the kept weights; 0: they start at zero.
    initial_mask: See `PhaseConfig`; `''`: that of the algorithm.
    rewind: Step of the run to whose weights the phase rewinds; `None`: none.
    frozen: Patterns of the paths of parameters that the phase does not train.

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
  revive: float = 0.0
  initial_mask: str = ''
  rewind: int | None = None
  frozen: tuple[str, ...] = ()

  def __post_init__(self):
    _check_fields(self, ('steps', 'batch_size', 'length'))
    _read_sparsity(self, create_algorithm)
    if not callable(self.learning_rate):
      raise ValueError(
          f'phase {self.name!r} has the learning rate {self.learning_rate!r}; '
          'give a schedule, a function of the step such as '
          'optax.constant_schedule(1e-3).'
      )

  @property
  def tokens_per_step(self) -> int:
    """Tokens per step: batch size times length."""
    return self.batch_size * self.length

  @property
  def tokens(self) -> int:
    """Number of tokens that the phase trains on."""
    return self.steps * self.tokens_per_step

  @property
  def notes(self) -> list[str]:
    """Descriptions of what the phase does to weights beyond training them."""
    notes = []
    if self.initial_mask:
      notes.append(f'initial mask: {self.initial_mask}')
    if self.rewind is not None:
      notes.append(f'kept weights rewound to those of step {self.rewind}')
    if self.revive:
      notes.append(
          f'revived weights drawn with {self.revive:g} times the deviation of '
          'kept ones'
      )
    if self.frozen:
      notes.append(f'frozen: {", ".join(self.frozen)}')
    return notes


def check_names(names: Sequence[str]) -> None:
  """Raises ValueError if no phase, or one without a name of its own, is given.
  """
  if not all(names) or not names or len(set(names)) != len(names):
    raise ValueError(
        f'the phases are named {list(names)}; give at least one, each with its '
        'own name.'
    )


def _check_fields(phase: PhaseConfig | Phase, counts: Sequence[str]) -> None:
  for field in counts:
    if getattr(phase, field) < 1:
      raise ValueError(
          f'phase {phase.name!r} has {field} {getattr(phase, field)}; it must '
          'be at least 1; raise it or remove the phase.'
      )
  if not phase.weight_decay >= 0:
    raise ValueError(
        f'phase {phase.name!r} has weight_decay {phase.weight_decay}; it must '
        'not be negative.'
    )


def _read_sparsity(phase: PhaseConfig | Phase, read: Callable[[Any], T]) -> T:
  try:
    return read(phase.sparsity)
  except ValueError as error:
    raise ValueError(f'phase {phase.name!r}: {error}') from error
  except TypeError as error:
    raise ValueError(
        f'phase {phase.name!r} has the sparsity {phase.sparsity!r}, a value of '
        f'which has another type than its algorithm takes ({error}); correct '
        'it.'
    ) from error

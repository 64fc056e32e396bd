# SPDX-License-Identifier: Apache-2.0
"""Phases of training, and their durations in steps, tokens or epochs."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any, TypeVar

from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.sparsity.algorithms import member_specs
from spdf_jax.sparsity.algorithms import resolve
from spdf_jax.sparsity.algorithms import user_functions
from spdf_jax.training.configs.early_stop import EarlyStop
from spdf_jax.training.configs.learning_rates import LearningRate
from spdf_jax.training.configs.learning_rates import SCHEDULES

_DURATION = re.compile(
    r'\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMBT]?)\s*'
    r'(steps?|tokens?|epochs?|tokens/parameter|%)\s*'
)
_SUFFIXES = {'': 1, 'k': 1e3, 'K': 1e3, 'M': 1e6, 'B': 1e9, 'T': 1e12}
_MOST_STEPS = 2**31 - 1  # Steps are counted in int32.


def check_duration(duration: str) -> None:
  """Raises ValueError unless a string is a duration."""
  _match_duration(duration)


def _match_duration(duration: str) -> re.Match[str]:
  match = _DURATION.fullmatch(str(duration))
  if match is None:
    raise ValueError(
        f'duration is {duration!r}; write a number and one of steps, tokens, '
        "epochs, tokens/parameter, e.g. '1500 steps' or '2.5B tokens', or, for "
        "a warm-up, a share of the phase, e.g. '5%'."
    )
  return match


def resolve_duration(
    duration: str,
    *,
    tokens_per_step: int,
    tokens_per_epoch: float,
    parameters: int,
    phase_steps: float | None = None,
    least: int = 1,
) -> float:
  """Converts a duration to optimizer steps.

  Args:
    duration: `'1500 steps'`, `'2.5B tokens'`, `'5 epochs'`,
      `'20 tokens/parameter'`, or `'5%'` of a phase.
    tokens_per_step: Batch size times length.
    tokens_per_epoch: Tokens of the phase's data in one epoch; `math.inf`
      before the data is read.
    parameters: Number of parameters of the model.
    phase_steps: Steps of the phase, if the duration is within one.
    least: Smallest number of steps.

  Returns:
    The nearest number of steps. Epochs are rounded down, so that they never
    need data of a further epoch; they are `math.inf` before the data is read.

  Raises:
    ValueError: the string is not a duration, is a share without a phase, or
      is shorter than `least` or longer than steps are counted.

  Example:
    >>> resolve_duration('1M tokens', tokens_per_step=1000,
    ...                  tokens_per_epoch=5_000, parameters=7)
    1000
  """
  amount, suffix, unit = _match_duration(duration).groups()
  number = float(amount) * _SUFFIXES[suffix]
  if unit.startswith('epoch') and math.isinf(tokens_per_epoch) and number:
    return math.inf
  if unit == '%':
    if phase_steps is None:
      raise ValueError(
          f'duration {duration!r} is a share of a phase, and is used outside '
          'of one; give steps, tokens or epochs.'
      )
    steps = number * phase_steps / 100
    return steps if math.isinf(steps) else max(round(steps), 1)
  if unit.startswith('step'):
    steps = number
  elif unit.startswith('epoch'):
    steps = number and number * tokens_per_epoch // tokens_per_step
  else:
    tokens = number * parameters if unit == 'tokens/parameter' else number
    steps = tokens / tokens_per_step
  if not steps <= _MOST_STEPS:
    raise ValueError(
        f'duration {duration!r:.40} is more than {_MOST_STEPS:,} steps of '
        f'{tokens_per_step} tokens; make it shorter.'
    )
  steps = round(steps)
  if steps < least:
    raise ValueError(
        f'duration {duration!r} is less than one step of {tokens_per_step} '
        "tokens; make it longer, or remove the phase; for no warm-up or no "
        "rewinding, set it to ''."
    )
  return steps


T = TypeVar('T')
Rate = LearningRate | Callable[[Any], Any]
"""A learning rate as a config has it, or a function of the step in a phase."""


@dataclasses.dataclass(frozen=True)
class Phase:
  """A part of training with one data source and one algorithm.

  Its fields are those of a config. A plan resolves its lengths in steps: then
  `steps` is known, `learning_rate` a schedule, and `rewind_weights_to` and the
  times of `algorithm` are steps.

  Attributes:
    name: Name of the phase in logs, checkpoints and reports.
    steps: Number of optimizer steps; `None`: not resolved yet.
    data: Name of the source of the batches, `'corpus'` or `'task'`.
    batch_size: Sequences per step.
    length: Tokens per sequence.
    algorithm: Name and arguments of the algorithm that makes and updates the
      mask, as `sparsity.algorithms.resolve` reads them.
    learning_rate: Learning rate, or an optax schedule of the step within the
      phase.
    weight_decay: Decoupled weight decay of matrices.
    reset_moments: Whether the optimizer's moments are reset when the phase
      begins.
    new_epoch: Whether the phase begins a new epoch of its source, in another
      order, as in a round of iterative pruning.
    early_stop: Condition that ends the phase early; `None`: none.
    revive: Standard deviation of the initial values of weights that the phase
      revives, as a multiple of that of the kept weights; `None`: they start at
      zero. See `sparsity.scaled_normal`.
    initial_mask: Mask of the first phase: `'snip'` or `'grasp'`, by the
      saliency of the weights for the phase's first batch, or the mask of
      `'WORKDIR'` or `'WORKDIR@PHASE'`; `None`: that of the algorithm.
    rewind_weights_to: Step of the run, or a duration in batches of the first
      phase, to whose values the kept weights are rewound when the phase
      begins; `0` or `'0 steps'`: the initial ones; `None`: they are not. See
      `sparsity.rewind_weights`.
    frozen: Patterns of the paths of parameters that the phase does not train;
      masks still apply to them. `None`: there are none.
    duration: Length of the phase, as `resolve_duration` reads it, unless
      `steps` is given.

  Raises:
    ValueError: a field is out of its range. A user-defined algorithm,
      `'package.module:function'`, is imported and checked once `steps` is
      known.
  """

  name: str
  steps: Any
  data: str
  batch_size: int
  length: int
  algorithm: Mapping[str, Any]
  learning_rate: Rate
  weight_decay: float
  reset_moments: bool
  new_epoch: bool = False
  early_stop: EarlyStop | None = None
  revive: float | None = None
  initial_mask: str | None = None
  rewind_weights_to: str | int | None = None
  frozen: tuple[str, ...] | None = None
  duration: str = ''

  def __post_init__(self):
    for field in ('steps', 'batch_size', 'length'):
      count = getattr(self, field)
      if count is not None and count < 1:
        raise ValueError(
            f'phase {self.name!r} has {field} {count}; it must be at least 1; '
            'raise it or remove the phase.'
        )
    if not self.weight_decay >= 0:
      raise ValueError(
          f'phase {self.name!r} has weight_decay {self.weight_decay}; it must '
          'not be negative.'
      )
    # Functions of the user are imported when there is a plan: the config of a
    # run is read without them, see `names.received`.
    if self.steps is not None or not self.user_functions:
      resolved = self.resolved_algorithm(self.steps)
      self._read_algorithm(lambda _: create_algorithm(resolved))
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
    if self.initial_mask and self.is_dense:
      raise ValueError(
          f'phase {self.name!r} has the initial_mask {self.initial_mask!r} and '
          'is dense; give its algorithm a sparsity, or no initial_mask.'
      )
    if self.thresholds:
      for field in ('revive', 'frozen', 'initial_mask'):
        if getattr(self, field):
          raise ValueError(
              f'phase {self.name!r} has hard_threshold, which chooses the mask '
              f'anew at every step, and {field} is {getattr(self, field)!r}; '
              'leave one of them out.'
          )
    if self.steps is None:
      self._check_durations()
    elif not callable(self.learning_rate):
      raise ValueError(
          f'phase {self.name!r} has the learning rate {self.learning_rate!r}; '
          'give a schedule, a function of the step such as '
          'optax.constant_schedule(1e-3).'
      )

  def _check_durations(self) -> None:
    try:
      for duration in (self.duration, self.rewind_weights_to):
        if duration is not None:
          check_duration(str(duration))
    except ValueError as error:
      raise ValueError(f'phase {self.name!r}: {error}') from error
    try:
      for duration in self._rate_durations:
        check_duration(duration)
    except ValueError as error:
      raise ValueError(
          f'learning rate of phase {self.name!r}: {error}'
      ) from error

  @property
  def continues(self) -> bool:
    """Whether the phase continues the learning rate of the one before it."""
    rate = self.learning_rate
    return isinstance(rate, LearningRate) and rate.schedule == 'continue'

  @property
  def _rate_durations(self) -> list[str]:
    rate = self.learning_rate
    if not isinstance(rate, LearningRate):
      return []
    return [duration for duration in (rate.warmup, rate.to) if duration]

  @property
  def counts_epochs(self) -> bool:
    """Whether a length is in epochs, so that it depends on the data."""
    durations = (
        self.duration, str(self.rewind_weights_to), *self._rate_durations
    )
    return any('epoch' in duration for duration in durations)

  @property
  def _algorithms(self) -> list[str]:
    specs = self._read_algorithm(member_specs)
    return [str(spec.get('name')) for spec in specs]

  @property
  def thresholds(self) -> bool:
    """Whether the phase keeps the largest weights, by `hard_threshold`."""
    return 'hard_threshold' in self._algorithms

  @property
  def user_functions(self) -> list[str]:
    """Names of the functions that the algorithm would import."""
    return user_functions(self.algorithm)

  def resolved_algorithm(self, steps: float | None) -> dict[str, Any]:
    """Returns the arguments of the algorithm, with times in steps.

    Args:
      steps: Number of steps of the phase, and of its neighbours of the same
        algorithm; `None` or `math.inf` if it is not known yet.

    Raises:
      ValueError: the description of the algorithm is not valid.
    """
    length = None if steps is None or math.isinf(steps) else int(steps)
    return self._read_algorithm(lambda spec: resolve(spec, length))

  def _read_algorithm(self, read: Callable[[Any], T]) -> T:
    try:
      return read(self.algorithm)
    except ValueError as error:
      raise ValueError(f'phase {self.name!r}: {error}') from error
    except TypeError as error:
      raise ValueError(
          f'phase {self.name!r} has the algorithm {self.algorithm!r}, where an '
          f'argument has a wrong type ({error}); correct the argument.'
      ) from error

  @property
  def is_dense(self) -> bool:
    """Whether no weight is pruned, as by `'dense'` or `'static'` with 0."""
    name, sparsity = self.algorithm['name'], self.algorithm.get('sparsity')
    return name == 'dense' or (name == 'static' and sparsity == 0)

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
    """Descriptions of what the phase does to weights besides training."""
    notes = []
    if self.initial_mask:
      notes.append(f'initial mask: {self.initial_mask}')
    if self.rewind_weights_to is not None:
      notes.append(
          f'kept weights rewound to those of step {self.rewind_weights_to}'
      )
    if self.revive:
      notes.append(
          f'revived weights drawn with {self.revive:g} times the deviation of '
          'kept ones'
      )
    if self.frozen:
      notes.append(f'frozen: {", ".join(self.frozen)}')
    return notes


def check_order(phases: Sequence[Phase]) -> None:
  """Raises ValueError unless phases can follow one another in a plan.

  There must be one at least, each with its own name, and the first may not
  reuse the learning-rate schedule of another.
  """
  names = [phase.name for phase in phases]
  if not all(names) or not names or len(set(names)) != len(names):
    raise ValueError(
        f'the phases are named {names}; give at least one, each with its own '
        'name.'
    )
  rate = phases[0].learning_rate
  if isinstance(rate, LearningRate) and rate.schedule not in SCHEDULES:
    raise ValueError(
        f'phase {names[0]!r} is the first and has the schedule '
        f'{rate.schedule!r}, which reuses that of an earlier phase; give one '
        f'of {", ".join(SCHEDULES)}.'
    )

"""Phases, as a config describes them and as a plan resolves them."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import re
from typing import Any

import optax

from spdf_jax.names import lookup
from spdf_jax.sparsity.algorithm import Algorithm
from spdf_jax.sparsity.algorithms import create_algorithm
from spdf_jax.training.learning_rates import LearningRate

METRICS = {
    'validation/loss': False,
    'validation/perplexity': False,
    'validation/bits_per_byte': False,
    'target/loss': False,
    'target/perplexity': False,
    'task/bleu': True,
    'task/chrf': True,
}
"""Metrics that can end a phase, and whether a larger value is better. Metrics
of `task/` need generations, which the phase then makes at every evaluation.
"""

_DURATION = re.compile(
    r'\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMBT]?)\s*'
    r'(steps?|tokens?|epochs?|tokens/parameter)\s*'
)
_SUFFIXES = {'': 1, 'k': 1e3, 'K': 1e3, 'M': 1e6, 'B': 1e9, 'T': 1e12}
_MOST_STEPS = 2**31 - 1  # Steps are counted in int32.


@dataclasses.dataclass(frozen=True)
class EarlyStop:
  """A condition on a metric of the evaluations that ends a phase early.

  However the phase ends, it ends with the weights of its best evaluation. With
  neither value nor patience the phase has its full length.

  Attributes:
    metric: One of `METRICS`.
    value: Value of the metric that ends the phase when reached; `None`: none.
    patience: Number of successive evaluations without a new best value that
      ends the phase; `None`: unlimited.

  Raises:
    ValueError: the metric is unknown, or patience is below 1.

  Example:
    >>> stop = EarlyStop('validation/loss', patience=2)
    >>> stop.is_met([3.0, 2.5, 2.6]), stop.is_met([3.0, 2.5, 2.6, 2.5])
    (False, True)
  """

  metric: str
  value: float | None = None
  patience: int | None = None

  def __post_init__(self):
    lookup('metric of early_stop', self.metric, METRICS)
    if self.patience is not None and self.patience < 1:
      raise ValueError(
          f'patience of early_stop is {self.patience}; it is a number of '
          'evaluations, at least 1.'
      )

  @property
  def generates(self) -> bool:
    """Whether the metric needs generations."""
    return self.metric.startswith('task/')

  def is_met(self, values: Sequence[float | None]) -> bool:
    """Returns whether the phase ends, from its values so far only.

    Args:
      values: Values of the metric at the evaluations of the phase, in order;
        values that are not finite, or `None`, are the worst.

    Returns:
      Whether the last value reaches `value`, or `patience` is exhausted.
    """
    if not values:
      return False
    sign = -1 if METRICS[self.metric] else 1
    losses = [self._loss(value) for value in values]
    if self.value is not None and losses[-1] <= sign * self.value:
      return True
    if self.patience is None:
      return False
    best = losses.index(min(losses))
    return len(losses) - 1 - best >= self.patience

  def improves(self, value: float, best: float | None) -> bool:
    """Returns whether a value is better than the best so far, if any.

    Example:
      >>> stop = EarlyStop('task/bleu', patience=2)
      >>> stop.improves(9.0, 8.0), stop.improves(9.0, 9.0)
      (True, False)
    """
    return self._loss(value) < self._loss(best)

  def _loss(self, value: float | None) -> float:
    if value is None or not math.isfinite(value):  # Logged as null.
      return math.inf
    return -value if METRICS[self.metric] else value


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

  def __post_init__(self):
    _check_fields(self, ('batch_size', 'length'))
    # A user-defined algorithm is not imported here, since reading the
    # config.json of a run must not execute code named in it.
    if not self.user_algorithm:
      self.create_algorithm()
    if self.early_stop is not None and self._algorithm == 'iterative':
      raise ValueError(
          f'phase {self.name!r} consists of rounds of iterative pruning, which '
          'have fixed lengths, and has early_stop; remove early_stop.'
      )
    try:
      check_duration(self.duration)
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
  def _algorithm(self) -> str:
    if not isinstance(self.sparsity, Mapping):
      return ''
    return str(self.sparsity.get('algorithm', ''))

  @property
  def user_algorithm(self) -> str:
    """Name `'package.module:function'` of a user-defined algorithm, or `''`."""
    return self._algorithm if ':' in self._algorithm else ''

  def create_algorithm(self) -> Algorithm:
    """Creates the algorithm of the phase.

    Raises:
      ValueError: the description of the algorithm is not valid.
    """
    return _create_algorithm(self)


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
    _check_fields(self, ('steps', 'batch_size', 'length'))
    _create_algorithm(self)
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


def check_names(names: Sequence[str]) -> None:
  """Raises ValueError if no phase, or one without a name of its own, is given.
  """
  if not all(names) or not names or len(set(names)) != len(names):
    raise ValueError(
        f'the phases are named {list(names)}; give at least one, each with its '
        'own name.'
    )


def check_duration(duration: str) -> None:
  """Raises ValueError unless a string is a duration."""
  _match_duration(duration)


def _match_duration(duration: str) -> re.Match[str]:
  match = _DURATION.fullmatch(str(duration))
  if match is None:
    raise ValueError(
        f'duration is {duration!r}; write a number and one of steps, tokens, '
        "epochs, tokens/parameter, e.g. '1500 steps' or '2.5B tokens'."
    )
  return match


def resolve_duration(
    duration: str,
    *,
    tokens_per_step: int,
    tokens_per_epoch: float,
    parameters: int,
) -> float:
  """Converts a duration to optimizer steps.

  Args:
    duration: `'1500 steps'`, `'2.5B tokens'`, `'5 epochs'` or
      `'20 tokens/parameter'`.
    tokens_per_step: Batch size times length.
    tokens_per_epoch: Tokens of the phase's data in one epoch; `math.inf`
      before the data is read.
    parameters: Number of parameters of the model.

  Returns:
    The nearest number of steps. Epochs are rounded down, so that they never
    need data of a further epoch; they are `math.inf` before the data is read.

  Raises:
    ValueError: the string is not a duration, or is shorter than one step or
      longer than steps are counted.

  Example:
    >>> resolve_duration('1M tokens', tokens_per_step=1000,
    ...                  tokens_per_epoch=5_000, parameters=7)
    1000
  """
  amount, suffix, unit = _match_duration(duration).groups()
  number = float(amount) * _SUFFIXES[suffix]
  if unit.startswith('epoch') and math.isinf(tokens_per_epoch) and number:
    return math.inf
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
  if steps < 1:
    raise ValueError(
        f'duration {duration!r} is less than one step of {tokens_per_step} '
        'tokens; make it longer or remove the phase.'
    )
  return steps


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


def _create_algorithm(phase: PhaseConfig | Phase) -> Algorithm:
  try:
    return create_algorithm(phase.sparsity)
  except ValueError as error:
    raise ValueError(f'phase {phase.name!r}: {error}') from error
  except TypeError as error:
    raise ValueError(
        f'phase {phase.name!r} has the sparsity {phase.sparsity!r}, a value of '
        f'which has another type than its algorithm takes ({error}); correct '
        'it.'
    ) from error

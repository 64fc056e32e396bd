# SPDX-License-Identifier: Apache-2.0
"""Early stopping on a metric of the evaluations, and the best of a phase."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

from spdf_jax.names import lookup

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
          f'patience of early_stop is {self.patience}; give a number of '
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


class Best(NamedTuple):
  """The best evaluation of a phase so far."""

  metric: str
  """The metric of the phase's early stop."""

  value: float
  """The best value of the metric."""

  step: int
  """The step of the evaluation, the earliest of equal ones."""

  def __str__(self) -> str:
    return f'step {self.step}, {self.metric} {self.value:.4g}'

  @property
  def row(self) -> dict[str, float]:
    """The values to log.

    Example:
      >>> Best('target/loss', 2.5, 40).row
      {'best/step': 40, 'best/target/loss': 2.5}
    """
    return {'best/step': self.step, f'best/{self.metric}': self.value}


def read_bests(meta: Mapping[str, Any]) -> dict[str, Best]:
  """Returns the best of each phase from the metadata of a checkpoint.

  Args:
    meta: The metadata; that of parameters alone has no best.

  Returns:
    The best by name of the phase.

  Example:
    >>> read_bests({'best': {'tune': ['target/loss', 2.5, 40]}})['tune'].step
    40
  """
  stored = meta['best'] if 'best' in meta else {}
  return {name: Best(*fields) for name, fields in stored.items()}


def describe_best(meta: Mapping[str, Any], step: int) -> str:
  """Describes which best weights a checkpoint holds.

  Args:
    meta: The metadata of the checkpoint.
    step: The step of the checkpoint.

  Returns:
    A phrase; `''` if the checkpoint is neither a best one nor at the end of a
    phase that has one.

  Example:
    >>> meta = {'best': {'tune': ['target/loss', 2.5, 40]},
    ...         'phase_ends': {'tune': 60}}
    >>> describe_best(meta, 60)
    "the best of phase 'tune' (step 40, target/loss 2.5)"
    >>> describe_best(meta, 50)
    ''
  """
  for name, best in read_bests(meta).items():
    if step in (best.step, meta['phase_ends'][name]):
      return f'the best of phase {name!r} ({best})'
  return ''

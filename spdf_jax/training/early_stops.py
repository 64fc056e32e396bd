"""Early stops: what ends a phase before its steps are done."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

from spdf_jax.names import lookup

# By what evaluators measure, and whether more of it is better.
METRICS = {
    'validation/loss': False,
    'validation/perplexity': False,
    'validation/bits_per_byte': False,
    'target/loss': False,
    'target/perplexity': False,
    'task/bleu': True,
    'task/chrf': True,
}
"""What a phase can be stopped by; those of `task/` need generations, which are
then made at every evaluation of the phase."""


@dataclasses.dataclass(frozen=True)
class EarlyStop:
  """When a phase ends early, by a metric of its evaluations.

  Attributes:
    metric: One of `METRICS`.
    value: The phase ends when the metric is there, or better; `None`: never.
    patience: The phase ends after so many evaluations without a better value
      than before; `None`: never.

  Raises:
    ValueError: the metric is unknown, patience is below 1, or neither value nor
      patience is given.

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
    if self.value is None and self.patience is None:
      raise ValueError(
          f'early_stop by {self.metric!r} has neither value nor patience; give '
          'one, or both.'
      )
    if self.patience is not None and self.patience < 1:
      raise ValueError(
          f'patience of early_stop is {self.patience}; it is a number of '
          'evaluations, at least 1.'
      )

  @property
  def generates(self) -> bool:
    """Whether the metric is one of generations."""
    return self.metric.startswith('task/')

  def is_met(self, values: Sequence[float]) -> bool:
    """Whether the phase ends, a function of its values so far alone.

    Args:
      values: The metric at every evaluation of the phase, in order.
    """
    if not values:
      return False
    sign = -1 if METRICS[self.metric] else 1
    losses = [sign * value for value in values]
    if self.value is not None and losses[-1] <= sign * self.value:
      return True
    if self.patience is None:
      return False
    best = losses.index(min(losses))
    return len(losses) - 1 - best >= self.patience


def values_in(
    rows: Iterable[Mapping[str, Any]], stop: EarlyStop, phase: str
) -> list[float]:
  """Returns the values that a phase's evaluations have logged of a metric.

  Args:
    rows: Of `metrics.jsonl`.
    stop: Whose metric.
    phase: Its name.

  Returns:
    The values, in order.
  """
  return [
      row[stop.metric] for row in rows
      if row.get('phase') == phase and stop.metric in row
  ]

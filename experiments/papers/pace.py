"""Pace of arms: seconds of their training steps, timed alternately."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import statistics
from typing import Any
from typing import NamedTuple

from experiments.benchmarks import measuring
from experiments.papers.arms import Arm
from experiments.papers.pool import Job
from experiments.papers.pool_data import Prepared
from experiments.papers.pool_runs import Runner
from experiments.papers.scales import DENSE
from experiments.papers.scales import Scale
from experiments.papers.scales import STATIC_75
from experiments.papers.scales import STATIC_90
from experiments.papers.scales import VARIABLE

_ROUNDS = 21
_MICRO_BATCHES = 1, 2, 4


class Pace(NamedTuple):
  """Seconds of the training steps at a width.

  Attributes:
    micro_batches: Number of micro-batches with which a dense step is fastest.
    seconds: Median seconds of a step, by sparsity in percent: 0, 75 and 90.
  """

  micro_batches: int
  seconds: Mapping[str, float]

  def budget(self, scale: Scale) -> float:
    """Returns the seconds that the dense arm needs at the scale's length."""
    return scale.steps(DENSE) * self.seconds['0']

  def speeds(self) -> dict[str, float]:
    """Returns the steps taken in the time of a dense step, by kind of arm."""
    dense = self.seconds['0']
    variable = 5 / 6 * self.seconds['90'] + 1 / 6 * dense
    return {
        STATIC_75.kind: dense / self.seconds['75'],
        VARIABLE.kind: dense / variable,
    }


def measure_pace(scale: Scale, prepared: Prepared) -> Pace:
  """Times the steps of a scale's main size.

  Args:
    scale: The scale.
    prepared: The prepared corpus.

  Returns:
    The pace.
  """
  in_parts = lambda n: dataclasses.replace(scale, micro_batches=n)
  dense = step_seconds([(in_parts(n), DENSE) for n in _MICRO_BATCHES], prepared)
  parts = _MICRO_BATCHES[dense.index(min(dense))]
  seconds = step_seconds([
      (in_parts(parts), arm) for arm in (DENSE, STATIC_75, STATIC_90)
  ], prepared)
  return Pace(parts, dict(zip(('0', '75', '90'), seconds)))


def step_seconds(
    cases: Sequence[tuple[Scale, Arm]], prepared: Prepared
) -> list[float]:
  """Times the training steps of arms, interleaved.

  Args:
    cases: Pairs of a scale and an arm with a single phase: dense, or with a
      static mask.
    prepared: The prepared corpus.

  Returns:
    Median seconds of a step for each case, without compilation.
  """
  steppers = [_Stepper(scale, arm, prepared) for scale, arm in cases]
  timings = measuring.interleave(steppers, _ROUNDS, warmups=2)
  return [statistics.median(row) for row in timings.wall.tolist()]


class _Stepper:
  """Takes one training step of an arm after another."""

  def __init__(self, scale: Scale, arm: Arm, prepared: Prepared):
    point = {'rate': scale.sizes[arm.size].rates[0]}
    runner = Runner(scale, '', prepared.corpus, '')
    self._recipe = runner.create_recipe(Job(arm, point, 0))
    self._state = self._recipe.state_from(self._recipe.init_params())
    self._count = 0

  def __call__(self) -> Any:
    batch = self._recipe.device_batch_at(self._count)
    self._count += 1
    self._state, metrics = self._recipe.step(self._state, batch)
    return metrics, self._state.step

"""Pace of arms: seconds of their training steps, timed alternately."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import statistics
from typing import Any
from typing import NamedTuple

from experiments.benchmarks import measuring
from experiments.benchmarks.machine import describe_machine
from experiments.papers.arms import Arm
from experiments.papers.pool import Job
from experiments.papers.pool_data import Prepared
from experiments.papers.pool_runs import Runner
from experiments.papers.scales import DENSE
from experiments.papers.scales import Scale
from experiments.papers.scales import STATIC_75
from experiments.papers.scales import STATIC_90
from experiments.papers.scales import VARIABLE

_ROUNDS = 61
_MICRO_BATCHES = 1, 2, 4


class Pace(NamedTuple):
  """Seconds of the training steps at a width.

  Attributes:
    micro_batches: Number of micro-batches with which a dense step is fastest.
    seconds: Median seconds of a step, by sparsity in percent: 0, 75 and 90.
    machine: Processor and number of its cores.
  """

  micro_batches: int
  seconds: Mapping[str, float]
  machine: str

  def budget(self, scale: Scale) -> float:
    """Returns the seconds that the dense arm needs at the scale's length."""
    return scale.steps(DENSE) * self.seconds['0']

  def speeds(self) -> dict[str, float]:
    """Returns the steps taken in the time of a dense step, by kind of arm."""
    return {
        arm.kind: self.seconds['0'] / self.seconds_until(arm, 1, 1)
        for arm in (STATIC_75, VARIABLE)
    }

  def seconds_until(self, arm: Arm, step: float, steps: float) -> float:
    """Returns the seconds that an arm takes until a step of its training.

    Args:
      arm: Dense, static or Variable SPDF.
      step: The step.
      steps: Number of steps of the whole training; the last sixth of Variable
        SPDF is dense.

    Example:
      >>> pace = Pace(1, {'0': 0.5, '75': 0.25, '90': 0.2}, 'a machine')
      >>> pace.seconds_until(VARIABLE, 60, steps=60)
      15.0
    """
    dense = max(step - 5 / 6 * steps, 0) if arm.method == 'variable' else 0
    sparse = self.seconds[f'{100 * arm.sparsity:g}']
    return (step - dense) * sparse + dense * self.seconds['0']


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
  machine = describe_machine()
  return Pace(
      parts, dict(zip(('0', '75', '90'), seconds)),
      f'{machine["processor"]}, {machine["cores"]} cores',
  )


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

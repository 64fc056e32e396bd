"""Seconds of the training steps of arms, timed in turn on all cores."""

from collections.abc import Sequence
import statistics
from typing import Any

from experiments.benchmarks import measuring
from experiments.papers.arms import Arm
from experiments.papers.pool import Job
from experiments.papers.pool_data import Prepared
from experiments.papers.pool_runs import Runner
from experiments.papers.scales import Scale

_ROUNDS = 21


def step_seconds(
    cases: Sequence[tuple[Scale, Arm]], prepared: Prepared
) -> list[float]:
  """Times the training steps of arms, interleaved.

  Args:
    cases: A scale and an arm of it each, of one phase: dense, or of a static
      mask.
    prepared: The prepared corpus.

  Returns:
    Median seconds of a step of each case, compilation not counted.
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

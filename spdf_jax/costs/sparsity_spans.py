"""Segments: stretches of steps at one level, and what their steps cost."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spdf_jax.training.phases import Phase
from spdf_jax.training.plan import Plan


class Segment(NamedTuple):
  """Steps of one phase at one level.

  Attributes:
    start: Steps completed before it.
    steps: Steps it takes.
    sparsity: Fraction of zeros in the sparsified weights.
    flops_per_step: Training FLOPs of a step, the mean over all of them.
  """

  start: int
  steps: int
  sparsity: float
  flops_per_step: float


def find_segments(
    plan: Plan,
    sparsity_at: Callable[[int], float],
    cost: Callable[[Phase, float, bool], float],
) -> list[list[Segment]]:
  """Cuts every phase where the level changes, and adds up what its steps cost.

  A mask that changes at a step is used from the next one on, so the first step
  of a segment still costs what the level before costs.

  Args:
    plan: The plan.
    sparsity_at: The level that is asked for from a step on.
    cost: `(phase, sparsity, dense_grads) -> FLOPs` of a step.

  Returns:
    For each phase its segments.
  """
  changes = np.union1d(plan.update_steps, plan.starts).tolist()
  levels = dict(zip(changes, map(sparsity_at, changes)))
  dense = plan.dense_grads_steps
  before = levels[0]
  found = []
  for phase, start in zip(plan.phases, plan.starts):
    end = start + phase.steps
    inside = [step for step in changes if start <= step < end]
    cuts = inside[:1] + [
        step for last, step in zip(inside, inside[1:])
        if levels[step] != levels[last]
    ]
    segments = []
    for first, stop in zip(cuts, [*cuts[1:], end]):
      level, steps = levels[first], stop - first
      number = int(np.searchsorted(dense, stop) - np.searchsorted(dense, first))
      first_dense = bool(np.isin(first, dense))
      later = number - first_dense
      flops = (
          cost(phase, before, first_dense)
          + later * cost(phase, level, True)
          + (steps - 1 - later) * cost(phase, level, False)
      )
      segments.append(Segment(first, steps, level, flops / steps))
      before = level
    found.append(segments)
  return found


def as_ranges(steps: Sequence[int]) -> list[list[int]]:
  """Writes rising steps as ranges, each its first step, last step and stride.

  Example:
    >>> as_ranges([50, 100, 150, 400, 500])
    [[50, 150, 50], [400, 500, 100]]
  """
  ranges: list[list[int]] = []
  for step in map(int, steps):
    last = ranges[-1] if ranges else None
    if last and last[0] == last[1]:
      last[1:] = [step, step - last[0]]
    elif last and step == last[1] + last[2]:
      last[1] = step
    else:
      ranges.append([step, step, 1])
  return ranges

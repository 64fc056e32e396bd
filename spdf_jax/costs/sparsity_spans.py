# SPDX-License-Identifier: Apache-2.0
"""Spans of steps of constant sparsity, and the cost of their steps."""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any
from typing import NamedTuple

import numpy as np

from spdf_jax.training.phases import Phase
from spdf_jax.training.plan import Plan


class Span(NamedTuple):
  """Steps of one phase at one sparsity.

  Attributes:
    start: Number of steps before the span.
    steps: Number of steps in the span.
    sparsity: Fraction of zeros in the sparsified weights.
    flops_per_step: Mean training FLOPs of a step.
  """

  start: int
  steps: int
  sparsity: float
  flops_per_step: float


def find_spans(
    plan: Plan,
    sparsity_at: Callable[[int], Any],
    cost: Callable[[Phase, Any, bool], float],
) -> list[list[Span]]:
  """Splits phases where the sparsity changes, and computes the cost of spans.

  A mask update at a step takes effect at the next one, so that the first step
  of a span has the cost of the previous sparsity.

  Args:
    plan: Plan of the run.
    sparsity_at: Function from a step to the planned sparsity from there on.
    cost: Function `(phase, sparsity, dense_grads) -> FLOPs` of a step.

  Returns:
    The spans of each phase.
  """
  changes = np.union1d(plan.update_steps, plan.starts).tolist()
  sparsities = dict(zip(changes, map(sparsity_at, changes)))
  dense = plan.dense_grads_steps
  before = sparsities[0]
  found = []
  for phase, start in zip(plan.phases, plan.starts):
    end = start + phase.steps
    inside = [step for step in changes if start <= step < end]
    cuts = inside[:1] + [
        step for last, step in zip(inside, inside[1:])
        if sparsities[step] != sparsities[last]
    ]
    spans = []
    for first, stop in zip(cuts, [*cuts[1:], end]):
      sparsity, steps = sparsities[first], stop - first
      number = int(np.searchsorted(dense, stop) - np.searchsorted(dense, first))
      first_dense = bool(np.isin(first, dense))
      later = number - first_dense
      flops = (
          cost(phase, before, first_dense)
          + later * cost(phase, sparsity, True)
          + (steps - 1 - later) * cost(phase, sparsity, False)
      )
      spans.append(Span(first, steps, sparsity, flops / steps))
      before = sparsity
    found.append(spans)
  return found


def as_ranges(steps: Iterable[int]) -> list[list[int]]:
  """Converts increasing steps to ranges `[first, last, stride]`.

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

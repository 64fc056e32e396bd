# SPDX-License-Identifier: Apache-2.0
"""Curves of loss over FLOPs, and comparison of runs at equal FLOPs."""

from typing import NamedTuple

import numpy as np

from spdf_jax.runs import read
from spdf_jax.runs.read import RunRecord


def _done(start: int, steps: int, step: int) -> int:
  """Returns the number of steps of a span among the first `step` steps."""
  return min(max(step - start, 0), steps)


def flops_at(run: RunRecord, step: int) -> float:
  """Returns the training FLOPs of a run's first steps.

  Args:
    run: A run.
    step: Number of completed steps.

  Returns:
    FLOPs of the first `step` steps.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phases = (
    ...     PhaseRecord('sparse', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0),
    ...     PhaseRecord('dense', 4, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0))
    >>> flops_at(RunRecord('toy', phases, ()), 6)
    38.0
  """
  return float(sum(
      _done(part.start, part.steps, step) * part.cost_per_step
      for phase in run.phases for part in phase.parts
  ))


def dense_flops_at(run: RunRecord, step: int) -> float:
  """Returns the training FLOPs of a run's first steps without sparsity.

  Args:
    run: A run.
    step: Number of completed steps.

  Returns:
    FLOPs of the first `step` steps of a dense run with the same batches.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phase = PhaseRecord('sparse', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0)
    >>> dense_flops_at(RunRecord('toy', (phase,), ()), 3)
    27.0
  """
  return float(sum(
      _done(phase.start, phase.steps, step) * phase.dense_flops_per_step
      for phase in run.phases
  ))


def sparsities_of(run: RunRecord) -> tuple[list[int], list[float]]:
  """Returns the planned sparsity of a run as a step function.

  Args:
    run: A run.

  Returns:
    The first steps of the spans of constant sparsity followed by the last step
    of the run, and the sparsity from each step on, the last one twice.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phases = (
    ...     PhaseRecord('sparse', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0),
    ...     PhaseRecord('dense', 4, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0))
    >>> sparsities_of(RunRecord('toy', phases, ()))
    ([0, 4, 8], [0.75, 0.0, 0.0])
  """
  parts = [part for phase in run.phases for part in phase.parts]
  steps = [*(part.start for part in parts), run.phases[-1].end]
  return steps, [part.sparsity for part in (*parts, parts[-1])]


def pretraining_curve(
    run: RunRecord, key: str = 'validation/loss'
) -> tuple[np.ndarray, np.ndarray]:
  """Returns a value over the training FLOPs of pre-training.

  Fine-tuning is excluded, as it does not minimize the loss on the corpus.

  Args:
    run: A run.
    key: Name of the value.

  Returns:
    float64 [N] FLOPs, increasing and above zero, and float64 [N] values.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phase = PhaseRecord('sparse', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0)
    >>> rows = [{'step': s, 'validation/loss': 4.0 - s} for s in (0, 1, 2)]
    >>> pretraining_curve(RunRecord('toy', (phase,), tuple(rows)))
    (array([ 5., 10.]), array([3., 2.]))
  """
  end = read.pretraining_phases(run)[-1].end
  points = [(s, v) for s, v in zip(*run.series(key)) if 0 < s <= end]
  flops = np.array([flops_at(run, step) for step, _ in points], np.float64)
  return flops, np.array([value for _, value in points], np.float64)


class EqualFlops(NamedTuple):
  """Losses of two runs at equal training FLOPs.

  Attributes:
    flops: Training FLOPs of each run.
    first: Validation loss of the first run, in nats per token.
    second: Validation loss of the second run, in nats per token.
    longer: Index, 0 or 1, of the run that continues beyond `flops`; None if
      neither does.
  """

  flops: float
  first: float
  second: float
  longer: int | None


def losses_at_equal_flops(
    first: RunRecord, second: RunRecord
) -> EqualFlops | None:
  """Compares pre-training losses at the largest FLOPs that both runs reached.

  Losses are interpolated linearly over the logarithm of FLOPs between the
  nearest evaluations.

  Args:
    first: A run.
    second: Another run, evaluated on the same validation text.

  Returns:
    The comparison, or None if the evaluated ranges do not overlap.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> def toy(cost):
    ...   phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, cost, 9.0)
    ...   rows = [{'step': s, 'validation/loss': 4.0 - s} for s in (1, 4)]
    ...   return RunRecord('toy', (phase,), tuple(rows))
    >>> found = losses_at_equal_flops(toy(1.0), toy(2.0))
    >>> found.flops, found.first, round(found.second, 3), found.longer
    (4.0, 0.0, 1.5, 1)
  """
  curves = [pretraining_curve(first), pretraining_curve(second)]
  if not all(len(flops) for flops, _ in curves):
    return None
  ends = [flops[-1] for flops, _ in curves]
  flops = min(ends)
  if flops < max(spent[0] for spent, _ in curves):
    return None
  losses = [
      float(np.interp(np.log(flops), np.log(spent), values))
      for spent, values in curves
  ]
  longer = None
  if max(ends) > flops * (1 + 1e-9):
    longer = int(np.argmax(ends))
  return EqualFlops(float(flops), losses[0], losses[1], longer)

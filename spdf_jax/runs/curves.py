# SPDX-License-Identifier: Apache-2.0
"""Curves of losses over tokens, FLOPs or seconds.

The cost of a run includes that of other runs up to the checkpoint that it
starts from.
"""

from collections.abc import Callable

import numpy as np

from spdf_jax.runs import read
from spdf_jax.runs.read import RunRecord
from spdf_jax.runs.read import SpentBefore


def _done(start: int, steps: int, step: int) -> int:
  """Returns the number of steps of a span among the first `step` steps."""
  return min(max(step - start, 0), steps)


def flops_at(run: RunRecord, step: int) -> float:
  """Returns the training FLOPs of a run's first `step` steps.

  Args:
    run: A run, as `read_run` returns it.
    step: Number of completed steps.

  Returns:
    Planned FLOPs of the first `step` steps, without those of pruned weights.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phases = (  # Steps 0 to 3 of 5.0 FLOPs, and 4 to 7 of 9.0.
    ...     PhaseRecord('sparse', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0),
    ...     PhaseRecord('dense', 4, 4, 2, 8, 'text', 0.0, 64, 9.0, 9.0))
    >>> flops_at(RunRecord('toy', phases, ()), 6)
    38.0
  """
  return float(run.before.flops + sum(
      _done(part.start, part.steps, step) * part.cost_per_step
      for phase in run.phases for part in phase.parts
  ))


def dense_flops_at(run: RunRecord, step: int) -> float:
  """Returns the training FLOPs of a run's first `step` steps without sparsity.

  Args:
    run: A run, as `read_run` returns it.
    step: Number of completed steps.

  Returns:
    FLOPs of the first `step` steps of a dense run with the same batches.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> # A dense step takes 9.0 FLOPs.
    >>> phase = PhaseRecord('sparse', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0)
    >>> dense_flops_at(RunRecord('toy', (phase,), ()), 3)
    27.0
  """
  return float(run.before.dense_flops + sum(
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


def tokens_at(run: RunRecord, step: int) -> float:
  """Returns the training tokens of a run's first `step` steps.

  Args:
    run: A run, as `read_run` returns it.
    step: Number of completed steps.

  Returns:
    Number of tokens of the first `step` steps.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> # The batches have 2 rows of 8 tokens.
    >>> phase = PhaseRecord('sparse', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0)
    >>> tokens_at(RunRecord('toy', (phase,), ()), 3)
    48.0
  """
  return float(run.before.tokens + sum(
      _done(phase.start, phase.steps, step) * phase.tokens / phase.steps
      for phase in run.phases
  ))


def seconds_at(run: RunRecord, step: int) -> float:
  """Returns the training seconds of a run's first `step` steps.

  Each row of metrics has the seconds since the row before, which are
  interpolated.

  Args:
    run: A run, as `read_run` returns it.
    step: Number of completed steps.

  Returns:
    Seconds of the first `step` steps; NaN if no row has seconds, or those of
    the runs before it are unknown.

  Example:
    >>> rows = tuple({'step': s, 'time/seconds': 8.0 / s} for s in (2, 4))
    >>> seconds_at(RunRecord('toy', (), rows), 3)
    5.0
  """
  steps, seconds = run.series('time/seconds')
  before = run.before.seconds
  if not steps or before is None:
    return float('nan')
  return float(before + np.interp(step, [0, *steps], np.cumsum([0, *seconds])))


def spent_before(
    source: str, earlier: RunRecord, step: int, *, resumed: bool
) -> SpentBefore:
  """Returns the cost of a checkpoint, for a run that starts from it.

  Args:
    source: The checkpoint, as the config of the run names it.
    earlier: The run of the checkpoint.
    step: Step of the checkpoint.
    resumed: Whether the run continues the phases of the earlier one, so that
      its own plan counts them.

  Returns:
    The sums over the run of the checkpoint and all runs before it.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phase = PhaseRecord('sparse', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0)
    >>> run = RunRecord('toy', (phase,), ({'step': 4, 'time/seconds': 2.0},))
    >>> spent_before('toy', run, 4, resumed=False).flops
    20.0
  """
  seconds = seconds_at(earlier, step)
  spent = SpentBefore(
      source,
      earlier.before.is_recorded,
      earlier.before.steps + step,
      round(tokens_at(earlier, step)),
      flops_at(earlier, step),
      dense_flops_at(earlier, step),
      seconds if np.isfinite(seconds) else None,
  )
  if not resumed:
    return spent
  return earlier.before._replace(source=source, seconds=spent.seconds)


Spent = Callable[[RunRecord, int], float]
"""What the first steps of a run take: `flops_at`, `tokens_at`, `seconds_at`."""


def pretraining_curve(
    run: RunRecord, key: str = 'validation/loss', spent: Spent = flops_at
) -> tuple[np.ndarray, np.ndarray]:
  """Returns a logged value over the FLOPs, tokens or seconds of pre-training.

  Fine-tuning is excluded, as it does not minimize the loss on the corpus.

  Args:
    run: A run, as `read_run` returns it.
    key: Name of the logged value.
    spent: Function `(run, step) -> float` of what the first `step` steps took:
      `flops_at`, `tokens_at` or `seconds_at`.

  Returns:
    Amounts of `spent`, float64 [N], increasing, without step 0; and the values
    logged there, float64 [N].

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> phase = PhaseRecord('sparse', 0, 4, 2, 8, 'text', 0.75, 64, 5.0, 9.0)
    >>> rows = [{'step': s, 'validation/loss': 4.0 - s} for s in (0, 1, 2)]
    >>> pretraining_curve(RunRecord('toy', (phase,), tuple(rows)))
    (array([ 5., 10.]), array([3., 2.]))
  """
  end = max((p.end for p in read.pretraining_phases(run)), default=0)
  points = [(s, v) for s, v in zip(*run.series(key)) if 0 < s <= end]
  amounts = np.array([spent(run, step) for step, _ in points], np.float64)
  known = np.isfinite(amounts)  # Seconds may not be logged.
  losses = np.array([value for _, value in points], np.float64)
  return amounts[known], losses[known]


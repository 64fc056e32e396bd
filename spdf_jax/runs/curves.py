# SPDX-License-Identifier: Apache-2.0
"""Curves of losses, and comparison at equal tokens, FLOPs or seconds."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from spdf_jax.runs import read
from spdf_jax.runs.read import RunRecord


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
  return float(sum(
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
  return float(sum(
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
    Seconds of the first `step` steps; NaN if no row has seconds.

  Example:
    >>> rows = tuple({'step': s, 'time/seconds': 8.0 / s} for s in (2, 4))
    >>> seconds_at(RunRecord('toy', (), rows), 3)
    5.0
  """
  steps, seconds = run.series('time/seconds')
  if not steps:
    return float('nan')
  return float(np.interp(step, [0, *steps], np.cumsum([0, *seconds])))


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


_EQUAL = 1.02  # Largest ratio of amounts that count as equal.


class Comparison(NamedTuple):
  """Losses of two runs at equal tokens, FLOPs or seconds of pre-training.

  Attributes:
    spent: Tokens, FLOPs or seconds of each run, the most that both took.
    first: Validation loss of the first run, in nats per token.
    second: Validation loss of the second run, in nats per token.
    longer: Index, 0 or 1, of the run that takes over 2 % more than `spent`, so
      that its loss there is one in the middle of its schedule; None if neither
      does.
  """

  spent: float
  first: float
  second: float
  longer: int | None


def losses_at_equal(
    spent: Spent, first: RunRecord, second: RunRecord
) -> Comparison | None:
  """Compares pre-training losses at equal FLOPs, tokens or seconds.

  The losses are those at the largest amount that both runs spent, interpolated
  linearly over the logarithm of the amount between the nearest evaluations. If
  the total amounts of the runs differ by at most 2 %, their final losses are
  compared.

  Args:
    spent: Function of the amount to compare at: `flops_at`, `tokens_at` or
      `seconds_at`.
    first: A run, as `read_run` returns it.
    second: Another run, evaluated on the same validation text.

  Returns:
    The amount; the validation losses of both runs there; and `longer`, the
    index, 0 or 1, of the run that spent over 2 % more in total, or `None`. If
    the evaluated ranges do not overlap, the result is `None`.

  Example:
    >>> from spdf_jax.runs.read import PhaseRecord
    >>> def toy(cost):
    ...   phase = PhaseRecord('p', 0, 4, 2, 8, 'text', 0.0, 64, cost, 9.0)
    ...   rows = [{'step': s, 'validation/loss': 4.0 - s} for s in (1, 4)]
    ...   return RunRecord('toy', (phase,), tuple(rows))
    >>> losses = losses_at_equal(flops_at, toy(1.0), toy(2.0))
    >>> losses.spent, losses.first, round(losses.second, 3), losses.longer
    (4.0, 0.0, 1.5, 1)
  """
  curves = [pretraining_curve(run, spent=spent) for run in (first, second)]
  if not all(len(amounts) for amounts, _ in curves):
    return None
  ends = [amounts[-1] for amounts, _ in curves]
  most = min(ends)
  if not most >= max(amounts[0] for amounts, _ in curves):
    return None
  if max(ends) <= _EQUAL * most:
    final = [float(values[-1]) for _, values in curves]
    return Comparison(float(most), final[0], final[1], None)
  losses = [
      float(np.interp(np.log(most), np.log(amounts), values))
      for amounts, values in curves
  ]
  return Comparison(float(most), losses[0], losses[1], int(np.argmax(ends)))

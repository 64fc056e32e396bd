"""Readings of the FLOPs that are printed in Cerebras' posts."""

from collections.abc import Iterator
import functools

from experiments.papers import published_flops as published
from experiments.papers import readings
from experiments.papers.published_flops import Row
from experiments.papers.readings import Read
from experiments.papers.readings import Reading
from spdf_jax.costs import flops
from spdf_jax.models import PRESETS
from spdf_jax.models import Sizes


def _variable(row: Row, column: str) -> Iterator[Reading]:
  shape = PRESETS[row[0]]
  parts = published.SPLIT_SHARES, published.SPLIT_SPARSITIES
  if column == 'effective sparsity':
    steps = [round(600 * share) for share in parts[0]]
    yield Reading(flops.effective_sparsity(steps, parts[1], 600))
    return
  static = flops.training_flops(shape, published.LENGTH, 0.75)
  yield Reading(_run_flops(shape, *parts) / static)


def _run_flops(
    shape: Sizes,
    shares: tuple[float, ...],
    sparsities: tuple[float, ...],
    embedding: float = 0.0,
) -> float:
  """Returns the FLOPs of stages, for one sequence of the standard budget.

  Args:
    shape: Sizes of the model.
    shares: Length of each stage, as a share of the standard budget.
    sparsities: Sparsity of each stage.
    embedding: Number of passes (forward, for inputs and for weights) in which
      the input embedding is counted, as a product.
  """
  length = published.LENGTH
  extra = embedding * flops.embedding_flops(shape, length)
  return sum(
      share * (flops.training_flops(shape, length, sparsity) + extra)
      for share, sparsity in zip(shares, sparsities)
  )


def _variable_large(row: Row, column: str) -> Iterator[Reading]:
  shape = PRESETS[row[0]]
  steps, sparsities = published.STAGE_STEPS, published.STAGE_SPARSITIES
  if column == 'effective sparsity':
    yield Reading(flops.effective_sparsity(steps, sparsities, steps[0]))
    return
  shares = tuple(n / steps[0] for n in steps)
  dense = functools.partial(_run_flops, shape, (1.0,), (0.0,))
  run = functools.partial(_run_flops, shape, shares, sparsities)
  if column == 'fewer FLOPs':
    yield Reading(1 - run() / dense())
    yield Reading(
        1 - run(2) / dense(2),
        'with the input embedding forward and for its weights',
    )
    yield Reading(
        1 - run(3) / dense(3), 'with the input embedding in all passes'
    )
    split = published.SPLIT_SHARES, published.SPLIT_SPARSITIES
    yield Reading(
        1 - _run_flops(shape, *split) / dense(),
        'by the split reading, 5/6 of the budget at 90% and 1/6 dense',
    )
    return
  tuning = published.DART_STEPS * published.DART_BATCH * flops.training_flops(
      shape, readings.TUNED
  )
  sequences = steps[0] * published.BATCH
  yield Reading(tuning / (sequences * run()))
  yield Reading(tuning / (sequences * dense()), 'of the dense pre-training')


def _iterative(row: Row, column: str) -> Iterator[Reading]:
  preset, sparsity = row
  shape = PRESETS[preset]
  parameters, hidden = readings.parameters_of(preset)
  if column == 'inference FLOPs':
    forward = functools.partial(flops.forward_flops, shape, 2048)
    yield Reading(forward() / forward(sparsity))
  elif column == 'parameters':
    yield Reading(parameters / (parameters - sparsity * hidden))
  else:
    yield Reading(1 / (1 - sparsity))


def _budgets(row: Row, column: str) -> Iterator[Reading]:
  preset, tokens = row
  parameters, _ = readings.parameters_of(preset)
  if column == 'tokens':
    yield Reading(20 * parameters)
    return
  shape = PRESETS[preset]
  yield Reading(tokens / 2048 * flops.training_flops(shape, 2048))
  yield Reading(
      6 * parameters * tokens, '6 FLOPs per parameter and token, no attention'
  )


POST_READINGS: dict[str, Read] = {
    published.VARIABLE.source: _variable,
    published.VARIABLE_LARGE.source: _variable_large,
    published.ITERATIVE.source: _iterative,
    published.BUDGETS.source: _budgets,
}
"""Readings by the source of a table."""

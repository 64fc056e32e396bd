"""Evaluations during training, which may end a phase early."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import logging
from typing import Any

from spdf_jax import sparsity
from spdf_jax.training.phases import EarlyStop
from spdf_jax.training.planned_sparsity import planned_sparsities
from spdf_jax.training.recipe import Recipe
from spdf_jax.training.step import TrainState

PyTree = Any
Evaluator = Callable[[int, PyTree], Iterable[tuple[str, float]]]

logger = logging.getLogger('spdf_jax')

_SHOWN = ('validation/perplexity', 'target/perplexity', 'task/chrf')


class Evaluations:
  """The evaluations of a run, which decide whether a phase ends early.

  Args:
    every_time: Evaluators, `(step, params) -> (name, value)` pairs, called at
      every evaluation.
    at_phase_ends: Evaluators called at the ends of phases, and at every
      evaluation of a phase whose early stop needs generations.
    rows: Rows of earlier evaluations, in a run that is resumed.
  """

  def __init__(
      self,
      every_time: Sequence[Evaluator],
      at_phase_ends: Sequence[Evaluator],
      rows: Iterable[Mapping[str, Any]] = (),
  ):
    self._every_time = every_time
    self._at_phase_ends = at_phase_ends
    self._rows = list(rows)

  def run(
      self, recipe: Recipe, step: int, state: TrainState
  ) -> tuple[dict[str, float | str], bool]:
    """Evaluates the state after a step.

    Args:
      recipe: Recipe of the run.
      step: Steps completed.
      state: The state.

    Returns:
      The row to log, and whether the phase ends here, before its last step.
    """
    phase = recipe.plan.phase_at(step - 1)
    is_end = step in recipe.plan.ends.values()
    stop = phase.early_stop
    row: dict[str, Any] = {
        'phase': phase.name, **_sparsities(recipe, step, state),
    }

    def measure(evaluators: Sequence[Evaluator]) -> None:
      for evaluate in evaluators:
        row.update(evaluate(step, state.params))

    measure(self._every_time)
    measured_all = is_end or (stop is not None and stop.generates)
    if measured_all:
      measure(self._at_phase_ends)
    self._rows.append(row)
    ends_early = stop is not None and not is_end and stop.is_met(
        values_in(self._rows, stop, phase.name)
    )
    if ends_early and not measured_all:
      measure(self._at_phase_ends)
    logger.info(
        'step %d: %s', step,
        '  '.join(f'{k} {row[k]:.2f}' for k in _SHOWN if k in row),
    )
    return row, ends_early


def _sparsities(
    recipe: Recipe, step: int, state: TrainState
) -> dict[str, float]:
  """Returns the measured and the planned sparsity of all layers."""
  mask = sparsity.get_mask(state.opt_state)
  summary = sparsity.summarize(mask, state.params, where=recipe.where)
  asked = planned_sparsities(
      recipe.plan, step - 1, recipe.abstract_state.params, recipe.where
  )
  row = {
      'sparsity/sparsified': summary.sparsity,
      'sparsity/all': summary.overall_sparsity,
  }
  for name, layer in summary.layers.items():
    row[f'sparsity/{name}'] = layer.sparsity
    row[f'sparsity_asked/{name}'] = asked[name].sparsity
  return row


def values_in(
    rows: Iterable[Mapping[str, Any]], stop: EarlyStop, phase: str
) -> list[float]:
  """Returns the logged values of an early stop's metric in a phase.

  Args:
    rows: Rows of `metrics.jsonl`.
    stop: The early stop.
    phase: Name of the phase.

  Returns:
    The values, in order.
  """
  return [
      row[stop.metric] for row in rows
      if 'phase' in row and row['phase'] == phase and stop.metric in row
  ]

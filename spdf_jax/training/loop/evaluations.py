# SPDX-License-Identifier: Apache-2.0
"""Evaluations during training, which may end a phase early."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import logging
from typing import Any, NamedTuple

import jax

from spdf_jax import sparsity
from spdf_jax.sparsity.statistics import Summary
from spdf_jax.training.configs.early_stop import Best
from spdf_jax.training.configs.early_stop import EarlyStop
from spdf_jax.training.configs.phases import Phase
from spdf_jax.training.loop import mask_record
from spdf_jax.training.loop import processes
from spdf_jax.training.plan import planned_sparsities
from spdf_jax.training.run import Run
from spdf_jax.training.step import optimizers
from spdf_jax.training.step.state import TrainState

PyTree = Any
Evaluator = Callable[[int, PyTree], Iterable[tuple[str, float]]]

logger = logging.getLogger('spdf_jax')

_SHOWN = ('validation/perplexity', 'target/perplexity', 'task/chrf')


class Evaluators(NamedTuple):
  """Functions `(step, params)` that return pairs `(name, value)`.

  Attributes:
    every_time: Evaluators called every `config.eval_every` steps and at the end
      of each phase.
    at_phase_ends: Evaluators called at the end of each phase, and at every
      evaluation of a phase whose `early_stop.metric` is measured on generated
      text.
  """

  every_time: Sequence[Evaluator] = ()
  at_phase_ends: Sequence[Evaluator] = ()


class Evaluations:
  """The evaluations of a run, which decide whether a phase ends early.

  Args:
    run: The run, whose `best` is updated.
    evaluators: Evaluators of the parameters.
    rows: Rows of earlier evaluations, in a run that is resumed.
  """

  def __init__(
      self,
      run: Run,
      evaluators: Evaluators,
      rows: Iterable[Mapping[str, Any]] = (),
  ):
    self._run = run
    self._evaluators = evaluators
    self._rows = list(rows)
    self._has_warned = False

  def run(
      self, step: int, state: TrainState
  ) -> tuple[dict[str, float | str], bool]:
    """Evaluates the state after a step.

    Args:
      step: Steps completed.
      state: The state.

    Returns:
      The row to log, and whether the phase ends here, before its last step.
    """
    plan = self._run.plan
    phase = plan.phase_at(step - 1)
    is_end = step in plan.ends.values()
    stop = phase.early_stop
    row = self._measure(step, state)
    generated = stop is not None and stop.generates
    if generated:
      row |= self._generate(step, state)
    self._rows.append(row)
    # A phase lasts until the weights to rewind to are copied.
    can_end = not is_end and step > plan.rewind_to
    ends_early = stop is not None and can_end and stop.is_met(
        values_in(self._rows, stop, phase.name)
    )
    best = self._update_best(phase, step, row)
    if best is not None:
      row |= best.row
    # Otherwise the phase ends with the best weights of an earlier step.
    is_last = (is_end or ends_early) and (best is None or best.step == step)
    if is_last and not generated:
      row |= self._generate(step, state)
    _show(step, row)
    return row, ends_early

  def best_of(self, step: int) -> Best | None:
    """Returns the best evaluation so far of the phase that a step is in."""
    return self._run.best.get(self._run.plan.phase_at(step - 1).name)

  def run_best(
      self, step: int, state: TrainState
  ) -> dict[str, float | str]:
    """Evaluates the weights that were best by the early stop's metric.

    Args:
      step: Steps completed at the end of the phase.
      state: The state with the best weights.

    Returns:
      The row to log in place of that of the last weights.
    """
    row = self._measure(step, state)
    row |= self._generate(step, state)
    if best := self.best_of(step):
      row |= best.row
    _show(step, row)
    return row

  def _measure(self, step: int, state: TrainState) -> dict[str, Any]:
    phase = self._run.plan.phase_at(step - 1).name
    mask = sparsity.get_mask(state.opt_state)
    summary = sparsity.summarize(
        mask, state.params, where=self._run.model.where
    )
    if self._run.plan.updates_masks and summary.sparsity:
      self._record(step, phase, mask, state.params, summary)
    row: dict[str, Any] = {
        'phase': phase, **_sparsities(self._run, step, summary),
    }
    params = optimizers.evaluation_params(state.opt_state, state.params)
    for evaluate in self._evaluators.every_time:
      row.update(evaluate(step, params))
    return row

  def _record(
      self, step: int, phase: str, mask: PyTree, params: PyTree,
      summary: Summary,
  ) -> None:
    """Records masks that move, and warns once where they cut off units."""
    description = mask_record.describe(
        mask, params, self._run.model.where, summary,
        jax.sharding.NamedSharding(
            self._run.programs.mesh, jax.sharding.PartitionSpec()
        ),
    )
    if not processes.is_main_process():
      return
    mask_record.write(self._run.workdir, step, phase, description)
    cut = {k: x for k, x in summary.layers.items() if x.cuts_off_units}
    # Under hard_threshold pruned weights have gradients: units may return.
    if cut and not (self._has_warned or self._run.plan.thresholds):
      self._has_warned = True
      name = max(cut, key=lambda name: cut[name].cut_off)
      layer = cut[name]
      logger.warning(
          'step %d: %.1f%% of the inputs and outputs of %r keep no weight and '
          'do not learn, where a random mask has %.1f%% (layers concerned: %d '
          "of %d); where growth gathers in few of them, set grow='balanced'.",
          step, 100 * layer.cut_off, name, 100 * layer.cut_off_at_random,
          len(cut), len(summary.layers),
      )

  def _generate(self, step: int, state: TrainState) -> dict[str, Any]:
    row: dict[str, Any] = {}
    params = optimizers.evaluation_params(state.opt_state, state.params)
    for evaluate in self._evaluators.at_phase_ends:
      row.update(evaluate(step, params))
    return row

  def _update_best(
      self, phase: Phase, step: int, row: Mapping[str, Any]
  ) -> Best | None:
    """Returns the best evaluation of a phase, which may be this one."""
    best, stop = self._run.best.get(phase.name), phase.early_stop
    if stop is not None and stop.metric in row and stop.improves(
        row[stop.metric], None if best is None else best.value
    ):
      best = Best(stop.metric, float(row[stop.metric]), step)
      self._run.best[phase.name] = best
    return best


def _show(step: int, row: Mapping[str, Any]) -> None:
  values = '  '.join(f'{k} {row[k]:.2f}' for k in _SHOWN if k in row)
  if values:
    logger.info('step %d: %s', step, values)


def _sparsities(run: Run, step: int, summary: Summary) -> dict[str, float]:
  """Returns the measured and the planned sparsity of all layers."""
  planned = planned_sparsities(
      run.plan, step - 1, run.programs.abstract_state.params, run.model.where
  )
  row = {
      'sparsity/sparsified': summary.sparsity,
      'sparsity/all': summary.overall_sparsity,
  }
  for name, layer in summary.layers.items():
    row[f'sparsity/{name}'] = layer.sparsity
    row[f'sparsity_planned/{name}'] = planned[name].sparsity
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

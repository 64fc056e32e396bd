# SPDX-License-Identifier: Apache-2.0
"""Costs of a plan: FLOPs of phases, spans of constant sparsity, and totals."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spdf_jax.accelerator import native
from spdf_jax.accelerator.pallas.lowering import BLOCKS
from spdf_jax.accelerator.wafer import execute
from spdf_jax.costs import flops as formula
from spdf_jax.sparsity import algorithms
from spdf_jax.training import plan as plans
from spdf_jax.training.configs.phases import Phase
from spdf_jax.training.plan import Plan
from spdf_jax.training.plan import PlannedSparsity
from spdf_jax.training.run import Run
from spdf_jax.training.step import teacher as teachers

Record = Mapping[str, Any]

_MULTIPLIES_ZEROS = (
    'XLA multiplies the zeros of masked matrices: FLOPs fall, seconds do not.'
)
_SKIPS_ZEROS = (
    'Native kernels ({kernels}) skip the zeros of masked matrices where more '
    'than {crossover:.0%} are zero, in steps that need no gradients of pruned '
    'weights; XLA runs all other steps.'
)
_SKIPS_BLOCKS = (
    'Kernels ({matmul}) skip the blocks of masked matrices that have no kept '
    'weight; other zeros are multiplied.'
)
_IS_COMPACT = 'Sparse phases store the values of kept weights only.'
_EMULATES = (
    'An emulated wafer of {cores:,} cores multiplies masked matrices: seconds '
    'are not those of a wafer, which experiments.simulate models.'
)


def describe_plan(run: Run, name: str) -> dict[str, Any]:
  """Describes a run for its `plan.json`: model, phases and their FLOPs.

  Args:
    run: The run.
    name: Name of the run.

  Returns:
    JSON-serializable fields: `name`; `model`, its preset and sizes, and
    `dropout` unless it is 0; the numbers of `parameters` and
    `sparsified_parameters`; `totals` against dense training, see `totals_of`;
    `compute`, a sentence on the kernels of the sparse products; and `phases`.
    A phase has, among others, its `steps`, `tokens` and `notes`; the final
    `sparsity` of the sparsified parameters, and `overall_sparsity` of all;
    `continues`, whether it continues the learning-rate schedule of the phase
    before; `mask_updates` as ranges, see `as_ranges`; and `spans` of constant
    sparsity. `flops_per_step` is the mean over its steps and
    `dense_flops_per_step` that without sparsity, both with the forward pass of
    a teacher and without the input embedding; `embedding_flops_per_step` is
    that of the embedding if it were computed as a product.
  """
  sizes = run.model.config
  source = run.config.loss.teacher
  teacher = None if source is None else teachers.teacher_config(source)

  def cost(phase, sparsity, dense_grads):
    flops = formula.training_flops(
        sizes, phase.length, sparsity, dense_grads=dense_grads
    )
    if teacher is not None:
      flops += formula.forward_flops(teacher, phase.length)
    return phase.batch_size * flops

  phase_spans = find_spans(
      run.plan,
      lambda step: plans.mean_sparsity(
          layer_sparsities(run, step)
      ),
      cost,
  )
  changes = run.plan.update_steps
  # The plan has schedules in place of the learning rates that a config gives.
  continues = {phase.name: phase.continues for phase in run.config.phases}
  hidden = sum(layer.size for layer in layer_sparsities(run, 0).values())
  phases: list[dict[str, Any]] = []
  for phase, spans in zip(run.plan.phases, phase_spans):
    start = spans[0].start
    flops = sum(s.steps * s.cost_per_step for s in spans)
    phases.append({
        'name': phase.name,
        'start': start,
        'steps': phase.steps,
        'batch_size': phase.batch_size,
        'length': phase.length,
        'source': phase.data,
        'continues': continues[phase.name],
        'sparsity': spans[-1].sparsity,
        'overall_sparsity': spans[-1].sparsity * hidden / run.parameters,
        'tokens': phase.tokens,
        'flops_per_step': flops / phase.steps,
        'dense_flops_per_step': cost(phase, 0.0, False),
        'embedding_flops_per_step': (
            3 * phase.batch_size * formula.embedding_flops(sizes, phase.length)
        ),
        'mask_updates': as_ranges(
            changes[(changes >= start) & (changes < start + phase.steps)]
        ),
        'spans': [
            {
                'start': span.start, 'steps': span.steps,
                'sparsity': span.sparsity, 'flops_per_step': span.cost_per_step,
            }
            for span in spans
        ],
        'notes': [*phase.notes, *_mask_notes(run, phase, spans, phases)],
    })
  return {
      'name': name,
      'model': {
          'preset': run.config.model.preset, **sizes.describe(),
          **({'dropout': sizes.dropout} if sizes.dropout else {}),
      },
      'parameters': run.parameters,
      'sparsified_parameters': hidden,
      'phases': phases,
      'totals': totals_of(phases),
      'compute': _describe_compute(run, phases),
      'data': {
          name: getattr(run.config.data, name)
          for name in ('corpus', 'tokenizer', 'task')
      },
  }


def _mask_notes(
    run: Run, phase: Phase, spans: Sequence['Span'], before: Sequence[Record]
) -> list[str]:
  """Describes how the mask with which a phase begins is made."""
  if not before:
    begin = run.config.init_from
    notes = [f'starts from the weights of {begin}'] if begin else []
    spec = phase.algorithm
    if begin:
      spec = algorithms.with_default_init(spec, 'magnitude')
    made = algorithms.initial_masks_of(spec)
    if 'nonzero' in made:
      made = [*made, 'whose zeros are counted when training starts']
    if spans[0].sparsity and not phase.initial_mask:
      text = ', '.join(made) or 'that of the algorithm'
      notes.append(f'initial mask: {text}')
    return notes
  begins = any(span.names[0] == phase.name for span in run.plan.spans)
  if begins and spans[0].sparsity > before[-1]['spans'][-1]['sparsity']:
    return ['prunes by magnitude at its start']
  return []


def _describe_compute(
    run: Run, phases: Sequence[Record]
) -> str:
  """Returns which programs multiply sparse matrices; '' if none is sparse."""
  if not any(span['sparsity'] for phase in phases for span in phase['spans']):
    return ''
  if run.config.matmul == execute.WAFER:
    return _EMULATES.format(cores=int(execute.CORNER.cores))
  if run.programs.sparse_steps is None:
    return _MULTIPLIES_ZEROS
  if run.config.matmul in BLOCKS:
    return _SKIPS_BLOCKS.format(matmul=run.config.matmul)
  text = _SKIPS_ZEROS.format(
      kernels=native.kernels(run.model.config.dtype),
      crossover=run.programs.sparse_steps.crossover,
  )
  return f'{text} {_IS_COMPACT}' if run.programs.storage == 'compact' else text


def layer_sparsities(run: Run, step: int) -> dict[str, PlannedSparsity]:
  """Returns the planned sparsity of each layer at a step."""
  return plans.planned_sparsities(
      run.plan, step, run.programs.abstract_state.params, run.model.where
  )


class Span(NamedTuple):
  """Steps of one phase at one sparsity.

  Attributes:
    start: Number of steps before the span.
    steps: Number of steps in the span.
    sparsity: Fraction of zeros in the sparsified weights, or what else the
      function of the sparsity returns.
    cost_per_step: Mean cost of a step: FLOPs in `plan.json`, where the field is
      `flops_per_step`; other functions of the cost give other units.
  """

  start: int
  steps: int
  sparsity: Any
  cost_per_step: float


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
    cost: Function `(phase, sparsity, dense_grads) -> cost` of a step, in any
      unit.

  Returns:
    The spans of each phase.
  """
  changes = np.union1d(plan.sparsity_steps, plan.starts).tolist()
  sparsities = dict(zip(changes, map(sparsity_at, changes)))
  dense = plan.dense_grads_steps
  before = sparsities[0]
  phase_spans = []
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
      total = (
          cost(phase, before, first_dense)
          + later * cost(phase, sparsity, True)
          + (steps - 1 - later) * cost(phase, sparsity, False)
      )
      spans.append(Span(first, steps, sparsity, total / steps))
      before = sparsity
    phase_spans.append(spans)
  return phase_spans


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


def totals_of(phases: Sequence[Record]) -> list[dict[str, Any]]:
  """Sums the costs of a plan and compares them with dense training.

  Args:
    phases: Phases as in `plan.json`.

  Returns:
    The total of all phases; that of pre-training, the phases on a corpus, if
    there are others; and, if a later phase of pre-training has a learning-rate
    schedule of its own, the total against dense training for the steps before
    it alone: what follows a complete schedule is additional cost.

  Example:
    >>> sparse = dict(
    ...     name='sparse', source='corpus', steps=100, tokens=6400,
    ...     flops_per_step=2.5, dense_flops_per_step=10.0,
    ...     embedding_flops_per_step=2.5, continues=False, spans=[
    ...         dict(start=0, steps=100, sparsity=0.9, flops_per_step=2.5)])
    >>> dense = sparse | dict(
    ...     name='dense', steps=15, tokens=960, flops_per_step=10.0, spans=[
    ...         dict(start=0, steps=15, sparsity=0.0, flops_per_step=10.0)])
    >>> total = totals_of([sparse, dense])[-1]
    >>> total['against'], total['of_dense'], total['of_dense_with_embedding']
    (['sparse'], 0.4, 0.55)
    >>> round(total['effective_sparsity'], 6)
    0.75
  """
  corpus = [phase for phase in phases if phase['source'] == 'corpus']
  totals = [{'name': 'all phases'} | total_of(phases, phases)]
  pretraining = {'name': 'pre-training'}
  if 0 < len(corpus) < len(phases):
    totals.append(pretraining | total_of(corpus, corpus))
  own = [i for i, phase in enumerate(corpus) if i and not phase['continues']]
  if own:
    totals.append(pretraining | total_of(corpus, corpus[:own[0]]))
  return totals


def total_of(
    phases: Sequence[Record], against: Sequence[Record]
) -> dict[str, Any]:
  """Sums the costs of phases and compares them with dense training.

  Args:
    phases: Phases as in `plan.json`.
    against: Phases with the steps of the dense training.

  Returns:
    JSON-serializable data: names of the phases, names of those they are
    compared with, FLOPs, their ratio to those of the dense training, the same
    ratio if the input embedding is counted as a product, and the effective
    sparsity.
  """
  names = lambda records: [record['name'] for record in records]
  flops = _sum(phases, 'flops_per_step')
  dense = _sum(against, 'dense_flops_per_step')
  embedding, dense_embedding = (
      _sum(records, 'embedding_flops_per_step') for records in (phases, against)
  )
  tokens, sparsities = zip(*_tokens(phases))
  return {
      'phases': names(phases),
      'against': names(against),
      'flops': flops,
      'of_dense': flops / dense,
      'of_dense_with_embedding': (
          (flops + embedding) / (dense + dense_embedding)
      ),
      'effective_sparsity': formula.effective_sparsity(
          tokens, sparsities, sum(record['tokens'] for record in against)
      ),
  }


def _sum(phases: Sequence[Record], key: str) -> float:
  return sum(phase['steps'] * phase[key] for phase in phases)


def _tokens(phases: Sequence[Record]) -> Iterator[tuple[int, float]]:
  """Yields the tokens and the sparsity of all spans."""
  for phase in phases:
    per_step = phase['tokens'] // phase['steps']
    for span in phase['spans']:
      yield span['steps'] * per_step, span['sparsity']

"""Readings of the FLOPs that are printed in SPDF's tables."""

from collections.abc import Iterator

from experiments.papers import printed_numbers
from experiments.papers import published_flops as published
from experiments.papers import readings
from experiments.papers.published_flops import Row
from experiments.papers.readings import Read
from experiments.papers.readings import Reading
from spdf_jax.costs.flops import forward_flops
from spdf_jax.costs.flops import softmax_flops
from spdf_jax.costs.flops import training_flops
from spdf_jax.models import PRESETS

_EXA = 1e18


def tuning_flops(preset: str, task: str) -> float:
  """Returns the FLOPs of SPDF's dense fine-tuning on sequences of 512 tokens.

  Example:
    >>> f'{tuning_flops("gpt3-xl", "E2E"):.2e}'
    '5.27e+17'
  """
  shape = PRESETS[preset]
  sequences = printed_numbers.value_of(published.SEQUENCES[task])
  return sequences * training_flops(shape, readings.TUNED)


def pretraining_flops(preset: str, sparsity: float) -> float:
  """Returns the FLOPs of SPDF's pre-training.

  Example:
    >>> f'{pretraining_flops("gpt3-xl", 0.75):.2e}'
    '9.48e+19'
  """
  tokens = printed_numbers.value_of(published.SIZES.cell((preset,), 'tokens'))
  shape = PRESETS[preset]
  return tokens / 2048 * training_flops(shape, 2048, sparsity)


def _sizes(row: Row, column: str) -> Iterator[Reading]:
  parameters, _ = readings.parameters_of(row[0])
  yield Reading(parameters if column == 'parameters' else 20 * parameters)


def _pretraining(row: Row, column: str) -> Iterator[Reading]:
  preset, sparsity = row
  shape = PRESETS[preset]
  flops = pretraining_flops(preset, sparsity)
  per_sequence = training_flops(shape, 2048, sparsity)
  if column == 'sequences':
    yield Reading(flops / per_sequence)
  elif column == 'FLOPs/seq':
    yield Reading(per_sequence)
  elif column == 'of dense':
    yield Reading(flops / pretraining_flops(preset, 0.0))
    yield Reading(
        _exaflops(row) / _exaflops((preset, 0.0)),
        'the quotient of the rounded exaFLOPs',
    )
  else:
    unit = 1 if column == 'FLOPs' else _EXA
    yield Reading(flops / unit)
    rounded = [
        printed_numbers.value_of(published.PRETRAINING.cell(row, name))
        for name in ('sequences', 'FLOPs/seq')
    ]
    yield Reading(
        rounded[0] * rounded[1] / unit, 'the product of the rounded columns'
    )


def _exaflops(row: Row) -> float:
  return printed_numbers.value_of(published.PRETRAINING.cell(row, 'exaFLOPs'))


def _tuning(row: Row, column: str) -> Iterator[Reading]:
  preset, task = row
  per_sequence = training_flops(PRESETS[preset], readings.TUNED)
  if column == 'FLOPs/seq':
    yield Reading(per_sequence)
    yield Reading(per_sequence / 3, 'the forward pass alone')
    return
  unit = 1 if column == 'FLOPs' else _EXA
  yield Reading(tuning_flops(preset, task) / unit)
  yield _within_rounding(row, column, task)
  for other in published.TASKS:
    if other != task:
      found = _within_rounding(row, column, other)
      yield Reading(found.value, f"{other}'s value", slip=True)


def _within_rounding(row: Row, column: str, task: str) -> Reading:
  """Returns a reading with an unrounded number of sequences.

  It is the number nearest to the one that gives the printed FLOPs, among those
  that round to the printed number of sequences.
  """
  unit = 1 if column == 'FLOPs' else _EXA
  per_sequence = training_flops(PRESETS[row[0]], readings.TUNED)
  printed = published.SEQUENCES[task]
  count, half = printed_numbers.value_of(printed), 10.0 ** (
      int(printed[-1]) - len(printed.split('e')[0].split('.')[1])
  ) / 2
  flops = printed_numbers.value_of(
      published.FINE_TUNING.cell(row, column)
  ) * unit
  sequences = min(max(flops / per_sequence, count - half), count + half)
  return Reading(
      sequences * per_sequence / unit,
      f'with {sequences:,.0f} sequences, which are printed as {printed}',
  )


def _totals(row: Row, column: str) -> Iterator[Reading]:
  if column.endswith('speedup'):
    yield from _speedups(row, column.split()[0])
    return
  values = lambda task: (_total(row, task) / _EXA, _columns(row, task))
  ours, columns = values(column)
  yield Reading(ours)
  yield Reading(columns, "the sum of the appendix's columns")
  printed = {t: published.TOTALS.cell(row, t) for t in published.TASKS}
  exchanged = lambda task: printed[task] in (
      printed_numbers.as_printed(value, printed[task]) for value in (
          ours, columns
      )
  )
  others = [task for task in published.TASKS if task != column]
  for task in sorted(others, key=exchanged, reverse=True):
    how = f"{task}'s value"
    if exchanged(task) and printed[task] != printed[column]:
      how += ', exchanged with that cell'
    for value in values(task):
      yield Reading(value, how, slip=True)


def _speedups(row: Row, task: str) -> Iterator[Reading]:
  dense = (row[0], 0.0)
  ours = _total(dense, task) / _total(row, task)
  printed = [
      printed_numbers.value_of(published.TOTALS.cell(r, task))
      for r in (dense, row)
  ]
  yield Reading(ours)
  yield Reading(
      printed[0] / printed[1], 'the quotient of the printed totals'
  )
  yield Reading(
      _columns(dense, task) / _columns(row, task),
      "the quotient of sums of the appendix's columns",
  )
  yield Reading(
      int(100 * ours) / 100, 'the computed value truncated, not rounded',
      slip=True,
  )


def _total(row: Row, task: str) -> float:
  return pretraining_flops(*row) + tuning_flops(row[0], task)


def _columns(row: Row, task: str) -> float:
  tuning = published.FINE_TUNING.cell((row[0], task), 'FLOPs')
  return _exaflops(row) + printed_numbers.value_of(tuning) / _EXA


def _shares(row: Row, column: str) -> Iterator[Reading]:
  shape = PRESETS[row[0]]
  total = forward_flops(shape, 2048)
  attention = 4 * shape.n_layers * 2048**2 * shape.attention_width
  head = 2 * 2048 * shape.d_model * shape.vocab_size
  if column.startswith('reduction'):
    yield Reading(total / forward_flops(shape, 2048, 0.75))
    return
  part = attention if column == 'attention' else head
  yield Reading(part / total)
  # Half of the scores are masked, and the softmax is left out.
  causal = total - attention / 2 - softmax_flops(shape, 2048)
  part = attention / 2 if column == 'attention' else head
  yield Reading(part / causal, 'attention halved for causality, no softmax')


SPDF_READINGS: dict[str, Read] = {
    published.SIZES.source: _sizes,
    published.PRETRAINING.source: _pretraining,
    published.FINE_TUNING.source: _tuning,
    published.TOTALS.source: _totals,
    published.SHARES.source: _shares,
}
"""Readings by the source of a table."""

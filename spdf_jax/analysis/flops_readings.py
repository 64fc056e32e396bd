"""Readings: how each printed number of FLOPs follows, or nearly does."""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import functools
from typing import NamedTuple

import jax

from spdf_jax.analysis import published_flops as published
from spdf_jax.analysis.flops import effective_sparsity
from spdf_jax.analysis.flops import forward_flops
from spdf_jax.analysis.flops import ModelShape
from spdf_jax.analysis.flops import shape_of
from spdf_jax.analysis.flops import softmax_flops
from spdf_jax.analysis.flops import training_flops
from spdf_jax.analysis.printed_numbers import as_printed
from spdf_jax.analysis.printed_numbers import value_of
from spdf_jax.analysis.published_flops import Row
from spdf_jax.interop.layouts import abstract_params
from spdf_jax.models import PRESETS

_EXA = 1e18
_TUNED = 512  # Tokens of a sequence in fine-tuning; 2,048 in pre-training.


class Reading(NamedTuple):
  """A way to get at a number.

  Attributes:
    value: The number.
    how: In words; `''` for ours.
    slip: Whether it would be an error: the value of another cell.
  """

  value: float
  how: str = ''
  slip: bool = False


def readings_of(source: str, row: Row, column: str) -> list[Reading]:
  """Returns all readings of a printed cell, ours first.

  Args:
    source: Of the table, see `published_flops`.
    row: What the cell is of.
    column: What stands in it.

  Returns:
    At least one reading; the value is in the unit of the cell.

  Example:
    >>> first, *others = readings_of(
    ...     'SPDF, appendix, table 3', ('gpt2-small', 'E2E'), 'FLOPs/seq')
    >>> f'{first.value:.2e}', [r.how for r in others]
    ('4.09e+11', ['the forward pass alone'])
  """
  return list(_READINGS[source](row, column))


@functools.cache
def parameters_of(preset: str) -> tuple[int, int]:
  """Returns the parameters of a preset, and those in its hidden matrices."""
  config = dataclasses.replace(PRESETS[preset], scan_layers=True)
  leaves = jax.tree.leaves(abstract_params(config))
  shape = shape_of(config)
  return (
      sum(int(x.size) for x in leaves), shape.n_layers * shape.hidden_weights
  )


def tuning_flops(preset: str, task: str) -> float:
  """Returns the FLOPs of SPDF's fine-tuning, dense, on sequences of 512."""
  shape = shape_of(PRESETS[preset])
  sequences = value_of(published.SEQUENCES[task])
  return sequences * training_flops(shape, _TUNED)


def pretraining_flops(preset: str, sparsity: float) -> float:
  """Returns the FLOPs of SPDF's pre-training."""
  tokens = value_of(published.SIZES.cell((preset,), 'tokens'))
  shape = shape_of(PRESETS[preset])
  return tokens / 2048 * training_flops(shape, 2048, sparsity)


def _sizes(row: Row, column: str) -> Iterator[Reading]:
  parameters, _ = parameters_of(row[0])
  yield Reading(parameters if column == 'parameters' else 20 * parameters)


def _pretraining(row: Row, column: str) -> Iterator[Reading]:
  preset, sparsity = row
  shape = shape_of(PRESETS[preset])
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
        value_of(published.PRETRAINING.cell(row, name))
        for name in ('sequences', 'FLOPs/seq')
    ]
    yield Reading(
        rounded[0] * rounded[1] / unit, 'the product of the rounded columns'
    )


def _exaflops(row: Row) -> float:
  return value_of(published.PRETRAINING.cell(row, 'exaFLOPs'))


def _tuning(row: Row, column: str) -> Iterator[Reading]:
  preset, task = row
  per_sequence = training_flops(shape_of(PRESETS[preset]), _TUNED)
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
  """Takes the count of sequences, which is rounded, as the cell asks for."""
  unit = 1 if column == 'FLOPs' else _EXA
  per_sequence = training_flops(shape_of(PRESETS[row[0]]), _TUNED)
  printed = published.SEQUENCES[task]
  count, half = value_of(printed), 10.0 ** (
      int(printed[-1]) - len(printed.split('e')[0].split('.')[1])
  ) / 2
  asked = value_of(published.FINE_TUNING.cell(row, column)) * unit
  asked = min(max(asked / per_sequence, count - half), count + half)
  return Reading(
      asked * per_sequence / unit,
      f'with {asked:,.0f} sequences, which are printed as {printed}',
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
      as_printed(value, printed[task]) for value in (ours, columns)
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
  printed = [value_of(published.TOTALS.cell(r, task)) for r in (dense, row)]
  yield Reading(ours)
  yield Reading(
      printed[0] / printed[1], 'the quotient of the printed totals'
  )
  yield Reading(
      _columns(dense, task) / _columns(row, task),
      "the quotient of sums of the appendix's columns",
  )
  yield Reading(int(100 * ours) / 100, 'cut, not rounded')


def _total(row: Row, task: str) -> float:
  return pretraining_flops(*row) + tuning_flops(row[0], task)


def _columns(row: Row, task: str) -> float:
  tuning = published.FINE_TUNING.cell((row[0], task), 'FLOPs')
  return _exaflops(row) + value_of(tuning) / _EXA


def _shares(row: Row, column: str) -> Iterator[Reading]:
  shape = shape_of(PRESETS[row[0]])
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


def _variable(row: Row, column: str) -> Iterator[Reading]:
  shape = shape_of(PRESETS[row[0]])
  parts = published.SPLIT_SHARES, published.SPLIT_SPARSITIES
  if column == 'effective sparsity':
    steps = [round(600 * share) for share in parts[0]]
    yield Reading(effective_sparsity(steps, parts[1], 600))
    return
  static = training_flops(shape, published.LENGTH, 0.75)
  yield Reading(_run_flops(shape, *parts) / static)


def _run_flops(
    shape: ModelShape,
    shares: tuple[float, ...],
    sparsities: tuple[float, ...],
    embedding: float = 0.0,
) -> float:
  """Returns the FLOPs of stages, for one sequence of the standard budget.

  Args:
    shape: Of the model.
    shares: Of each stage, in standard budgets.
    sparsities: Of each stage.
    embedding: In how many of the passes (forward, for inputs and for weights)
      the input embedding is counted, as a product of 2 s d V FLOPs.
  """
  length = published.LENGTH
  extra = embedding * 2 * length * shape.d_model * shape.vocab_size
  return sum(
      share * (training_flops(shape, length, sparsity) + extra)
      for share, sparsity in zip(shares, sparsities)
  )


def _variable_large(row: Row, column: str) -> Iterator[Reading]:
  shape = shape_of(PRESETS[row[0]])
  steps, levels = published.STAGE_STEPS, published.STAGE_SPARSITIES
  if column == 'effective sparsity':
    yield Reading(effective_sparsity(steps, levels, steps[0]))
    return
  shares = tuple(n / steps[0] for n in steps)
  dense = functools.partial(_run_flops, shape, (1.0,), (0.0,))
  run = functools.partial(_run_flops, shape, shares, levels)
  if column == 'fewer FLOPs':
    yield Reading(1 - run() / dense())
    yield Reading(
        1 - run(2) / dense(2),
        'the input embedding counted forward and for its weights',
    )
    yield Reading(
        1 - run(3) / dense(3), 'the input embedding counted in all passes'
    )
    split = published.SPLIT_SHARES, published.SPLIT_SPARSITIES
    yield Reading(
        1 - _run_flops(shape, *split) / dense(),
        'the split reading: 5/6 of the budget at 90%, 1/6 dense',
    )
    return
  tuning = published.DART_STEPS * published.DART_BATCH * training_flops(
      shape, _TUNED
  )
  sequences = steps[0] * published.BATCH
  yield Reading(tuning / (sequences * run()))
  yield Reading(tuning / (sequences * dense()), 'of the dense pre-training')


def _iterative(row: Row, column: str) -> Iterator[Reading]:
  preset, sparsity = row
  shape = shape_of(PRESETS[preset])
  parameters, hidden = parameters_of(preset)
  if column == 'inference FLOPs':
    forward = functools.partial(forward_flops, shape, 2048)
    yield Reading(forward() / forward(sparsity))
  elif column == 'parameters':
    yield Reading(parameters / (parameters - sparsity * hidden))
  else:
    yield Reading(1 / (1 - sparsity))


def _budgets(row: Row, column: str) -> Iterator[Reading]:
  preset, tokens = row
  parameters, _ = parameters_of(preset)
  if column == 'tokens':
    yield Reading(20 * parameters)
    return
  shape = shape_of(PRESETS[preset])
  yield Reading(tokens / 2048 * training_flops(shape, 2048))
  yield Reading(
      6 * parameters * tokens, '6 FLOPs per parameter and token, no attention'
  )


_READINGS: dict[str, Callable[[Row, str], Iterator[Reading]]] = {
    published.SIZES.source: _sizes,
    published.PRETRAINING.source: _pretraining,
    published.FINE_TUNING.source: _tuning,
    published.TOTALS.source: _totals,
    published.SHARES.source: _shares,
    published.VARIABLE.source: _variable,
    published.VARIABLE_LARGE.source: _variable_large,
    published.ITERATIVE.source: _iterative,
    published.BUDGETS.source: _budgets,
}

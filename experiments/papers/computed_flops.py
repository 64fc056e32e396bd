"""FLOPs, parameters and tokens that the papers print, computed."""

from collections.abc import Callable
import dataclasses
import functools

import jax

from experiments.papers import printed_numbers
from experiments.papers import published_flops as published
from experiments.papers.published_flops import Row
from spdf_jax.costs import flops
from spdf_jax.interop import layouts
from spdf_jax.models import PRESETS

TUNED = 512
"""Sequence length in fine-tuning: Hu et al. 2021, "LoRA"."""

_EXA = 1e18


@functools.cache
def parameters_of(preset: str) -> tuple[int, int]:
  """Returns the parameters of a preset, and those in its hidden matrices.

  Example:
    >>> parameters_of('gpt2-small')
    (125226240, 84934656)
  """
  config = dataclasses.replace(PRESETS[preset], scan_layers=True)
  leaves = jax.tree.leaves(layouts.abstract_params(config))
  return (
      sum(int(x.size) for x in leaves), config.n_layers * config.hidden_weights
  )


def tuning_flops(preset: str, task: str) -> float:
  """Returns the FLOPs of SPDF's dense fine-tuning on sequences of 512 tokens.

  Example:
    >>> f'{tuning_flops("gpt3-xl", "E2E"):.2e}'
    '5.27e+17'
  """
  sequences = printed_numbers.value_of(published.SEQUENCES[task])
  return sequences * flops.training_flops(PRESETS[preset], TUNED)


def pretraining_flops(preset: str, sparsity: float) -> float:
  """Returns the FLOPs of SPDF's pre-training.

  Example:
    >>> f'{pretraining_flops("gpt3-xl", 0.75):.2e}'
    '9.48e+19'
  """
  tokens = printed_numbers.value_of(published.SIZES.cell((preset,), 'tokens'))
  return tokens / 2048 * flops.training_flops(PRESETS[preset], 2048, sparsity)


def _sizes(row: Row, column: str) -> float:
  parameters, _ = parameters_of(row[0])
  return parameters if column == 'parameters' else 20 * parameters


def _pretraining(row: Row, column: str) -> float:
  preset, sparsity = row
  whole = pretraining_flops(preset, sparsity)
  each = flops.training_flops(PRESETS[preset], 2048, sparsity)
  return {
      'sequences': whole / each, 'FLOPs/seq': each, 'FLOPs': whole,
      'exaFLOPs': whole / _EXA,
      'of dense': whole / pretraining_flops(preset, 0.0),
  }[column]


def _tuning(row: Row, column: str) -> float:
  preset, task = row
  return {
      'FLOPs/seq': flops.training_flops(PRESETS[preset], TUNED),
      'FLOPs': tuning_flops(preset, task),
      'exaFLOPs': tuning_flops(preset, task) / _EXA,
  }[column]


def _totals(row: Row, column: str) -> float:
  preset, sparsity = row
  task = column.split()[0]
  total = lambda sparsity: (
      pretraining_flops(preset, sparsity) + tuning_flops(preset, task)
  )
  if column.endswith('speedup'):
    return total(0.0) / total(sparsity)
  return total(sparsity) / _EXA


def _shares(row: Row, column: str) -> float:
  shape = PRESETS[row[0]]
  total = flops.forward_flops(shape, 2048)
  return {
      'attention': (
          4 * shape.n_layers * 2048**2 * shape.attention_width / total
      ),
      'vocabulary': 2 * 2048 * shape.d_model * shape.vocab_size / total,
      'reduction at 75%': total / flops.forward_flops(shape, 2048, 0.75),
  }[column]


def _stages(
    preset: str, shares: tuple[float, ...], sparsities: tuple[float, ...]
) -> float:
  """Returns the FLOPs of stages, for one sequence of the standard budget.

  Args:
    preset: Name of the model.
    shares: Length of each stage, as a share of the standard budget.
    sparsities: Sparsity of each stage.
  """
  return sum(
      share * flops.training_flops(PRESETS[preset], published.LENGTH, sparsity)
      for share, sparsity in zip(shares, sparsities)
  )


def _variable(row: Row, column: str) -> float:
  shares, sparsities = published.SPLIT_SHARES, published.SPLIT_SPARSITIES
  if column == 'effective sparsity':
    steps = [round(600 * share) for share in shares]
    return flops.effective_sparsity(steps, sparsities, 600)
  return _stages(row[0], shares, sparsities) / _stages(row[0], (1.0,), (0.75,))


def _variable_large(row: Row, column: str) -> float:
  steps, sparsities = published.STAGE_STEPS, published.STAGE_SPARSITIES
  if column == 'effective sparsity':
    return flops.effective_sparsity(steps, sparsities, steps[0])
  shares = tuple(n / steps[0] for n in steps)
  run = _stages(row[0], shares, sparsities)
  if column == 'fewer FLOPs':
    return 1 - run / _stages(row[0], (1.0,), (0.0,))
  return large_tuning_flops() / (steps[0] * published.BATCH * run)


def large_tuning_flops() -> float:
  """Returns the FLOPs of the fine-tuning of Variable SPDF's large model."""
  return published.DART_STEPS * published.DART_BATCH * flops.training_flops(
      PRESETS[published.V_LARGE], TUNED
  )


def _iterative(row: Row, column: str) -> float:
  preset, sparsity = row
  parameters, hidden = parameters_of(preset)
  forward = functools.partial(flops.forward_flops, PRESETS[preset], 2048)
  return {
      'inference FLOPs': forward() / forward(sparsity),
      'parameters': parameters / (parameters - sparsity * hidden),
      'weights': 1 / (1 - sparsity),
  }[column]


def _budgets(row: Row, column: str) -> float:
  preset, tokens = row
  if column == 'tokens':
    return 20 * parameters_of(preset)[0]
  return tokens / 2048 * flops.training_flops(PRESETS[preset], 2048)


VALUES: dict[str, Callable[[Row, str], float]] = {
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
"""Functions of row and column that compute a cell, by the source of a table."""

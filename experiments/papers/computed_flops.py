"""FLOPs, parameters and tokens that the papers print, computed."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax

from spdf_jax.costs import flops
from spdf_jax.interop import layouts
from spdf_jax.models import PRESETS

SMALL, XL = 'gpt2-small', 'gpt3-xl'
TOKENS = {SMALL: 2.5e9, XL: 26e9}
"""Tokens of SPDF's pre-training."""
SEQUENCES = {
    'E2E': 1.26e5, 'WebNLG': 0.54e5, 'DART': 1.25e5, 'Curation': 0.34e5,
}
"""Column "Total Seq" of SPDF's table 3: sequences read in fine-tuning."""
PRETRAINED = tuple((name, s) for name in (SMALL, XL) for s in (0.0, 0.5, 0.75))
"""Models and sparsities of SPDF."""
TUNED = 512
"""Sequence length in fine-tuning: Hu et al. 2021, "LoRA"."""

V_SMALL, V_LARGE = 'cerebras-gpt-256m', 'cerebras-gpt-6.7b'
STAGE_STEPS, STAGE_SPARSITIES = (62_523, 9_379), (0.9, 0.0)
"""Steps and sparsities of the stages of Variable SPDF's extended 6.7B run. The
post does not print them; they are those of its configs in Cerebras' model zoo.
Stage 1 is the standard budget."""
SPLIT_SHARES, SPLIT_SPARSITIES = (5 / 6, 1 / 6), (0.9, 0.0)
"""Shares of the standard budget and sparsities of the stages: with 90 % in the
first one, the effective sparsity is 75 %."""
BATCH, LENGTH = 1040, 2048
DART_STEPS, DART_BATCH = 1938, 32
"""Batch sizes, sequence length and steps of the 6.7B run and of its
fine-tuning, from the same configs."""

PRUNED = 'gpt3-1.3b'
PRUNED_SPARSITY = 0.838
"""Model of the post on iterative pruning, and its last sparsity."""

_EXA = 1e18

Setting = str | float
"""Sparsity, task, plan or number of tokens of a row; empty if it has none."""


@functools.cache
def parameters_of(preset: str) -> tuple[int, int]:
  """Counts the parameters of a preset, and those in its hidden matrices.

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
  return SEQUENCES[task] * flops.training_flops(PRESETS[preset], TUNED)


def pretraining_flops(preset: str, sparsity: float) -> float:
  """Returns the FLOPs of SPDF's pre-training.

  Example:
    >>> f'{pretraining_flops("gpt3-xl", 0.75):.2e}'
    '9.48e+19'
  """
  return TOKENS[preset] / 2048 * flops.training_flops(
      PRESETS[preset], 2048, sparsity
  )


def _sizes(preset: str, _: Setting, column: str) -> float:
  parameters, _ = parameters_of(preset)
  return parameters if column == 'parameters' else 20 * parameters


def _pretraining(preset: str, sparsity: float, column: str) -> float:
  whole = pretraining_flops(preset, sparsity)
  each = flops.training_flops(PRESETS[preset], 2048, sparsity)
  return {
      'sequences': whole / each, 'FLOPs/seq': each, 'FLOPs': whole,
      'exaFLOPs': whole / _EXA,
      'of dense': whole / pretraining_flops(preset, 0.0),
  }[column]


def _tuning(preset: str, task: str, column: str) -> float:
  return {
      'FLOPs/seq': flops.training_flops(PRESETS[preset], TUNED),
      'FLOPs': tuning_flops(preset, task),
      'exaFLOPs': tuning_flops(preset, task) / _EXA,
  }[column]


def _totals(preset: str, sparsity: float, column: str) -> float:
  task = column.split()[0]
  total = lambda sparsity: (
      pretraining_flops(preset, sparsity) + tuning_flops(preset, task)
  )
  if column.endswith('speedup'):
    return total(0.0) / total(sparsity)
  return total(sparsity) / _EXA


def _shares(preset: str, _: Setting, column: str) -> float:
  shape = PRESETS[preset]
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
      share * flops.training_flops(PRESETS[preset], LENGTH, sparsity)
      for share, sparsity in zip(shares, sparsities)
  )


def _variable(preset: str, _: Setting, column: str) -> float:
  shares, sparsities = SPLIT_SHARES, SPLIT_SPARSITIES
  if column == 'effective sparsity':
    steps = [round(600 * share) for share in shares]
    return flops.effective_sparsity(steps, sparsities, 600)
  return _stages(preset, shares, sparsities) / _stages(preset, (1.0,), (0.75,))


def _variable_large(preset: str, _: Setting, column: str) -> float:
  steps, sparsities = STAGE_STEPS, STAGE_SPARSITIES
  if column == 'effective sparsity':
    return flops.effective_sparsity(steps, sparsities, steps[0])
  shares = tuple(n / steps[0] for n in steps)
  run = _stages(preset, shares, sparsities)
  if column == 'fewer FLOPs':
    return 1 - run / _stages(preset, (1.0,), (0.0,))
  return large_tuning_flops() / (steps[0] * BATCH * run)


def large_tuning_flops() -> float:
  """Returns the FLOPs of the fine-tuning of Variable SPDF's large model."""
  return DART_STEPS * DART_BATCH * flops.training_flops(
      PRESETS[V_LARGE], TUNED
  )


def _iterative(preset: str, sparsity: float, column: str) -> float:
  parameters, hidden = parameters_of(preset)
  forward = functools.partial(flops.forward_flops, PRESETS[preset], 2048)
  return {
      'inference FLOPs': forward() / forward(sparsity),
      'parameters': parameters / (parameters - sparsity * hidden),
      'weights': 1 / (1 - sparsity),
  }[column]


def _budgets(preset: str, tokens: float, column: str) -> float:
  if column == 'tokens':
    return 20 * parameters_of(preset)[0]
  return tokens / 2048 * flops.training_flops(PRESETS[preset], 2048)


VALUES: dict[str, Callable[[str, Any, str], float]] = {
    'SPDF, appendix, table 1': _sizes,
    'SPDF, appendix, table 2': _pretraining,
    'SPDF, appendix, table 3': _tuning,
    'SPDF, table 2': _totals,
    'SPDF, section 3.5': _shares,
    'Variable SPDF, "Improves over SPDF"; appendix, table 5': _variable,
    'Variable SPDF, "Scaling" and figure 5': _variable_large,
    'Iterative pruning, text and figure 3': _iterative,
    'Iterative pruning, introduction and method': _budgets,
}
"""Functions of model, setting and column that compute a cell, by the source of
a table in `printed_flops.csv`."""

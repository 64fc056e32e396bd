"""Variants of the wafer model: possible explanations of its largest errors."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

from experiments.wafer import validation
from experiments.wafer.validation import Training
from spdf_jax import names
from spdf_jax.accelerator import wafer
from spdf_jax.accelerator.wafer import program as programs
from spdf_jax.accelerator.wafer.program import Program

_PER_STEP = 0.598, 1.18
_PER_WEIGHT = 0.598, 0.097, 0.19e-9
_MICRO_BATCH = 64


class Variant(NamedTuple):
  """A change of the model for training.

  Attributes:
    reason: What the change assumes, and what is printed about it.
    seconds: Function from a training to the time of a step.
  """

  reason: str
  seconds: Callable[[Training], float]


def _timed(
    training: Training, program: Program | None = None, **changes: Any
) -> float:
  device = wafer.create_device(training.device, **changes)
  program = program or validation.training_of(training)
  return float(wafer.report_on(program, device, training.systems).seconds)


def _shorter(training: Training) -> float:
  return _timed(training._replace(length=min(training.length, 2048)))


def _micro(training: Training) -> float:
  parts = math.ceil(training.batch / training.systems / _MICRO_BATCH)
  parts = parts if training.length >= 2048 else 1
  program = validation.training_of(training)
  return _timed(training, programs.in_micro_batches(program, parts))


def _per_step(training: Training) -> float:
  efficiency, seconds = _PER_STEP
  return _timed(training, efficiency=efficiency, step_seconds=seconds)


def _per_weight(training: Training) -> float:
  efficiency, seconds, per_weight = _PER_WEIGHT
  weights = training.shape.n_layers * training.shape.hidden_weights
  seconds += per_weight * weights
  return _timed(training, efficiency=efficiency, step_seconds=seconds)


VARIANTS = {
    'model': Variant('the model as it is', _timed),
    'length': Variant(
        'sequences of at most 2,048 tokens; 4,096 is the printed limit of the '
        'config, the log does not print the length', _shorter,
    ),
    'micro_batches': Variant(
        'micro-batches of 64 sequences, each with its own stream of weights; '
        '1,024 do not fit, and 99 of LLaMA-7B are printed to take one', _micro,
    ),
    'attention': Variant(
        'attention at full peak speed instead of half',
        lambda training: _timed(training, attention_efficiency=1.0),
    ),
    'clock': Variant(
        "1.1 GHz, from which the vendor's peak is computed",
        lambda training: _timed(training, clock=1.1e9),
    ),
    'per_step': Variant(
        'a constant time per step instead of per token: efficiency 0.598 and '
        '1.18 s, fitted to the two points of the CS-3', _per_step,
    ),
    'per_weight': Variant(
        'the same, with 0.097 s and 0.19 s per 1e9 weights of the blocks, '
        'fitted to 0, 1 and 4', _per_weight,
    ),
}
"""Variants of trainings by name."""


def variants_table(name: str) -> str:
  """Formats the errors of the model's variants on all published trainings.

  Args:
    name: A key of `VARIANTS`, `'gemm'` for the dense product, or `'all'`.

  Returns:
    A text of several lines.

  Raises:
    ValueError: the name is unknown.

  Example:
    >>> print(variants_table('clock').splitlines()[-1].split()[0])
    clock
  """
  names.lookup('variant', name, dict.fromkeys((*VARIANTS, 'gemm', 'all')))
  if name == 'gemm':
    return _gemm_table()
  chosen = VARIANTS if name == 'all' else {name: VARIANTS[name]}
  trainings = validation.TRAININGS
  lines = ['errors of the speed of trainings, by variant of the model']
  lines += [f'  {i}: {t.name}' for i, t in enumerate(trainings)]
  header = ''.join(f'{i:>8}' for i in range(len(trainings)))
  lines.append(f'{"variant":<15}{header}  assumption')
  for label, variant in chosen.items():
    errors = [t.batch / variant.seconds(t) / t.printed - 1 for t in trainings]
    numbers = ''.join(f'{error:>+8.1%}' for error in errors)
    lines.append(f'{label:<15}{numbers}  {variant.reason}')
  if name == 'all':
    lines += ['', _gemm_table()]
  return '\n'.join(lines)


def _gemm_table() -> str:
  """Formats the errors of the dense fp32 product's variants."""
  size, cores = validation.GEMM_SIZE, validation.GEMM_CORES
  rate, seconds = validation.GEMM_RATE, validation.gemm_seconds
  flops = 2 * size**3
  printed = flops / rate
  side = size // cores
  vectors = cores * side**2 / wafer.create_device('cs2').clock
  needed = (printed - seconds()) / vectors
  # The two tiles arrive one after the other, after passing half of the cores in
  # a row.
  tiles = 2 * (side**2 + cores / 2)
  seconds_of = {
      'the kernel law': seconds(),
      'and the transport of both tiles, not overlapped': seconds(exposed=tiles),
      f'and {needed:.1f} more cycles per vector (fitted)': seconds(needed),
  }
  lines = [
      f'fp32 GEMM, {size:,} squared on {cores} x {cores} cores: '
      f'{rate / 1e12:.0f} TF printed'
  ]
  lines += [
      f'{label:<50}{flops / t / 1e12:>7.0f} TF{printed / t - 1:>+8.1%}'
      for label, t in seconds_of.items()
  ]
  return '\n'.join(lines)

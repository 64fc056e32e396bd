"""Validation: the errors of the model on published numbers."""

from typing import NamedTuple

import numpy as np

from experiments.wafer import sweeps
from experiments.wafer.training_step import training_step
from spdf_jax.accelerator import wafer
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.models import DecoderConfig
from spdf_jax.models import GPTConfig
from spdf_jax.models import PRESETS

_ALCF = 'ALCF user guides, history'
_SPDF = 'SPDF, appendix A.4'
_GEMM = 'IPSJ JIP 34:132'
GPT_J = GPTConfig(50400, 28, 16, 4096, 16384, 2048)
LLAMA_7B = PRESETS['llama2-7b']
BERT_LARGE = GPTConfig(30522, 24, 16, 1024, 4096, 512)
GPT2_SMALL = PRESETS['gpt2-small']
GPT3_XL = PRESETS['gpt3-xl']
SPMM = (
    (48, 6, 68, 4974336, 16974),
    (48, 24, 68, 21620736, 18306),
    (192, 6, 68, 21620736, 18304),
    (64, 8, 68, 8912896, 17002),
    (64, 32, 68, 41500672, 19522),
    (256, 8, 68, 38993920, 18442),
    (64, 12, 132, 21086208, 22101),
    (64, 48, 132, 92454912, 24154),
    (256, 12, 132, 85155840, 22298),
    (64, 8, 68, 17059840, 31044),
    (64, 32, 68, 69910528, 31889),
    (256, 8, 68, 69910528, 31886),
    (48, 32, 260, 83865600, 38412),
    (48, 128, 260, 322682880, 37094),
    (192, 32, 260, 348241920, 39804),
    (128, 16, 132, 74072064, 28570),
    (128, 64, 132, 300613632, 29026),
    (512, 16, 132, 291962880, 28280),
    (96, 24, 260, 123402240, 37798),
    (96, 96, 260, 517570560, 39455),
    (384, 24, 260, 507985920, 38844),
    (128, 32, 260, 215121920, 37020),
    (128, 128, 260, 920125440, 39455),
    (512, 32, 260, 920125440, 39455),
)
"""Cycles of a sparse matmul on a WSE-2, counted by its authors.

Numbers from benchmarks/COO_benchmark.csv of github.com/pr0f3ss/SpMM_Cerebras
(ETH Zürich, 2022), simulated with the SDK for one core's share each: columns of
cores, rows of cores, dense columns M, FLOPs of all cores, mean cycles.
"""

GEMM_SIZE = 33_000
"""Rows and columns of the matrices of a published dense product."""
GEMM_CORES = 750
"""Rows and columns of cores that compute the product."""
GEMM_RATE = 349e12
"""Published speed of the product in FLOP/s."""


class Training(NamedTuple):
  """A published training speed.

  Attributes:
    name: Model, systems and batch.
    shape: Sizes of the model.
    batch: Number of sequences.
    length: Number of tokens of each sequence.
    device: `'cs2'` or `'cs3'`.
    systems: Number of systems.
    printed: Published sequences per second.
    use: Use of the number, as in `Point`.
    predicted: Fraction of the tokens to which the head is applied.
  """

  name: str
  shape: DecoderConfig
  batch: int
  length: int
  device: str
  systems: int
  printed: float
  use: str
  predicted: float = 1.0


TRAININGS = (
    Training(
        'GPT-J 6B, 2 CS-2, batch 120 x 2048', GPT_J, 120, 2048, 'cs2', 2,
        43.67, 'calibrates efficiency',
    ),
    Training(
        'BERT-large, CS-2, batch 1024 x 128', BERT_LARGE, 1024, 128, 'cs2', 1,
        4044, 'calibrates step_seconds',
        predicted=20 / 128,  # The head is applied to the masked tokens only.
    ),
    Training(
        'LLaMA-7B, CS-2, batch 99 x 2048', LLAMA_7B, 99, 2048, 'cs2', 1, 20.45,
        'held out',
    ),
    Training(
        'GPT-J 6B, CS-3, batch 120 x 2048', GPT_J, 120, 2048, 'cs3', 1, 44.75,
        'held out',
    ),
    Training(
        'Llama2-7B, CS-3, batch 1024 x 4096', LLAMA_7B, 1024, 4096, 'cs3', 1,
        31.98, 'held out, unexplained',
    ),
)
"""Published speeds of dense training, from logs of the ALCF."""


class Point(NamedTuple):
  """A published number and the prediction of the model.

  Attributes:
    name: Measured or counted quantity.
    unit: Unit of both numbers.
    printed: Published number.
    model: Prediction of the model.
    use: `'held out'`, `'in sample'` (the kernel law was fitted to it),
      `'calibrates …'` (it determined a constant), `'bound'` (the model has only
      a bound of it) or `'count'`.
    source: Publication of the number.
  """

  name: str
  unit: str
  printed: float
  model: float
  use: str
  source: str

  @property
  def error(self) -> float:
    """Relative error of the model."""
    return self.model / self.printed - 1


def spmm_cycles(nonzeros: float, tokens: float) -> float:
  """Returns the cycles of a core in a sparse matmul written with the SDK.

  The kernel dispatches in software, which takes 38.8 cycles, and multiplies in
  float32. The linear law is fitted to `SPMM`.

  Args:
    nonzeros: Number of non-zeros of one core.
    tokens: Number of columns of the dense matrix.

  Returns:
    Number of cycles.

  Example:
    >>> round(spmm_cycles(100, 260))
    36744
  """
  return nonzeros * (38.8 + 1.199 * tokens) + 1690


def gemm_seconds(dispatch: float = 0.0, exposed: float = 0.0) -> float:
  """Returns the time of the published dense product on 750 x 750 cores.

  Matrices of 33,000 squared are split into tiles of 44 squared; each core
  multiplies one pair of tiles for each column of cores.

  Args:
    dispatch: Cycles per vector operation in addition to those of `spmm_cycles`.
    exposed: Cycles per pair of tiles in which cores wait for them.

  Returns:
    Seconds.

  Example:
    >>> f'{2 * 33_000**3 / gemm_seconds() / 1e12:.0f} TF'
    '455 TF'
  """
  side = GEMM_SIZE // GEMM_CORES
  cycles = spmm_cycles(side**2, side) + side**2 * dispatch + exposed
  return GEMM_CORES * cycles / wafer.create_device('cs2').clock


def validation_points() -> list[Point]:
  """Returns all points; the constants of the model are not fitted here.

  Example:
    >>> points = {p.name: p for p in validation_points()}
    >>> f"{points['LLaMA-7B, CS-2, batch 99 x 2048'].error:+.1%}"
    '-1.7%'
  """
  return [*_flops(), *_kernels(), *_trainings(), _cluster()]


def validation_table() -> str:
  """Formats all points as text.

  Example:
    >>> print(validation_table().splitlines()[0].split()[0])
    point
  """
  lines = [
      f'{"point":<46}{"printed":>11}{"model":>11}{"error":>8}  use; source'
  ]
  for p in validation_points():
    lines.append(
        f'{p.name:<46}{p.printed:>11,.4g}{p.model:>11,.4g}{p.error:>+8.1%}  '
        f'{p.unit}; {p.use}; {p.source}'
    )
  return '\n'.join(lines + [
      'The measured series of Appendix C of SPDF is not printed in numbers: '
      'not available.',
  ])


def _flops() -> list[Point]:
  printed = (
      (GPT2_SMALL, 'GPT-2 Small', (1.99e12, 1.47e12, 1.20e12)),
      (GPT3_XL, 'GPT-3 XL', (1.86e13, 1.12e13, 7.46e12)),
  )
  points = []
  for shape, name, values in printed:
    for sparsity, value in zip((0.0, 0.5, 0.75), values):
      step = training_step(shape, 1, 2048, sparsity)
      report = wafer.report_on(step, wafer.create_device('cs2', 'ideal'))
      # The paper does not count elementwise operations.
      flops = report.flops - report.by_operation()['elementwise'].flops
      points.append(Point(
          f'{name}, {sparsity:.0%} zeros, one sequence', 'FLOPs', value,
          flops, 'count', _SPDF,
      ))
  return points


def _kernels() -> list[Point]:
  width, height, tokens, flops, cycles = np.array(SPMM, float).T
  nonzeros = flops / (width * height) / (2 * tokens)
  ratios = spmm_cycles(nonzeros, tokens) / cycles
  worst = int(np.argmax(np.abs(ratios - 1)))
  device = wafer.create_device('cs2')
  gemm = 2 * GEMM_SIZE**3 / gemm_seconds()
  return [
      Point(
          'SpMM on a WSE-2, the worst of 24 shapes', 'cycles', cycles[worst],
          cycles[worst] * ratios[worst], 'in sample', 'pr0f3ss/SpMM_Cerebras',
      ),
      Point(
          'fp32 GEMM, 33,000 squared on 750 x 750 cores', 'FLOP/s',
          GEMM_RATE, gemm, 'held out', _GEMM,
      ),
      Point(
          'the same at the energy per FLOP of peak speed', 'FLOP/J', 79.66e9,
          1 / device.energy_per_flop, 'bound', _GEMM,
      ),
      Point(
          'the same at peak power', 'FLOP/J', 79.66e9, gemm / device.power,
          'bound', _GEMM,
      ),
  ]


def training_of(training: Training) -> Program:
  """Returns a step of a published training."""
  return training_step(
      training.shape, training.batch, training.length,
      predicted=training.predicted,
  )


def _trainings() -> list[Point]:
  points = []
  for training in TRAININGS:
    device = wafer.create_device(training.device)
    report = wafer.report_on(training_of(training), device, training.systems)
    speed = training.batch / report.seconds
    points.append(Point(
        training.name, 'seq/s', training.printed, speed, training.use, _ALCF
    ))
  return points


def _cluster() -> Point:
  step = training_step(GPT_J, 120, 2048)
  speedup, = sweeps.weak_scaling(step, wafer.create_device('cs3'), [16])
  return Point(
      '16 CS-3 over one', 'x', 15.3, speedup, 'calibrates scaling_loss',
      'Sandia Kingfisher',
  )

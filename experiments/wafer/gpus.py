"""GPUs for comparison: rooflines from their data sheets.

Unstructured sparsity gives GPUs no speedup; 2:4 sparsity doubles the peak of
products with weights. The rooflines assume no overhead, full bandwidth and
perfect scaling, so real programs take longer.
"""

from typing import NamedTuple

from spdf_jax import names
from spdf_jax.accelerator.wafer.program import Product
from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.program import ScoreProduct
from spdf_jax.accelerator.wafer.program import Work


class Gpu(NamedTuple):
  """A GPU by its data sheet.

  Attributes:
    name: Name of the GPU.
    dense_flops: Dense bf16 or fp16 FLOP/s with tensor cores.
    two_of_four_flops: FLOP/s with 2:4 sparsity.
    bandwidth: Memory bandwidth, bytes/s.
    power: Power, W.
    source: Name of the data sheet.
  """

  name: str
  dense_flops: float
  two_of_four_flops: float
  bandwidth: float
  power: float
  source: str


GPUS = {
    'v100': Gpu(
        'V100 SXM2 32GB', 125e12, 125e12, 0.9e12, 300,
        'NVIDIA V100 data sheet, 2020; no 2:4 sparsity',
    ),
    'a100': Gpu(
        'A100 SXM 80GB', 312e12, 624e12, 2.039e12, 400,
        'NVIDIA A100 data sheet, 2021',
    ),
    'h100': Gpu(
        'H100 SXM', 989.4e12, 1978.9e12, 3.35e12, 700,
        'NVIDIA H100 data sheet, 2023',
    ),
    'h200': Gpu(
        'H200 SXM', 989.4e12, 1978.9e12, 4.8e12, 700,
        'NVIDIA H200 data sheet, 2024',
    ),
}
"""GPUs by name."""


def roofline_seconds(
    program: Program, gpu: str, *, two_of_four: bool = False, count: int = 1
) -> float:
  """Returns the roofline time of a program on GPUs.

  Args:
    program: Program to run; pruned weights are multiplied like all others.
    gpu: A key of `GPUS`.
    two_of_four: Whether products with hidden weights have 2:4 sparsity.
    count: Number of GPUs over which all work is split.

  Returns:
    Seconds: the sum over operations of the larger of two times, FLOPs at the
    peak and 16-bit values at full bandwidth; elementwise operations cost
    nothing, as they are fused.

  Raises:
    ValueError: the GPU is unknown.

  Example:
    >>> from experiments.wafer.training_step import training_step
    >>> from spdf_jax.models import PRESETS
    >>> xl = PRESETS['gpt3-xl']
    >>> dense, sparse = (
    ...     roofline_seconds(training_step(xl, 64, 2048, s), 'h100')
    ...     for s in (0.0, 0.75))
    >>> dense == sparse
    True
  """
  device = names.lookup('gpu', gpu, GPUS)
  seconds = 0.0
  for operation in program.operations:
    flops, numbers = _dense(operation.work)
    # Only masked matrices have the structure, so the head stays dense.
    masked = getattr(operation.work, 'sparsity', 0.0) > 0
    structured = two_of_four and masked
    peak = device.two_of_four_flops if structured else device.dense_flops
    longest = max(flops / peak, 2 * numbers / device.bandwidth)
    seconds += operation.count * longest
  return seconds / count


def comparison_table(program: Program, count: int = 1) -> str:
  """Formats the roofline times of a program on all GPUs.

  Args:
    program: Program to run.
    count: Number of GPUs of each kind.

  Returns:
    A text with one line for each GPU.

  Example:
    >>> print(comparison_table(Program()).splitlines()[1].split()[0])
    V100
  """
  lines = [
      f'lower bounds of the time on {count} GPUs (rooflines of data sheets; '
      'unstructured sparsity gives no speedup):'
  ]
  for name, gpu in GPUS.items():
    dense, structured = (
        roofline_seconds(program, name, two_of_four=s, count=count)
        for s in (False, True)
    )
    lines.append(
        f'{gpu.name:<14} {dense:.4g} s, with 2:4 in masked matrices '
        f'{structured:.4g} s'
    )
  return '\n'.join(lines)


def _dense(work: Work) -> tuple[float, float]:
  """Returns dense FLOPs, and the number of values read and written."""
  if isinstance(work, Product):
    numbers = work.tokens * (work.inputs + work.outputs)
    numbers += work.inputs * work.outputs
    return 2.0 * work.tokens * work.inputs * work.outputs, numbers
  if isinstance(work, ScoreProduct):
    return 2.0 * work.multiply_adds, 0.0
  return 0.0, 0.0

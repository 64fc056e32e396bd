"""Devices to compare with, from their data sheets, at their best.

On them unstructured zeros save nothing; 2:4 sparsity doubles the peak of
products of weights. Times are a roofline: no overhead, full bandwidth, perfect
scaling. They flatter these devices.
"""

from typing import NamedTuple

from spdf_jax.accelerator.wafer.program import Program
from spdf_jax.accelerator.wafer.work import Product
from spdf_jax.accelerator.wafer.work import Scores
from spdf_jax.accelerator.wafer.work import Work
from spdf_jax.names import lookup


class Gpu(NamedTuple):
  """A GPU by its data sheet.

  Attributes:
    name: What it is called.
    dense_flops: bf16 or fp16 with tensor cores, FLOP/s.
    two_of_four_flops: With 2:4 sparsity, FLOP/s.
    bandwidth: Of its memory, bytes/s.
    power: W.
    source: The data sheet.
  """

  name: str
  dense_flops: float
  two_of_four_flops: float
  bandwidth: float
  power: float
  source: str


GPUS = {
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
  """Returns the least time that a program's operations take on a GPU.

  Args:
    program: What is asked for; its zeros are multiplied like the rest.
    gpu: A key of `GPUS`.
    two_of_four: Whether products of hidden weights have 2:4 sparsity.
    count: GPUs, among which all work is split.

  Returns:
    Seconds: for each operation the longer of FLOPs at the peak and bytes at
    full bandwidth, 16 bits each; elementwise operations are taken for fused.

  Raises:
    ValueError: the GPU is unknown.

  Example:
    >>> from spdf_jax.accelerator.wafer.decoders import Decoder
    >>> from spdf_jax.accelerator.wafer.decoders import training_step
    >>> xl = Decoder(24, 2048, 8192, 16, 50257)
    >>> dense, sparse = (
    ...     roofline_seconds(training_step(xl, 64, 2048, d), 'h100')
    ...     for d in (1.0, 0.25))
    >>> dense == sparse
    True
  """
  device = lookup('gpu', gpu, GPUS)
  seconds = 0.0
  for operation in program.operations:
    flops, numbers = _dense(operation.work)
    # Only masked matrices can have the structure: the head has none.
    masked = getattr(operation.work, 'density', 1.0) < 1
    structured = two_of_four and masked
    peak = device.two_of_four_flops if structured else device.dense_flops
    longest = max(flops / peak, 2 * numbers / device.bandwidth)
    seconds += operation.count * longest
  return seconds / count


def comparison_table(program: Program, count: int = 1) -> str:
  """Writes the least times of a program on all GPUs.

  Args:
    program: What is asked for.
    count: GPUs of each kind.

  Returns:
    Text.

  Example:
    >>> print(comparison_table(Program()).splitlines()[1].split()[0])
    A100
  """
  lines = [
      f'at most this fast on {count} of them (rooflines of data sheets; '
      'unstructured zeros gain nothing):'
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
  """Returns FLOPs, zeros included, and numbers read and written."""
  if isinstance(work, Product):
    numbers = work.tokens * (work.inputs + work.outputs)
    numbers += work.inputs * work.outputs
    return 2.0 * work.tokens * work.inputs * work.outputs, numbers
  if isinstance(work, Scores):
    return 2.0 * work.multiply_adds, 0.0
  return 0.0, 0.0

"""The model against printed numbers: errors shown, the bad ones included."""

from typing import NamedTuple

import numpy as np

from spdf_jax.accelerator.wafer.decoders import Decoder
from spdf_jax.accelerator.wafer.decoders import training_step
from spdf_jax.accelerator.wafer.device import create_device
from spdf_jax.accelerator.wafer.report import report_on
from spdf_jax.accelerator.wafer.scaling import weak_scaling
from spdf_jax.accelerator.wafer.spmm_data import SPMM

_ALCF = 'ALCF user guides, history'
_SPDF = 'SPDF, appendix A.4'
GPT_J = Decoder(28, 4096, 16384, 16, 50400)
LLAMA_7B = Decoder(32, 4096, 11008, 32, 32000, gated=True)
# The head sees the masked tokens only: 20 of 128.
BERT_LARGE = Decoder(24, 1024, 4096, 16, 30522, predicted=20 / 128)
GPT2_SMALL = Decoder(12, 768, 3072, 12, 50257)
GPT3_XL = Decoder(24, 2048, 8192, 16, 50257)


class Point(NamedTuple):
  """A printed number, and the model's.

  Attributes:
    name: What was measured or counted.
    unit: Of both numbers.
    printed: The printed number.
    model: The model's.
    use: `'held out'`, `'in sample'` (the law was fitted to it), `'calibrates
      …'` (a constant was set by it) or `'count'`.
    source: Where it is printed.
  """

  name: str
  unit: str
  printed: float
  model: float
  use: str
  source: str

  @property
  def error(self) -> float:
    """The model's relative error."""
    return self.model / self.printed - 1


def spmm_cycles(nonzeros: float, tokens: float) -> float:
  """Returns the cycles of a core in a sparse matmul written with the SDK.

  A software kernel: its dispatch takes 38.8 cycles, and it multiplies in
  float32. The law is fitted to `spmm_data`.

  Args:
    nonzeros: Of the core.
    tokens: Columns of the dense matrix.

  Returns:
    Cycles.

  Example:
    >>> round(spmm_cycles(100, 260))
    36744
  """
  return nonzeros * (38.8 + 1.199 * tokens) + 1690


def reduce_cycles(
    columns: int, energy: float, links: float, latency: float, depth: float,
    ramp: float,
) -> float:
  """Returns the cycles of a reduction over a wafer's mesh, by its formula.

  Args:
    columns: C, contention at the busiest core.
    energy: E, wavelets times hops.
    links: N, links that carry them.
    latency: L, hops of the longest path.
    depth: D, cores that add one after another.
    ramp: T_R, cycles between a core and its router.

  Returns:
    max(C, E / N + L) + (2 T_R + 1) D.

  Source: arXiv 2404.15888, whose measurements are within 4 % of it; not
  recomputed here.

  Example:
    >>> reduce_cycles(256, 1024, 4, 3, 2, 2)
    269.0
  """
  return max(columns, energy / links + latency) + (2 * ramp + 1) * depth


def validation_points() -> list[Point]:
  """Computes all points; nothing is fitted here.

  Returns:
    The points.

  Example:
    >>> points = {p.name: p for p in validation_points()}
    >>> f"{points['LLaMA-7B, CS-2, batch 99 x 2048'].error:+.1%}"
    '-1.7%'
  """
  return [*_flops(), *_kernels(), *_trainings(), _cluster()]


def validation_table() -> str:
  """Writes all points as text.

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
  found = []
  for decoder, name, values in printed:
    for density, value in zip((1.0, 0.5, 0.25), values):
      step = training_step(decoder, 1, 2048, density)
      report = report_on(step, create_device('cs2', 'ideal'))
      # The papers do not count elementwise operations.
      flops = report.flops - report.by_operation()['elementwise'].flops
      found.append(Point(
          f'{name}, {1 - density:.0%} zeros, one sequence', 'FLOPs', value,
          flops, 'count', _SPDF,
      ))
  return found


def _kernels() -> list[Point]:
  width, height, tokens, flops, cycles = np.array(SPMM, float).T
  nonzeros = flops / (width * height) / (2 * tokens)
  ratios = spmm_cycles(nonzeros, tokens) / cycles
  worst = int(np.argmax(np.abs(ratios - 1)))
  side = 33_000 // 750
  # Each core multiplies tiles of side x side, once for each column of cores.
  seconds = 750 * spmm_cycles(side**2, side) / create_device('cs2').clock
  return [
      Point(
          'SpMM on a WSE-2, the worst of 24 shapes', 'cycles', cycles[worst],
          cycles[worst] * ratios[worst], 'in sample', 'pr0f3ss/SpMM_Cerebras',
      ),
      Point(
          'fp32 GEMM, 33,000 squared on 750 x 750 cores', 'FLOP/s', 349e12,
          2 * 33_000.0**3 / seconds, 'held out', 'IPSJ JIP 34:132',
      ),
  ]


def _trainings() -> list[Point]:
  rows: tuple[tuple[str, Decoder, int, int, str, int, float, str], ...] = (
      ('GPT-J 6B, 2 CS-2, batch 120 x 2048', GPT_J, 120, 2048, 'cs2', 2, 43.67,
       'calibrates efficiency'),
      ('BERT-large, CS-2, batch 1024 x 128', BERT_LARGE, 1024, 128, 'cs2', 1,
       4044, 'calibrates step_seconds'),
      ('LLaMA-7B, CS-2, batch 99 x 2048', LLAMA_7B, 99, 2048, 'cs2', 1, 20.45,
       'held out'),
      ('GPT-J 6B, CS-3, batch 120 x 2048', GPT_J, 120, 2048, 'cs3', 1, 44.75,
       'held out'),
      ('Llama2-7B, CS-3, batch 1024 x 4096', LLAMA_7B, 1024, 4096, 'cs3', 1,
       31.98, 'held out, unexplained'),
  )
  found = []
  for name, decoder, batch, length, device, systems, printed, use in rows:
    step = training_step(decoder, batch, length)
    seconds = report_on(step, create_device(device), systems).seconds
    found.append(
        Point(name, 'seq/s', printed, batch / seconds, use, _ALCF)
    )
  return found


def _cluster() -> Point:
  step = training_step(GPT_J, 120, 2048)
  point = weak_scaling(step, create_device('cs3'), [16])[0]
  return Point(
      '16 CS-3 over one', 'x', 15.3, point.speedup, 'calibrates scaling_loss',
      'Sandia Kingfisher',
  )

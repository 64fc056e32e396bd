"""Benchmark suites of `python -m experiments.benchmark`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.benchmarks import auto
from experiments.benchmarks import decode
from experiments.benchmarks import matmul
from experiments.benchmarks import model
from experiments.benchmarks import optimizer
from experiments.benchmarks import primitives
from experiments.benchmarks import profiles
from experiments.benchmarks import pytorch
from experiments.benchmarks import skip_zeros
from experiments.benchmarks import topk
from experiments.benchmarks import train_step
from experiments.benchmarks.measuring import Row


class Suite(NamedTuple):
  """A suite: its measurement, and the number of rounds."""

  measure: Callable[[int, np.random.Generator], Iterable[Row]]
  """`(repeats, rng) -> rows`, yielded as they are measured."""

  repeats: int
  """Default rounds of timing, which take a few minutes."""

  plot: Callable[[Sequence[Row]], Any] | None = None
  """`rows -> figure`, which is saved beside the table."""


SUITES = {
    'auto': Suite(auto.measure, 10, auto.plot),
    'decode': Suite(decode.measure, 15),
    'first_loop': Suite(skip_zeros.measure_loop, 21),
    'gpu': Suite(profiles.measure_gpu, 20),
    'matmul': Suite(matmul.measure, 7),
    'model': Suite(model.measure, 15),
    'optimizer': Suite(optimizer.measure, 8),
    'peers': Suite(pytorch.measure, 15),
    'primitives': Suite(primitives.measure, 40),
    'profiles': Suite(profiles.measure_parts, 5),
    'skip_zeros': Suite(skip_zeros.measure, 9),
    'topk': Suite(topk.measure, 3),
    'train_step': Suite(train_step.measure, 20),
}
"""Suites by name."""

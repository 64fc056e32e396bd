"""Runs of a suite: measurement, printed table and JSON file."""

import json
import math
import pathlib
import sys

import numpy as np

from experiments.benchmarks import SUITES
from experiments.benchmarks import torch_decoding
from experiments.benchmarks.machine import describe_machine
from experiments.benchmarks.measuring import format_table
from experiments.benchmarks.measuring import Row
from experiments.benchmarks.measuring import verdict
from spdf_jax.accelerator import native
from spdf_jax.names import lookup
from spdf_jax.training.metrics import write_atomically


def run_suite(name: str, output: str | None, repeats: int | None) -> int:
  """Measures a suite; prints the machine and the table.

  Args:
    name: A key of `SUITES`.
    output: JSON file for the rows; `None`: none is written.
    repeats: Rounds of timing; `None`: the suite's own number.

  Returns:
    The exit status: 1 if a target is missed, else 0.

  Raises:
    ValueError: the suite is unknown, or the output cannot be written.
    OSError: the suite needs native kernels, which are unavailable.
  """
  suite = lookup('suite', name, SUITES)
  path = _output_path(output)
  machine = describe_machine() | torch_decoding.describe_version()
  for key, value in machine.items():
    print(f'{key:<16}  {value}')
  repeats = repeats or suite.repeats
  rows: list[Row] = []
  try:
    for row in suite.measure(repeats, np.random.default_rng(0)):
      if not rows or row.case != rows[-1].case:
        print(f'measuring {row.case} …', file=sys.stderr)
      rows.append(row)
  except native.Unavailable as error:
    raise OSError(str(error)) from error
  print(f'\n{format_table(rows)}')
  if path is not None:
    report = {
        'suite': name,
        'repeats': repeats,
        'machine': machine,
        'rows': [_as_json(row) for row in rows],
    }
    write_atomically(path, json.dumps(report, indent=2) + '\n')
  return int(any(verdict(row) == 'missed' for row in rows))


def _output_path(name: str | None) -> pathlib.Path | None:
  if name is None:
    return None
  path = pathlib.Path(name)
  if path.is_dir() or not path.absolute().parent.is_dir():
    raise ValueError(
        f'--output={name} is no file in an existing directory; make the '
        'directory first, or give another file.'
    )
  return path


def _as_json(row: Row) -> dict[str, str | float | bool | None]:
  # JSON has no infinity, so an unbounded end becomes null.
  known = lambda x: x if not isinstance(x, float) or math.isfinite(x) else None
  fields = {name: known(value) for name, value in row._asdict().items()}
  return fields | {'verdict': verdict(row)}

"""Measures speed and memory: python -m experiments.benchmark --suite=NAME.

  python -m experiments.benchmark --suite=train_step
  python -m experiments.benchmark --suite=topk --output=topk.json

The variants that a suite compares are timed alternately, A B A B …, and paired;
a row has the median over the pairs and its 95 % bootstrap interval. A target is
`missed` if the whole interval is beyond it, and only then is the exit status 1.
It is `undecided` if the interval contains the target: raise --repeats, or use a
machine with less load. A suite takes several minutes and prints its table at
the end.
"""

import json
import math
import pathlib
import sys
from typing import Any

from absl import flags
import numpy as np

from experiments.benchmarks import machine
from experiments.benchmarks import measuring
from experiments.benchmarks import pytorch
from experiments.benchmarks import SUITES
from experiments.launch import console
from spdf_jax import files
from spdf_jax import names
from spdf_jax.accelerator import native
from spdf_jax.runs import style

_SUITE = flags.DEFINE_string(
    'suite', None, f'Suite to run: {", ".join(SUITES)}.'
)
_OUTPUT = flags.DEFINE_string(
    'output', None, 'JSON file for the rows; a figure, if any, lies beside it.'
)
_REPEATS = flags.DEFINE_integer(
    'repeats', None, "Rounds of timing; by default the suite's own number.",
    lower_bound=1,
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(
      argv, run_suite, _SUITE.value, _OUTPUT.value, _REPEATS.value
  )


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
  suite = names.lookup('suite', name, SUITES)
  path = _output_path(output)
  description = machine.describe_machine() | pytorch.describe_version()
  for key, value in description.items():
    print(f'{key:<16}  {value}')
  repeats = repeats or suite.repeats
  report: dict[str, Any] = {
      'suite': name, 'repeats': repeats, 'machine': description, 'rows': []
  }
  rows: list[measuring.Row] = []
  try:
    for row in suite.measure(repeats, np.random.default_rng(0)):
      if not rows or row.case != rows[-1].case:
        print(f'measuring {row.case} …', file=sys.stderr)
      rows.append(row)
      report['rows'].append(_as_json(row))
      if path is not None:  # After every row, since a suite may be stopped.
        files.write_atomically(path, json.dumps(report, indent=2) + '\n')
  except native.Unavailable as error:
    raise OSError(str(error)) from error
  print(f'\n{measuring.format_table(rows)}')
  if path is not None and suite.plot is not None:
    style.save(suite.plot(rows), path.with_suffix('.png'))
  return int(any(measuring.verdict(row) == 'missed' for row in rows))


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


def _as_json(row: measuring.Row) -> dict[str, str | float | bool | None]:
  # JSON has no infinity, so an unbounded end becomes null.
  known = lambda x: x if not isinstance(x, float) or math.isfinite(x) else None
  fields = {name: known(value) for name, value in row._asdict().items()}
  return fields | {'verdict': measuring.verdict(row)}


if __name__ == '__main__':
  flags.mark_flag_as_required('suite')
  console.start(main)

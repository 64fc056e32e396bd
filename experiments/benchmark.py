"""Measures speed and memory: python -m experiments.benchmark --suite=NAME.

  python -m experiments.benchmark --suite=train_step
  python -m experiments.benchmark --suite=topk --output=topk.json

Rivals are timed in turn, A B A B …, and compared pair by pair; a row has the
median of its pairs and a 95 % bootstrap interval. A target is `missed` where
the whole interval lies beyond it, and only then the exit status is 1;
`undecided` means that more --repeats, or a quieter machine, would tell.
"""

import json
import math
import pathlib
import sys

from absl import app
from absl import flags
from absl import logging
import numpy as np

from experiments.benchmarks import SUITES
from experiments.benchmarks.machine import describe_machine
from experiments.benchmarks.measuring import format_table
from experiments.benchmarks.measuring import Row
from experiments.benchmarks.measuring import verdict
from experiments.launch import console
from spdf_jax.accelerator import native
from spdf_jax.names import lookup
from spdf_jax.training.metrics import write_atomically

_SUITE = flags.DEFINE_string(
    'suite', None, f'What to measure: {", ".join(SUITES)}.'
)
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file for the rows.')
_REPEATS = flags.DEFINE_integer(
    'repeats', None, "Rounds of timing; the suite's own number by default.",
    lower_bound=1,
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  console.prepare()
  try:
    suite = lookup('suite', _SUITE.value, SUITES)
    output = _output_path(_OUTPUT.value)
  except ValueError as error:
    logging.error('%s', error)
    return 1
  machine = describe_machine()
  for name, value in machine.items():
    print(f'{name:<9}  {value}')
  repeats = _REPEATS.value or suite.repeats
  rows = []
  try:
    for row in suite.measure(repeats, np.random.default_rng(0)):
      if not rows or row.case != rows[-1].case:
        print(f'measuring {row.case} …', file=sys.stderr)
      rows.append(row)
  except native.Unavailable as error:
    logging.error('%s', error)
    return 1
  print(f'\n{format_table(rows)}')
  if output is not None:
    report = {
        'suite': _SUITE.value,
        'repeats': repeats,
        'machine': machine,
        'rows': [_as_json(row) for row in rows],
    }
    write_atomically(output, json.dumps(report, indent=2) + '\n')
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
  # JSON has no infinity: an end that is not known is null.
  known = lambda x: x if not isinstance(x, float) or math.isfinite(x) else None
  fields = {name: known(value) for name, value in row._asdict().items()}
  return fields | {'verdict': verdict(row)}


if __name__ == '__main__':
  flags.mark_flag_as_required('suite')
  app.run(main)

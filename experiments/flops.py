"""Counts FLOPs: the papers' tables, recomputed, and the FLOPs of any config.

  python -m experiments.flops --table=spdf
  python -m experiments.flops --table=iterative --inference
  python -m experiments.flops --config=configs/spdf.py:model=gpt3-xl --trace

--table prints every number of FLOPs, parameters and tokens in a paper (spdf,
variable or iterative) beside the number computed here, and whether its printed
digits agree, agree under another way of counting, or are misprints. --output
writes the cells as CSV with all digits. --config prints the FLOPs of a config's
phases; --trace also counts the matrix products of the traced train step.
--inference prints the FLOPs of forward passes instead.
"""

from absl import app
from absl import flags

from experiments.launch import config_file
from experiments.launch import console
from experiments.papers import flops_report

_TABLE = flags.DEFINE_string(
    'table', None, 'Paper: spdf, variable or iterative.'
)
_CONFIG = config_file.define()
_INFERENCE = flags.DEFINE_bool(
    'inference', False, 'Count forward passes, sparse against dense.'
)
_TRACE = flags.DEFINE_bool(
    'trace', False, 'With --config: also count the traced train step.'
)
_OUTPUT = flags.DEFINE_string(
    'output', None, 'With --table: folder for the cells, TABLE.csv.'
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if bool(_TABLE.value) == bool(_CONFIG.value):
    raise app.UsageError('give --table or --config.')
  return console.run(
      argv, flops_report.describe, _TABLE.value, _CONFIG.value,
      inference=_INFERENCE.value, trace=_TRACE.value, output=_OUTPUT.value,
  )


if __name__ == '__main__':
  console.start(main)

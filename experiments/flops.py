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

from collections.abc import Iterator
import pathlib

from absl import app
from absl import flags

from experiments.launch import config_file
from experiments.launch import console
from experiments.papers import flops_of_models
from experiments.papers import flops_tables
from spdf_jax import files
from spdf_jax import training

FLAGS = flags.FlagValues()
_TABLE = flags.DEFINE_string(
    'table', None, 'Paper: spdf, variable or iterative.', flag_values=FLAGS
)
_CONFIG = config_file.define(FLAGS)
_INFERENCE = flags.DEFINE_bool(
    'inference', False, 'Count forward passes, sparse against dense.',
    flag_values=FLAGS,
)
_TRACE = flags.DEFINE_bool(
    'trace', False, 'With --config: also count the traced train step.',
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    'output', None, 'With --table: folder for the cells, TABLE.csv.',
    flag_values=FLAGS,
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if bool(_TABLE.value) == bool(_CONFIG.value):
    raise app.UsageError('give --table or --config.')
  if _TABLE.value and _TRACE.value:
    raise app.UsageError('--trace needs --config; leave it out with --table.')
  if _CONFIG.value and _OUTPUT.value:
    raise app.UsageError('--output needs --table; leave it out with --config.')
  return console.run(
      argv, _describe_table if _TABLE.value else _describe_config
  )


def _describe_table() -> Iterator[str]:
  name = _TABLE.value
  cells = flops_tables.compare(name)
  if _INFERENCE.value:
    yield flops_of_models.format_inference(
        flops_of_models.published_models(name)
    )
  else:
    yield flops_tables.format_cells(cells)
    if name == 'spdf':
      yield '\n' + flops_of_models.format_tuning_shares()
  if _OUTPUT.value:
    path = pathlib.Path(_OUTPUT.value, f'{name}.csv')
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, flops_tables.as_csv(cells))
    yield f'\n{path} is written'


def _describe_config() -> Iterator[str]:
  run = training.Run.create(_CONFIG.value, planning=True)
  if _INFERENCE.value:
    yield flops_of_models.format_inference(flops_of_models.models_of(run))
  else:
    yield flops_of_models.format_run(run, _CONFIG.value.model.preset)
  if _TRACE.value:
    yield '\n' + flops_of_models.format_traced(run)


if __name__ == '__main__':
  console.start(main, FLAGS)

"""Counts FLOPs: the papers' tables beside ours, and those of any config.

  python -m experiments.flops --table=spdf
  python -m experiments.flops --table=iterative --inference
  python -m experiments.flops --config=configs/spdf.py:model=gpt3-xl --trace

--table prints every number that a paper (spdf, variable or iterative) gives of
FLOPs, parameters and tokens beside ours: whether its digits follow, by which
other reading they do, or what is wrong with them. --output keeps the cells as
CSV with all digits. --config prints what its phases take; --trace counts the
products of its traced train step too. --inference is of forward passes.
"""

import pathlib

from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from experiments.launch import console
from experiments.papers import flops_of_models
from experiments.papers import flops_tables
from spdf_jax import training
from spdf_jax.training.metrics import write_atomically

_TABLE = flags.DEFINE_string('table', None, 'spdf, variable or iterative.')
_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'Config file, with its argument: path.py:argument.'
)
_INFERENCE = flags.DEFINE_bool(
    'inference', False, 'Forward passes of the models, sparse against dense.'
)
_TRACE = flags.DEFINE_bool(
    'trace', False, 'With --config: count the traced train step, too.'
)
_OUTPUT = flags.DEFINE_string(
    'output', None, 'With --table: folder for its cells, TABLE.csv.'
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  if bool(_TABLE.value) == bool(_CONFIG.value):
    raise app.UsageError('give --table or --config.')
  console.prepare()
  try:
    if _TABLE.value:
      print_table(_TABLE.value)
    else:
      print_config(_CONFIG.value)
  except (ValueError, OSError) as error:
    logging.error('%s', error)
    return 1
  return 0


def print_table(name: str) -> None:
  """Prints a paper's table, or its models; writes the cells to --output.

  Raises:
    ValueError: the table is unknown, or a flag does not go with it.
  """
  if _TRACE.value:
    raise ValueError('--trace is of a --config; leave it out with --table.')
  cells = flops_tables.compare(name)
  if _INFERENCE.value:
    models = flops_of_models.published_models(name)
    print(flops_of_models.format_inference(models))
  else:
    print(flops_tables.format_cells(cells))
    if name == 'spdf':
      print('\n' + flops_of_models.format_tuning_shares())
  if _OUTPUT.value:
    path = pathlib.Path(_OUTPUT.value, f'{name}.csv')
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, flops_tables.as_csv(cells))
    print(f'\n{path} is written')


def print_config(config) -> None:
  """Prints the FLOPs of a config's phases, and of its traced step.

  Raises:
    ValueError: the config cannot be planned, or a flag does not go with it.
  """
  if _OUTPUT.value:
    raise ValueError('--output is of a --table; leave it out with --config.')
  recipe = training.create_recipe(config, planning=True)
  if _INFERENCE.value:
    models = flops_of_models.models_of(recipe)
    print(flops_of_models.format_inference(models))
  else:
    print(flops_of_models.format_recipe(recipe, config.model.preset))
  if _TRACE.value:
    print('\n' + flops_of_models.format_traced(recipe))


if __name__ == '__main__':
  app.run(main)

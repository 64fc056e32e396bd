"""Report of FLOPs: a paper's tables, recomputed, or the FLOPs of a config."""

from collections.abc import Iterator
import pathlib
from typing import Any

from experiments.papers import flops_of_models
from experiments.papers import flops_tables
from spdf_jax import files
from spdf_jax import training


def describe(
    table: str | None,
    config: Any | None,
    *,
    inference: bool,
    trace: bool,
    output: str | None,
) -> Iterator[str]:
  """Describes the FLOPs of a paper's table, or of a config.

  Args:
    table: Name of a paper; `None`: the config is described.
    config: A ConfigDict.
    inference: Whether forward passes are described instead of training.
    trace: Whether the traced train step is counted too, for a config only.
    output: Folder for the table's cells; `None`: they are not written.

  Returns:
    Texts, each but the first with a blank line before it.

  Raises:
    ValueError: the table is unknown, the config cannot be planned, or an
      argument cannot be combined with the table or the config.
  """
  if table:
    return _describe_table(table, inference, trace, output)
  return _describe_config(config, inference, trace, output)


def _describe_table(
    name: str, inference: bool, trace: bool, output: str | None
) -> Iterator[str]:
  if trace:
    raise ValueError('--trace needs --config; leave it out with --table.')
  cells = flops_tables.compare(name)
  if inference:
    models = flops_of_models.published_models(name)
    yield flops_of_models.format_inference(models)
  else:
    yield flops_tables.format_cells(cells)
    if name == 'spdf':
      yield '\n' + flops_of_models.format_tuning_shares()
  if output:
    path = pathlib.Path(output, f'{name}.csv')
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, flops_tables.as_csv(cells))
    yield f'\n{path} is written'


def _describe_config(
    config: Any, inference: bool, trace: bool, output: str | None
) -> Iterator[str]:
  if output:
    raise ValueError('--output needs --table; leave it out with --config.')
  run = training.Run.create(config, planning=True)
  if inference:
    models = flops_of_models.models_of(run)
    yield flops_of_models.format_inference(models)
  else:
    yield flops_of_models.format_run(run, config.model.preset)
  if trace:
    yield '\n' + flops_of_models.format_traced(run)

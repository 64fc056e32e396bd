# SPDX-License-Identifier: Apache-2.0
"""Documents in columns of Parquet, Arrow and Hugging Face datasets."""

from collections.abc import Iterable
from collections.abc import Iterator
import json
from pathlib import Path
from typing import Any

from spdf_jax.data.pieces import Piece
from spdf_jax.data.pieces import Skipped
from spdf_jax.data.pieces import text_or_fault
from spdf_jax.extras import require


def read_parquet(path: Path, field: str) -> Iterator[Piece | Skipped]:
  """Reads a column of a Parquet file, 64 rows at a time."""
  parquet = require('pyarrow.parquet', 'prepare')
  errors = require('pyarrow', 'prepare').ArrowException
  try:
    with parquet.ParquetFile(path) as file:
      _check_column(field, file.schema_arrow.names, path)
      batches = file.iter_batches(batch_size=64, columns=[field])
      yield from _read_batches(batches, path)
  except (errors, OSError) as error:
    raise ValueError(
        f'{path} is not a valid Parquet file ({_line(error)}); download it'
        ' again.'
    ) from error


def read_dataset(folder: Path, field: str) -> Iterator[Piece | Skipped]:
  """Reads a column of a dataset that `save_to_disk` wrote."""
  try:
    state = json.loads((folder / 'state.json').read_bytes())
    files = [folder / Path(f['filename']).name for f in state['_data_files']]
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    raise ValueError(
        f'{folder} is not a dataset of save_to_disk ({_line(error)}); save it'
        ' again.'
    ) from error
  for path in files:
    yield from read_arrow(path, field)


def read_arrow(path: Path, field: str) -> Iterator[Piece | Skipped]:
  """Reads a column of a file in Arrow's streaming format."""
  arrow = require('pyarrow', 'prepare')
  ipc = require('pyarrow.ipc', 'prepare')
  try:
    with arrow.memory_map(str(path)) as source:
      with ipc.open_stream(source) as reader:
        _check_column(field, reader.schema.names, path)
        column = reader.schema.get_field_index(field)
        batches = (batch.select([column]) for batch in reader)
        yield from _read_batches(batches, path)
  except (arrow.ArrowException, OSError) as error:
    raise ValueError(
        f'{path} is not a valid Arrow file ({_line(error)}); save it again.'
    ) from error


def _read_batches(
    batches: Iterable[Any], path: Path
) -> Iterator[Piece | Skipped]:
  number = 0
  for batch in batches:
    for value in batch.column(0):
      try:
        text = value.as_py()
      except UnicodeDecodeError:
        yield Skipped('broken UTF-8', f'{path} row {number}')
      else:
        yield from text_or_fault(text, f'{path} row {number}')
      number += 1


def _check_column(field: str, names: list[str], path: Path) -> None:
  if field not in names:
    raise ValueError(
        f'{path} has no column {field!r} but {", ".join(names)}; set field to'
        ' the column with the text.'
    )


def _line(error: Exception) -> str:
  return ' '.join(str(error).split())

# SPDX-License-Identifier: Apache-2.0
"""Datasets of Hugging Face, streamed from the hub or from files."""

from collections.abc import Iterator
import contextlib
import hashlib
from pathlib import Path
from typing import Any

from spdf_jax.data.library_errors import one_sentence
from spdf_jax.data.pieces import Piece
from spdf_jax.data.pieces import Skipped
from spdf_jax.data.pieces import text_or_fault
from spdf_jax.extras import require

PREFIX = 'hf:'
"""Beginning of an input that names a dataset, not a file."""


def is_stream(path: Path) -> bool:
  """Returns whether a path, or the name of a dataset, is to be streamed.

  Example:
    >>> is_stream(Path('hf:owner/name/train')), is_stream(Path('a/hf:b'))
    (True, False)
  """
  return bool(path.parts) and path.parts[0].startswith(PREFIX)


def list_streams(name: str) -> list[Path]:
  """Lists the splits of a dataset.

  Args:
    name: `'hf:PATH'` or `'hf:PATH,CONFIG'`, either also with `'@REVISION'`;
      PATH is a dataset of the hub or a folder, and all parts are arguments of
      `datasets.load_dataset`.

  Returns:
    A path for each split, whose last part is the split.

  Raises:
    ImportError: `datasets` is not installed.
    ValueError: The dataset cannot be read.
  """
  return [Path(name) / split for split in _load(name)]


def identify_stream(path: Path) -> list[Any]:
  """Identifies a split by its name and the state of the dataset's files.

  Args:
    path: A path of `list_streams`.

  Returns:
    The split, 0 for the size, which is not known, and a hash, which changes
    with the commit of the hub, or with the times of local files.
  """
  library = require('datasets', 'stream')
  with _one_sentence(str(path.parent)):
    builder = library.load_dataset_builder(**_arguments(str(path.parent)))
  facts = f'{builder.name} {builder.config_id} {builder.hash}'
  return [path.name, 0, hashlib.sha256(facts.encode()).hexdigest()]


def read_stream(path: Path, field: str) -> Iterator[Piece | Skipped]:
  """Reads the documents of a split.

  Args:
    path: A path of `list_streams`.
    field: Name of the column with the text.

  Yields:
    Pieces of documents, and skipped documents.

  Raises:
    ImportError: `datasets` is not installed.
    ValueError: The dataset cannot be read, or has no such column.
  """
  dataset = _load(str(path.parent))[path.name]
  rows = iter(dataset)
  number = 0
  while True:
    with _one_sentence(str(path.parent)):
      row = next(rows, None)
    if row is None:
      return
    if number == 0 and field not in row:
      raise ValueError(
          f'{path} has no column {field!r} but {", ".join(row)}; set field to'
          ' the column with the text.'
      )
    yield from text_or_fault(row.get(field), f'{path} row {number}')
    number += 1


def _arguments(name: str) -> dict[str, str | None]:
  """Returns the arguments of `datasets.load_dataset` that a name gives.

  Example:
    >>> _arguments('hf:allenai/c4,en@1ddc917')
    {'path': 'allenai/c4', 'name': 'en', 'revision': '1ddc917'}
  """
  rest, _, revision = name.removeprefix(PREFIX).partition('@')
  path, _, config = rest.partition(',')
  return dict(path=path, name=config or None, revision=revision or None)


def _load(name: str) -> dict[str, Any]:
  load = require('datasets', 'stream').load_dataset
  with _one_sentence(name):
    return load(**_arguments(name), streaming=True)


def _one_sentence(name: str) -> contextlib.AbstractContextManager[None]:
  return one_sentence(
      f'input={name!r} cannot be streamed',
      'give hf:PATH or hf:PATH,CONFIG of a dataset that can be reached.',
  )

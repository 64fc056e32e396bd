# SPDX-License-Identifier: Apache-2.0
"""Files of tasks: readers, custom tasks in JSON lines, and Curation."""

from collections.abc import Iterator, Mapping, Sequence
import csv
import io
import json
import logging
import os
from pathlib import Path
import random
from typing import Any

from spdf_jax.data.tasks import task
from spdf_jax.data.tasks.task import Input
from spdf_jax.data.tasks.task import Task
from spdf_jax.files import reading

_CURATION = 'curation-corpus-base-with-articles.csv'

_logger = logging.getLogger(__name__)


def find_files(
    directory: str | os.PathLike[str], candidates: Mapping[str, Sequence[str]]
) -> dict[str, Path]:
  """Finds the file or folder of each split.

  Args:
    directory: Folder of the files.
    candidates: Names for each split, of which the first existing one is used.

  Returns:
    Paths by split, without splits that have no file; these are logged as a
    warning.

  Raises:
    ValueError: `directory` does not exist, or has none of the names.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'test.txt').write_text('a||b')
    >>> find_files(folder, {'test': ['test.csv', 'test.txt']})['test'].name
    'test.txt'
  """
  directory = Path(directory).expanduser()
  if not directory.is_dir():
    raise ValueError(
        f'input={str(directory)!r} is not a folder; give the folder with the'
        " task's files."
    )
  by_split = {}
  for split, names in candidates.items():
    paths = [directory / name for name in names if (directory / name).exists()]
    if paths:
      by_split[split] = paths[0]
  if not by_split:
    wanted = ', '.join(name for names in candidates.values() for name in names)
    raise ValueError(
        f'input={str(directory)!r} has none of the files {wanted}; give the'
        " folder with the task's files."
    )
  for split in candidates.keys() - by_split.keys():
    _logger.warning(
        'The %s split is empty: %s has none of %s.', split, directory,
        ', '.join(candidates[split]),
    )
  return by_split


def read_text(path: Path) -> str:
  """Reads UTF-8, with or without a byte order mark.

  Args:
    path: The file to read.

  Returns:
    The text, with newlines unchanged.

  Raises:
    ValueError: the file is not UTF-8.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'latin'
    >>> _ = path.write_bytes('é'.encode('latin-1'))
    >>> read_text(path)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: ...latin cannot be read (UnicodeDecodeError: ...
  """
  with reading(path, 'convert it to UTF-8.'):
    return path.read_bytes().decode('utf-8-sig')


def read_json(path: Path) -> Any:
  """Reads a JSON file; raises ValueError if it is not JSON."""
  with reading(path, 'download it again.'):
    return json.loads(read_text(path))


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields the objects of a file of JSON lines, skipping blank lines.

  Args:
    path: The file to read.

  Yields:
    Pairs (line number, object).

  Raises:
    ValueError: a line is not a JSON object.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'a.jsonl'
    >>> _ = path.write_text('{"a": 1}')
    >>> list(read_json_lines(path))
    [(1, {'a': 1})]
  """
  for number, line in enumerate(read_text(path).split('\n'), start=1):
    if not line.strip():
      continue
    with reading(f'{path} line {number}', 'write an object on each line.'):
      yield number, dict(json.loads(line).items())


def read_table(
    path: Path, columns: Sequence[str]
) -> Iterator[dict[str, str]]:
  """Yields the rows of a CSV file with a header.

  Args:
    path: The file to read.
    columns: Columns to return.

  Yields:
    Values of these columns, by name.

  Raises:
    ValueError: a column is missing.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'a.csv'
    >>> _ = path.write_text('mr,text')
    >>> list(read_table(path, ['mr', 'ref']))
    Traceback (most recent call last):
    ...
    ValueError: a.csv has no column 'ref'; its columns are mr, text; use the \
file of the task as it was published.
  """
  csv.field_size_limit(1 << 30)  # Articles can exceed the default limit.
  rows = csv.DictReader(io.StringIO(read_text(path), newline=''))
  for column in columns:
    if column not in (rows.fieldnames or ()):
      raise ValueError(
          f'{path.name} has no column {column!r}; its columns are'
          f' {", ".join(rows.fieldnames or ["none"])}; use the file of the task'
          ' as it was published.'
      )
  for row in rows:
    yield {column: row[column] or '' for column in columns}


def json_lines(directory: str | os.PathLike[str]) -> Task:
  """Reads `train.jsonl`, `validation.jsonl` and `test.jsonl`.

  A line is `{"context": …, "target": …}` or, with several references,
  `{"context": …, "references": […]}`; `"part"` may name a part of a split.

  Args:
    directory: Folder with the files; a missing file is an empty split.

  Returns:
    The task.

  Raises:
    ValueError: there is no file of the task, or a line has another form.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'train.jsonl').write_text(
    ...     '{"context": "2 + 2", "target": "4"}')
    >>> json_lines(folder).train
    (Pair(context='2 + 2', target='4'),)
  """
  files = find_files(directory, {s: [f'{s}.jsonl'] for s in task.SPLITS})
  return task.task_of_inputs('jsonl', {
      split: list(_read_lines(path)) for split, path in files.items()
  })


def curation(directory: str | os.PathLike[str]) -> Task:
  """Reads the Curation Corpus: articles and their summaries.

  The table is the one that the scraper of the corpus writes. Pairs with an
  empty side are skipped; 39,911 remain of the full corpus. They are shuffled;
  a tenth each, rounded down, is for validation and test, the rest for training:
  31,929, 3,991 and 3,991 pairs, as in the SPDF paper. The score is the
  perplexity over the tokens of summaries, their end of text included.

  Args:
    directory: Folder with `curation-corpus-base-with-articles.csv`.

  Returns:
    The task.

  Raises:
    ValueError: the file is missing, or lacks a column.

  References:
    Curation 2020, `Curation Corpus Base
    <https://github.com/CurationCorp/curation-corpus>`_

  Example:
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> rows = ''.join(f'S{i},Article {i}\\n' for i in range(10)) + 'S,\\n'
    >>> _ = (folder / _CURATION).write_text('summary,article_content\\n' + rows)
    >>> task = curation(folder)
    >>> len(task.train), len(task.validation), len(task.test)
    (8, 1, 1)
  """
  path = find_files(directory, {'train': [_CURATION]})['train']
  rows = (
      (row['article_content'].strip(), row['summary'].strip())
      for row in read_table(path, ['article_content', 'summary'])
  )
  inputs = [Input(a, (summary,)) for a, summary in rows if a and summary]
  random.Random(0).shuffle(inputs)
  tenth = len(inputs) // 10
  first, second = len(inputs) - 2 * tenth, len(inputs) - tenth
  return task.task_of_inputs('curation', {
      'train': inputs[:first],
      'validation': inputs[first:second],
      'test': inputs[second:],
  })


def _read_lines(path: Path) -> Iterator[Input]:
  for number, fields in read_json_lines(path):
    with reading(
        f'{path} line {number}', 'write text as "context" and "target" (or a '
        'list of texts as "references"; "part" is text too, if given).'
    ):
      texts = fields.get('references', [fields.get('target')])
      part = fields.get('part', '')
      # Raises an error for other types, and for halves of surrogate pairs.
      ''.join([fields['context'], part] + texts).encode()
    yield Input(fields['context'], tuple(texts), part)

# SPDX-License-Identifier: Apache-2.0
"""Custom tasks, as JSON lines."""

from collections.abc import Iterator
import os
from pathlib import Path
import re
from typing import Any

from spdf_jax.data.tasks.files import find_files
from spdf_jax.data.tasks.files import read_json_lines
from spdf_jax.data.tasks.task import Input
from spdf_jax.data.tasks.task import SPLITS
from spdf_jax.data.tasks.task import Task
from spdf_jax.data.tasks.task import task_of_inputs

_SURROGATES = re.compile('[\ud800-\udfff]')


def json_lines(directory: str | os.PathLike[str]) -> Task:
  """Reads `train.jsonl`, `validation.jsonl` and `test.jsonl`.

  A line is `{"context": …, "target": …}` or, with several references,
  `{"context": …, "references": […]}`; `"part"` may name a part of a split.

  Args:
    directory: Folder with the files; a missing file is an empty split.

  Returns:
    The task.

  Raises:
    ValueError: There is no file of the task, or a line has another form.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'train.jsonl').write_text(
    ...     '{"context": "2 + 2", "target": "4"}')
    >>> json_lines(folder).train
    (Pair(context='2 + 2', target='4'),)
  """
  files = find_files(directory, {s: [f'{s}.jsonl'] for s in SPLITS})
  return task_of_inputs('jsonl', {
      split: list(_read(path)) for split, path in files.items()
  })


def _read(path: Path) -> Iterator[Input]:
  for number, fields in read_json_lines(path):
    context: Any = fields.get('context')
    part: Any = fields.get('part', '')
    texts = fields.get('references', [fields.get('target')])
    strings = isinstance(texts, list) and [context, part, *texts]
    if not strings or not all(map(_is_text, strings)):
      raise ValueError(
          f'line {number} of {path} is not a context with a target or'
          ' references, all text; write {"context": …, "target": …}.'
      )
    yield Input(context, tuple(texts), part)


def _is_text(value: Any) -> bool:
  """Returns whether a value is text without halves of surrogate pairs."""
  return isinstance(value, str) and not _SURROGATES.search(value)

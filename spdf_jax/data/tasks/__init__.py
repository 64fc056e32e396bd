# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning tasks by name."""

from collections.abc import Callable, Mapping
import os

from spdf_jax.data.tasks import data_to_text
from spdf_jax.data.tasks import files
from spdf_jax.data.tasks.docstrings import docstring_pairs
from spdf_jax.data.tasks.docstrings import python_docstrings
from spdf_jax.data.tasks.task import format_sizes
from spdf_jax.data.tasks.task import Input
from spdf_jax.data.tasks.task import merge_equal_contexts
from spdf_jax.data.tasks.task import Pair
from spdf_jax.data.tasks.task import Task
from spdf_jax.data.tasks.task import task_of_inputs
from spdf_jax.names import lookup

__all__ = [
    'Input',
    'Pair',
    'Task',
    'docstring_pairs',
    'format_sizes',
    'load_task',
    'merge_equal_contexts',
    'task_of_inputs',
]

_FROM_FILES: Mapping[str, Callable[..., Task]] = {
    'curation': files.curation,
    'dart': data_to_text.dart,
    'dart_smoke': data_to_text.dart_smoke,
    'e2e': data_to_text.e2e,
    'e2e_csv': data_to_text.e2e_csv,
    'jsonl': files.json_lines,
    'webnlg': data_to_text.webnlg,
}
_TASKS: dict[str, Callable[..., Task]] = {
    'python-docstrings': python_docstrings, **_FROM_FILES,
}


def load_task(
    name: str,
    input: str | os.PathLike[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Task:
  """Reads a task by its name.

  Args:
    name: Name of the task. `'python-docstrings'` maps Python signatures to the
      first lines of their docstrings, from the running Python's standard
      library. Tasks from files are `'e2e'` (the text files of the LoRA paper,
      or else the files of `'e2e_csv'`), `'e2e_csv'` (CSV files of the E2E
      challenge), `'webnlg'`, `'dart'`, `'dart_smoke'` (trained on the dev split
      of DART, for tests), `'curation'` (Curation Corpus) and `'jsonl'` (custom
      tasks: `train.jsonl` and others with lines of
      `{"context": …, "target": …}`).
    input: Folder with the files of the task; unused by `'python-docstrings'`.
    cache_dir: Folder of prepared data, where `'python-docstrings'` keeps its
      pairs, so that the library is parsed once; `None`: they are not kept.

  Returns:
    The task.

  Raises:
    RuntimeError: `'python-docstrings'`: Python's library has no `.py` files.
    ValueError: `name` is unknown, or `input` is missing or not in the format of
      the task.

  Example:
    >>> load_task('python-docstring')
    Traceback (most recent call last):
    ...
    ValueError: task 'python-docstring' is unknown; did you mean \
'python-docstrings'?
  """
  read = lookup('task', name, _TASKS)
  if name not in _FROM_FILES:
    return read(cache_dir)
  if not input:
    raise ValueError(
        f'task {name!r} is read from files but no folder is given; set input'
        ' to the folder that holds them.'
    )
  return read(input)

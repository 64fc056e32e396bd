# SPDX-License-Identifier: Apache-2.0
"""DART: texts from sets of triples of many sources."""

from collections.abc import Iterator
import os
from pathlib import Path

from spdf_jax.data.tasks.files import find_files
from spdf_jax.data.tasks.files import read_json
from spdf_jax.data.tasks.task import Input
from spdf_jax.data.tasks.task import Task
from spdf_jax.data.tasks.task import task_of_inputs
from spdf_jax.data.tasks.triples import linearize_triples

_NAMES = {
    split: [f'dart-v1.1.1-full-{name}.json', f'{name}.json']
    for split, name in (
        ('train', 'train'), ('validation', 'dev'), ('test', 'test')
    )
}


def dart(directory: str | os.PathLike[str]) -> Task:
  """Reads DART v1.1.1.

  Relations are lower-cased, as by Hu et al. Inputs are sets of triples; the
  test split has 5,097, with 4,159 distinct texts.

  Args:
    directory: Folder with `dart-v1.1.1-full-train.json` and the other splits.

  Returns:
    The task.

  Raises:
    ValueError: There is no file of the task, or a file has another format.

  Source: Nan et al. 2021, "DART"; Hu et al. 2021, "LoRA".

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'dev.json').write_text(
    ...     '[{"tripleset": [["A", "IN", "B"]],'
    ...     '  "annotations": [{"text": "A is in B."}]}]')
    >>> dart(folder).validation
    (Pair(context='A : in : B', target='A is in B.'),)
  """
  files = find_files(directory, _NAMES)
  return task_of_inputs('dart', {
      split: list(_read(path)) for split, path in files.items()
  })


def dart_smoke(directory: str | os.PathLike[str]) -> Task:
  """Reads a small smoke-test task, which trains on DART's dev split.

  Nine tenths of the dev split are for training and every tenth set is for
  validation; the test split is DART's. The task is for testing without the
  training file; its scores are not meaningful.

  Args:
    directory: Folder with `dart-v1.1.1-full-dev.json` and the test split.

  Returns:
    The task.

  Raises:
    ValueError: There is no dev file, or a file has another format.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> entry = ('{"tripleset": [["A", "IN", "B"]],'
    ...          ' "annotations": [{"text": "A is in B."}]}')
    >>> _ = (folder / 'dev.json').write_text(f'[{",".join([entry] * 20)}]')
    >>> task = dart_smoke(folder)
    >>> len(task.train), len(task.validation)
    (18, 2)
  """
  names = {split: _NAMES[split] for split in ('validation', 'test')}
  files = find_files(directory, names)
  if 'validation' not in files:
    raise ValueError(
        f'input={str(directory)!r} has no {_NAMES["validation"][0]}, which'
        ' dart_smoke trains on; add it.'
    )
  held = list(_read(files['validation']))
  return task_of_inputs('dart_smoke', {
      'train': [entry for i, entry in enumerate(held) if i % 10 != 9],
      'validation': held[9::10],
      'test': list(_read(files['test'])) if 'test' in files else [],
  })


def _read(path: Path) -> Iterator[Input]:
  entries = read_json(path)
  if not isinstance(entries, list):
    raise ValueError(f'{path} is not a list; use the JSON of DART v1.1.1.')
  for number, entry in enumerate(entries):
    try:
      triples = [
          (subject, relation.lower(), value)
          for subject, relation, value in entry['tripleset']
      ]
      context = linearize_triples(triples)
      texts = tuple(note['text'] for note in entry['annotations'])
      ''.join(texts)  # Raises TypeError if one is not a string.
    except (KeyError, TypeError, ValueError, AttributeError) as error:
      raise ValueError(
          f'entry {number} of {path} is not a set of triples with texts'
          f' ({error}); use the JSON of DART v1.1.1.'
      ) from error
    yield Input(context, texts)

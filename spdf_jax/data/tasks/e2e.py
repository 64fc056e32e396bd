# SPDX-License-Identifier: Apache-2.0
"""E2E: descriptions of restaurants from slots and values."""

from collections.abc import Iterable
import os
from pathlib import Path
import re

from spdf_jax.data.tasks.files import find_files
from spdf_jax.data.tasks.files import read_table
from spdf_jax.data.tasks.files import read_text
from spdf_jax.data.tasks.task import Input
from spdf_jax.data.tasks.task import Task
from spdf_jax.data.tasks.task import task_of_inputs

_TEXT_FILES = {
    'train': ['train.txt'], 'validation': ['valid.txt'], 'test': ['test.txt'],
}
_TABLES = {
    'train': ['trainset.csv', 'train-fixed.no-ol.csv'],
    'validation': ['devset.csv', 'devel-fixed.no-ol.csv'],
    'test': ['testset_w_refs.csv', 'test-fixed.csv', 'testset.csv'],
}
_SLOTS = {
    'eatType': 'Type', 'familyFriendly': 'family friendly',
    'priceRange': 'price',
}


def e2e(directory: str | os.PathLike[str]) -> Task:
  """Reads the E2E challenge from the files of Hu et al., or else the tables.

  `train.txt`, `valid.txt` and `test.txt` hold `context||reference`, with
  tokenized references. If none of them exists, the original or the cleaned
  tables are read (`e2e_csv`). Equal contexts are one input.

  Args:
    directory: Folder with the files.

  Returns:
    The task.

  Raises:
    ValueError: There is no file of the task, or a file has another format.

  Source: Novikova et al. 2017, "The E2E Dataset"; Hu et al. 2021, "LoRA".

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'test.txt').write_text('name : A||A is . \\n' * 2)
    >>> e2e(folder).inputs_of('test')
    (Input(context='name : A', references=('A is .', 'A is .'), part=''),)
  """
  if not any(
      (Path(directory).expanduser() / names[0]).exists()
      for names in _TEXT_FILES.values()
  ):
    return e2e_csv(directory)
  files = find_files(directory, _TEXT_FILES)
  return task_of_inputs('e2e', {
      split: _grouped(_read_lines(path)) for split, path in files.items()
  })


def e2e_csv(directory: str | os.PathLike[str]) -> Task:
  """Reads the tables of the E2E challenge, with raw references.

  The tables are the original ones (`trainset.csv`, `devset.csv`,
  `testset_w_refs.csv`) or the cleaned ones (`train-fixed.no-ol.csv`,
  `devel-fixed.no-ol.csv`, `test-fixed.csv`).

  Args:
    directory: Folder with the files.

  Returns:
    The task, with the contexts of Hu et al.

  Raises:
    ValueError: There is no file of the task, or a file lacks a column.

  Source: Dušek et al. 2019, "Semantic Noise Matters for Neural NLG" (the
    cleaned tables).

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'devset.csv').write_text('mr,ref\\nname[A],A is.')
    >>> e2e_csv(folder).validation
    (Pair(context='name : A', target='A is.'),)
  """
  files = find_files(directory, _TABLES)
  if files.get('test', Path()).name == 'testset.csv':
    raise ValueError(
        f'{files["test"]} has no references; use testset_w_refs.csv.'
    )
  return task_of_inputs('e2e_csv', {
      split: _grouped(
          (linearize_slots(row['mr']), row['ref'])
          for row in read_table(path, ['mr', 'ref'])
      )
      for split, path in files.items()
  })


def linearize_slots(meaning: str) -> str:
  """Formats a meaning representation as a context of Hu et al.

  Args:
    meaning: Slots with values, as in the tables.

  Returns:
    `slot : value` joined by ` | `, with spaces around pound signs and hyphens.

  Raises:
    ValueError: The text is not a meaning representation.

  Example:
    >>> linearize_slots('name[Cocum], eatType[pub], priceRange[£20-25]')
    'name : Cocum | Type : pub | price : £ 20 - 25'
  """
  found = re.findall(r'\s*([^,\[\]]+?)\[([^\]]*)\]', meaning)
  if not found:
    raise ValueError(
        f'meaning representation {meaning!r} has no slot[value]; use the'
        ' table of the challenge.'
    )
  spaced = lambda value: ' '.join(re.sub('([£-])', r' \1 ', value).split())
  return ' | '.join(
      f'{_SLOTS.get(slot, slot)} : {spaced(value)}' for slot, value in found
  )


def _read_lines(path: Path) -> list[tuple[str, str]]:
  pairs = []
  for number, line in enumerate(read_text(path).split('\n'), start=1):
    if not line.strip():
      continue
    context, bars, reference = line.partition('||')
    if not bars:
      raise ValueError(
          f'line {number} of {path} has no ||; write context||reference.'
      )
    pairs.append((context.strip(), reference.strip()))
  return pairs


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[Input]:
  groups: dict[str, list[str]] = {}
  for context, reference in pairs:
    groups.setdefault(context, []).append(reference)
  return [Input(context, tuple(texts)) for context, texts in groups.items()]

# SPDX-License-Identifier: Apache-2.0
"""Published tasks from data to text: E2E, WebNLG 2017 and DART."""

from collections.abc import Iterable, Iterator, Sequence
import os
from pathlib import Path
import re
from typing import Any
from xml.etree import ElementTree

from spdf_jax.data.tasks import files
from spdf_jax.data.tasks import task
from spdf_jax.data.tasks.task import Input
from spdf_jax.data.tasks.task import Task
from spdf_jax.files import reading

_E2E_TEXTS = {
    'train': ['train.txt'], 'validation': ['valid.txt'], 'test': ['test.txt'],
}
_E2E_TABLES = {
    'train': ['trainset.csv', 'train-fixed.no-ol.csv'],
    'validation': ['devset.csv', 'devel-fixed.no-ol.csv'],
    'test': ['testset_w_refs.csv', 'test-fixed.csv', 'testset.csv'],
}
_SLOTS = {
    'eatType': 'Type', 'familyFriendly': 'family friendly',
    'priceRange': 'price',
}
SEEN = frozenset({
    'Airport', 'Astronaut', 'Building', 'City', 'ComicsCharacter', 'Food',
    'Monument', 'SportsTeam', 'University', 'WrittenWork',
})
"""Categories of the training data; entries of other categories are unseen."""

_WEBNLG_2017 = 'use the JSON of WebNLG 2017.'
_WEBNLG = {
    'train': ['train.jsonl', 'train.json', 'train.xml', 'train'],
    'validation': ['dev.jsonl', 'dev.json', 'dev.xml', 'dev'],
    'test': ['test.jsonl', 'test.json', 'testdata_with_lex.xml', 'test.xml',
             'test'],
}
_DART = {
    split: [f'dart-v1.1.1-full-{name}.json', f'{name}.json']
    for split, name in (
        ('train', 'train'), ('validation', 'dev'), ('test', 'test')
    )
}


def e2e(directory: str | os.PathLike[str]) -> Task:
  """Reads the E2E challenge from the text files of the LoRA paper, or CSV.

  `train.txt`, `valid.txt` and `test.txt` hold `context||reference`, with
  tokenized references. If none of them exists, the CSV files of the challenge
  are read, see `e2e_csv`. Equal contexts are one input.

  Args:
    directory: Folder with the files.

  Returns:
    The task.

  Raises:
    ValueError: there is no file of the task, or a file has another format.

  References:
    Novikova et al. 2017, "The E2E Dataset"; Hu et al. 2021, "LoRA".

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'test.txt').write_text('name : A||A is . \\n' * 2)
    >>> e2e(folder).inputs_of('test')
    (Input(context='name : A', references=('A is .', 'A is .'), part=''),)
  """
  if not any(
      (Path(directory).expanduser() / names[0]).exists()
      for names in _E2E_TEXTS.values()
  ):
    return e2e_csv(directory)
  paths = files.find_files(directory, _E2E_TEXTS)
  return task.task_of_inputs('e2e', {
      split: _grouped(_read_pairs(path)) for split, path in paths.items()
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
    ValueError: there is no file of the task, or a file lacks a column.

  References:
    Dušek et al. 2019, "Semantic Noise Matters for Neural NLG" (the cleaned
    tables).

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'devset.csv').write_text('mr,ref\\nname[A],A is.')
    >>> e2e_csv(folder).validation
    (Pair(context='name : A', target='A is.'),)
  """
  paths = files.find_files(directory, _E2E_TABLES)
  if paths.get('test', Path()).name == 'testset.csv':
    raise ValueError(
        f'{paths["test"]} has no references; use testset_w_refs.csv.'
    )
  return task.task_of_inputs('e2e_csv', {
      split: _grouped(
          (linearize_slots(row['mr']), row['ref'])
          for row in files.read_table(path, ['mr', 'ref'])
      )
      for split, path in paths.items()
  })


def linearize_slots(meaning: str) -> str:
  """Formats a meaning representation as Hu et al. write contexts.

  Args:
    meaning: Slots with values, as in the tables.

  Returns:
    `slot : value` joined by ` | `, with spaces around pound signs and hyphens.

  Raises:
    ValueError: the text is not a meaning representation.

  Example:
    >>> linearize_slots('name[Cocum], eatType[pub], priceRange[£20-25]')
    'name : Cocum | Type : pub | price : £ 20 - 25'
  """
  slots = re.findall(r'\s*([^,\[\]]+?)\[([^\]]*)\]', meaning)
  if not slots:
    raise ValueError(
        f'meaning representation {meaning!r} has no slot[value]; use the'
        ' tables of the E2E challenge.'
    )
  spaced = lambda value: ' '.join(re.sub('([£-])', r' \1 ', value).split())
  return ' | '.join(
      f'{_SLOTS.get(slot, slot)} : {spaced(value)}' for slot, value in slots
  )


def _read_pairs(path: Path) -> list[tuple[str, str]]:
  pairs = []
  for number, line in enumerate(files.read_text(path).split('\n'), start=1):
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


def webnlg(directory: str | os.PathLike[str]) -> Task:
  """Reads the WebNLG 2017 challenge from XML, JSON or JSON lines.

  Each split is a file or, for XML, a folder of files. Only references that
  are marked good, or not marked, are used; names keep their underscores.
  The parts of the test split are `'seen'` and `'unseen'`.

  Args:
    directory: Folder with the splits.

  Returns:
    The task, with an input for each entry.

  Raises:
    ValueError: there is no file of the task, or a file has another format.

  References:
    Gardent et al. 2017, "The WebNLG Challenge"; Hu et al. 2021, "LoRA".

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'test.xml').write_text('''<benchmark><entries>
    ... <entry category="Food"><modifiedtripleset><mtriple>
    ... Pie | from | Kent</mtriple></modifiedtripleset>
    ... <lex comment="good">Pie is Kentish.</lex></entry>
    ... </entries></benchmark>''')
    >>> webnlg(folder).inputs_of('test')
    ... # doctest: +NORMALIZE_WHITESPACE
    (Input(context='Pie : from : Kent', references=('Pie is Kentish.',),
           part='seen'),)
  """
  return task.task_of_inputs('webnlg', {
      split: [
          entry if split == 'test' else entry._replace(part='')
          for entry in _read_webnlg(path)
      ]
      for split, path in files.find_files(directory, _WEBNLG).items()
  })


def _read_webnlg(path: Path) -> Iterator[Input]:
  if path.is_dir():
    paths = sorted(path.rglob('*.xml'))
    if not paths:
      raise ValueError(
          f'{path} holds no .xml file; give the files of WebNLG 2017.'
      )
    for file in paths:
      yield from _read_xml(file)
  elif path.suffix == '.xml':
    yield from _read_xml(path)
  elif path.suffix == '.jsonl':
    for number, fields in files.read_json_lines(path):
      yield _entry(fields, f'{path} line {number}')
  else:
    fields = files.read_json(path)
    with reading(path, _WEBNLG_2017):
      entries = [e for numbered in fields['entries'] for e in numbered.values()]
    for number, entry in enumerate(entries):
      yield _entry(entry, f'{path} entry {number}')


def _entry(fields: dict[str, Any], where: str) -> Input:
  """Reads an entry of either JSON format."""
  with reading(where, _WEBNLG_2017):
    triples: list[Sequence[str]]
    if 'modifiedtripleset' in fields:
      triples = [
          (t['subject'], t['property'], t['object'])
          for t in fields['modifiedtripleset']
      ]
      texts = [(t['comment'], t['lex']) for t in fields['lexicalisations']]
    else:
      triples = [tuple(map(str, triple)) for triple in fields['triples']]
      texts = [(t['comment'], t['text']) for t in fields['lexs']]
    ''.join(text for _, text in texts)  # Raises TypeError for other types.
    return _input(fields['category'], triples, texts)


def _read_xml(path: Path) -> Iterator[Input]:
  with reading(path, 'download it again.'):
    root = ElementTree.fromstring(path.read_bytes())
  for entry in root.iter('entry'):
    triples = []
    for triple in entry.iterfind('modifiedtripleset/mtriple'):
      parts = [part.strip() for part in (triple.text or '').split(' | ')]
      if len(parts) != 3:
        raise ValueError(
            f'{path} has the triple {triple.text!r}; write subject |'
            ' property | object.'
        )
      triples.append(parts)
    texts = [
        (lex.get('comment', 'good'), (lex.text or '').strip())
        for lex in entry.iterfind('lex')
    ]
    yield _input(entry.get('category', ''), triples, texts)


def _input(
    category: str | None,
    triples: Sequence[Sequence[str]],
    texts: Iterable[tuple[str, str]],
) -> Input:
  good = tuple(text for comment, text in texts if comment in ('good', ''))
  part = 'seen' if category in SEEN else 'unseen'
  return Input(linearize_triples(triples), good, part)


def dart(directory: str | os.PathLike[str]) -> Task:
  """Reads DART v1.1.1.

  Relations are lower-cased, as by Hu et al. Inputs are sets of triples; the
  test split has 5,097, with 4,159 distinct texts.

  Args:
    directory: Folder with `dart-v1.1.1-full-train.json` and the other splits.

  Returns:
    The task.

  Raises:
    ValueError: there is no file of the task, or a file has another format.

  References:
    Nan et al. 2021, "DART"; Hu et al. 2021, "LoRA".

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'dev.json').write_text(
    ...     '[{"tripleset": [["A", "IN", "B"]],'
    ...     '  "annotations": [{"text": "A is in B."}]}]')
    >>> dart(folder).validation
    (Pair(context='A : in : B', target='A is in B.'),)
  """
  paths = files.find_files(directory, _DART)
  return task.task_of_inputs('dart', {
      split: list(_read_dart(path)) for split, path in paths.items()
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
    ValueError: there is no dev file, or a file has another format.

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
  names = {split: _DART[split] for split in ('validation', 'test')}
  paths = files.find_files(directory, names)
  if 'validation' not in paths:
    raise ValueError(
        f'input={str(directory)!r} has no {_DART["validation"][0]}, which'
        ' dart_smoke trains on; add it.'
    )
  held = list(_read_dart(paths['validation']))
  return task.task_of_inputs('dart_smoke', {
      'train': [entry for i, entry in enumerate(held) if i % 10 != 9],
      'validation': held[9::10],
      'test': list(_read_dart(paths['test'])) if 'test' in paths else [],
  })


def _read_dart(path: Path) -> Iterator[Input]:
  for number, entry in enumerate(files.read_json(path)):
    with reading(f'{path} entry {number}', 'use the JSON of DART v1.1.1.'):
      triples = [
          (subject, relation.lower(), value)
          for subject, relation, value in entry['tripleset']
      ]
      context = linearize_triples(triples)
      texts = tuple(note['text'] for note in entry['annotations'])
      ''.join(texts)  # Raises TypeError if one is not a string.
    yield Input(context, texts)


def linearize_triples(triples: Iterable[Sequence[str]]) -> str:
  """Formats triples as Hu et al. write contexts.

  Args:
    triples: Triples of subject, property and object.

  Returns:
    `subject : property : object`, joined by ` | `.

  References:
    Hu et al. 2021, "LoRA".

  Example:
    >>> linearize_triples([('Ada', 'born_in', 'Lund'), ('Lund', 'in', 'X')])
    'Ada : born_in : Lund | Lund : in : X'
  """
  return ' | '.join(' : '.join(triple) for triple in triples)

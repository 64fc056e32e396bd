# SPDX-License-Identifier: Apache-2.0
"""WebNLG 2017: texts from triples of DBpedia."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from spdf_jax.data.tasks.files import find_files
from spdf_jax.data.tasks.files import read_json
from spdf_jax.data.tasks.files import read_json_lines
from spdf_jax.data.tasks.task import Input
from spdf_jax.data.tasks.task import Task
from spdf_jax.data.tasks.task import task_of_inputs
from spdf_jax.data.tasks.triples import linearize_triples

SEEN = frozenset({
    'Airport', 'Astronaut', 'Building', 'City', 'ComicsCharacter', 'Food',
    'Monument', 'SportsTeam', 'University', 'WrittenWork',
})
"""Categories of the training data; entries of other categories are unseen."""

_NAMES = {
    'train': ['train.jsonl', 'train.json', 'train.xml', 'train'],
    'validation': ['dev.jsonl', 'dev.json', 'dev.xml', 'dev'],
    'test': ['test.jsonl', 'test.json', 'testdata_with_lex.xml', 'test.xml',
             'test'],
}


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
    ValueError: There is no file of the task, or a file has another format.

  Source: Gardent et al. 2017, "The WebNLG Challenge"; Hu et al. 2021,
    "LoRA".

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
  return task_of_inputs('webnlg', {
      split: [
          entry if split == 'test' else entry._replace(part='')
          for entry in _read(path)
      ]
      for split, path in find_files(directory, _NAMES).items()
  })


def _read(path: Path) -> Iterator[Input]:
  if path.is_dir():
    files = sorted(path.rglob('*.xml'))
    if not files:
      raise ValueError(f'{path} holds no .xml file; give the challenge data.')
    for file in files:
      yield from _read_xml(file)
  elif path.suffix == '.xml':
    yield from _read_xml(path)
  elif path.suffix == '.jsonl':
    for number, fields in read_json_lines(path):
      yield _entry(fields, f'line {number} of {path}')
  else:
    fields = read_json(path)
    try:
      entries = [e for numbered in fields['entries'] for e in numbered.values()]
    except (KeyError, TypeError, AttributeError) as error:
      raise ValueError(
          f'{path} has no list of entries; use the JSON of the challenge.'
      ) from error
    for number, entry in enumerate(entries):
      yield _entry(entry, f'entry {number} of {path}')


def _entry(fields: dict[str, Any], where: str) -> Input:
  """Reads an entry of either JSON format."""
  try:
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
  except (KeyError, TypeError) as error:
    raise ValueError(
        f'{where} is not a set of triples with texts ({error}); use the JSON of'
        ' the challenge.'
    ) from error


def _read_xml(path: Path) -> Iterator[Input]:
  data = path.read_bytes()
  # Expanding entities can take unbounded memory; UTF-16 has zero bytes.
  if b'<!ENTITY' in data.replace(b'\0', b''):
    raise ValueError(f'{path} defines entities; use the file as published.')
  try:
    root = ElementTree.fromstring(data)
  except ElementTree.ParseError as error:
    raise ValueError(f'{path} is not XML ({error}); download it again.'
                     ) from error
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

"""Documents are read in little memory, and damaged files are named."""

import gzip
import json
import os
import pathlib
import tempfile

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from experiments.preparation import documents
from experiments.preparation.documents import Piece
from experiments.preparation.documents import Skipped
from experiments.preparation.inputs import list_inputs
from experiments.preparation.inputs import read_documents
from spdf_jax.data import train_bpe
from tests.refusals import refuse
from tests.text_files import make_gz
from tests.text_files import make_parquet
from tests.text_files import make_zst


def test_inputs_are_listed_in_a_fixed_order(tmp_path):
  for name in ('b/2.jsonl', 'b/10.txt', 'a.parquet', 'notes.pdf'):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
  paths = [p.relative_to(tmp_path).as_posix() for p in list_inputs(tmp_path)]
  assert paths == ['a.parquet', 'b/10.txt', 'b/2.jsonl']
  (tmp_path / 'dataset_dict.json').touch()
  refuse('give the folder of one', list_inputs, tmp_path)


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path, caplog):
  for name in ('a.jsonl', 'b.csv', 'c/d.json', 'c/e.csv', '.hidden', 'f.txt'):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
  assert [p.name for p in list_inputs(tmp_path)] == ['a.jsonl', 'f.txt']
  message, = caplog.messages
  assert 'b.csv, c/d.json, c/e.csv are not read: documents are in .arrow' in (
      message
  )
  caplog.clear()
  for i in range(20):
    (tmp_path / f'{i:02}.csv').touch()
  list_inputs(tmp_path)
  assert '00.csv, 01.csv, 02.csv and 20 more are not read' in caplog.text


def test_a_dataset_card_beside_data_files_is_not_read(tmp_path, caplog):
  for name in ('README.md', 'a.md'):
    (tmp_path / name).touch()
  assert [p.name for p in list_inputs(tmp_path)] == ['README.md', 'a.md']
  assert not caplog.messages
  (tmp_path / 'data').mkdir()
  (tmp_path / 'data' / 'a.parquet').touch()
  (tmp_path / 'data' / 'readme.md').touch()
  paths = [p.relative_to(tmp_path).as_posix() for p in list_inputs(tmp_path)]
  assert paths == ['a.md', 'data/a.parquet']
  assert 'README.md, data/readme.md are not read' in caplog.text


MARKED = '\ufeff{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize('name, text, expected', [
    ('a.jsonl', MARKED, ['one', 'two']), ('a.txt', '\ufeffone', ['one']),
    ('a.md', '\ufeffone', ['one']),
])
def test_a_byte_order_mark_is_no_part_of_a_document(
    tmp_path, name, text, expected
):
  for suffix, pack in (('', bytes), ('.gz', gzip.compress)):
    path = tmp_path / (name + suffix)
    path.write_bytes(pack(text.encode('utf-8')))
    assert [item.content for item in read_documents(path)] == expected


@pytest.mark.parametrize('value, kind', [
    (['a'], 'a list'), ({'a': 'b'}, 'a dict'), (3, 'an int'), (True, 'a bool'),
    ([{'role': 'user', 'content': 'x'}], 'a list'),
])
def test_an_error_names_a_document_that_is_not_text(tmp_path, value, kind):
  path = tmp_path / 'a.jsonl'
  path.write_text(json.dumps({'text': value}) + '\n')
  item, = read_documents(path)
  assert item == Skipped(f'text is {kind}', f'{path} line 1')


def test_an_error_lists_the_fields_of_a_document_without_text(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text(
      '{"messages": [], "id": 1}\n{"text": null}\n' + json.dumps(
          {f'{i}': i for i in range(9)}
      )
  )
  assert list(read_documents(path)) == [
      Skipped('text is missing', f'{path} line 1, which has messages, id'),
      Skipped('text is missing', f'{path} line 2'),
      Skipped(
          'text is missing', f'{path} line 3, which has 0, 1, 2, 3, 4 and more'
      ),
  ]


@pytest.mark.parametrize('value, kind', [
    (['a'], 'a list'), ({'a': 'b'}, 'a dict'), (b'a', 'a bytes'), (1, 'an int'),
])
def test_an_error_names_a_column_that_is_not_text(tmp_path, value, kind):
  columns = {'text': [value], 'body': ['x']}
  arrow = pytest.importorskip('pyarrow')
  parquet = pytest.importorskip('pyarrow.parquet')
  parquet.write_table(arrow.table(columns), tmp_path / 'a.parquet')
  pytest.importorskip('datasets').Dataset.from_dict(columns).save_to_disk(
      tmp_path / 'dataset'
  )
  for name in ('a.parquet', 'dataset'):
    item, = read_documents(tmp_path / name)
    assert item.reason == f'text is {kind}'
    assert list(read_documents(tmp_path / name, field='body')) == [Piece('x')]


@pytest.mark.parametrize('make, suffix, message', [
    (make_zst, '.zst', 'cannot be read .*Truncated compressed stream'),
    (make_gz, '.gz', 'cannot be read .*ended before the end'),
])
@pytest.mark.parametrize('cut', [0.3, 0.99])
def test_truncated_files_are_refused(tmp_path, make, suffix, message, cut):
  make(tmp_path)
  path = tmp_path / f'a.jsonl{suffix}'
  os.truncate(path, int(path.stat().st_size * cut))
  refuse(message, list, read_documents(path))


@pytest.mark.parametrize('name, library', [
    ('a.jsonl.gz', 'gzip'), ('a.jsonl.zst', 'pyarrow'),
    ('a.parquet', 'pyarrow'), ('a.arrow', 'datasets'),
])
def test_damaged_files_are_named(tmp_path, name, library):
  pytest.importorskip(library)
  (tmp_path / name).write_bytes(b'nothing of the kind, and long enough')
  read = lambda: list(read_documents(tmp_path / name))
  refuse(f'{name} cannot be read ', read)


def test_a_row_of_parquet_in_another_encoding_is_a_fault(tmp_path):
  arrow = pytest.importorskip('pyarrow')
  parquet = pytest.importorskip('pyarrow.parquet')
  texts = arrow.array([b'one', b'\xff', b'two']).view(arrow.string())
  path = tmp_path / 'a.parquet'
  parquet.write_table(arrow.table({'text': texts}), path)
  assert list(read_documents(path)) == [
      Piece('one'), Skipped('broken UTF-8', f'{path} row 1'), Piece('two')
  ]


def test_a_missing_column_is_named(tmp_path):
  make_parquet(tmp_path)
  with pytest.raises(ValueError, match="no column 'body'; .* id, text"):
    list(read_documents(tmp_path / 'a.parquet', field='body'))


SPACED = 'One word,\n  and   another.\n\n' * 40
SPACED_TOKENIZER = train_bpe([SPACED], 274)


@pytest.mark.parametrize('size', range(50, 56))
def test_long_texts_are_read_in_pieces(tmp_path, monkeypatch, size):
  monkeypatch.setattr(documents, '_PIECE', size)
  path = tmp_path / 'a.txt'
  path.write_text(SPACED)
  pieces = list(read_documents(path))
  assert len(pieces) > 10 and ''.join(p.content for p in pieces) == SPACED
  assert [p.last for p in pieces] == [False] * (len(pieces) - 1) + [True]
  encode = SPACED_TOKENIZER.encode
  assert sum((encode(p.content) for p in pieces), []) == encode(SPACED)


@settings(deadline=None)
@given(st.lists(st.integers(7, 9), max_size=24), st.integers(1, 5))
def test_long_documents_of_tokens_are_read_in_pieces(ids, size):
  with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context(
  ) as patch:
    patch.setattr(documents, '_PIECE', size)
    path = pathlib.Path(folder, 'a.bin')
    path.write_bytes(np.array(ids, '<u2').tobytes())
    joined, document = [], []
    for item in read_documents(path, end_of_text=9):
      if isinstance(item, Skipped):
        joined.append([])
        continue
      document += item.content.tolist()
      if item.last:
        joined.append(document)
        document = []
  assert not document
  whole = [[]]
  for token in ids:
    if token == 9:
      whole.append([])
    else:
      whole[-1].append(token)
  assert joined == (whole if whole[-1] else whole[:-1])


DEEP = '[' * 200_000


@pytest.mark.parametrize(
    'line', [DEEP, '{"text":' * 200_000, '{"text": ' + '9' * 5000 + '}']
)
def test_json_that_cannot_be_parsed_is_a_faulty_document(tmp_path, line):
  path = tmp_path / 'a.jsonl'
  path.write_text(f'{line}\n{{"text": "next"}}\n')
  items = list(read_documents(path))
  assert items == [Skipped('not JSON', f'{path} line 1'), Piece('next')]


def test_a_broken_dataset_is_refused_with_its_name(tmp_path):
  pytest.importorskip('datasets')
  (tmp_path / 'dataset_info.json').write_text('{}')
  for text in (DEEP, '[]', '{"_data_files": [{"filename": 3}]}'):
    (tmp_path / 'state.json').write_text(text)
    refuse(f'^{tmp_path} cannot be read', list, read_documents(tmp_path))

"""Documents are read in little memory, and damaged files are named."""

import gzip
import json
import os
import pathlib
import tempfile
import tracemalloc

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
from tests.text_files import make_dataset
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
  with pytest.raises(ValueError, match='give the folder of one'):
    list_inputs(tmp_path)


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


def test_a_card_beside_rows_is_no_document(tmp_path, caplog):
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
def test_a_document_of_another_type_is_named_with_it(tmp_path, value, kind):
  path = tmp_path / 'a.jsonl'
  path.write_text(json.dumps({'text': value}) + '\n')
  item, = read_documents(path)
  assert item == Skipped(f'text is {kind}', f'{path} line 1')


def test_a_document_without_its_field_is_named_with_those_it_has(tmp_path):
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
def test_a_column_of_another_type_is_named_with_it(tmp_path, value, kind):
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
    (make_zst, '.zst', 'in the middle of a Zstandard frame'),
    (make_gz, '.gz', 'not a valid gzip file .*ended before the end'),
])
@pytest.mark.parametrize('cut', [0.3, 0.99])
def test_truncated_files_are_refused(tmp_path, make, suffix, message, cut):
  make(tmp_path)
  path = tmp_path / f'a.jsonl{suffix}'
  os.truncate(path, int(path.stat().st_size * cut))
  with pytest.raises(ValueError, match=message):
    list(read_documents(path))


@pytest.mark.parametrize('name, library', [
    ('a.jsonl.gz', 'gzip'), ('a.jsonl.zst', 'zstandard'),
    ('a.parquet', 'pyarrow'), ('a.arrow', 'datasets'),
])
def test_damaged_files_are_named(tmp_path, name, library):
  pytest.importorskip(library)
  (tmp_path / name).write_bytes(b'nothing of the kind, and long enough')
  with pytest.raises(ValueError, match=f'{name} is not a valid ') as caught:
    list(read_documents(tmp_path / name))
  assert '\n' not in str(caught.value)


def test_a_row_of_parquet_in_another_encoding_is_a_fault(tmp_path):
  arrow = pytest.importorskip('pyarrow')
  parquet = pytest.importorskip('pyarrow.parquet')
  texts = arrow.array([b'one', b'\xff', b'two']).view(arrow.string())
  path = tmp_path / 'a.parquet'
  parquet.write_table(arrow.table({'text': texts}), path)
  assert list(read_documents(path)) == [
      Piece('one'), Skipped('broken UTF-8', f'{path} row 1'), Piece('two')
  ]


def test_a_dataset_reaches_for_no_file_outside_of_its_folder(tmp_path):
  folder = tmp_path / 'in'
  make_dataset(folder)
  state = folder / 'state.json'
  state.write_text(state.read_text().replace('data-', '../data-'))
  name = 'data-00000-of-00001.arrow'
  (folder / name).rename(tmp_path / name)
  with pytest.raises(ValueError, match=f'in/{name} is not a valid Arrow'):
    list(read_documents(folder))


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


def bomb(blocks, window=17):
  """Builds a Zstandard frame in which 4 bytes become 128 KiB of spaces."""
  header = bytes([0x28, 0xB5, 0x2F, 0xFD, 0, (window - 10) << 3])
  block = lambda last: (last | 1 << 1 | 1 << 17 << 3).to_bytes(3, 'little')
  return header + (block(0) + b' ') * (blocks - 1) + block(1) + b' '


def peak_of(read):
  """Returns the result of a call and the largest allocation during it."""
  tracemalloc.start()
  try:
    return read(), tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()


def test_a_zstandard_bomb_needs_little_memory(tmp_path, monkeypatch):
  pytest.importorskip('zstandard')
  monkeypatch.setattr(documents, '_LONGEST_LINE', 1 << 20)
  path = tmp_path / 'a.jsonl.zst'
  path.write_bytes(bomb(2048))
  items, peak = peak_of(lambda: list(read_documents(path)))
  assert items == [Skipped('line too long', f'{path} line 1')]
  assert peak < 1 << 27


def test_a_zstandard_window_of_gigabytes_is_refused(tmp_path):
  pytest.importorskip('zstandard')
  path = tmp_path / 'a.jsonl.zst'
  path.write_bytes(bomb(1, window=31))
  with pytest.raises(ValueError, match='a.jsonl.zst is not a valid .*memory'):
    list(read_documents(path))


def test_equal_rows_of_parquet_are_held_a_few_at_a_time(tmp_path, monkeypatch):
  arrow = pytest.importorskip('pyarrow')
  parquet = pytest.importorskip('pyarrow.parquet')
  path, text = tmp_path / 'a.parquet', '0' * (1 << 22)
  entries = arrow.DictionaryArray.from_arrays([0] * 64, [text])
  table = arrow.table({'text': entries.cast(arrow.string())})
  parquet.write_table(table, path, compression='zstd', write_statistics=False)
  del table, entries
  monkeypatch.setattr(documents, '_LARGEST_BATCH', 1 << 24)
  monkeypatch.setattr(documents, '_LARGEST_RATIO', 1e9)
  held = [
      (item == Piece(text), arrow.total_allocated_bytes())
      for item in read_documents(path)
  ]
  assert len(held) == 64 and all(equal for equal, _ in held)
  assert max(size for _, size in held) < 1 << 26  # 64 rows are 1 << 28 bytes.
  monkeypatch.undo()
  monkeypatch.setattr(documents, '_LONGEST_LINE', 1 << 20)
  with pytest.raises(ValueError, match="a column 'text' that expands from "):
    list(read_documents(path))


@pytest.mark.parametrize('as_dictionary', [False, True])
def test_compressed_arrow_is_refused_before_it_is_expanded(
    tmp_path, as_dictionary
):
  pytest.importorskip('datasets')
  arrow = pytest.importorskip('pyarrow')
  ipc = arrow.ipc
  values = arrow.array(['0' * (1 << 20)])
  values = values.dictionary_encode() if as_dictionary else values
  table = arrow.table({'text': values})
  for compression in (None, 'zstd'):
    path = tmp_path / f'{compression}.arrow'
    options = ipc.IpcWriteOptions(compression=compression)
    with ipc.new_stream(path, table.schema, options=options) as writer:
      writer.write_table(table)
  assert list(read_documents(tmp_path / 'None.arrow')) == [
      Piece('0' * (1 << 20))]
  with pytest.raises(ValueError, match='zstd.arrow is .* are compressed'):
    list(read_documents(path))


@pytest.mark.parametrize('compressed', [False, True])
def test_lines_that_are_too_long_are_skipped_and_not_held(
    tmp_path, monkeypatch, compressed
):
  monkeypatch.setattr(documents, '_LONGEST_LINE', 1 << 20)
  lines = [json.dumps({'text': text}).encode() for text in ('one', 'two')]
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'\n'.join([lines[0], b' ' * (1 << 25), lines[1]]))
  if compressed:
    zstandard = pytest.importorskip('zstandard')
    data = zstandard.ZstdCompressor().compress(path.read_bytes())
    path = tmp_path / 'a.jsonl.zst'
    path.write_bytes(data)
  items, peak = peak_of(lambda: list(read_documents(path)))
  assert items == [
      Piece('one'), Skipped('line too long', f'{path} line 2'), Piece('two')
  ]
  # A piece of compressed data is up to 32 MiB.
  assert peak < (1 << 27 if compressed else 1 << 23)


@pytest.mark.parametrize('excess', [0, 1])
def test_a_line_of_the_largest_length_is_a_document(
    tmp_path, monkeypatch, excess
):
  monkeypatch.setattr(documents, '_LONGEST_LINE', 100)
  line = json.dumps({'text': 'x' * (100 - 13 + excess)}) + '\n'
  path = tmp_path / 'a.jsonl'
  path.write_text(line + '{"text": "next"}\n')
  assert len(line) == 100 + excess
  first, second = read_documents(path)
  assert isinstance(first, Skipped if excess else Piece)
  assert second == Piece('next')


@pytest.mark.parametrize(
    'line', [DEEP, '{"text":' * 200_000, '{"text": ' + '9' * 5000 + '}']
)
def test_json_that_cannot_be_parsed_is_a_faulty_document(tmp_path, line):
  path = tmp_path / 'a.jsonl'
  path.write_text(f'{line}\n{{"text": "next"}}\n')
  items = list(read_documents(path))
  assert items == [Skipped('not JSON', f'{path} line 1'), Piece('next')]


def test_a_broken_dataset_is_refused_with_its_name(tmp_path):
  for text in (DEEP, '[]', '{"_data_files": [{"filename": 3}]}'):
    (tmp_path / 'state.json').write_text(text)
    with pytest.raises(ValueError, match=f'^{tmp_path} is not a dataset'):
      list(read_documents(tmp_path))

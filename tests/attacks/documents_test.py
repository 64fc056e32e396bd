"""Attacks on the readers of documents, tasks and tokenizers."""

import json
import tracemalloc

import pytest

from spdf_jax.data import load_task
from spdf_jax.data import load_tokenizer
from spdf_jax.data import open_tokenizer
from spdf_jax.data import prepare_corpus
from spdf_jax.data import prepare_files
from spdf_jax.data import train_bpe
from spdf_jax.data.prepare.documents import Piece
from spdf_jax.data.prepare.documents import Skipped
from spdf_jax.data.prepare.inputs import read_documents

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
  monkeypatch.setattr('spdf_jax.data.prepare.documents._LONGEST_LINE', 1 << 20)
  path = tmp_path / 'a.jsonl.zst'
  path.write_bytes(bomb(2048))
  found, peak = peak_of(lambda: list(read_documents(path)))
  assert found == [Skipped('line too long', f'{path} line 1')]
  assert peak < 1 << 27


def test_a_zstandard_window_of_gigabytes_is_refused(tmp_path):
  pytest.importorskip('zstandard')
  path = tmp_path / 'a.jsonl.zst'
  path.write_bytes(bomb(1, window=31))
  with pytest.raises(ValueError, match='a.jsonl.zst is not a valid .*memory'):
    list(read_documents(path))


@pytest.mark.parametrize('compressed', [False, True])
def test_lines_that_are_too_long_are_skipped_and_not_held(
    tmp_path, monkeypatch, compressed
):
  monkeypatch.setattr('spdf_jax.data.prepare.documents._LONGEST_LINE', 1 << 20)
  lines = [json.dumps({'text': text}).encode() for text in ('one', 'two')]
  path = tmp_path / 'a.jsonl'
  path.write_bytes(b'\n'.join([lines[0], b' ' * (1 << 25), lines[1]]))
  if compressed:
    zstandard = pytest.importorskip('zstandard')
    data = zstandard.ZstdCompressor().compress(path.read_bytes())
    path = tmp_path / 'a.jsonl.zst'
    path.write_bytes(data)
  found, peak = peak_of(lambda: list(read_documents(path)))
  assert found == [
      Piece('one'), Skipped('line too long', f'{path} line 2'), Piece('two')
  ]
  # A piece of compressed data is up to 32 MiB.
  assert peak < (1 << 27 if compressed else 1 << 23)


@pytest.mark.parametrize('excess', [0, 1])
def test_a_line_of_the_largest_length_is_a_document(
    tmp_path, monkeypatch, excess
):
  monkeypatch.setattr('spdf_jax.data.prepare.documents._LONGEST_LINE', 100)
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
  found = list(read_documents(path))
  assert found == [Skipped('not JSON', f'{path} line 1'), Piece('next')]


@pytest.mark.parametrize('size', ['1048577', '4000000000', '9' * 5000, '256'])
def test_vocabularies_out_of_range_are_refused_at_once(tmp_path, size):
  name = f'bpe-{size}'
  path = tmp_path / 'a.txt'
  path.write_text('some text')
  message = 'is out of range; .* 257 to 1048576'
  with pytest.raises(ValueError, match=message):
    prepare_corpus('python-stdlib', tokenizer=name, cache_dir=tmp_path)
  with pytest.raises(ValueError, match=message):
    prepare_files(path, tokenizer=name, output=tmp_path / 'out')
  with pytest.raises(ValueError, match='vocab_size=4000000000 is too large'):
    train_bpe(['some text'], 4_000_000_000)
  assert [p.name for p in tmp_path.iterdir()] == ['a.txt']


@pytest.mark.parametrize('text', [
    DEEP, '[]', '3', '{"kind": []}', '{"kind": "bpe"}',
    '{"kind": "bpe", "vocab": [], "merges": []}',
    '{"kind": "tokenizers", "model": {"model": ' + '[' * 500 + ']' * 500 + '}}',
    '{"kind": "sentencepiece", "model": 3}',
])
@pytest.mark.parametrize('read', [load_tokenizer, open_tokenizer])
def test_broken_tokenizers_are_refused_with_their_name(tmp_path, text, read):
  path = tmp_path / 'tokenizer.json'
  path.write_text(text)
  with pytest.raises(ValueError, match='tokenizer.json'):
    read(path)


@pytest.mark.parametrize('task, name', [
    ('webnlg', 'test.json'), ('webnlg', 'test.jsonl'), ('dart', 'test.json'),
    ('jsonl', 'test.jsonl'),
])
@pytest.mark.parametrize('text', [DEEP, '9' * 5000])
def test_broken_tasks_are_refused_with_the_name_of_the_file(
    tmp_path, task, name, text
):
  (tmp_path / name).write_text(text)
  with pytest.raises(ValueError, match=rf'{name} is not'):
    load_task(task, tmp_path)


def test_entities_are_refused_in_every_encoding_of_xml(tmp_path):
  text = '<!DOCTYPE a [<!ENTITY b "c">]><entries>&b;</entries>'
  for encoding in ('utf-8', 'utf-16', 'utf-16-be'):
    (tmp_path / 'test.xml').write_bytes(text.encode(encoding))
    with pytest.raises(ValueError, match='test.xml defines entities'):
      load_task('webnlg', tmp_path)


def test_a_broken_dataset_is_refused_with_its_name(tmp_path):
  for text in (DEEP, '[]', '{"_data_files": [{"filename": 3}]}'):
    (tmp_path / 'state.json').write_text(text)
    with pytest.raises(ValueError, match=f'^{tmp_path} is not a dataset'):
      list(read_documents(tmp_path))

"""Datasets of Hugging Face are streamed as their files are read."""

import functools
import gzip
import http.server
import json
import os
import sys
import threading

import pytest

from experiments import preparation
from experiments.preparation import files
from experiments.preparation import inputs
from spdf_jax.data.corpora import SPLITS
from tests.refusals import refuse
from tests.text_files import stop_after

TEXTS = [f'Text {i}: élan. ' * (1 + i % 5) for i in range(60)]


@pytest.fixture
def folder(tmp_path):
  """Files of a dataset, as `load_dataset` finds them."""
  pytest.importorskip('datasets')
  folder = tmp_path / 'in'
  folder.mkdir()
  for name, texts in {
      'train-0': TEXTS[:20], 'train-1': [*TEXTS[20:40], ''],
      'validation': TEXTS[40:50], 'test': TEXTS[50:],
  }.items():
    (folder / f'{name}.jsonl').write_text(
        ''.join(json.dumps({'text': text, 'id': 1}) + '\n' for text in texts)
    )
  return folder


def prepare(source, output, **changes):
  return preparation.prepare_files(
      source, tokenizer='bytes', output=output, **changes
  )


def tokens_of(corpus):
  return {s: getattr(corpus, s).tokens.tobytes() for s in SPLITS}


def test_a_streamed_dataset_has_the_tokens_of_its_files(folder, tmp_path):
  corpus = prepare(f'hf:{folder}', tmp_path / 'x')
  assert tokens_of(corpus) == tokens_of(prepare(folder, tmp_path / 'files'))
  source = corpus.train.description['source']
  assert source['skipped'] == {'empty': 1}
  assert [name for name, _, _ in source['inputs']] == [
      'train', 'validation', 'test'
  ]
  assert str(tmp_path) not in json.dumps(source)
  again = prepare(f'hf:{folder}', tmp_path / 'x')
  assert again.fingerprint == corpus.fingerprint
  os.utime(folder / 'train-0.jsonl', (1, 1))
  with pytest.raises(ValueError, match=r'differently \(other inputs\); give'):
    prepare(f'hf:{folder}', tmp_path / 'x')


def test_a_killed_stream_reads_no_finished_file_again(
    folder, tmp_path, monkeypatch
):
  expected = prepare(f'hf:{folder}', tmp_path / 'a' / 'x')
  monkeypatch.setattr(files, '_BATCH', 200)
  monkeypatch.setattr(files, '_SAVE_EVERY', 100)
  with pytest.raises(KeyboardInterrupt):
    prepare(f'hf:{folder}', tmp_path / 'b' / 'x', report=stop_after(8))
  read, real = [], inputs.read_documents
  monkeypatch.setattr(inputs, 'read_documents', lambda path, **kwargs: (
      read.append(path.relative_to(f'hf:{folder}').as_posix()),
      real(path, **kwargs),
  )[1])
  corpus = prepare(f'hf:{folder}', tmp_path / 'b' / 'x')
  assert corpus.fingerprint == expected.fingerprint
  assert read == ['train/1', 'validation/0', 'test/0']


def test_shards_of_a_stream_are_joined_to_the_whole(folder, tmp_path):
  total = 6
  expected = prepare(f'hf:{folder}', tmp_path / 'a' / 'x')
  output = tmp_path / 'b' / 'x'
  for number in range(1, total + 1):
    preparation.prepare_shard(
        f'hf:{folder}', f'{number}/{total}', tokenizer='bytes', output=output
    )
  assert preparation.join_shards(output).fingerprint == expected.fingerprint


@pytest.mark.parametrize('name', ['a.jsonl.gz', 'a.jsonl'])
def test_a_file_behind_a_url_has_the_tokens_of_the_file(
    folder, tmp_path, address, name
):
  path = tmp_path / name
  text = ''.join(json.dumps({'text': text}) + '\n' for text in TEXTS)
  path.write_bytes(
      gzip.compress(text.encode()) if path.suffix == '.gz' else text.encode()
  )
  changes = dict(validation=0.2, test=0.2)
  actual = prepare(f'{address}/{name}', tmp_path / 'x', **changes)
  expected = prepare(path, tmp_path / 'y', **changes)
  assert tokens_of(actual) == tokens_of(expected)


@pytest.fixture
def address(tmp_path):
  """Address of a server of the files in `tmp_path`."""
  pytest.importorskip('aiohttp')

  class Handler(http.server.SimpleHTTPRequestHandler):

    def log_message(self, *args):
      pass

  handler = functools.partial(Handler, directory=tmp_path)
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    threading.Thread(target=server.serve_forever).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()


def test_a_stream_that_cannot_be_read_gets_one_sentence(
    folder, tmp_path, address
):
  (tmp_path / 'faulty.jsonl').write_text('{"text": "a"}\n[1]\n{"te\n')
  for source, changes, message in (
      (f'hf:{folder}/none', {}, "input='hf:.*/none' cannot be streamed"),
      (f'hf:{folder},other', {}, 'cannot be streamed .* not found'),
      (f'hf:{folder}', {'field': 'body'},
       "no column 'body'; its columns are text, id; set"),
      (f'{address}/none.jsonl', {}, 'none.jsonl.* cannot be streamed'),
      (f'{address}/faulty.jsonl', {}, 'streamed .*or download the files'),
      ('https://a.org/b.pdf', {}, "kind of file '.pdf' is unknown"),
  ):
    refuse(message, prepare, source, tmp_path / 'x', **changes)


def test_without_the_library_the_extra_is_named(monkeypatch, tmp_path):
  monkeypatch.setitem(sys.modules, 'datasets', None)
  (tmp_path / 'a.arrow').touch()
  for source in ('hf:a/b', 'https://a.org/b.jsonl', tmp_path / 'a.arrow'):
    with pytest.raises(ImportError, match=r'datasets is not .*\[prepare'):
      prepare(source, tmp_path / 'x')

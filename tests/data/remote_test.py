"""Corpora in buckets are copied once; URLs to write to are refused."""

import functools
import io
import json
import os
import pathlib
import time

import pytest

from experiments.preparation import prepare_files
from experiments.sweep import run_sweep
from spdf_jax import files
from spdf_jax.data import prepare_corpus
from spdf_jax.data import read_tokenizer
from spdf_jax.data.corpora import SPLITS
from spdf_jax.training.checkpoints.workdir import check_workdir
from tests.refusals import refuse

URL = 's3://bucket/corpora/books'


@functools.cache
def bucket_class():
  """Registers a file system for s3://, once, since epath keeps its instance."""
  fsspec = pytest.importorskip('fsspec')
  from fsspec.implementations.local import LocalFileSystem

  class Object(io.BytesIO):
    """An object that is written as a whole."""

    def __init__(self, path):
      super().__init__()
      self._path = path

    def close(self):
      if not self.closed:
        with files.replacing(self._path) as temporary:
          temporary.write_bytes(self.getvalue())
      super().close()

  class Bucket(LocalFileSystem):
    """Folders as buckets, which records the names of the files it opens."""

    protocol = 's3'
    root = ''
    opened = []

    @classmethod
    def _strip_protocol(cls, path):
      return str(path).replace('s3://', f'{cls.root}/', 1)

    def _open(self, path, mode='rb', **kwargs):
      self.opened.append(pathlib.Path(path).name)
      if mode == 'wb':
        return Object(self._strip_protocol(path))
      return super()._open(path, mode, **kwargs)

  fsspec.register_implementation('s3', Bucket, clobber=True)
  return Bucket


@pytest.fixture
def bucket(tmp_path):
  """Returns the names of the files that were opened in the bucket."""
  buckets = bucket_class()
  buckets.root = tmp_path
  buckets.opened.clear()
  return buckets.opened


def write(folder, texts):
  path = folder.parent / 'in.jsonl'
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(json.dumps({'text': t}) + '\n' for t in texts))
  return prepare_files(
      path, tokenizer='bytes', output=folder, validation=0.2, test=0.2
  )


def load(cache, name=URL):
  return prepare_corpus(name, tokenizer='', cache_dir=cache)


def copied(cache):
  """Returns the files of the copy of a corpus, by name."""
  return {path.name: path for path in cache.glob('copies/*/books/*')}


def test_a_corpus_in_a_bucket_is_copied_once(bucket, tmp_path):
  folder = tmp_path / 'bucket' / 'corpora' / 'books'
  made = write(folder, [f'Text {i}.' for i in range(50)])
  cache = tmp_path / 'cache'
  corpus = load(cache)
  assert corpus.fingerprint == made.fingerprint
  assert bucket.count('train.bin') == 1
  assert load(cache, URL + '/').fingerprint == made.fingerprint
  assert bucket.count('train.bin') == 1
  mixed = load(cache, f'{URL}=3,{folder}=1')
  assert mixed.train.fingerprint == made.train.fingerprint
  bucket.clear()
  again = read_tokenizer(URL, tokenizer='', cache_dir=cache)
  assert again.fingerprint == made.tokenizer.fingerprint and not bucket

  copy = copied(cache)['train.bin']
  data = copy.read_bytes()
  copy.write_bytes(data[:-2] + b'\0\0')
  refuse('other tokens than were written', load, cache)
  copy.unlink()  # A killed copy would leave this state.
  assert load(cache).fingerprint == made.fingerprint

  for file in folder.iterdir():
    file.unlink()
  other = write(folder, [f'Another text {i}.' for i in range(50)])
  assert load(cache).fingerprint == other.fingerprint != made.fingerprint


def test_a_corpus_that_is_not_there_gets_one_sentence(bucket, tmp_path):
  prepare = functools.partial(prepare_corpus, URL, cache_dir=tmp_path)
  refuse(f'{URL}.* cannot be read .FileNot', prepare, tokenizer='')
  with pytest.raises(OSError, match='tokenizer.json'):
    read_tokenizer(URL, tokenizer='', cache_dir=tmp_path)
  refuse("own tokenizer, but tokenizer='bytes'", prepare, tokenizer='bytes')


class Refused(Exception):
  """An error of a bucket's own library."""


class Broken(io.RawIOBase):
  """A file whose connection is lost after the first bytes."""

  def __init__(self):
    self.count = 0

  def read(self, size=-1):
    self.count += 1
    if self.count == 1:
      return b'1234'
    raise Refused('the session\nhas expired')


def test_a_corpus_that_cannot_be_read_to_its_end_gets_one_sentence(
    bucket, tmp_path, monkeypatch
):
  write(tmp_path / 'bucket' / 'corpora' / 'books', [f't{i}' for i in range(50)])
  opened = bucket_class()._open
  monkeypatch.setattr(
      bucket_class(), '_open', lambda self, path, *args, **kwargs: Broken()
      if path.endswith('train.bin') else opened(self, path, *args, **kwargs)
  )
  message = 'cannot be read .Refused: the session has expired.; give the URL'
  refuse(message, load, tmp_path / 'cache')
  copies = tmp_path / 'cache' / 'copies'
  assert {
      path.name for path in copies.rglob('*') if path.is_file()
  } <= {'.lock'}


def test_the_next_copy_removes_what_a_kill_has_left(
    bucket, tmp_path, monkeypatch
):
  write(tmp_path / 'bucket' / 'corpora' / 'books', [f't{i}' for i in range(50)])
  cache = tmp_path / 'cache'

  def killed(*unused, **also_unused):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(os, 'replace', killed)
    patch.setattr(pathlib.Path, 'unlink', lambda self, **unused: None)
    with pytest.raises(KeyboardInterrupt):
      load(cache)
  assert any(name.endswith('.tmp') for name in copied(cache))
  load(cache)
  assert set(copied(cache)) == {
      '.lock', 'tokenizer.json', *(
          f'{split}.{kind}' for split in SPLITS for kind in ('bin', 'json')
      ),
  }


def test_a_process_waits_for_the_copy_of_another(bucket, tmp_path, monkeypatch):
  made = write(
      tmp_path / 'bucket' / 'corpora' / 'books', [f't{i}' for i in range(50)]
  )
  cache = tmp_path / 'cache'
  attempts = []

  def lock(folder, name):
    attempts.append(folder)
    if len(attempts) == 1:
      raise files.FolderInUse
    return lambda: None

  def copy(seconds):
    monkeypatch.setattr(files, 'lock_folder', lambda *_: lambda: None)
    load(cache)  # Simulates the other process.
    monkeypatch.setattr(files, 'lock_folder', lock)

  monkeypatch.setattr(files, 'lock_folder', lock)
  monkeypatch.setattr(time, 'sleep', copy)
  assert load(cache).fingerprint == made.fingerprint
  assert len(attempts) == 2 and bucket.count('train.bin') == 1


def test_urls_to_write_to_are_refused(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'a.txt').write_text('text')
  refused = 'is a URL, but files in this folder are locked, renamed and'
  with pytest.raises(ValueError, match=f"^output 'gs://b/x' {refused}"):
    prepare_files('a.txt', tokenizer='bytes', output='gs://b/x')
  refuse(f"^workdir 'gs://b/x' {refused}", check_workdir, 'gs://b/x', None)
  with pytest.raises(ValueError, match=f"^workdir 'gs:/b/x' {refused}"):
    list(run_sweep(
        None, pathlib.Path('gs://b/x'), [], seeds=1, metric='', settings=None
    ))
  assert os.listdir() == ['a.txt']

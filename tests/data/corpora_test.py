"""The built-in corpus: its modules, its cache and its tokenizers."""

import logging
import multiprocessing
import os
import platform

import pytest

from spdf_jax import data
from spdf_jax.data import corpora
from spdf_jax.data import stdlib
from spdf_jax.data import tokenizers
from spdf_jax.data.corpora import prepare_corpus
from spdf_jax.data.corpora import SPLITS
from spdf_jax.data.tokenizers import ByteTokenizer
from tests.text_files import flip_bit


@pytest.fixture(scope='module')
def cache_dir(tmp_path_factory):
  return tmp_path_factory.mktemp('corpora')


@pytest.fixture(scope='module')
def corpus(cache_dir):
  return prepare_corpus('python-stdlib', tokenizer='bytes', cache_dir=cache_dir)


@pytest.fixture
def small_library(monkeypatch, tmp_path):
  """Replaces the standard library by a few small files."""
  names = [f'module{i}' for i in range(60)]
  sources = [(name, f'"""Text of {name}."""\n' * 5) for name in names]
  monkeypatch.setattr(stdlib, 'module_sources', lambda: sources)
  return tmp_path / 'cache'


def prepare(cache_dir, tokenizer='bytes'):
  return prepare_corpus(
      'python-stdlib', tokenizer=tokenizer, cache_dir=cache_dir
  )


def folder(cache_dir, tokenizer='bytes'):
  version = platform.python_version()
  return cache_dir / f'python-stdlib-{version}-{tokenizer}'


def documents(corpus, split):
  tokens = getattr(corpus, split).tokens
  text = bytes(i if i < 256 else 0 for i in tokens.tolist())
  return text.decode('utf-8').split('\0')[:-1]


def test_held_out_splits_have_about_five_percent_each(corpus):
  sizes = {s: getattr(corpus, s).description['bytes'] for s in SPLITS}
  assert 7e6 < sum(sizes.values()) < 11e6
  for split in ('validation', 'test'):
    assert 0.03 < sizes[split] / sum(sizes.values()) < 0.07


def test_every_split_holds_its_modules_in_order_and_no_others(corpus):
  train = set(documents(corpus, 'train'))
  for split in SPLITS:
    expected = [t for m, t in stdlib.module_sources()
                if stdlib.module_split(m) == split]
    assert documents(corpus, split) == expected
    # Modules of a few bytes may be equal in two splits.
    held_out = {text for text in expected if len(text) > 100}
    assert len(held_out) >= 20
    assert split == 'train' or not held_out & train
    file = getattr(corpus, split)
    assert file.description['documents'] == len(expected)
    assert file.tokens[-1] == corpus.tokenizer.end_of_text
    assert len(file.tokens) == file.description['bytes'] + len(expected)


def test_a_corpus_is_read_from_the_cache_the_second_time(
    corpus, cache_dir, monkeypatch
):
  monkeypatch.setattr(stdlib, 'module_sources', None)
  again = prepare(cache_dir)
  assert again.fingerprint == corpus.fingerprint
  assert os.listdir(cache_dir) == [folder(cache_dir).name]


def test_the_python_version_is_in_the_fingerprint(small_library, monkeypatch):
  first = prepare(small_library)
  source = first.train.description['source']
  assert source['python'] == platform.python_version()
  identity = stdlib.python_identity() | {'python': '3.99.0'}
  monkeypatch.setattr(stdlib, 'python_identity', lambda: identity)
  second = prepare(small_library)
  assert second.train.fingerprint == first.train.fingerprint
  assert second.fingerprint != first.fingerprint


def test_byte_pairs_are_learned_on_training_documents_only(
    small_library, monkeypatch
):
  pytest.importorskip('tokenizers')
  seen = []
  real_train = tokenizers.train_bpe

  def train(texts, vocab_size):
    seen.extend(texts)
    return real_train(seen, vocab_size)

  monkeypatch.setattr(tokenizers, 'train_bpe', train)
  corpus = prepare(small_library, 'bpe-270')
  sources = stdlib.module_sources()
  assert seen == [t for m, t in sources if stdlib.module_split(m) == 'train']
  assert corpus.train.vocab_size == corpus.tokenizer.vocab_size == 270
  assert prepare(small_library, 'bpe-270').fingerprint == corpus.fingerprint
  ids = corpus.test.tokens.tolist()
  texts = [t for m, t in sources if stdlib.module_split(m) == 'test']
  assert corpus.tokenizer.decode(ids) == ''.join(texts)


def truncate(path):
  os.truncate(path, 10)


@pytest.mark.parametrize('name, damage', [
    ('train.bin', truncate), ('test.json', os.unlink),
    ('train.bin', lambda path: flip_bit(path, 20)),
    ('tokenizer.json', lambda path: path.write_text('{"kind": "bpe"}')),
])
def test_a_damaged_corpus_is_built_again_with_a_warning(
    small_library, caplog, name, damage
):
  good = prepare(small_library)
  damage(folder(small_library) / name)
  with caplog.at_level(logging.WARNING):
    mended = prepare(small_library)
  assert 'again' in caplog.text and name.split('.')[0] in caplog.text
  assert mended.fingerprint == good.fingerprint
  caplog.clear()
  prepare(small_library)
  assert caplog.text == ''
  assert os.listdir(small_library) == [folder(small_library).name]


def test_a_build_that_fails_leaves_nothing_behind(small_library, monkeypatch):
  def failing(*args, **kwargs):
    raise KeyboardInterrupt

  monkeypatch.setattr(corpora, 'write_token_file', failing)
  with pytest.raises(KeyboardInterrupt):
    prepare(small_library)
  assert os.listdir(small_library) == []


def _prepare_in_child(cache_dir, barrier, results):
  barrier.wait()
  results.put(prepare(cache_dir).fingerprint)


@pytest.mark.process
def test_processes_that_build_at_once_get_the_same_corpus(corpus, tmp_path):
  context = multiprocessing.get_context('spawn')
  barrier, results = context.Barrier(2), context.Queue()
  children = [
      context.Process(
          target=_prepare_in_child, args=(tmp_path, barrier, results)
      )
      for _ in range(2)
  ]
  for child in children:
    child.start()
  fingerprints = {results.get(timeout=120) for _ in children}
  for child in children:
    child.join()
  assert fingerprints == {corpus.fingerprint}
  assert os.listdir(tmp_path) == [folder(tmp_path).name]


@pytest.mark.parametrize('error, call, message', [
    (ValueError, lambda folder: prepare_corpus(
        'python-stdlb', tokenizer='bytes', cache_dir=folder
    ), "'python-stdlb'.*'python-stdlib'"),
    *((ValueError, lambda folder, name=name: prepare(folder, name),
       f"='{name}' .*'bytes'.*'bpe-N'")
      for name in ('byte', 'bpe-', 'bpe-256', 'bpe-01024')),
    (ValueError, lambda folder: data.write_corpus(
        folder / 'texts', {'train': ['a']}, ByteTokenizer()
    ), 'texts has no documents of test, valid'),
    (RuntimeError, stdlib.module_sources, 'holds no Python sources'),
])
def test_a_corpus_that_cannot_be_made_is_refused_and_nothing_is_written(
    error, call, message, tmp_path
):
  with pytest.raises(error, match=message):
    call(tmp_path)
  assert os.listdir(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
  (tmp_path / 'file').write_text('in the way')
  with pytest.raises(OSError, match='cache_dir=.*file.*can be written'):
    prepare(tmp_path / 'file')


def test_tests_tables_and_packages_are_left_out(tmp_path):
  (tmp_path / 'pkg').mkdir()
  (tmp_path / 'pkg' / '__init__.py').write_text('package')
  for left_out in (
      'test/a.py', 'pkg/tests/a.py', 'encodings/a.py', 'idlelib/a.py',
      'pydoc_data/a.py', 'distutils/a.py', 'lib2to3/a.py',
      'site-packages/a.py', 'dist-packages/a.py', '__pycache__/a.py',
      'config-3.11-x86/a.py', '_sysconfigdata__linux.py', 'data.txt',
  ):
    path = tmp_path / left_out
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('left out')
  (tmp_path / 'pkg' / 'b.py').write_text('b')
  (tmp_path / 'a.py').write_text('a')
  sources = stdlib.module_sources(tmp_path)
  assert sources == [('a', 'a'), ('pkg', 'package'), ('pkg.b', 'b')]


def test_sources_are_decoded_as_they_declare(tmp_path):
  latin = '# -*- coding: latin-1 -*-\nname = "é"\n'
  (tmp_path / 'a.py').write_bytes(latin.encode('latin-1'))
  (tmp_path / 'b.py').write_bytes(b'\xef\xbb\xbfx = 1\r\n')
  assert stdlib.module_sources(tmp_path) == [('a', latin), ('b', 'x = 1\n')]


def test_a_file_that_cannot_be_decoded_is_skipped_with_a_warning(
    tmp_path, caplog
):
  (tmp_path / 'a.py').write_bytes(b'\xff\xfe')
  (tmp_path / 'b.py').write_text('b')
  assert stdlib.module_sources(tmp_path) == [('b', 'b')]
  assert 'a.py' in caplog.text


def test_splits_of_modules_equal_recorded_ones():
  # Golden: a change here changes every corpus, and moves modules that were
  # trained on into the test split.
  assert {
      name: stdlib.module_split(name)
      for name in ('bisect', 'asyncio.sslproto', '__future__')
  } == {
      'bisect': 'train', 'asyncio.sslproto': 'validation', '__future__': 'test'
  }


def test_a_written_corpus_is_opened_with_its_texts(tmp_path):
  texts = {'train': ['One.', 'Two.'], 'validation': ['ä'], 'test': []}
  written = data.write_corpus(
      tmp_path / 'texts', {k: iter(v) for k, v in texts.items()},
      ByteTokenizer(),
  )
  opened = data.open_corpus(tmp_path / 'texts')
  assert opened.name == 'texts' and opened.fingerprint == written.fingerprint
  end = opened.tokenizer.end_of_text
  for split, documents in texts.items():
    tokens = getattr(opened, split).tokens.tolist()
    assert tokens == [
        id for text in documents for id in [*text.encode('utf-8'), end]
    ]

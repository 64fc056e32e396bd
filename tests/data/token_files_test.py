"""Tests of spdf_jax.data.token_files."""

import os

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from spdf_jax.data.token_files import open_token_file
from spdf_jax.data.token_files import verify_token_file
from spdf_jax.data.token_files import write_token_file
from tests.text_files import flip_bit


def write(path, documents=(([1, 2, 0], 5), ([3, 0], 1)), vocab_size=4):
  return write_token_file(
      path, documents, vocab_size=vocab_size, source={'made': 'by hand'}
  )


@settings(deadline=None, max_examples=30)
@given(
    documents=st.lists(st.lists(st.integers(0, 69_999), max_size=9)),
    vocab_size=st.sampled_from([70_000, 2**32]),
)
def test_token_files_are_read_as_they_were_written(
    tmp_path_factory, documents, vocab_size
):
  path = tmp_path_factory.mktemp('tokens') / 'train'
  file = write(path, [(ids, len(ids)) for ids in documents], vocab_size)
  flat = [i for ids in documents for i in ids]
  assert file.tokens.tolist() == flat
  assert open_token_file(path).tokens.tolist() == flat
  assert file.description['tokens'] == len(flat)
  assert file.description['documents'] == len(documents)
  assert file.description['bytes'] == len(flat)


def test_the_description_shows_what_the_tokens_are(tmp_path):
  file = write(tmp_path / 'train')
  assert file.description == {
      'format_version': 1,
      'dtype': '<u2',
      'vocab_size': 4,
      'tokens': 5,
      'documents': 2,
      'bytes': 6,
      'fingerprint': file.fingerprint,
      'source': {'made': 'by hand'},
  }
  assert sorted(os.listdir(tmp_path)) == ['train.bin', 'train.json']


def test_the_fingerprint_depends_on_tokens_and_width_only(tmp_path):
  base = write(tmp_path / 'a')
  again = write_token_file(
      tmp_path / 'b', [([1, 2, 0, 3, 0], 6)], vocab_size=4, source={}
  )
  other = write(tmp_path / 'c', [([1, 2, 0, 3, 1], 6)])
  wide = write(tmp_path / 'd', vocab_size=70_000)
  assert base.fingerprint == again.fingerprint
  assert len({f.fingerprint for f in (base, other, wide)}) == 3


def test_a_write_that_fails_leaves_the_old_file_as_it_was(tmp_path):
  def failing():
    yield [1, 0], 1
    raise RuntimeError('no more text')

  old = write(tmp_path / 'train')
  with pytest.raises(RuntimeError, match='no more text'):
    write(tmp_path / 'train', failing())
  new = open_token_file(tmp_path / 'train')
  verify_token_file(new)
  assert new.fingerprint == old.fingerprint
  assert sorted(os.listdir(tmp_path)) == ['train.bin', 'train.json']


def test_tokens_without_their_description_cannot_be_opened(
    tmp_path, monkeypatch
):
  real_replace = os.replace

  def replace(source, target):
    if str(target).endswith('.json'):
      raise KeyboardInterrupt
    real_replace(source, target)

  write(tmp_path / 'train')
  monkeypatch.setattr(os, 'replace', replace)
  with pytest.raises(KeyboardInterrupt):
    write(tmp_path / 'train', [([3, 3, 3, 3, 3], 5)])
  with pytest.raises(FileNotFoundError, match='train.json is missing'):
    open_token_file(tmp_path / 'train')


@pytest.mark.parametrize('vocab_size, width', [(65_536, 2), (65_537, 4)])
def test_ids_are_little_endian_of_the_width_of_the_vocabulary(
    tmp_path, vocab_size, width
):
  file = write(tmp_path / 'v1.2', [([258, vocab_size - 1], 3)], vocab_size)
  data = (tmp_path / 'v1.2.bin').read_bytes()
  assert data == b''.join(
      i.to_bytes(width, 'little') for i in (258, vocab_size - 1)
  )
  assert file.tokens.tolist() == [258, vocab_size - 1]
  with pytest.raises(ValueError, match='read-only'):
    file.tokens[0] = 3


@pytest.mark.parametrize('ids, vocab_size, message', [
    ([2, 4], 4, r'document 2 holds token id 4, .*\[0, 4\)'),
    ([2, -1], 4, 'document 2 holds token id -1'),
    ([1.5], 4, 'document 2 is not a flat sequence'),
    ([1], 0, 'vocab_size=0 cannot'),
    ([1], 2**32 + 1, 'vocab_size=4294967297 cannot'),
])
def test_ids_that_cannot_be_stored_are_refused(
    tmp_path, ids, vocab_size, message
):
  with pytest.raises(ValueError, match=message):
    write(tmp_path / 'train', [([1, 0], 1), (ids, 1), ([0], 1)], vocab_size)
  assert os.listdir(tmp_path) == []


def replace(path, old, new):
  path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize('suffix, damage, error, message', [
    ('.bin', os.unlink, FileNotFoundError, 'train.bin is missing'),
    ('.json', os.unlink, FileNotFoundError, 'train.json is missing'),
    ('.bin', lambda path: os.truncate(path, 9), ValueError,
     'train.bin holds 9 bytes .* 10; .*again'),
    ('.bin', lambda path: flip_bit(path, 4), ValueError,
     'its fingerprint differs'),
    ('.json', lambda path: replace(path, '"<u2"', '"<f4"'), ValueError,
     'train.json has another dtype'),
    ('.json', lambda path: replace(path, '_version": 1', '_version": 2'),
     ValueError, 'train.json has another format version'),
])
def test_damaged_files_are_named(tmp_path, suffix, damage, error, message):
  write(tmp_path / 'train')
  damage(tmp_path / f'train{suffix}')
  with pytest.raises(error, match=message):
    verify_token_file(open_token_file(tmp_path / 'train'))

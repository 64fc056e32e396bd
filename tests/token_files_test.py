"""Tests of spdf_jax.data.token_files."""

import json
import os

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from spdf_jax.data.token_files import open_token_file
from spdf_jax.data.token_files import verify_token_file
from spdf_jax.data.token_files import write_token_file


def write(path, documents=(([1, 2, 0], 5), ([3, 0], 1)), vocab_size=4):
  return write_token_file(
      path, documents, vocab_size=vocab_size, source={'made': 'by hand'}
  )


@settings(deadline=None, max_examples=30)
@given(
    documents=st.lists(st.lists(st.integers(0, 69_999), max_size=9)),
    vocab_size=st.sampled_from([70_000, 2**32]),
)
def test_what_is_written_is_read(tmp_path_factory, documents, vocab_size):
  path = tmp_path_factory.mktemp('tokens') / 'train'
  file = write(path, [(ids, len(ids)) for ids in documents], vocab_size)
  flat = [i for ids in documents for i in ids]
  assert file.tokens.tolist() == flat
  assert open_token_file(path).tokens.tolist() == flat
  assert file.description['tokens'] == len(flat)
  assert file.description['documents'] == len(documents)
  assert file.description['bytes'] == len(flat)


def test_the_description_says_what_the_tokens_are(tmp_path):
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


@pytest.mark.parametrize(
    'vocab_size, dtype', [(65_536, '<u2'), (65_537, '<u4')]
)
def test_the_vocabulary_chooses_the_width_of_a_token(
    tmp_path, vocab_size, dtype
):
  ids = [0, 1, vocab_size - 1]
  file = write(tmp_path / 'train', [(ids, 3)], vocab_size)
  assert file.tokens.dtype == np.dtype(dtype)
  assert file.tokens.tolist() == ids


def test_the_bytes_on_disk_are_little_endian(tmp_path):
  write(tmp_path / 'train', [([258], 1)], vocab_size=300)
  assert (tmp_path / 'train.bin').read_bytes() == b'\x02\x01'


def test_opened_tokens_cannot_be_written(tmp_path):
  file = write(tmp_path / 'train')
  with pytest.raises(ValueError, match='read-only'):
    file.tokens[0] = 3


def test_the_fingerprint_depends_on_tokens_and_width_only(tmp_path):
  base = write(tmp_path / 'a')
  again = write_token_file(
      tmp_path / 'b', [([1, 2, 0, 3, 0], 6)], vocab_size=4, source={}
  )
  other = write(tmp_path / 'c', [([1, 2, 0, 3, 1], 6)])
  wide = write(tmp_path / 'd', vocab_size=70_000)
  assert base.fingerprint == again.fingerprint
  assert len({f.fingerprint for f in (base, other, wide)}) == 3


@pytest.mark.parametrize('bad', [4, -1, 70_000])
def test_a_token_id_beyond_the_vocabulary_is_refused(tmp_path, bad):
  with pytest.raises(
      ValueError, match=rf'document 2 holds token id {bad}, .*\[0, 4\)'
  ):
    write(tmp_path / 'train', [([1, 0], 1), ([2, bad], 1), ([0], 1)])
  assert os.listdir(tmp_path) == []


@pytest.mark.parametrize('ids', [[1.5], ['a'], [[1, 2]], [True]])
def test_ids_that_are_no_integers_are_refused(tmp_path, ids):
  with pytest.raises(ValueError, match='document 1 is not a flat sequence'):
    write(tmp_path / 'train', [(ids, 1)])


@pytest.mark.parametrize('vocab_size', [0, -3, 2**32 + 1])
def test_a_vocabulary_that_cannot_be_stored_is_refused(tmp_path, vocab_size):
  with pytest.raises(ValueError, match=f'vocab_size={vocab_size} cannot'):
    write(tmp_path / 'train', vocab_size=vocab_size)


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


@pytest.mark.parametrize('size', [0, 9, 12])
def test_a_file_of_the_wrong_size_is_refused(tmp_path, size):
  write(tmp_path / 'train')
  os.truncate(tmp_path / 'train.bin', size)
  with pytest.raises(
      ValueError, match=rf'train.bin holds {size} bytes .* 10; .*again'
  ):
    open_token_file(tmp_path / 'train')


def test_a_changed_token_is_found_by_verifying(tmp_path):
  file = write(tmp_path / 'train')
  verify_token_file(file)
  data = bytearray((tmp_path / 'train.bin').read_bytes())
  data[4] ^= 1
  (tmp_path / 'train.bin').write_bytes(data)
  with pytest.raises(ValueError, match='its fingerprint differs'):
    verify_token_file(open_token_file(tmp_path / 'train'))


@pytest.mark.parametrize('suffix', ['.bin', '.json'])
def test_a_missing_part_is_named(tmp_path, suffix):
  write(tmp_path / 'train')
  (tmp_path / f'train{suffix}').unlink()
  with pytest.raises(FileNotFoundError, match=f'train{suffix} is missing'):
    open_token_file(tmp_path / 'train')


@pytest.mark.parametrize(
    'change', [{'dtype': '<f4'}, {'tokens': '5'}, {'source': None}]
)
def test_a_damaged_description_is_refused(tmp_path, change):
  file = write(tmp_path / 'train')
  path = tmp_path / 'train.json'
  path.write_text(json.dumps({**file.description, **change}))
  with pytest.raises(ValueError, match='not a complete description'):
    open_token_file(tmp_path / 'train')
  path.write_text(json.dumps(file.description)[:40])
  with pytest.raises(ValueError, match='not a complete description'):
    open_token_file(tmp_path / 'train')


def test_a_description_of_another_format_version_is_refused(tmp_path):
  file = write(tmp_path / 'train')
  changed = json.dumps({**file.description, 'format_version': 2})
  (tmp_path / 'train.json').write_text(changed)
  with pytest.raises(ValueError, match='format version 2, and this .* reads 1'):
    open_token_file(tmp_path / 'train')


def test_a_name_with_dots_keeps_them(tmp_path):
  write(tmp_path / 'v1.2')
  assert sorted(os.listdir(tmp_path)) == ['v1.2.bin', 'v1.2.json']

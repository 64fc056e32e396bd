"""Splits: named files keep theirs, and few documents leave none empty."""

import json
from pathlib import Path
import zlib

from hypothesis import example
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from experiments.preparation.documents import Piece
from experiments.preparation.files import prepare_files
from experiments.preparation.splits import choose_splits
from experiments.preparation.splits import name_splits

FILE = Path('a.jsonl')
SPLITS = ('train', 'validation', 'test')


def find(texts, read, **shares):
  splits = choose_splits([FILE], {}, read, **shares)
  return [splits.split_of(FILE, Piece(text)) for text in texts]


@given(st.integers(0, 10**6), st.floats(0, 0.5), st.floats(0, 0.4))
@settings(deadline=None)
def test_documents_are_split_by_ranges_of_their_hashes(first, a, b):
  texts = [f'Text {first + i}' for i in range(50)]
  splits = find(texts, None, validation=a, test=b)
  for text, split in zip(texts, splits):
    place = zlib.crc32(text.encode()) / 2**32
    assert split == (
        'validation' if place < a else 'test' if place < a + b else 'train'
    )


@given(st.sets(st.integers(), min_size=3), st.floats(1e-9, 0.3),
       st.floats(1e-9, 0.3))
@example({0, -119, -125}, 0.25, 0.25)  # All hashes are below 0.25.
@settings(deadline=None)
def test_splits_of_few_documents_are_not_empty(numbers, a, b):
  texts = [f'Text {i}' for i in numbers]
  read = lambda file: [Piece(text) for text in texts]
  splits = find(texts, read, validation=a, test=b)
  assert {'validation', 'test'} <= set(splits)
  if find(texts, None, validation=a, test=b).count('train') == len(texts):
    assert splits.count('validation') == 1
  tiny = find(texts, read, validation=1e-12, test=1e-12)
  assert tiny.count('train') == len(texts) - 2
  assert {'validation', 'test'} <= set(tiny)


def test_a_share_of_zero_stays_empty():
  texts = [f'Text {i}' for i in range(9)]
  read = lambda file: [Piece(text) for text in texts]
  assert set(find(texts, read, validation=1e-6, test=0.0)) == {
      'train', 'validation'
  }


@pytest.mark.parametrize('name, split', [
    ('val.jsonl.zst', 'validation'), ('valid/00.txt', 'validation'),
    ('dev.jsonl', 'validation'), ('validation-00000.parquet', 'validation'),
    ('Test.txt', 'test'), ('test/val.md', 'test'), ('train/00.jsonl', None),
    ('tests.txt', None), ('contest.md', None),
])
def test_files_named_after_a_split_belong_to_it(name, split):
  root = Path('data/test')
  assert name_splits([root / name], root).get(root / name) == split


def write(path, texts):
  path.parent.mkdir(exist_ok=True)
  path.write_text(''.join(json.dumps({'text': t}) + '\n' for t in texts))


def texts_of(tokens):
  parts = np.split(tokens, np.nonzero(tokens == 256)[0] + 1)[:-1]
  return {bytes(part[:-1].astype(np.uint8)).decode() for part in parts}


def test_documents_of_a_validation_file_go_to_no_other_split(tmp_path):
  folder = tmp_path / 'in'
  held = {f'Held {i}' for i in range(20)}
  rest = {f'Text {i}' for i in range(20)}
  write(folder / 'val.jsonl', held)
  write(folder / 'train.jsonl', rest)
  corpus = prepare_files(folder, tokenizer='bytes', output=tmp_path / 'out')
  assert texts_of(corpus.validation.tokens) == held
  test = texts_of(corpus.test.tokens)
  assert len(test) == 1 and texts_of(corpus.train.tokens) == rest - test


def test_a_single_file_is_split_whatever_its_name(tmp_path):
  path = tmp_path / 'test.jsonl'
  write(path, [f'Text {i}' for i in range(20)])
  corpus = prepare_files(path, tokenizer='bytes', output=tmp_path / 'out')
  sizes = [getattr(corpus, s).description['documents'] for s in SPLITS]
  assert sizes == [18, 1, 1]

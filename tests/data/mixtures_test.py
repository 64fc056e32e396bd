"""Mixtures keep their weights, and no window is seen twice or lost."""

from collections import Counter
import json

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from experiments import preparation
from spdf_jax import data
from spdf_jax.data import mixtures
from spdf_jax.data import token_files
from tests.refusals import refuse

LENGTH = 8


class Numbers:
  """Blocks whose tokens equal the block's number, counted from `first`."""

  def __init__(self, first, count):
    self.first, self.count = first, count

  @property
  def fingerprint(self):
    return f'{self.first}+{self.count}'

  def block_length(self, lengths):
    return max(lengths)

  def num_blocks(self, block_length):
    del block_length
    return self.count

  def read(self, blocks, offsets, *, block_length, length):
    del block_length
    ids = self.first + np.asarray(blocks)[:, None] % self.count
    ids = ids + 0 * np.arange(length)
    ids = ids + 0 * offsets[:, None]
    return data.Batch(ids, ids, np.ones(ids.shape, np.float32))


def rows(mixture, epochs=1):
  blocks = np.arange(epochs * mixture.num_blocks(LENGTH))
  batch = mixture.read(
      blocks, 0 * blocks, block_length=LENGTH, length=LENGTH
  )
  return batch.inputs[:, 0].tolist()


def mixture_of(counts, weights, repeats=1):
  sources = {
      str(i): Numbers(1000 * i, count) for i, count in enumerate(counts)
  }
  return mixtures.Mixture(sources, dict(zip(sources, weights)), repeats)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0.01, 5)),
             min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_shares_follow_the_weights_and_no_block_comes_too_often(parts, repeats):
  counts, weights = zip(*parts)
  mixture = mixture_of(counts, weights, repeats)
  epoch = min(n * repeats / w for n, w in parts)
  if min(weight * epoch for weight in weights) * (1 + 1e-12) < 1:
    refuse('has no block|none would be read', mixture.num_blocks, 4)
    return
  seen = Counter(rows(mixture))
  assert max(seen.values(), default=0) <= repeats
  for i, (_, weight) in enumerate(parts):
    share = [k for block, k in seen.items() if block // 1000 == i]
    assert abs(sum(share) - weight * epoch) <= 1
    if share:  # Blocks are read equally often, give or take one.
      every = share + [0] * (counts[i] - len(share))
      assert max(every) - min(every) <= 1


def test_blocks_of_a_larger_source_are_evenly_spread():
  assert rows(mixture_of([3, 9], [1, 1])) == [0, 1, 2, 1000, 1007, 1005]


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 400), st.integers(1, 9))
def test_no_window_is_read_twice_before_all_are_read_once(few, many, epochs):
  mixture = mixture_of([few, many], [1, 1])
  seen = Counter(rows(mixture, epochs))
  for first, count in ((0, few), (1000, many)):
    share = [seen[first + i] for i in range(count)]
    assert sum(share) == epochs * min(few, many)
    assert max(share) - min(share) <= 1


def test_fingerprints_differ_between_weights_and_sources():
  made = [
      mixture_of([3, 9], [1, 1]), mixture_of([3, 8], [1, 1]),
      mixture_of([3, 9], [1, 2]), mixture_of([3, 9], [1, 1], 2),
  ]
  assert len({mixture.fingerprint for mixture in made}) == 4


@pytest.mark.parametrize('weight', [0, -1, float('nan')])
def test_a_weight_that_is_not_positive_is_refused(weight):
  with pytest.raises(ValueError, match=f'weight {weight} of'):
    mixtures.Mixture({'a': Numbers(0, 3)}, {'a': weight})


def windows(folder, name, first, count):
  """A source whose tokens are all different."""
  ids = np.arange(first, first + count * LENGTH + 1)
  return data.Windows(token_files.write_token_file(
      folder / name, [(ids, 1)], vocab_size=70_000, source={}
  ))


def test_no_window_of_a_mixture_is_lost_or_seen_twice_over_stages(tmp_path):
  # 60 blocks: a sparse stage, a dense one of another batch size and half the
  # length, and an epoch that ends within it.
  parts = {
      'a': windows(tmp_path, 'a', 0, 45), 'b': windows(tmp_path, 'b', 1000, 15)
  }
  batch_at = data.schedule_batches(
      {'text': mixtures.Mixture(parts, {'a': 3, 'b': 1})},
      [data.Allotment('text', batch_size=4, length=LENGTH, steps=7),
       data.Allotment('text', batch_size=6, length=LENGTH // 2, steps=15)],
      seed=3, max_epochs={'text': 2},
  )
  tokens = np.concatenate([batch_at(step).inputs.ravel() for step in range(22)])
  held = 60 * LENGTH
  first, second = tokens[:held], tokens[held:]
  assert len(set(first.tolist())) == held  # An epoch: each token once.
  assert len(set(second.tolist())) == len(second) > 0
  assert set(second.tolist()) < set(first.tolist())


def prepared(folder, name, tokenizer='bytes'):
  path = folder / f'{name}.jsonl'
  path.write_text(''.join(
      json.dumps({'text': f'{name} {i}' * 9}) + '\n' for i in range(90)
  ))
  preparation.prepare_files(path, tokenizer=tokenizer, output=folder / name,
                validation=0.2, test=0.2)
  return str(folder / name)


def test_a_corpus_may_be_a_mixture_of_prepared_folders(tmp_path):
  a, b = prepared(tmp_path, 'a'), prepared(tmp_path, 'b')
  mixed = data.prepare_corpus(f'{a}=3,{b}=1', tokenizer='', cache_dir=tmp_path)
  alone = data.prepare_corpus(a, tokenizer='', cache_dir=tmp_path)
  assert mixed.validation.fingerprint == alone.validation.fingerprint
  assert mixed.fingerprint != alone.fingerprint
  count = mixed.source.num_blocks(16)
  batch = mixed.source.read(
      np.arange(count), np.zeros(count, int), block_length=16, length=16
  )
  texts = [bytes(i for i in row if i < 256) for row in batch.inputs.tolist()]
  share = sum(b'a' in text for text in texts) / count
  assert share == pytest.approx(0.75, abs=0.02)
  assert alone.source.num_blocks(16) == data.Windows(alone.train).num_blocks(16)


def test_bad_mixtures_of_folders_get_one_sentence(tmp_path):
  a, b = prepared(tmp_path, 'a'), prepared(tmp_path, 'b', 'bpe-260')
  open_it = lambda name: data.prepare_corpus(
      name, tokenizer='', cache_dir=tmp_path
  )
  refuse('names a folder twice', open_it, f'{a}=3,{a}=1')
  refuse('have different tokenizers', open_it, f'{a}=1,{b}=1')
  refuse('existing folder nor a mixture; write', open_it, f'{a}=1,{b}')
  refuse('weight -1.0', open_it, f'{a}=-1')


def test_folders_of_a_mixture_may_have_equals_signs(tmp_path):
  (tmp_path / 'dt=2026-11-26').mkdir()
  a = prepared(tmp_path / 'dt=2026-11-26', 'a')
  b = prepared(tmp_path, 'b=2')
  mixed = data.prepare_corpus(f'{a}=3,{b}=1', tokenizer='', cache_dir=tmp_path)
  assert set(mixed.source.weights.values()) == {3.0, 1.0}
  for folder in (a, b):
    alone = data.prepare_corpus(folder, tokenizer='', cache_dir=tmp_path)
    assert isinstance(alone.source, data.Windows)

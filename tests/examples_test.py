"""Tests of spdf_jax.data.examples."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from spdf_jax.data.examples import encode_pairs
from spdf_jax.data.tasks import Pair
from spdf_jax.data.tokenizers import ByteTokenizer

PAIRS = [Pair(f'call {i}(self)', f'Return {i}.') for i in range(23)]
END = ByteTokenizer.end_of_text


def test_examples_are_laid_out_as_context_end_target_end():
  examples = encode_pairs([Pair('ab', 'c')], ByteTokenizer(), 16)
  zero = np.zeros(1, np.int64)
  batch = examples.read(zero, zero, block_length=8, length=8)
  assert batch.inputs[0].tolist() == [97, 98, END, 32, 99, END, END, END]
  assert batch.targets[0].tolist() == [98, END, 32, 99, END, END, END, END]
  assert batch.weights[0].tolist() == [0, 0, 1, 1, 1, 0, 0, 0]


@settings(deadline=None, max_examples=100)
@given(
    texts=st.lists(
        st.tuples(st.text(max_size=30), st.text(min_size=1, max_size=30)),
        min_size=1, max_size=5,
    ),
    max_length=st.integers(4, 40),
)
def test_examples_always_fit_and_keep_their_target(texts, max_length):
  tokenizer = ByteTokenizer()
  pairs = [Pair(*pair) for pair in texts]
  examples = encode_pairs(pairs, tokenizer, max_length)
  index = np.arange(len(pairs))
  batch = examples.read(
      index, 0 * index, block_length=max_length, length=max_length
  )
  for i, (context, target) in enumerate(pairs):
    part = tokenizer.encode(' ' + target)[:max_length // 2 - 1] + [END]
    counted = batch.weights[i] == 1
    assert batch.targets[i][counted].tolist() == part
    context_ids = examples.contexts[i]
    assert context_ids[-1] == END
    whole = tokenizer.encode(context)
    assert context_ids[:-1] == whole[:max_length - len(part) - 1]
    assert batch.inputs[i][:len(context_ids)].tolist() == context_ids
    total = len(context_ids) + len(part)
    assert total <= max_length
    assert (batch.targets[i][total - 1:] == END).all()
    assert batch.weights[i][total - 1:].sum() == 0


def test_examples_read_with_two_lengths_are_refused():
  examples = encode_pairs(PAIRS, ByteTokenizer(), max_length=32)
  with pytest.raises(ValueError, match=r"lengths \[32, 64\] read"):
    examples.block_length([32, 64])


def test_a_length_too_short_for_the_examples_is_refused():
  examples = encode_pairs(PAIRS, ByteTokenizer(), max_length=32)
  with pytest.raises(ValueError, match='length 8 is too short .*inputs'):
    examples.block_length([8])


def test_pairs_that_cannot_be_encoded_are_refused():
  with pytest.raises(ValueError, match='pairs is empty'):
    encode_pairs([], ByteTokenizer(), 32)
  with pytest.raises(ValueError, match='max_length=3 leaves no room'):
    encode_pairs(PAIRS, ByteTokenizer(), 3)


def test_the_fingerprint_of_examples_changes_with_what_is_read():
  fingerprints = {
      encode_pairs(pairs, ByteTokenizer(), length).fingerprint
      for pairs, length in ((PAIRS, 32), (PAIRS, 12), (PAIRS[:-1], 32))
  }
  assert len(fingerprints) == 3
  # Another border between context and target, the same tokens.
  assert (
      encode_pairs([Pair('a', 'b')], ByteTokenizer(), 32).fingerprint
      == encode_pairs([Pair('a', 'b')], ByteTokenizer(), 64).fingerprint
  )

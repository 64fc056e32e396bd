"""Tests of spdf_jax.data.sources."""

import numpy as np
import pytest

from spdf_jax.data.sources import Windows
from spdf_jax.data.token_files import write_token_file


@pytest.fixture
def counting(tmp_path):
  """Creates windows over the tokens 0 to n - 1, which equal their positions."""

  def make(n):
    return Windows(write_token_file(
        tmp_path / str(n), [(range(n), n)], vocab_size=2**20, source={}
    ))

  return make


def test_targets_are_the_tokens_after_the_inputs(counting):
  batch = counting(101).read(
      np.array([3, 9]), np.array([5, 5]), block_length=10, length=5
  )
  expected = [[35, 36, 37, 38, 39], [95, 96, 97, 98, 99]]
  assert batch.inputs.tolist() == expected
  assert np.array_equal(batch.targets, batch.inputs + 1)
  assert np.array_equal(batch.weights, np.ones((2, 5)))
  dtypes = [array.dtype for array in batch]
  assert dtypes == [np.int32, np.int32, np.float32]


def test_a_window_needs_the_token_after_it(counting):
  sizes = [counting(n).num_blocks(4) for n in (0, 1, 4, 5, 8, 9)]
  assert sizes == [0, 0, 0, 1, 1, 2]


def test_a_block_is_as_long_as_the_longest_length(counting):
  windows = counting(101)
  assert windows.block_length([4, 8, 2]) == 8
  with pytest.raises(ValueError, match='length 3 does not divide 8'):
    windows.block_length([8, 3])


def test_the_fingerprint_is_that_of_the_tokens(counting):
  assert counting(10).fingerprint == counting(10).token_file.fingerprint
  assert counting(10).fingerprint != counting(11).fingerprint

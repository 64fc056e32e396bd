# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for data that does not exist yet, to plan a run."""

from collections.abc import Sequence
import dataclasses
from typing import final
from typing import NamedTuple
from typing import NoReturn

import numpy as np

from spdf_jax.data.sources import Batch


class PlannedTokenizer(NamedTuple):
  """A stand-in for a tokenizer, of which only the size is known.

  Attributes:
    vocab_size: Number of token ids.
  """

  vocab_size: int


@final
@dataclasses.dataclass(frozen=True)
class PlannedCorpus:
  """A stand-in for a corpus and its source, of which only the size is known.

  Attributes:
    name: Name of the corpus.
    tokens: Number of tokens of the training split.
    tokenizer: Planned tokenizer.

  Example:
    >>> corpus = PlannedCorpus('pile', 1000, PlannedTokenizer(50257))
    >>> corpus.source.num_blocks(corpus.block_length([64, 128]))
    7
  """

  name: str
  tokens: int
  tokenizer: PlannedTokenizer

  @property
  def source(self) -> 'PlannedCorpus':
    """Source of training batches, which is this object."""
    return self

  @property
  def fingerprint(self) -> str:
    """Constant instead of a fingerprint."""
    return 'planned'

  def block_length(self, lengths: Sequence[int]) -> int:
    """Returns the longest length, in tokens."""
    return max(lengths)

  def num_blocks(self, block_length: int) -> int:
    """Returns the planned number of blocks of `block_length` tokens."""
    return max(self.tokens - 1, 0) // block_length

  def read(
      self,
      blocks: np.ndarray,
      offsets: np.ndarray,
      *,
      block_length: int,
      length: int,
  ) -> Batch:
    """Raises ValueError, since planned data cannot be read."""
    del blocks, offsets, block_length, length
    _refuse('corpus', self.name)


@final
@dataclasses.dataclass(frozen=True)
class PlannedExamples:
  """A stand-in for the examples of a task, of which only the number is known.

  Attributes:
    name: Name of the task.
    examples: Number of training examples.

  Example:
    >>> PlannedExamples('e2e', 42061).num_blocks(512)
    42061
  """

  name: str
  examples: int

  @property
  def fingerprint(self) -> str:
    """Constant instead of a fingerprint."""
    return 'planned'

  def block_length(self, lengths: Sequence[int]) -> int:
    """Returns the longest length, in tokens."""
    return max(lengths)

  def num_blocks(self, block_length: int) -> int:
    """Returns the planned number of examples, each of which is a block."""
    del block_length
    return self.examples

  def read(
      self,
      blocks: np.ndarray,
      offsets: np.ndarray,
      *,
      block_length: int,
      length: int,
  ) -> Batch:
    """Raises ValueError, since planned data cannot be read."""
    del blocks, offsets, block_length, length
    _refuse('task', self.name)


def _refuse(kind: str, name: str) -> NoReturn:
  raise ValueError(
      f'{kind} {name!r} is only planned; prepare it to train on it.'
  )

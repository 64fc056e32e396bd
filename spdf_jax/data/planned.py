"""Data that is not there yet: enough of it to plan a run."""

from collections.abc import Sequence
import dataclasses
from typing import final
from typing import NamedTuple
from typing import NoReturn

import numpy as np

from spdf_jax.data.sources import Batch


class PlannedTokenizer(NamedTuple):
  """A tokenizer of which only the size is known.

  Attributes:
    vocab_size: Number of token ids.
  """

  vocab_size: int


@final
@dataclasses.dataclass(frozen=True)
class PlannedCorpus:
  """Says how much text there will be; also its own source. Nothing is read.

  Attributes:
    name: Of the corpus.
    tokens: How many the training split will hold.
    tokenizer: How many there are to choose from.

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
    """What batches are planned on."""
    return self

  @property
  def fingerprint(self) -> str:
    """None yet."""
    return 'planned'

  def block_length(self, lengths: Sequence[int]) -> int:
    """Returns the longest length, in tokens."""
    return max(lengths)

  def num_blocks(self, block_length: int) -> int:
    """Returns how many blocks of so many tokens there will be."""
    return max(self.tokens - 1, 0) // block_length

  def read(
      self,
      blocks: np.ndarray,
      offsets: np.ndarray,
      *,
      block_length: int,
      length: int,
  ) -> Batch:
    """Raises ValueError: there is nothing to read."""
    del blocks, offsets, block_length, length
    _refuse('corpus', self.name)


@final
@dataclasses.dataclass(frozen=True)
class PlannedExamples:
  """Says how many examples of a task there will be. Nothing is read.

  Attributes:
    name: Of the task.
    examples: How many there will be to train on.

  Example:
    >>> PlannedExamples('e2e', 42061).num_blocks(512)
    42061
  """

  name: str
  examples: int

  @property
  def fingerprint(self) -> str:
    """None yet."""
    return 'planned'

  def block_length(self, lengths: Sequence[int]) -> int:
    """Returns the longest length, in tokens."""
    return max(lengths)

  def num_blocks(self, block_length: int) -> int:
    """Returns how many examples there will be: a block is one of them."""
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
    """Raises ValueError: there is nothing to read."""
    del blocks, offsets, block_length, length
    _refuse('task', self.name)


def _refuse(kind: str, name: str) -> NoReturn:
  raise ValueError(
      f'{kind} {name!r} is only planned; prepare it to train on it.'
  )

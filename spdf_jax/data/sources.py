# SPDX-License-Identifier: Apache-2.0
"""Sources of batches, and stand-ins for data that does not exist yet."""

from collections.abc import Sequence
import dataclasses
from typing import Any, ClassVar, final, NamedTuple, NoReturn, Protocol

import numpy as np

from spdf_jax.data.token_files import TokenFile


class Batch(NamedTuple):
  """The input of a step, as arrays of NumPy or JAX of shape [batch, length].

  Attributes:
    inputs: Token ids, int32.
    targets: The token that follows each input, int32.
    weights: Weight of each target in the loss, float32; 0 is padding.
  """

  inputs: Any
  targets: Any
  weights: Any


class Source(Protocol):
  """A set of numbered blocks, each of which is read once per epoch.

  Example:
    >>> from spdf_jax.data.examples import encode_pairs
    >>> from spdf_jax.data.tasks import Pair
    >>> from spdf_jax.data.tokenizers import ByteTokenizer
    >>> source: Source = encode_pairs(
    ...     [Pair('a', 'b'), Pair('b', 'c')], ByteTokenizer(), max_length=8)
    >>> source.num_blocks(source.block_length([8]))
    2
  """

  @property
  def fingerprint(self) -> str:
    """Fingerprint, which changes with the data."""

  def block_length(self, lengths: Sequence[int]) -> int:
    """Returns the block length of phases of `lengths`; may raise ValueError."""

  def num_blocks(self, block_length: int) -> int:
    """Returns the number of blocks of `block_length` tokens."""

  def read(
      self,
      blocks: np.ndarray,
      offsets: np.ndarray,
      *,
      block_length: int,
      length: int,
  ) -> Batch:
    """Reads `length` tokens of each block, starting at its offset.

    Block `n + e * num_blocks` is the n-th of epoch e: a mixture reads others in
    each epoch, other sources the same.
    """


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
  """A source of blocks of a token file; all targets have weight one.

  The last target of a block is the first token of the next block.

  Attributes:
    token_file: The token file.

  Example:
    >>> import tempfile
    >>> from spdf_jax.data.token_files import write_token_file
    >>> windows = Windows(write_token_file(
    ...     tempfile.mkdtemp() + '/train', [(range(10), 10)], vocab_size=10,
    ...     source={}))
    >>> windows.num_blocks(4)
    2
    >>> windows.read(np.array([1]), np.array([2]), block_length=4, length=2)
    Batch(inputs=array([[6, 7]], dtype=int32), \
targets=array([[7, 8]], dtype=int32), weights=array([[1., 1.]], dtype=float32))
  """

  token_file: TokenFile

  @property
  def fingerprint(self) -> str:
    """Fingerprint of the tokens."""
    return self.token_file.fingerprint

  def block_length(self, lengths: Sequence[int]) -> int:
    """Returns the longest length; all others must divide it.

    Args:
      lengths: Sequence lengths of the phases.

    Returns:
      The length of a block, in tokens.

    Raises:
      ValueError: a length does not divide the longest one.
    """
    longest = max(lengths)
    for length in lengths:
      if longest % length:
        raise ValueError(
            f'length {length} does not divide {longest}, the longest length'
            ' of the phases that read this text; choose lengths that divide it.'
        )
    return longest

  def num_blocks(self, block_length: int) -> int:
    """Returns the number of whole blocks that are followed by a token.

    Args:
      block_length: Length of a block, in tokens.
    """
    return max(len(self.token_file.tokens) - 1, 0) // block_length

  def read(
      self,
      blocks: np.ndarray,
      offsets: np.ndarray,
      *,
      block_length: int,
      length: int,
  ) -> Batch:
    """Reads `length` tokens of each block, and the token after them.

    Args:
      blocks: Numbers of the blocks [batch].
      offsets: Start of each row within its block, in tokens [batch].
      block_length: Length of a block, in tokens.
      length: Number of tokens to read per row.

    Returns:
      The batch [batch, length].
    """
    blocks = blocks.astype(np.int64) % max(self.num_blocks(block_length), 1)
    starts = blocks * block_length + offsets
    positions = starts[:, None] + np.arange(length + 1)
    tokens = np.asarray(self.token_file.tokens)[positions].astype(np.int32)
    return Batch(
        inputs=tokens[:, :-1],
        targets=tokens[:, 1:],
        weights=np.ones((len(blocks), length), np.float32),
    )


class PlannedTokenizer(NamedTuple):
  """A stand-in for a tokenizer, of which only the size is known.

  Attributes:
    vocab_size: Number of token ids.
  """

  vocab_size: int

  @property
  def fingerprint(self) -> str:
    """Fingerprint of every planned tokenizer."""
    return PlannedCorpus.fingerprint


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

  fingerprint: ClassVar[str] = 'planned'

  @property
  def source(self) -> 'PlannedCorpus':
    """Source of training batches, which is this object."""
    return self

  def block_length(self, lengths: Sequence[int]) -> int:
    """Returns the longest length, in tokens."""
    return max(lengths)

  def num_blocks(self, block_length: int) -> int:
    """Returns the planned number of blocks of `block_length` tokens."""
    return max(self.tokens - 1, 0) // block_length

  def read(self, *unused: Any, **unused_too: Any) -> NoReturn:
    """Raises ValueError, since planned data cannot be read."""
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

  fingerprint: ClassVar[str] = 'planned'

  def block_length(self, lengths: Sequence[int]) -> int:
    """Returns the longest length, in tokens."""
    return max(lengths)

  def num_blocks(self, block_length: int) -> int:
    """Returns the planned number of examples, each of which is a block."""
    del block_length
    return self.examples

  def read(self, *unused: Any, **unused_too: Any) -> NoReturn:
    """Raises ValueError, since planned data cannot be read."""
    _refuse('task', self.name)


def _refuse(kind: str, name: str) -> NoReturn:
  raise ValueError(
      f'{kind} {name!r} is only planned and holds no data; prepare its data,'
      ' and create the run with planning=False.'
  )

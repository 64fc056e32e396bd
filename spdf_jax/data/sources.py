# SPDX-License-Identifier: Apache-2.0
"""Sources of batches: blocks of a text, or examples of a task."""

from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import final
from typing import NamedTuple
from typing import Protocol

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
    """Reads `length` tokens of each block, starting at its offset."""


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
      ValueError: A length does not divide the longest one.
    """
    longest = max(lengths)
    for length in lengths:
      if longest % length:
        raise ValueError(
            f'length {length} does not divide {longest}, the longest length'
            ' that reads this text; choose lengths that divide it.'
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
    starts = blocks.astype(np.int64) * block_length + offsets
    positions = starts[:, None] + np.arange(length + 1)
    tokens = np.asarray(self.token_file.tokens)[positions].astype(np.int32)
    return Batch(
        inputs=tokens[:, :-1],
        targets=tokens[:, 1:],
        weights=np.ones((len(blocks), length), np.float32),
    )

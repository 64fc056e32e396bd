"""What batches are read from: blocks of a text, or examples of a task."""

from collections.abc import Sequence
import dataclasses
from typing import final
from typing import NamedTuple
from typing import Protocol

import numpy as np

from spdf_jax.data.token_files import TokenFile


class Batch(NamedTuple):
  """One step's input; shapes are [batch, length].

  Attributes:
    inputs: Token ids, int32.
    targets: The token that follows each input, int32.
    weights: How much each target counts in the loss, float32; 0 is padding.
  """

  inputs: np.ndarray
  targets: np.ndarray
  weights: np.ndarray


class Source(Protocol):
  """Numbered blocks that are each seen once per epoch.

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
    """Changes whenever anything that is read changes."""

  def block_length(self, lengths: Sequence[int]) -> int:
    """Returns the block length for phases of `lengths`, or ValueError."""

  def num_blocks(self, block_length: int) -> int:
    """Returns how many blocks of `block_length` tokens there are."""

  def read(
      self,
      blocks: np.ndarray,
      offsets: np.ndarray,
      *,
      block_length: int,
      length: int,
  ) -> Batch:
    """Reads `length` tokens of each block, from its offset on."""


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
  """A token file cut into blocks; every token is a target with weight one.

  A block's last target is the next block's first token.

  Attributes:
    token_file: Where the tokens lie.

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
      lengths: Lengths that phases read, in tokens.

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
    """Returns how many whole blocks have a token after them.

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
    """Reads `length` tokens, and the one after them, of each block.

    Args:
      blocks: Numbers of the blocks [batch].
      offsets: Where in its block each row starts, in tokens [batch].
      block_length: Length of a block, in tokens.
      length: How many tokens to read of each.

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

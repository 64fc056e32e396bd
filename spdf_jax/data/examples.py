"""Examples: pairs of a task as tokens, with a loss on the target only."""

from collections.abc import Sequence
import dataclasses
import hashlib
from typing import final

import numpy as np

from spdf_jax.data.sources import Batch
from spdf_jax.data.tasks.task import Pair
from spdf_jax.data.tokenizers import Tokenizer


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
  """Encoded pairs; a block is one example, padded when it is read.

  Attributes:
    pairs: The texts.
    tokens: All examples one after another [tokens], int32.
    offsets: Where each example starts, and the end [examples + 1], int64.
    context_lengths: Tokens of each context, its end included [examples].
    end_of_text: The id that ends contexts and targets, and pads.
  """

  pairs: tuple[Pair, ...]
  tokens: np.ndarray
  offsets: np.ndarray
  context_lengths: np.ndarray
  end_of_text: int

  @property
  def fingerprint(self) -> str:
    """SHA-256 over everything that is read, in hexadecimal."""
    digest = hashlib.sha256(str(self.end_of_text).encode())
    for array, dtype in (
        (self.tokens, '<i4'),
        (self.offsets, '<i8'),
        (self.context_lengths, '<i8'),
    ):
      digest.update(array.astype(dtype).tobytes())
    return digest.hexdigest()

  @property
  def contexts(self) -> list[list[int]]:
    """Token ids of every context, its end included: what to generate from."""
    return [
        self.tokens[start:start + length].tolist()
        for start, length in zip(self.offsets[:-1], self.context_lengths)
    ]

  def block_length(self, lengths: Sequence[int]) -> int:
    """Returns the one length that phases read examples with.

    Args:
      lengths: Lengths that phases read, in tokens.

    Returns:
      That length.

    Raises:
      ValueError: The lengths differ, or an example does not fit.
    """
    if len(set(lengths)) > 1:
      raise ValueError(
          f'lengths {sorted(set(lengths))} read the same examples; read them'
          ' with one length.'
      )
    longest = int(np.diff(self.offsets).max()) - 1
    if longest > lengths[0]:
      raise ValueError(
          f'length {lengths[0]} is too short for the longest example, which'
          f' has {longest} inputs; encode the pairs with a smaller'
          ' max_length or read them with a greater length.'
      )
    return lengths[0]

  def num_blocks(self, block_length: int) -> int:
    """Returns how many examples there are.

    Args:
      block_length: Not used: a block is an example.
    """
    del block_length
    return len(self.pairs)

  def read(
      self,
      blocks: np.ndarray,
      offsets: np.ndarray,
      *,
      block_length: int,
      length: int,
  ) -> Batch:
    """Reads whole examples, padded on the right.

    Args:
      blocks: Numbers of the examples [batch].
      offsets: Zeros: an example is not cut.
      block_length: The same as `length`.
      length: Length to pad to, in tokens.

    Returns:
      The batch [batch, length]; weights are one where the target of a
      position belongs to the pair's target or is the end after it.
    """
    del offsets, block_length
    starts, ends = self.offsets[blocks], self.offsets[blocks + 1]
    steps = np.arange(length + 1)
    positions = starts[:, None] + steps
    held = positions < ends[:, None]
    tokens = self.tokens[np.minimum(positions, len(self.tokens) - 1)]
    tokens = np.where(held, tokens, self.end_of_text).astype(np.int32)
    counts = held & (steps >= self.context_lengths[blocks][:, None])
    return Batch(
        inputs=tokens[:, :-1],
        targets=tokens[:, 1:],
        weights=counts[:, 1:].astype(np.float32),
    )


def encode_pairs(
    pairs: Sequence[Pair], tokenizer: Tokenizer, max_length: int
) -> Examples:
  """Encodes pairs as context, end of text, target, end of text.

  The layout of Hu et al., "LoRA: Low-Rank Adaptation of Large Language
  Models" (2021), for GPT-2; the target starts with a space. A target takes
  at most half of `max_length`, its end included; the context is cut on the
  right so that the target fits.

  Args:
    pairs: What to encode.
    tokenizer: Makes the tokens.
    max_length: Most tokens of an example, both ends included; at least 4.

  Returns:
    The examples, in the order of `pairs`.

  Raises:
    ValueError: There are no pairs, or `max_length` is below 4.

  Example:
    >>> from spdf_jax.data.tokenizers import ByteTokenizer
    >>> examples = encode_pairs([Pair('a', 'b')], ByteTokenizer(), 8)
    >>> examples.tokens.tolist(), examples.contexts
    ([97, 256, 32, 98, 256], [[97, 256]])
    >>> examples.read(
    ...     np.array([0]), np.array([0]), block_length=6, length=6
    ... ).weights.tolist()
    [[0.0, 1.0, 1.0, 1.0, 0.0, 0.0]]
  """
  if max_length < 4:
    raise ValueError(
        f'max_length={max_length} leaves no room for context, target and'
        ' their two ends; use at least 4.'
    )
  if not pairs:
    raise ValueError('pairs is empty; give at least one pair.')
  end = tokenizer.end_of_text
  contexts = tokenizer.encode_batch([pair.context for pair in pairs])
  targets = tokenizer.encode_batch([' ' + pair.target for pair in pairs])
  flat, lengths, context_lengths = [], [], []
  for context, target in zip(contexts, targets):
    target = [*target[:max_length // 2 - 1], end]
    context = [*context[:max_length - len(target) - 1], end]
    flat += context + target
    lengths.append(len(context) + len(target))
    context_lengths.append(len(context))
  return Examples(
      pairs=tuple(pairs),
      tokens=np.array(flat, np.int32),
      offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
      context_lengths=np.array(context_lengths, np.int64),
      end_of_text=end,
  )

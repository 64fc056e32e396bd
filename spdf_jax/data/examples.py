# SPDX-License-Identifier: Apache-2.0
"""Examples: tokenized pairs of a task, with a loss on the target only."""

from collections.abc import Sequence
import dataclasses
import hashlib
from typing import final

import numpy as np

from spdf_jax.data import special_tokens
from spdf_jax.data.sources import Batch
from spdf_jax.data.tasks.task import Pair
from spdf_jax.data.tokenizers import Tokenizer


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Examples:
  """A source of encoded pairs, whose blocks are single, padded examples.

  Attributes:
    pairs: The texts.
    tokens: Concatenated tokens of all examples [tokens], int32.
    offsets: Start of each example, and the end [examples + 1], int64.
    context_lengths: Tokens of each context with its end of text [examples].
    end_of_text: Id that ends contexts and targets, and pads examples.
  """

  pairs: tuple[Pair, ...]
  tokens: np.ndarray
  offsets: np.ndarray
  context_lengths: np.ndarray
  end_of_text: int

  @property
  def fingerprint(self) -> str:
    """SHA-256 over all data that batches contain, in hexadecimal."""
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
    """Token ids of every context with its end of text, to generate from."""
    return [
        self.tokens[start:start + length].tolist()
        for start, length in zip(self.offsets[:-1], self.context_lengths)
    ]

  def block_length(self, lengths: Sequence[int]) -> int:
    """Returns the sequence length of the phases that read the examples.

    Args:
      lengths: Sequence lengths of the phases.

    Returns:
      The sequence length, in tokens.

    Raises:
      ValueError: the lengths differ, or an example is longer.
    """
    if len(set(lengths)) > 1:
      raise ValueError(
          f'phases of lengths {sorted(set(lengths))} read the same examples;'
          ' give these phases one length.'
      )
    longest = int(np.diff(self.offsets).max()) - 1
    if longest > lengths[0]:
      raise ValueError(
          f'length {lengths[0]} is too short for the longest example, which'
          f' has {longest} input tokens; encode the pairs with a smaller'
          ' max_length or read them with a greater length.'
      )
    return lengths[0]

  def num_blocks(self, block_length: int) -> int:
    """Returns the number of examples.

    Args:
      block_length: Unused, since a block is an example.
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
      offsets: Unused zeros, since examples are not cut.
      block_length: Equal to `length`; unused.
      length: Length to pad to, in tokens.

    Returns:
      The batch [batch, length]. Weights are one for the tokens of a pair's
      target and the end of text after it.
    """
    del offsets, block_length
    blocks = blocks % len(self.context_lengths)
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

  This is the layout of Hu et al., "LoRA: Low-Rank Adaptation of Large Language
  Models" (2021), for GPT-2. A space is inserted before the target. The target
  is truncated to half of `max_length`, its end of text included; the context is
  truncated on the right so that the target fits. If the texts of the tokenizer
  begin with a special token, as those of Llama do, so does the context.

  Args:
    pairs: Pairs to encode.
    tokenizer: The tokenizer.
    max_length: Largest number of tokens of an example, both ends of text
      included; at least 4.

  Returns:
    A source of batches, with one example for each pair, in order.

  Raises:
    ValueError: `max_length` is below 4.

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
        ' their two ends of text; use at least 4.'
    )
  end = tokenizer.end_of_text
  contexts = [
      special_tokens.begun(tokenizer, ids)
      for ids in tokenizer.encode_batch([pair.context for pair in pairs])
  ]
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

"""Prompts of different lengths, laid out in batches of one shape."""

from collections.abc import Iterator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Batch(NamedTuple):
  """Prompts in one right-padded buffer."""

  first: int
  """Number of the first prompt."""

  rows: int
  """How many there are; further rows are idle."""

  prompt_length: int
  """Tokens of the longest prompt, of all batches."""

  tokens_BxL: np.ndarray
  """The buffer, int32, with room for what is generated."""

  starts_B: np.ndarray
  """Where the first new token of every row goes."""

  stops_B: np.ndarray
  """Where no more goes."""


def batches(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    length: int,
) -> Iterator[Batch]:
  """Lays prompts out, the last batch filled up with idle rows.

  Args:
    prompts: Token ids of each prompt.
    max_new_tokens: Most tokens to generate for a prompt.
    batch_size: Rows of a batch.
    length: Most tokens of prompt and continuation together.

  Returns:
    The batches, all of one shape.

  Raises:
    ValueError: A prompt is empty or longer than `length - 1`, or a size is
      below 1.

  Example:
    >>> (batch,) = batches([[3], [0, 7]], 2, batch_size=2, length=16)
    >>> batch.tokens_BxL.tolist(), batch.starts_B.tolist()
    ([[3, 0, 0, 0], [0, 7, 0, 0]], [1, 2])
  """
  _check(prompts, max_new_tokens, batch_size, length)
  longest = max(map(len, prompts), default=1)
  width = min(length, longest + max_new_tokens)

  def batch(first):
    chosen = prompts[first:first + batch_size]
    tokens_BxL = np.zeros((batch_size, width), np.int32)
    starts_B = np.ones(batch_size, np.int32)
    stops_B = np.ones(batch_size, np.int32)  # Idle rows stop at once.
    for row, prompt in enumerate(chosen):
      tokens_BxL[row, :len(prompt)] = prompt
      starts_B[row] = len(prompt)
      stops_B[row] = min(width, len(prompt) + max_new_tokens)
    return Batch(first, len(chosen), longest, tokens_BxL, starts_B, stops_B)

  return map(batch, range(0, len(prompts), batch_size))


def _check(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    length: int,
) -> None:
  for name, value in (
      ('max_new_tokens', max_new_tokens), ('batch_size', batch_size),
  ):
    if value < 1:
      raise ValueError(f'{name} is {value}; it must be at least 1.')
  for index, prompt in enumerate(prompts):
    if not len(prompt):
      raise ValueError(
          f'prompts[{index}] is empty; begin it with the end-of-text token.'
      )
    if len(prompt) > length - 1:
      raise ValueError(
          f'prompts[{index}] has {len(prompt)} tokens, but with length '
          f'{length} a prompt has room for {length - 1} and one new token; '
          'shorten the prompt or raise length.'
      )

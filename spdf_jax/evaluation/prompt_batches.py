# SPDX-License-Identifier: Apache-2.0
"""Prompts of different lengths, packed into batches of few shapes."""

from collections.abc import Iterator, Sequence
import logging
import time
from typing import NamedTuple

import numpy as np

logger = logging.getLogger('spdf_jax')

_LOG_EVERY = 10  # Seconds between messages.


class PromptBatch(NamedTuple):
  """Prompts in one right-padded buffer."""

  numbers: tuple[int, ...]
  """Indices of the prompts, one for each row in use; other rows are idle."""

  prompt_length: int
  """Length of the longest prompt in all batches of this shape, in tokens."""

  tokens_BxL: np.ndarray
  """The buffer, int32, with space for the generated tokens."""

  numbers_B: np.ndarray
  """Index of the prompt of each row, int32; idle rows repeat the first."""

  starts_B: np.ndarray
  """Position of the first new token of each row."""

  stops_B: np.ndarray
  """Position after the last possible token of each row."""


def batches(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    length: int,
    vocab_size: int,
) -> Iterator[PromptBatch]:
  """Packs prompts into batches of few shapes, padding the last of each shape.

  Several batches group prompts of similar length: those of 65 to 128 tokens, of
  129 to 256, and so on.

  Args:
    prompts: Token ids of each prompt.
    max_new_tokens: Maximum number of tokens to generate for a prompt.
    batch_size: Number of rows in a batch.
    length: Maximum total length of prompt and continuation, in tokens.
    vocab_size: Number of token ids.

  Returns:
    The batches, each prompt in one of them.

  Raises:
    ValueError: a prompt is empty, longer than `length - 1` or has a token that
      is no id, or a size is below 1.

  Example:
    >>> (batch,) = batches([[3], [0, 7]], 2, batch_size=2, length=16,
    ...                     vocab_size=8)
    >>> batch.tokens_BxL.tolist(), batch.starts_B.tolist()
    ([[3, 0, 0, 0], [0, 7, 0, 0]], [1, 2])
    >>> [batch.numbers for batch in batches(
    ...     [[3], [0] * 9, [5]], 2, batch_size=2, length=16, vocab_size=8)]
    [(0, 2), (1,)]
  """
  _check(prompts, max_new_tokens, batch_size, length, vocab_size)

  def batch(numbers, group):
    lengths = [len(prompts[number]) for number in group]
    width = min(length, max(lengths) + max_new_tokens)
    tokens_BxL = np.zeros((batch_size, width), np.int32)
    numbers_B = np.full(batch_size, numbers[0], np.int32)
    starts_B = np.ones(batch_size, np.int32)
    stops_B = np.ones(batch_size, np.int32)  # Idle rows generate nothing.
    for row, number in enumerate(numbers):
      prompt = prompts[number]
      tokens_BxL[row, :len(prompt)] = prompt
      numbers_B[row] = number
      starts_B[row] = len(prompt)
      stops_B[row] = min(width, len(prompt) + max_new_tokens)
    return PromptBatch(
        tuple(numbers), max(lengths), tokens_BxL, numbers_B, starts_B, stops_B
    )

  groups: dict[int, list[int]] = {}
  for number, prompt in enumerate(prompts):
    alone = len(prompts) <= batch_size
    kind = 0 if alone else (len(prompt) - 1).bit_length()
    groups.setdefault(kind, []).append(number)
  return _log_progress(len(prompts), (
      batch(group[first:first + batch_size], group)
      for group in groups.values()
      for first in range(0, len(group), batch_size)
  ))


def _log_progress(
    number: int, all_batches: Iterator[PromptBatch]
) -> Iterator[PromptBatch]:
  started = last = time.monotonic()
  done = 0
  for batch in all_batches:
    yield batch
    done += len(batch.numbers)
    now = time.monotonic()
    if now - last >= _LOG_EVERY and done < number:
      last = now
      left = (now - started) / done * (number - done)
      logger.info(
          'continued %d of %d prompts, %.0f s left', done, number, left
      )


def _check(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int,
    length: int,
    vocab_size: int,
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
    for token in prompt:
      if not 0 <= token < vocab_size:
        raise ValueError(
            f'prompts[{index}] has the token {token}; token ids are at least 0 '
            f'and below {vocab_size}, so use the tokenizer of the model.'
        )

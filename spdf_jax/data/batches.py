# SPDX-License-Identifier: Apache-2.0
"""Batches: the schedule of permuted blocks over the steps of a plan."""

import bisect
from collections.abc import Mapping, Sequence
import hashlib
import math
import operator
from typing import NamedTuple, Protocol
import zlib

import numpy as np

from spdf_jax import names
from spdf_jax.data.sources import Batch
from spdf_jax.data.sources import Source

_ROUNDS = 6  # Rounds of a Feistel network.


class BatchAt(Protocol):
  """A function from a step to its batch, or to some of its rows."""

  def __call__(self, step: int, rows: slice = slice(None)) -> Batch:
    """Reads rows of the batch of a step."""


class Allotment(NamedTuple):
  """The share of a phase in a source.

  Attributes:
    source: Name of the source.
    batch_size: Rows of a batch.
    length: Tokens of a row.
    steps: Number of batches.
    new_epoch: Whether the phase starts a new epoch, even if the previous one is
      incomplete.
  """

  source: str
  batch_size: int
  length: int
  steps: int
  new_epoch: bool = False


class _PlacedAllotment(NamedTuple):
  """An allotment and its position in the stream of its source."""

  source: Source
  name: str
  batch_size: int
  length: int
  block_length: int
  num_blocks: int
  first_step: int
  first_row: int  # Counted in rows of this length, over epochs.


def schedule_batches(
    sources: Mapping[str, Source],
    allotments: Sequence[Allotment],
    *,
    seed: int,
    max_epochs: Mapping[str, int],
) -> BatchAt:
  """Schedules the batch of every step.

  An allotment is the batches that one phase reads from one source. The blocks
  of a source, permuted in every epoch by (seed, epoch, name), form one stream
  that its allotments read one after another, so that they share epochs and no
  block is read twice in an epoch. A batch that reaches the end of an epoch
  continues in the next one. A block is as long as the longest row that any
  allotment reads from its source, and shorter rows are parts of it. An
  allotment may end within a block; if the next one has longer rows, its first
  row begins at a multiple of that length, and the tokens between are not read.
  An allotment with `new_epoch` skips the rest of the current epoch.

  Args:
    sources: Sources of batches, by name.
    allotments: The allotment of each phase, in order.
    seed: Seed of the permutations.
    max_epochs: Largest number of epochs of each source, by name.

  Returns:
    `batch_at(step, rows)`, a pure function of the step, counted from 0 over all
    allotments, and of a slice of the rows to read, by default all. It raises
    IndexError for a step outside the allotments.

  Raises:
    ValueError: the source of an allotment is unknown, is smaller than a batch,
      does not support the lengths, or needs more epochs than `max_epochs`.

  Example:
    >>> from spdf_jax.data.examples import encode_pairs
    >>> from spdf_jax.data.tasks import Pair
    >>> from spdf_jax.data.tokenizers import ByteTokenizer
    >>> pairs = [Pair('a', '1'), Pair('b', '2')]
    >>> batch_at = schedule_batches(
    ...     {'toy': encode_pairs(pairs, ByteTokenizer(), max_length=8)},
    ...     [Allotment('toy', batch_size=1, length=6, steps=2)],
    ...     seed=0, max_epochs={'toy': 1})
    >>> sorted(chr(batch_at(step).inputs[0, 0]) for step in range(2))
    ['a', 'b']
  """
  block_lengths = {
      name: _block_length(
          name, names.lookup('source', name, sources), allotments
      )
      for name in {allotment.source for allotment in allotments}
  }
  cursors = dict.fromkeys(block_lengths, 0)  # In tokens, over epochs.
  placed_allotments, steps = [], 0
  for allotment in allotments:
    name = allotment.source
    num_blocks = sources[name].num_blocks(block_lengths[name])
    # At least 1, to avoid a division by zero; `_check_one_batch` rejects an
    # empty source.
    held = max(num_blocks * block_lengths[name], 1)
    if allotment.new_epoch:
      cursors[name] = -(-cursors[name] // held) * held
    placed = _PlacedAllotment(
        source=sources[name],
        name=name,
        batch_size=allotment.batch_size,
        length=allotment.length,
        block_length=block_lengths[name],
        num_blocks=num_blocks,
        first_step=steps,
        first_row=-(-cursors[name] // allotment.length),
    )
    _check_one_batch(placed)
    rows = placed.first_row + allotment.steps * allotment.batch_size
    cursors[name] = rows * allotment.length
    steps += allotment.steps
    placed_allotments.append(placed)
  for placed in placed_allotments:
    _check_epochs(placed, cursors[placed.name], max_epochs)
  first_steps = [placed.first_step for placed in placed_allotments]

  def batch_at(step: int, rows: slice = slice(None)) -> Batch:
    step = operator.index(step)
    if not 0 <= step < steps:
      raise IndexError(
          f'step {step} is outside the plan, which has steps 0 to'
          f' {steps - 1}; add steps to a phase.'
      )
    placed = placed_allotments[bisect.bisect_right(first_steps, step) - 1]
    return _read(placed, step - placed.first_step, rows, seed)

  return batch_at


def evaluation_batches(
    source: Source, *, batch_size: int, length: int, max_batches: int
) -> list[Batch]:
  """Reads a fixed set of batches, whose rows are spread evenly over a source.

  Args:
    source: Source of the batches.
    batch_size: Rows of a batch.
    length: Tokens of a row.
    max_batches: Largest number of batches to read.

  Returns:
    Batches [batch_size, length]; rows that pad the last one have weight 0.

  Raises:
    ValueError: the source has no row of this length, or an example that is
      longer.

  Example:
    >>> from spdf_jax.data.examples import encode_pairs
    >>> from spdf_jax.data.tasks import Pair
    >>> from spdf_jax.data.tokenizers import ByteTokenizer
    >>> examples = encode_pairs(
    ...     [Pair('a', 'b')] * 3, ByteTokenizer(), max_length=8)
    >>> batches = evaluation_batches(
    ...     examples, batch_size=2, length=8, max_batches=9)
    >>> [batch.weights.sum(axis=1).tolist() for batch in batches]
    [[3.0, 3.0], [3.0, 0.0]]
  """
  block_length = source.block_length([length])
  total = source.num_blocks(block_length)
  if total == 0:
    raise ValueError(
        f'the source of evaluation batches holds no row of {length} tokens'
        ' and the token after them; use a smaller length or more text.'
    )
  count = min(total, batch_size * max_batches)
  blocks = np.arange(count) * total // count
  batches = []
  for start in range(0, count, batch_size):
    chunk = blocks[start:start + batch_size]
    batch = source.read(
        chunk, np.zeros_like(chunk), block_length=block_length, length=length
    )
    padding = ((0, batch_size - len(chunk)), (0, 0))
    batches.append(Batch(*(np.pad(array, padding) for array in batch)))
  return batches


def _read(
    placed: _PlacedAllotment, step: int, chosen: slice, seed: int
) -> Batch:
  first = placed.first_row + step * placed.batch_size
  rows = first + np.arange(placed.batch_size, dtype=np.int64)[chosen]
  rows_per_block = placed.block_length // placed.length
  positions, parts = np.divmod(rows, rows_per_block)
  epochs, positions = np.divmod(positions, placed.num_blocks)
  blocks = np.empty_like(positions)
  for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
    key = (seed, epoch, zlib.crc32(placed.name.encode()))
    here = epochs == epoch
    blocks[here] = permute(positions[here], placed.num_blocks, key)
  return placed.source.read(
      blocks + epochs * placed.num_blocks,
      parts * placed.length,
      block_length=placed.block_length,
      length=placed.length,
  )


def _block_length(
    name: str, source: Source, allotments: Sequence[Allotment]
) -> int:
  lengths = [a.length for a in allotments if a.source == name]
  try:
    return source.block_length(lengths)
  except ValueError as error:
    raise ValueError(f'source {name!r}: {error}') from error


def _check_one_batch(placed: _PlacedAllotment) -> None:
  rows = placed.num_blocks * (placed.block_length // placed.length)
  if rows < placed.batch_size:
    raise ValueError(
        f'source {placed.name!r} holds {rows} rows of {placed.length}'
        f' tokens, fewer than one batch of {placed.batch_size}; use a'
        ' smaller batch_size or length, or more text.'
    )


def _check_epochs(
    placed: _PlacedAllotment, tokens: int, max_epochs: Mapping[str, int]
) -> None:
  held = placed.num_blocks * placed.block_length
  needed, allowed = -(-tokens // held), max_epochs[placed.name]
  if needed > allowed:
    raise ValueError(
        f'the plan needs {needed} epochs of source {placed.name!r}'
        f' ({tokens} tokens, and it holds {held}), but max_epochs allows'
        f' {allowed}; set max_epochs.{placed.name} to {needed} or plan fewer'
        ' steps.'
    )


def permute(
    index: np.ndarray | int, size: int, key: tuple[int, ...]
) -> np.ndarray:
  """Evaluates a pseudo-random permutation of `range(size)`.

  The permutation is a bijection on `range(size)` for every key, and the same on
  every platform. It is never stored: a position is written as a pair (row,
  column) of a table of at least `size` cells, and a generalized Feistel network
  is applied to the pair until the result is below `size` (cycle walking).

  Args:
    index: Positions in [0, size), of any shape.
    size: Size of the permuted range, below 2^62.
    key: Integers that choose the permutation, e.g. (seed, epoch).

  Returns:
    The images of the positions, int64 of the shape of `index`.

  References:
    Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains".

  Example:
    >>> permute(np.arange(8), 8, key=(0, 1)).tolist()
    [0, 5, 6, 4, 2, 7, 3, 1]
  """
  index = np.asarray(index, np.int64)
  digest = hashlib.blake2b(repr(tuple(map(int, key))).encode()).digest()
  round_keys = np.frombuffer(digest, '<u8')[:_ROUNDS].astype(np.uint64)
  rows = math.isqrt(size - 1) + 1
  columns = -(-size // rows)
  result = _encipher(index.reshape(-1).astype(np.uint64),
                     np.uint64(rows), np.uint64(columns), round_keys)
  beyond = np.flatnonzero(result >= size)
  while beyond.size:
    result[beyond] = _encipher(result[beyond], np.uint64(rows),
                               np.uint64(columns), round_keys)
    beyond = beyond[result[beyond] >= size]
  return result.astype(np.int64).reshape(index.shape)


def _encipher(
    x: np.ndarray, rows: np.uint64, columns: np.uint64, keys: np.ndarray
) -> np.ndarray:
  a: np.ndarray = x // columns
  b: np.ndarray = x % columns
  for i, key in enumerate(keys):
    if i % 2:
      b = (b + _mix(a + key) % columns) % columns
    else:
      a = (a + _mix(b + key) % rows) % rows
  return a * columns + b


def _mix(x: np.ndarray) -> np.ndarray:
  """Applies the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))

"""Batches: which blocks each step of a plan reads."""

import bisect
from collections.abc import Mapping
from collections.abc import Sequence
import operator
from typing import NamedTuple
from typing import Protocol
import zlib

import numpy as np

from spdf_jax.data.permutations import permute
from spdf_jax.data.sources import Batch
from spdf_jax.data.sources import Source
from spdf_jax.names import lookup


class BatchAt(Protocol):
  """The batch of a step, or some of its rows."""

  def __call__(self, step: int, rows: slice = slice(None)) -> Batch:
    """Returns rows of the batch of a step, read anew each time."""


class Allotment(NamedTuple):
  """One phase's share of a source.

  Attributes:
    source: Name of what it reads.
    batch_size: Rows of a batch.
    length: Tokens of a row.
    steps: How many batches.
    new_epoch: Whether it starts with a new epoch, whatever is left of the one
      before.
  """

  source: str
  batch_size: int
  length: int
  steps: int
  new_epoch: bool = False


class _Segment(NamedTuple):
  """An allotment and where it lies in its source's stream of rows."""

  source: Source
  name: str
  batch_size: int
  length: int
  block_length: int
  num_blocks: int
  first_step: int
  first_row: int  # Counted in rows of this segment's length, over epochs.


def schedule_batches(
    sources: Mapping[str, Source],
    allotments: Sequence[Allotment],
    *,
    seed: int,
    max_epochs: Mapping[str, int],
) -> BatchAt:
  """Plans which batch each step reads.

  The blocks of a source, permuted anew in every epoch by (seed, epoch, name),
  form one stream that its allotments read one after another: they share
  epochs, and no block is seen twice in one. A batch that reaches the end of
  an epoch goes on in the next. A block is as long as the longest row of its
  source; shorter rows are parts of it, and where rows get longer the stream
  goes on at a multiple of their length. An allotment of a new epoch leaves out
  what was left of the one before.

  Args:
    sources: What can be read, by name.
    allotments: The phases' shares, in the order of their steps.
    seed: Chooses the permutations.
    max_epochs: How often each source may be seen at most.

  Returns:
    `batch_at`, a pure function of the step, counted from 0 over allotments, and
    of the rows to read, by default all.

  Raises:
    ValueError: A share is not positive, or its source is unknown, smaller
      than a batch, seen too often or read with lengths that do not fit.

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
  if not allotments:
    raise ValueError('allotments is empty; give the share of one phase.')
  for number, allotment in enumerate(allotments):
    _check(number, allotment, sources, max_epochs)
  block_lengths = {
      name: _block_length(name, sources[name], allotments)
      for name in {allotment.source for allotment in allotments}
  }
  cursors = dict.fromkeys(block_lengths, 0)  # In tokens, over epochs.
  segments, steps = [], 0
  for allotment in allotments:
    name = allotment.source
    num_blocks = sources[name].num_blocks(block_lengths[name])
    # Of an empty source nothing is held; it is refused below.
    held = max(num_blocks * block_lengths[name], 1)
    if allotment.new_epoch:
      cursors[name] = -(-cursors[name] // held) * held
    segment = _Segment(
        source=sources[name],
        name=name,
        batch_size=allotment.batch_size,
        length=allotment.length,
        block_length=block_lengths[name],
        num_blocks=num_blocks,
        first_step=steps,
        first_row=-(-cursors[name] // allotment.length),
    )
    _check_one_batch(segment)
    rows = segment.first_row + allotment.steps * allotment.batch_size
    cursors[name] = rows * allotment.length
    steps += allotment.steps
    segments.append(segment)
  for segment in segments:
    _check_epochs(segment, cursors[segment.name], max_epochs)
  first_steps = [segment.first_step for segment in segments]

  def batch_at(step: int, rows: slice = slice(None)) -> Batch:
    step = operator.index(step)
    if not 0 <= step < steps:
      raise IndexError(
          f'step {step} is outside the plan, which has steps 0 to'
          f' {steps - 1}; add steps to a phase.'
      )
    segment = segments[bisect.bisect_right(first_steps, step) - 1]
    return _read(segment, step - segment.first_step, rows, seed)

  return batch_at


def evaluation_batches(
    source: Source, *, batch_size: int, length: int, max_batches: int
) -> list[Batch]:
  """Reads rows spread evenly over a source, always the same ones.

  Args:
    source: What to read.
    batch_size: Rows of a batch.
    length: Tokens of a row.
    max_batches: How many batches to read at most.

  Returns:
    Batches [batch_size, length]; rows that fill the last one have weight 0.

  Raises:
    ValueError: A number is not positive, or the source has no row.

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
  if min(batch_size, length, max_batches) < 1:
    raise ValueError(
        f'batch_size={batch_size}, length={length} and'
        f' max_batches={max_batches} must be positive; use 1 or more.'
    )
  block_length = source.block_length([length])
  total = source.num_blocks(block_length)
  if total == 0:
    raise ValueError(f'the source holds no row of {length} tokens; use a'
                     ' smaller length or more text.')
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


def _read(segment: _Segment, step: int, chosen: slice, seed: int) -> Batch:
  first = segment.first_row + step * segment.batch_size
  rows = first + np.arange(segment.batch_size, dtype=np.int64)[chosen]
  rows_per_block = segment.block_length // segment.length
  positions, parts = np.divmod(rows, rows_per_block)
  epochs, positions = np.divmod(positions, segment.num_blocks)
  blocks = np.empty_like(positions)
  for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
    key = (seed, epoch, zlib.crc32(segment.name.encode()))
    here = epochs == epoch
    blocks[here] = permute(positions[here], segment.num_blocks, key)
  return segment.source.read(
      blocks,
      parts * segment.length,
      block_length=segment.block_length,
      length=segment.length,
  )


def _check(
    number: int,
    allotment: Allotment,
    sources: Mapping[str, Source],
    max_epochs: Mapping[str, int],
) -> None:
  lookup('source', allotment.source, sources)
  for name in ('batch_size', 'length', 'steps'):
    if getattr(allotment, name) < 1:
      raise ValueError(
          f'{name}={getattr(allotment, name)} of allotment {number}, on'
          f' {allotment.source!r}, is not positive; use 1 or more.'
      )
  if allotment.source not in max_epochs:
    raise ValueError(
        f'max_epochs has no entry for {allotment.source!r}; say how often'
        ' that source may be seen.'
    )


def _block_length(
    name: str, source: Source, allotments: Sequence[Allotment]
) -> int:
  lengths = [a.length for a in allotments if a.source == name]
  try:
    return source.block_length(lengths)
  except ValueError as error:
    raise ValueError(f'source {name!r}: {error}') from error


def _check_one_batch(segment: _Segment) -> None:
  rows = segment.num_blocks * (segment.block_length // segment.length)
  if rows < segment.batch_size:
    raise ValueError(
        f'source {segment.name!r} holds {rows} rows of {segment.length}'
        f' tokens, fewer than one batch of {segment.batch_size}; use a'
        ' smaller batch_size or length, or more text.'
    )


def _check_epochs(
    segment: _Segment, tokens: int, max_epochs: Mapping[str, int]
) -> None:
  held = segment.num_blocks * segment.block_length
  needed, allowed = -(-tokens // held), max_epochs[segment.name]
  if needed > allowed:
    raise ValueError(
        f'the plan needs {needed} epochs of source {segment.name!r}'
        f' ({tokens} tokens where it holds {held}), but max_epochs allows'
        f' {allowed}; set it to {needed} or plan fewer steps.'
    )

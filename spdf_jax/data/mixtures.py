"""Mixtures: several sources read as one, by weights."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import math
from typing import final

import numpy as np

from spdf_jax.data.sources import Batch
from spdf_jax.data.sources import Source


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
  """Sources of which every epoch holds shares by weight.

  An epoch is as long as it can be with no source read more than `repeats`
  times. Of a source that has more than its share the same blocks, evenly
  spread, are read in every epoch; of one that has less each block is read
  equally often, give or take one. Where rows of the mixture fall is settled
  by the permutation of its blocks, a function of (seed, epoch).

  Attributes:
    sources: What is mixed, by name.
    weights: Share of each in the tokens; they need not add to one.
    repeats: How often a block may be read in an epoch.

  Raises:
    ValueError: Names differ, a weight is not positive, or `repeats` is below
      one.

  Example:
    >>> from spdf_jax.data.examples import encode_pairs
    >>> from spdf_jax.data.tasks import Pair
    >>> from spdf_jax.data.tokenizers import ByteTokenizer
    >>> encode = lambda text: encode_pairs(
    ...     [Pair(c, c) for c in text], ByteTokenizer(), max_length=8)
    >>> mixture = Mixture(
    ...     {'few': encode('ab'), 'many': encode('uvwxyz')},
    ...     {'few': 1, 'many': 2})
    >>> blocks = np.arange(mixture.num_blocks(4))
    >>> batch = mixture.read(blocks, 0 * blocks, block_length=4, length=4)
    >>> bytes(batch.inputs[:, 0].tolist())
    b'abuvxy'
  """

  sources: Mapping[str, Source]
  weights: Mapping[str, float]
  repeats: int = 1

  def __post_init__(self):
    if not self.sources or self.sources.keys() != self.weights.keys():
      raise ValueError(
          f'weights name {sorted(self.weights)} and sources'
          f' {sorted(self.sources)}; give each source its weight.'
      )
    for name, weight in self.weights.items():
      if not (weight > 0 and math.isfinite(weight)):
        raise ValueError(
            f'weight {weight} of {name!r} is not positive; leave the source'
            ' out or give it a share.'
        )
    if self.repeats < 1:
      raise ValueError(f'repeats={self.repeats} is below 1; use 1 or more.')

  @property
  def fingerprint(self) -> str:
    """Changes with any source, weight or `repeats`."""
    facts = [
        [name, source.fingerprint, float(self.weights[name])]
        for name, source in self.sources.items()
    ]
    text = json.dumps([facts, self.repeats])
    return hashlib.sha256(text.encode('utf-8')).hexdigest()

  def block_length(self, lengths: Sequence[int]) -> int:
    """Returns the block length that all sources have for `lengths`.

    Args:
      lengths: Lengths that phases read, in tokens.

    Returns:
      The length of a block, in tokens.

    Raises:
      ValueError: A source cannot be read so, or sources differ.
    """
    found = {n: s.block_length(lengths) for n, s in self.sources.items()}
    if len(set(found.values())) > 1:
      raise ValueError(
          f'sources of a mixture have blocks of different lengths: {found};'
          ' mix sources of one kind.'
      )
    return next(iter(found.values()))

  def num_blocks(self, block_length: int) -> int:
    """Returns how many blocks an epoch has.

    Args:
      block_length: Length of a block, in tokens.
    """
    return int(self._shares(block_length)[1][-1])

  def read(
      self,
      blocks: np.ndarray,
      offsets: np.ndarray,
      *,
      block_length: int,
      length: int,
  ) -> Batch:
    """Reads `length` tokens of each block, from the source it falls to.

    Args:
      blocks: Numbers of the blocks [batch].
      offsets: Where in its block each row starts, in tokens [batch].
      block_length: Length of a block, in tokens.
      length: How many tokens to read of each.

    Returns:
      The batch [batch, length].
    """
    held, ends = self._shares(block_length)
    which = np.searchsorted(ends, blocks, side='right')
    quotas = np.diff(ends, prepend=0)
    # The k-th of q rows of a source with n blocks is block k n // q.
    within = blocks.astype(np.int64) - (ends - quotas)[which]
    theirs = within * held[which] // quotas[which]
    batch = Batch(
        inputs=np.empty((len(blocks), length), np.int32),
        targets=np.empty((len(blocks), length), np.int32),
        weights=np.empty((len(blocks), length), np.float32),
    )
    for number, source in enumerate(self.sources.values()):
      rows = np.nonzero(which == number)[0]
      if rows.size:
        part = source.read(
            theirs[rows], offsets[rows],
            block_length=block_length, length=length,
        )
        for array, read in zip(batch, part):
          array[rows] = read
    return batch

  def _shares(self, block_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns blocks of each source, and where its share of an epoch ends."""
    held = np.array(
        [s.num_blocks(block_length) for s in self.sources.values()], np.int64
    )
    weights = np.array([self.weights[name] for name in self.sources])
    epoch = (held * self.repeats / weights).min()
    # Shares are rounded down: none is read more often than it may.
    quotas = np.floor(weights * epoch * (1 + 1e-12)).astype(np.int64)
    return held, np.cumsum(np.minimum(quotas, held * self.repeats))

# SPDX-License-Identifier: Apache-2.0
"""Mixtures: several sources, weighted and read as one."""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import math
from typing import final

import numpy as np

from spdf_jax.data.sources import Batch
from spdf_jax.data.sources import Source

_GOLDEN = (math.sqrt(5) - 1) / 2


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
  """A source whose epochs contain several sources, in shares by weight.

  An epoch has the largest length at which no source is read more than `repeats`
  times. If a source has more blocks than its share, each epoch reads others,
  evenly spread, until all have been read; the numbers of reads of its blocks
  never differ by more than one. The permutation of the mixture's blocks, a
  function of (seed, epoch), determines their order.

  Attributes:
    sources: The sources, by name.
    weights: Weight of each source in the tokens; the sum need not be one.
    repeats: Largest number of reads of a block in an epoch.

  Raises:
    ValueError: a weight is not positive.

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
    b'abuzyx'
  """

  sources: Mapping[str, Source]
  weights: Mapping[str, float]
  repeats: int = 1

  def __post_init__(self):
    for name, weight in self.weights.items():
      if not (weight > 0 and math.isfinite(weight)):
        raise ValueError(
            f'weight {weight} of {name!r} is not positive and finite; leave'
            ' the source out or give it such a weight.'
        )

  @property
  def fingerprint(self) -> str:
    """SHA-256 over sources, weights and `repeats`, in hexadecimal."""
    facts = [
        [name, source.fingerprint, float(self.weights[name])]
        for name, source in self.sources.items()
    ]
    text = json.dumps([facts, self.repeats])
    return hashlib.sha256(text.encode('utf-8')).hexdigest()

  def block_length(self, lengths: Sequence[int]) -> int:
    """Returns the block length of all sources for some sequence lengths.

    Args:
      lengths: Sequence lengths of the phases.

    Returns:
      The length of a block, in tokens.

    Raises:
      ValueError: a source does not support the lengths, or block lengths
        differ.
    """
    blocks = {n: s.block_length(lengths) for n, s in self.sources.items()}
    if len(set(blocks.values())) > 1:
      raise ValueError(
          f'sources of a mixture have blocks of different lengths: {blocks};'
          ' mix sources of one type, such as Windows.'
      )
    return next(iter(blocks.values()))

  def num_blocks(self, block_length: int) -> int:
    """Returns the number of blocks of an epoch.

    Args:
      block_length: Length of a block, in tokens.

    Raises:
      ValueError: a source has less than a block in an epoch.
    """
    held, ends = self._shares(block_length)
    for name, blocks, quota in zip(
        self.sources, held, np.diff(ends, prepend=0)
    ):
      if not blocks:
        raise ValueError(
            f'source {name!r} of a mixture has no block of {block_length} '
            'tokens; give it more text, shorten the sequences, or leave it out.'
        )
      if not quota and held.all():
        raise ValueError(
            f'source {name!r} of a mixture has {blocks} blocks and the weight '
            f'{self.weights[name]:g}, less than one block in an epoch of '
            f'{ends[-1]}, so that none would be read; raise its weight, or '
            'leave it out.'
        )
    return int(ends[-1])

  def read(
      self,
      blocks: np.ndarray,
      offsets: np.ndarray,
      *,
      block_length: int,
      length: int,
  ) -> Batch:
    """Reads `length` tokens of each block from its source.

    Args:
      blocks: Numbers of the blocks [batch].
      offsets: Start of each row within its block, in tokens [batch].
      block_length: Length of a block, in tokens.
      length: Number of tokens to read per row.

    Returns:
      The batch [batch, length].
    """
    held, ends = self._shares(block_length)
    quotas = np.diff(ends, prepend=0)
    epochs, positions = np.divmod(blocks.astype(np.int64), max(ends[-1], 1))
    which = np.searchsorted(ends, positions, side='right')
    within = positions - (ends - quotas)[which]
    # Strides without a common factor with the number of blocks visit all.
    strides = np.array([_stride(n, q) for n, q in zip(held, quotas)])
    passes, order = np.divmod(epochs * quotas[which] + within, held[which])
    theirs = order * strides[which] % held[which] + passes * held[which]
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
    """Returns the sizes of all sources, and the ends of their shares.

    Both are in blocks; the ends are positions in an epoch.
    """
    held = np.array(
        [s.num_blocks(block_length) for s in self.sources.values()], np.int64
    )
    weights = np.array([self.weights[name] for name in self.sources])
    epoch = (held * self.repeats / weights).min()
    # Shares are rounded down, so that no block is read more than `repeats`
    # times.
    quotas = np.floor(weights * epoch * (1 + 1e-12)).astype(np.int64)
    return held, np.cumsum(np.minimum(quotas, held * self.repeats))


def _stride(blocks: int, share: int) -> int:
  """Returns a step between blocks that spreads a share and visits all blocks.

  Multiples of the golden ratio are spread evenly for any share.
  """
  stride = 1 if share >= blocks else round(_GOLDEN * blocks)
  while math.gcd(stride, blocks) > 1:
    stride += 1
  return stride

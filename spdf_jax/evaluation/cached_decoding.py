# SPDX-License-Identifier: Apache-2.0
"""Incremental decoding: models with a cache of keys and values."""

import dataclasses
from typing import Any, Protocol

import jax
from jax.experimental import multihost_utils

from spdf_jax import models

PyTree = Any


class Decoder(Protocol):
  """A model that generation can call; hashable, as it is a static argument."""

  def create_cache(self, batch_size: int, length: int) -> PyTree:
    """Returns an empty cache."""

  def __call__(
      self,
      params: PyTree,
      cache: PyTree,
      tokens_BxL: jax.Array,
      positions_BxL: jax.Array,
  ) -> tuple[jax.Array, PyTree]:
    """Returns logits [B, L, V] of tokens at their positions, and the updated
    cache; attention to later positions is masked."""

  @property
  def batch_axis(self) -> int:
    """The batch axis of the cache's leaves."""

  @property
  def length_axis(self) -> int:
    """The axis of positions in the cache's leaves."""


def vocab_size_of(decoder: Decoder) -> int:
  """Returns the number of token ids, or that of int32 if a decoder has none.

  Example:
    >>> model = models.create_model('gpt-mini', vocab_size=64)
    >>> vocab_size_of(CachedModel(model))
    64
  """
  if isinstance(decoder, CachedModel):
    return decoder.model.config.vocab_size
  return 2**31


def fetch(results: PyTree) -> PyTree:
  """Copies results to the host, including shards of other processes.

  Example:
    >>> import jax.numpy as jnp
    >>> fetch(jnp.arange(3)).tolist()
    [0, 1, 2]
  """
  if jax.process_count() == 1:
    return jax.device_get(results)
  return multihost_utils.process_allgather(results, tiled=True)


@dataclasses.dataclass(frozen=True)
class CachedModel:
  """A Flax model with its cache of keys and values, as a `Decoder`.

  Attributes:
    model: A `GPT` or `Llama`.

  Example:
    >>> import jax.numpy as jnp
    >>> model = models.create_model('gpt-mini', vocab_size=64)
    >>> tokens, positions = jnp.array([[5]]), jnp.array([[0]])
    >>> params = model.init(jax.random.key(0), tokens)['params']
    >>> decoder = CachedModel(model)
    >>> cache = decoder.create_cache(batch_size=1, length=8)
    >>> logits, cache = decoder(params, cache, tokens, positions)
    >>> logits.shape
    (1, 1, 64)
  """

  model: models.GPT | models.Llama

  def create_cache(self, batch_size: int, length: int) -> PyTree:
    """Returns a cache of zeros for every layer, see `models.create_cache`."""
    return models.create_cache(self.model, batch_size, length)

  def __call__(
      self,
      params: PyTree,
      cache: PyTree,
      tokens_BxL: jax.Array,
      positions_BxL: jax.Array,
  ) -> tuple[jax.Array, PyTree]:
    """Applies the model to tokens at their positions."""
    logits_BxLxV, updated = self.model.apply(
        {'params': params, 'cache': cache}, tokens_BxL, positions_BxL,
        mutable=['cache'],
    )
    return logits_BxLxV, updated['cache']

  @property
  def batch_axis(self) -> int:
    """The batch axis: 1 where the layers are stacked on axis 0, else 0."""
    return int(self.model.config.scan_layers)

  @property
  def length_axis(self) -> int:
    """The axis of positions, after those of the batch and the heads."""
    return self.batch_axis + 2

"""Models that continue sequences a few tokens at a time."""

import dataclasses
from typing import Any
from typing import Protocol

import jax
from jax.experimental import multihost_utils

from spdf_jax import models

PyTree = Any


class Decoder(Protocol):
  """What generation asks of a model; hashable, as it is compiled for it."""

  def create_cache(self, batch_size: int, length: int) -> PyTree:
    """Returns the cache before the first token."""

  def __call__(
      self,
      params: PyTree,
      cache: PyTree,
      tokens_BxL: jax.Array,
      positions_BxL: jax.Array,
  ) -> tuple[jax.Array, PyTree]:
    """Returns logits [B, L, V] of tokens at their positions, and the cache with
    them; tokens at later positions are not seen."""

  @property
  def batch_axis(self) -> int:
    """Which axis of the cache's leaves numbers the sequences."""

  @property
  def length_axis(self) -> int:
    """Which axis of the cache's leaves numbers positions."""


def fetch(results: PyTree) -> PyTree:
  """Brings results to the host, of devices of other processes too.

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
  """A Flax decoder with its cache of keys and values: a `Decoder`.

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
    """Returns zeros for every layer, see `models.create_cache`."""
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
    """Behind the layers, where they are stacked."""
    return int(self.model.config.scan_layers)

  @property
  def length_axis(self) -> int:
    """Behind the heads."""
    return self.batch_axis + 2

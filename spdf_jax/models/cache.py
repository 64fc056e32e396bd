"""Keys and values of the tokens so far, for generation."""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

PyTree = Any


def create_cache(model: nn.Module, batch_size: int, length: int) -> PyTree:
  """Makes the empty cache of a decoder.

  Tokens are then computed where they stand, in any portions:

  .. code-block:: python

    logits, updated = model.apply(
        {'params': params, 'cache': cache}, tokens_BxL, positions_BxL,
        mutable=['cache'],
    )
    cache = updated['cache']

  Args:
    model: A `GPT` or `Llama`.
    batch_size: Sequences.
    length: Positions of each, at most the model's.

  Returns:
    The collection `'cache'`, zeros: keys and values `[batch_size, heads,
    length, head_size]` for every layer.

  Raises:
    ValueError: the model has fewer positions.

  Example:
    >>> from spdf_jax import models
    >>> model = models.create_model('gpt-mini', vocab_size=64)
    >>> cache = create_cache(model, batch_size=2, length=16)
    >>> cache['h_0']['attn']['key'].shape
    (2, 4, 16, 32)
  """
  tokens_BxL = jnp.zeros((batch_size, length), jnp.int32)
  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens_BxL, tokens_BxL)
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes['cache'])

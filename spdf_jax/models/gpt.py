# SPDX-License-Identifier: Apache-2.0
"""The GPT-2 / GPT-3 decoder, with masked hidden matrices."""

import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax.models import decoder
from spdf_jax.models.attention import Attention
from spdf_jax.models.decoder import DecoderConfig
from spdf_jax.models.decoder import ReadOut

ACTIVATIONS = {
    'gelu_tanh': functools.partial(nn.gelu, approximate=True),
    'gelu': functools.partial(nn.gelu, approximate=False),
}
"""Activations of the feed-forward layer: GPT-2's approximation, and exact."""


@dataclasses.dataclass(frozen=True)
class GPTConfig(DecoderConfig):
  """Sizes of a GPT.

  Attributes:
    activation: `gelu_tanh`, as in GPT-2, or `gelu`, as in Cerebras-GPT.
    attention_by_layer: Whether the scores of layer i, counted from 1, are also
      divided by i (`scale_attn_by_inverse_layer_idx` of GPT-2).

  Raises:
    ValueError: a size is not positive, the heads do not divide the width, or
      a name is unknown.

  References:
    Dey et al., `Cerebras-GPT <https://arxiv.org/abs/2304.03208>`_, 2023
  """

  activation: str = 'gelu_tanh'
  attention_by_layer: bool = False

  def __post_init__(self):
    super().__post_init__()
    if self.activation not in ACTIVATIONS:
      raise ValueError(
          f'activation is {self.activation!r}; use one of '
          f'{", ".join(ACTIVATIONS)}.'
      )


class MLP(nn.Module):
  """A feed-forward layer."""

  config: GPTConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    c = self.config
    h_BxLxF = decoder.dense(c, c.d_ff, name='wi', use_bias=True)(x_BxLxD)
    # In 16 bits, XLA:CPU would round every intermediate result.
    h_BxLxF = ACTIVATIONS[c.activation](h_BxLxF.astype(jnp.float32))
    wo = decoder.dense(c, c.d_model, name='wo', use_bias=True, residual=True)
    return wo(h_BxLxF)


class Block(nn.Module):
  """A pre-LayerNorm decoder layer; returns a pair, as `nn.scan` requires."""

  config: GPTConfig

  @nn.compact
  def __call__(
      self,
      x_BxLxD: jax.Array,
      positions_BxL: jax.Array | None,
      divisor: jax.Array | None = None,
  ) -> tuple[jax.Array, None]:
    c = self.config
    norm = lambda name: nn.LayerNorm(epsilon=1e-5, dtype=c.dtype, name=name)
    attention = Attention(c, name='attn')
    y_BxLxD = attention(norm('ln_1')(x_BxLxD), positions_BxL, divisor)
    x_BxLxD += decoder.drop(self, y_BxLxD)
    x_BxLxD += decoder.drop(self, MLP(c, name='mlp')(norm('ln_2')(x_BxLxD)))
    return x_BxLxD, None


class GPT(nn.Module):
  """A decoder with learned positions and tied embeddings.

  `model.apply({'params': p}, tokens_BxL)` returns float32 logits [B, L, V].
  With `'masks': m` the products with hidden matrices are sparse, and with
  `'grad_masks': g` their gradients are computed where `g` is `True`. With
  positions and a cache (see `create_cache`), tokens can be processed in parts.
  `read_out` is called with the head, a function to logits, and its input, and
  computes the result.

  References:
    Radford et al., Language Models are Unsupervised Multitask Learners, 2019
    Brown et al., `GPT-3 <https://arxiv.org/abs/2005.14165>`_, 2020

  Example:
    >>> model = GPT(GPTConfig(64, 2, 2, 16, 64, 32))
    >>> tokens = jnp.zeros((1, 8), jnp.int32)
    >>> variables = model.init(jax.random.key(0), tokens)
    >>> model.apply(variables, tokens).shape
    (1, 8, 64)
  """

  config: GPTConfig

  where = property(lambda _: decoder.sparsifiable)
  with_lowering = nn.nowrap(decoder.with_lowering)

  @nn.compact
  def __call__(
      self,
      tokens_BxL: jax.Array,
      positions_BxL: jax.Array | None = None,
      read_out: ReadOut = decoder.read_all,
  ) -> Any:
    c = self.config
    decoder.check_length(c, tokens_BxL)
    embed = lambda size, stddev, name: nn.Embed(
        size, c.d_model, embedding_init=nn.initializers.normal(stddev),
        dtype=c.dtype, name=name,
    )
    wte = embed(c.vocab_size, 0.02, 'wte')
    wpe = embed(c.max_length, 0.01, 'wpe')
    at = positions_BxL
    if at is None:
      at = jnp.arange(tokens_BxL.shape[1])
    x_BxLxD = c.embeddings_scale * (wte(tokens_BxL) + wpe(at))
    x_BxLxD = decoder.drop(self, x_BxLxD)
    divisors: tuple[np.ndarray, ...] = ()
    if c.attention_by_layer:
      divisors = (np.arange(1, c.n_layers + 1, dtype=np.float32),)
    x_BxLxD = decoder.apply_layers(Block, c, x_BxLxD, positions_BxL, *divisors)
    x_BxLxD = nn.LayerNorm(epsilon=1e-5, dtype=c.dtype, name='ln_f')(x_BxLxD)
    head = lambda x: c.logits_scale * decoder.tied_logits(wte, x)
    return read_out(head, x_BxLxD)

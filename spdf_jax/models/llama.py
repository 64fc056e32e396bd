# SPDX-License-Identifier: Apache-2.0
"""The Llama decoder, with masked hidden matrices."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from spdf_jax.accelerator import bf16_matmul
from spdf_jax.models import decoder
from spdf_jax.models import rotary
from spdf_jax.models.attention import Attention
from spdf_jax.models.decoder import DecoderConfig
from spdf_jax.models.decoder import ReadOut
from spdf_jax.models.rotary import Rotary


@dataclasses.dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
  """Sizes of a Llama.

  Attributes:
    n_kv_heads: Number of heads of keys and values, each shared by several heads
      of queries; `None`: that of the queries.
    head_dim: Size of a head; `None`: d_model / n_heads.
    norm_eps: Term added to the mean square in RMSNorm.
    tied: Whether the head shares the embedding.
    qkv_bias: Whether the projections to queries, keys and values have biases,
      as in Qwen2.
    qk_norm: Whether the queries and keys of every head are normalized by
      RMSNorm, as in Qwen3.
    rope_theta: Base of the rotary wavelengths. This and the following fields
      are those of `Rotary`.
    rope_scaling: `none`, `linear` or `llama3`.
    rope_factor: Scaling factor of the positions.
    rope_low_freq_factor: See `Rotary`.
    rope_high_freq_factor: See `Rotary`.
    rope_original_length: See `Rotary`.

  Raises:
    ValueError: a size or norm_eps is not positive, n_heads does not divide the
      width, n_kv_heads does not divide n_heads, a name is unknown, or qkv_bias
      and qk_norm are both true.
  """

  n_kv_heads: int | None = None
  head_dim: int | None = None
  norm_eps: float = 1e-5
  tied: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  rope_theta: float = 10000.0
  rope_scaling: str = 'none'
  rope_factor: float = 1.0
  rope_low_freq_factor: float = 1.0
  rope_high_freq_factor: float = 4.0
  rope_original_length: int = 8192

  def __post_init__(self):
    super().__post_init__()
    if not self.norm_eps > 0:
      raise ValueError(f'norm_eps is {self.norm_eps}; it must be positive.')
    for name in ('n_kv_heads', 'head_dim'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ValueError(f'{name} is {value}; it must be positive.')
    if self.n_heads % self.kv_heads:
      raise ValueError(
          f'n_kv_heads is {self.kv_heads}, which does not divide n_heads '
          f'{self.n_heads}; choose a divisor.'
      )
    if self.qkv_bias and self.qk_norm:
      raise ValueError(
          'qkv_bias and qk_norm are both True, but no model in transformers '
          'has both; set one of them to False.'
      )
    rotary.frequencies(self.rotary, self.head_size)

  @property
  def kv_heads(self) -> int:
    """Number of heads of keys and values."""
    return self.n_kv_heads or self.n_heads

  @property
  def own_head_size(self) -> int | None:
    """Width of a head if set explicitly; otherwise `None`."""
    return self.head_dim

  @property
  def gated(self) -> bool:
    """Whether the feed-forward layer has a gate, here `True`."""
    return True

  @property
  def rotary(self) -> Rotary:
    """Rotary positions of queries and keys."""
    return Rotary(
        self.rope_theta, self.rope_scaling, self.rope_factor,
        self.rope_low_freq_factor, self.rope_high_freq_factor,
        self.rope_original_length,
    )


class GatedMLP(nn.Module):
  """A feed-forward layer with a gate, SwiGLU.

  References:
    Shazeer, `GLU Variants <https://arxiv.org/abs/2002.05202>`_, 2020, eq. 6
  """

  config: LlamaConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    c = self.config
    layer = lambda name: decoder.dense(c, c.d_ff, name=name, use_bias=False)
    h_BxLxF = nn.silu(layer('wg')(x_BxLxD)) * layer('wi')(x_BxLxD)
    wo = decoder.dense(c, c.d_model, name='wo', use_bias=False, residual=True)
    return wo(h_BxLxF)


class Block(nn.Module):
  """A pre-RMSNorm decoder layer; returns a pair, as `nn.scan` requires."""

  config: LlamaConfig

  @nn.compact
  def __call__(
      self, x_BxLxD: jax.Array, positions_BxL: jax.Array | None
  ) -> tuple[jax.Array, None]:
    c = self.config
    attention = Attention(
        c, use_bias=c.qkv_bias, output_bias=False,
        norm=functools.partial(_norm, c) if c.qk_norm else None,
        rotary=c.rotary, name='attn',
    )
    y_BxLxD = attention(_norm(c, 'ln_1')(x_BxLxD), positions_BxL)
    x_BxLxD += decoder.drop(self, y_BxLxD)
    y_BxLxD = GatedMLP(c, name='mlp')(_norm(c, 'ln_2')(x_BxLxD))
    x_BxLxD += decoder.drop(self, y_BxLxD)
    return x_BxLxD, None


class Llama(nn.Module):
  """A decoder with rotary positions, RMSNorm and SwiGLU: Llama, Mistral, Qwen.

  It is called like `GPT`.

  References:
    Touvron et al., `Llama 2 <https://arxiv.org/abs/2307.09288>`_, 2023;
    Yang et al., `Qwen3 <https://arxiv.org/abs/2505.09388>`_, 2025

  Example:
    >>> model = Llama(LlamaConfig(64, 2, 4, 16, 40, 32, n_kv_heads=2))
    >>> tokens = jnp.zeros((1, 8), jnp.int32)
    >>> variables = model.init(jax.random.key(0), tokens)
    >>> model.apply(variables, tokens).shape
    (1, 8, 64)
  """

  config: LlamaConfig

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
    init = nn.initializers.normal(0.02)
    wte = nn.Embed(
        c.vocab_size, c.d_model, embedding_init=init, dtype=c.dtype, name='wte'
    )
    x_BxLxD = decoder.drop(self, c.embeddings_scale * wte(tokens_BxL))
    x_BxLxD = decoder.apply_layers(Block, c, x_BxLxD, positions_BxL)
    x_BxLxD = _norm(c, 'ln_f')(x_BxLxD)
    head: Callable[[jax.Array], jax.Array]
    if c.tied:
      head = functools.partial(decoder.tied_logits, wte)
    else:
      kernel_DxV = _Head(c, name='head')().astype(c.dtype)
      head = lambda x: bf16_matmul.matmul(x, kernel_DxV).astype(
          jnp.float32
      )
    return read_out(lambda x: c.logits_scale * head(x), x_BxLxD)


class _Head(nn.Module):
  """The kernel of the head, as an array for use inside other transforms."""

  config: LlamaConfig

  @nn.compact
  def __call__(self) -> jax.Array:
    c = self.config
    init = nn.initializers.normal(0.02)
    return self.param('kernel', init, (c.d_model, c.vocab_size), jnp.float32)


def _norm(config: LlamaConfig, name: str) -> nn.RMSNorm:
  return nn.RMSNorm(epsilon=config.norm_eps, dtype=config.dtype, name=name)

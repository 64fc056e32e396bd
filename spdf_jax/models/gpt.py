"""The GPT-2 / GPT-3 decoder, with masked hidden matrices."""

import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

from spdf_jax.accelerator.primitives import check_lowering
from spdf_jax.models.layers import MaskedDense

HIDDEN_KERNELS = {
    'attn/wq/kernel': (-2, -1),
    'attn/wk/kernel': (-2, -1),
    'attn/wv/kernel': (-2, -1),
    'attn/wd/kernel': (-2, -1),
    'mlp/wi/kernel': (-2, -1),
    'mlp/wo/kernel': (-2, -1),
}
"""The six sparsifiable matrices of a layer (SPDF, section 3.1), with their
(reduction, output) axes; scanned models have a layer axis in front."""

DTYPES = ('float32', 'bfloat16', 'float16')
"""Types a model can compute in."""


@dataclasses.dataclass(frozen=True)
class GPTConfig:
  """Sizes of a GPT.

  Attributes:
    vocab_size: Number of token ids.
    n_layers: Number of decoder layers.
    n_heads: Attention heads per layer; divides d_model.
    d_model: Width.
    d_ff: Width of the feed-forward layer.
    max_length: Positions; no sequence may be longer.
    scan_layers: Compile one layer and scan over it; kernels are stacked.
    dtype: Type of the computation.
    lowering: What computes sparse matmuls, see `accelerator.sparse_matmul`.

  Raises:
    ValueError: a size is not positive, the heads do not divide the width, or
      the type or the lowering is unknown.
  """

  vocab_size: int
  n_layers: int
  n_heads: int
  d_model: int
  d_ff: int
  max_length: int
  scan_layers: bool = False
  dtype: str = 'float32'
  lowering: str = 'reference'

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is int and value < 1:
        raise ValueError(f'{field.name} is {value}; it must be positive.')
    if self.dtype not in DTYPES:
      raise ValueError(
          f'dtype is {self.dtype!r}; use one of {", ".join(DTYPES)}.'
      )
    if self.d_model % self.n_heads:
      raise ValueError(
          f'n_heads is {self.n_heads}, which does not divide d_model '
          f'{self.d_model}; choose a divisor.'
      )
    check_lowering(self.lowering)


class Attention(nn.Module):
  """Causal multi-head self-attention."""

  config: GPTConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    c = self.config
    heads = (*x_BxLxD.shape[:-1], c.n_heads, c.d_model // c.n_heads)
    q_BxLxHxK, k_BxLxHxK, v_BxLxHxK = (
        _dense(c, c.d_model, name=name)(x_BxLxD).reshape(heads)
        for name in ('wq', 'wk', 'wv')
    )
    y_BxLxHxK = jax.nn.dot_product_attention(
        q_BxLxHxK, k_BxLxHxK, v_BxLxHxK, is_causal=True
    )
    y_BxLxD = y_BxLxHxK.reshape(x_BxLxD.shape)
    return _dense(c, c.d_model, residual=True, name='wd')(y_BxLxD)


class MLP(nn.Module):
  """Feed-forward layer with the tanh form of gelu, as GPT-2."""

  config: GPTConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
    c = self.config
    h_BxLxF = _dense(c, c.d_ff, name='wi')(x_BxLxD)
    h_BxLxF = nn.gelu(h_BxLxF, approximate=True)
    return _dense(c, c.d_model, residual=True, name='wo')(h_BxLxF)


class Block(nn.Module):
  """A pre-LayerNorm decoder layer; returns a pair, as `nn.scan` asks."""

  config: GPTConfig

  @nn.compact
  def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, None]:
    c = self.config
    norm = lambda name: nn.LayerNorm(epsilon=1e-5, dtype=c.dtype, name=name)
    x_BxLxD += Attention(c, name='attn')(norm('ln_1')(x_BxLxD))
    x_BxLxD += MLP(c, name='mlp')(norm('ln_2')(x_BxLxD))
    return x_BxLxD, None


class GPT(nn.Module):
  """A decoder with learned positions and tied embeddings.

  `model.apply({'params': p}, tokens_BxL)` gives float32 logits [B, L, V];
  with `'masks': m` the hidden matrices are computed sparsely, and with
  `'grad_masks': g` their gradients where `g` is `True`.

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

  @nn.compact
  def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
    c = self.config
    length = tokens_BxL.shape[1]
    if length > c.max_length:
      raise ValueError(
          f'the sequence has {length} tokens and the model {c.max_length} '
          'positions; shorten the sequence or raise max_length.'
      )
    embed = lambda size, stddev, name: nn.Embed(
        size, c.d_model, embedding_init=nn.initializers.normal(stddev),
        dtype=c.dtype, name=name,
    )
    wte = embed(c.vocab_size, 0.02, 'wte')
    wpe = embed(c.max_length, 0.01, 'wpe')
    x_BxLxD = wte(tokens_BxL) + wpe(jnp.arange(length))
    if c.scan_layers:
      layers = nn.scan(
          Block,
          variable_axes={'params': 0, 'masks': 0, 'grad_masks': 0},
          split_rngs={'params': True},
          length=c.n_layers,
      )
      x_BxLxD, _ = layers(c, name='h')(x_BxLxD)
    else:
      for i in range(c.n_layers):
        x_BxLxD, _ = Block(c, name=f'h_{i}')(x_BxLxD)
    x_BxLxD = nn.LayerNorm(epsilon=1e-5, dtype=c.dtype, name='ln_f')(x_BxLxD)
    return wte.attend(x_BxLxD).astype(jnp.float32)


def sparsifiable(
    path: str, leaf: Any
) -> optax.contrib.MuonDimensionNumbers | bool:
  """Selects the hidden matrices of a GPT: the `where` of `sparsify`.

  Embeddings, positions, norms, biases and the (tied) head are never selected.

  Args:
    path: The leaf's path in the parameters, parts joined by `'/'`.
    leaf: The parameter, or its shape.

  Returns:
    The axes of a hidden matrix, `False` for everything else.

  Example:
    >>> kernel = jax.ShapeDtypeStruct((12, 64, 256), jnp.float32)
    >>> sparsifiable('h/mlp/wi/kernel', kernel)
    MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
  """
  del leaf
  axes = HIDDEN_KERNELS.get('/'.join(path.split('/')[-3:]))
  return axes is not None and optax.contrib.MuonDimensionNumbers(*axes)


def _dense(
    config: GPTConfig, features: int, *, name: str, residual: bool = False
) -> MaskedDense:
  # GPT-2 scales the layers that write to the residual stream by their number.
  stddev = 0.02 / (2 * config.n_layers) ** 0.5 if residual else 0.02
  return MaskedDense(
      features,
      kernel_init=nn.initializers.normal(stddev),
      dtype=config.dtype,
      lowering=config.lowering,
      name=name,
  )

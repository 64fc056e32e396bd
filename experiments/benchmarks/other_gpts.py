"""GPTs as users of Flax, NNX, Equinox and plain JAX write them.

They use their libraries' own layers and nothing of `spdf_jax.models`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp

from spdf_jax import extras

PyTree = Any


class Sizes(NamedTuple):
  """Sizes of a GPT."""

  width: int
  """Width of the model."""

  dtype: str = 'float32'
  """Dtype of the computation; parameters are float32."""

  layers: int = 4
  """Number of layers."""

  vocabulary: int = 512
  """Number of token ids."""

  @property
  def heads(self) -> int:
    """Number of heads, of at most 64 channels."""
    return max(1, self.width // 64)


class GPT(NamedTuple):
  """The parameters of a GPT, and its function to logits."""

  params: PyTree
  """A pytree with arrays."""

  logits: Callable[[PyTree, jax.Array], jax.Array]
  """`(params, tokens [B, L]) -> logits [B, L, V]`."""


class _Block(nn.Module):
  sizes: Sizes

  @nn.compact
  def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
    s, dtype = self.sizes, jnp.dtype(self.sizes.dtype)
    mask = nn.make_causal_mask(x[..., 0])
    attention = nn.MultiHeadDotProductAttention(s.heads, dtype=dtype)
    x += attention(nn.LayerNorm(dtype=dtype)(x), mask=mask)
    h = nn.Dense(4 * s.width, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
    return x + nn.Dense(s.width, dtype=dtype)(nn.gelu(h)), None


class _Linen(nn.Module):
  sizes: Sizes
  is_scanned: bool

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    s, dtype = self.sizes, jnp.dtype(self.sizes.dtype)
    embed = nn.Embed(s.vocabulary, s.width, dtype=dtype, name='embed')
    x = embed(tokens)
    if self.is_scanned:
      blocks = nn.scan(
          nn.remat(_Block), variable_axes={'params': 0}, length=s.layers,
          split_rngs={'params': True},
      )
      x, _ = blocks(s, name='blocks')(x, None)
    else:
      for i in range(s.layers):
        x, _ = _Block(s, name=f'block_{i}')(x)
    return embed.attend(nn.LayerNorm(dtype=dtype)(x))


def linen(sizes: Sizes, is_scanned: bool = False) -> GPT:
  """Returns a GPT in Flax Linen, optionally with scanned, rematted layers."""
  model = _Linen(sizes, is_scanned)
  tokens = jnp.zeros((1, 2), jnp.int32)
  params = jax.jit(model.init)(jax.random.key(0), tokens)['params']
  return GPT(params, lambda params, x: model.apply({'params': params}, x))


class _NNXBlock(nnx.Module):

  def __init__(self, s: Sizes, rngs: nnx.Rngs):
    kind: dict[str, Any] = dict(dtype=jnp.dtype(s.dtype), rngs=rngs)
    self.norm_1 = nnx.LayerNorm(s.width, **kind)
    self.norm_2 = nnx.LayerNorm(s.width, **kind)
    self.attention = nnx.MultiHeadAttention(
        s.heads, s.width, decode=False, **kind
    )
    self.wi = nnx.Linear(s.width, 4 * s.width, **kind)
    self.wo = nnx.Linear(4 * s.width, s.width, **kind)

  def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    x += self.attention(self.norm_1(x), mask=mask)
    return x + self.wo(nnx.gelu(self.wi(self.norm_2(x))))


class _NNX(nnx.Module):

  def __init__(self, s: Sizes, rngs: nnx.Rngs):
    kind: dict[str, Any] = dict(dtype=jnp.dtype(s.dtype), rngs=rngs)
    self.embed = nnx.Embed(s.vocabulary, s.width, **kind)
    self.norm = nnx.LayerNorm(s.width, **kind)
    self.layers = nnx.List(_NNXBlock(s, rngs) for _ in range(s.layers))

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = self.embed(tokens)
    mask = nnx.make_causal_mask(tokens)
    for layer in self.layers:
      x = layer(x, mask)
    return self.embed.attend(self.norm(x))


def of_nnx(sizes: Sizes) -> GPT:
  """Returns a GPT in Flax NNX, whose parameters are an `nnx.State`."""
  graph, params = nnx.split(_NNX(sizes, nnx.Rngs(0)), nnx.Param)
  return GPT(params, lambda params, x: nnx.merge(graph, params)(x))


def equinox(sizes: Sizes) -> GPT:
  """Returns a GPT in Equinox, of its layers for one token, under `vmap`."""
  eqx = extras.require('equinox', 'notebooks')
  s, keys = sizes, iter(jax.random.split(jax.random.key(0), 99))
  linear = lambda inputs, outputs: eqx.nn.Linear(
      inputs, outputs, key=next(keys)
  )
  model = {
      'embed': eqx.nn.Embedding(s.vocabulary, s.width, key=next(keys)),
      'norm': eqx.nn.LayerNorm(s.width),
      'layers': [{
          'norm_1': eqx.nn.LayerNorm(s.width),
          'norm_2': eqx.nn.LayerNorm(s.width),
          'attention': eqx.nn.MultiheadAttention(
              s.heads, s.width, key=next(keys)
          ),
          'wi': linear(s.width, 4 * s.width),
          'wo': linear(4 * s.width, s.width),
      } for _ in range(s.layers)],
  }
  params, static = eqx.partition(model, eqx.is_inexact_array)

  def logits(params, tokens):
    params = jax.tree.map(lambda w: w.astype(s.dtype), params)
    model = eqx.combine(params, static)
    mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))

    def of_sequence(tokens):
      x = jax.vmap(model['embed'])(tokens)
      for layer in model['layers']:
        h = jax.vmap(layer['norm_1'])(x)
        x += layer['attention'](h, h, h, mask=mask)
        h = jax.vmap(layer['wi'])(jax.vmap(layer['norm_2'])(x))
        x += jax.vmap(layer['wo'])(jax.nn.gelu(h))
      return jax.vmap(model['norm'])(x) @ model['embed'].weight.T

    return jax.vmap(of_sequence)(tokens)

  return GPT(params, logits)


def plain(sizes: Sizes) -> GPT:
  """Returns a GPT as a function of a dictionary of arrays."""
  s, keys = sizes, iter(jax.random.split(jax.random.key(0), 99))
  draw = lambda *shape: (
      jax.random.normal(next(keys), shape, 'float32') / shape[0] ** 0.5
  )
  params = {'embed': draw(s.vocabulary, s.width), 'layers': [{
      'qkv': draw(s.width, 3 * s.width), 'wd': draw(s.width, s.width),
      'wi': draw(s.width, 4 * s.width), 'wo': draw(4 * s.width, s.width),
  } for _ in range(s.layers)]}

  def norm(x):
    return jax.nn.standardize(x.astype(jnp.float32)).astype(x.dtype)

  def logits(params, tokens):
    params = jax.tree.map(lambda w: w.astype(s.dtype), params)
    x = params['embed'][tokens]
    for layer in params['layers']:
      qkv = jnp.split(norm(x) @ layer['qkv'], 3, axis=-1)
      q, k, v = (
          a.reshape(*a.shape[:2], s.heads, s.width // s.heads) for a in qkv
      )
      y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
      x += y.reshape(x.shape) @ layer['wd']
      x += jax.nn.gelu(norm(x) @ layer['wi']) @ layer['wo']
    return norm(x) @ params['embed'].T

  return GPT(params, logits)


GPTS: Mapping[str, Callable[[Sizes], GPT]] = {
    'Linen': linen,
    'Linen, scan and remat': lambda sizes: linen(sizes, is_scanned=True),
    'NNX': of_nnx,
    'Equinox': equinox,
    'plain JAX': plain,
}
"""GPTs of all kinds by their names."""

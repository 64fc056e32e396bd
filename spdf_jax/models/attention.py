"""Causal self-attention, with grouped queries and a cache where asked for."""

from flax import linen as nn
import jax
import jax.numpy as jnp

from spdf_jax.models.causal_attention import causal_attention
from spdf_jax.models.decoder import DecoderConfig
from spdf_jax.models.decoder import dense
from spdf_jax.models.rotary import frequencies
from spdf_jax.models.rotary import Rotary
from spdf_jax.models.rotary import rotate

_OF_JAX = ('xla', 'cudnn')


class Attention(nn.Module):
  """Causal multi-head self-attention.

  Where positions are given and the collection `'cache'` is mutable, keys and
  values are written there at their positions, and queries see everything in it
  up to their own.

  Attributes:
    config: Of the decoder.
    use_bias: Whether the four projections have biases.
    rotary: Turns queries and keys; `None`: positions are learned.
    scale: Of the scores; `None`: one over the root of the head's size.
  """

  config: DecoderConfig
  use_bias: bool = True
  rotary: Rotary | None = None
  scale: float | None = None

  @nn.compact
  def __call__(
      self, x_BxLxD: jax.Array, positions_BxL: jax.Array | None = None
  ) -> jax.Array:
    c = self.config
    project = lambda heads, name: dense(
        c, heads * c.head_size, name=name, use_bias=self.use_bias
    )(x_BxLxD).reshape(*x_BxLxD.shape[:-1], heads, c.head_size)
    q_BxLxHxK = project(c.n_heads, 'wq')
    k_BxLxGxK, v_BxLxGxK = project(c.kv_heads, 'wk'), project(c.kv_heads, 'wv')
    if self.rotary is not None:
      turns = frequencies(self.rotary, c.head_size)
      at = positions_BxL
      if at is None:
        at = jnp.arange(x_BxLxD.shape[1])[None]
      q_BxLxHxK, k_BxLxGxK = (
          rotate(x, at, turns) for x in (q_BxLxHxK, k_BxLxGxK)
      )
    seen = dict(is_causal=True)
    if positions_BxL is not None and self.is_mutable_collection('cache'):
      k_BxLxGxK, v_BxLxGxK, mask_Bx1xLxS = self._cached(
          k_BxLxGxK, v_BxLxGxK, positions_BxL
      )
      seen = dict(mask=mask_Bx1xLxS)
    if c.dtype == 'float16' and jax.default_backend() == 'cpu':
      # `dot_product_attention` multiplies float16 in a way that XLA has for
      # other devices only.
      q_BxLxHxK, k_BxLxGxK, v_BxLxGxK = (
          x.astype(jnp.float32) for x in (q_BxLxHxK, k_BxLxGxK, v_BxLxGxK)
      )
    on_cpu = c.attention == 'auto' and jax.default_backend() == 'cpu'
    if 'is_causal' in seen and (on_cpu or c.attention == 'blocks'):
      y_BxLxHxK = causal_attention(
          q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, self.scale
      )
    else:
      y_BxLxHxK = jax.nn.dot_product_attention(
          q_BxLxHxK, k_BxLxGxK, v_BxLxGxK,
          scale=self.scale,
          implementation=c.attention if c.attention in _OF_JAX else None,
          **seen,
      )
    return dense(
        c, c.d_model, name='wd', use_bias=self.use_bias, residual=True
    )(y_BxLxHxK.reshape(*x_BxLxD.shape[:-1], c.n_heads * c.head_size))

  def _cached(
      self,
      k_BxLxGxK: jax.Array,
      v_BxLxGxK: jax.Array,
      positions_BxL: jax.Array,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes keys and values; returns all of them, and who sees what."""
    is_there = self.has_variable('cache', 'key')
    # A head's keys and values lie together: no token moves those before it.
    swap = lambda x: jnp.swapaxes(x, 1, 2)
    key, value = (
        self.variable('cache', name, jnp.zeros_like, swap(x_BxLxGxK))
        for name, x_BxLxGxK in (('key', k_BxLxGxK), ('value', v_BxLxGxK))
    )
    if is_there:
      at = jnp.arange(len(positions_BxL))[:, None], slice(None), positions_BxL
      key.value = key.value.at[at].set(k_BxLxGxK)
      value.value = value.value.at[at].set(v_BxLxGxK)
    written_S = jnp.arange(key.value.shape[2])
    mask_BxLxS = written_S <= positions_BxL[:, :, None]
    return swap(key.value), swap(value.value), mask_BxLxS[:, None]

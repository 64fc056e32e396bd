# SPDX-License-Identifier: Apache-2.0
"""Causal self-attention, with optional grouped queries and cache."""

from collections.abc import Callable
import functools
import logging
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from spdf_jax.accelerator import bf16_matmul
from spdf_jax.models import decoder
from spdf_jax.models import rotary
from spdf_jax.models.decoder import DecoderConfig
from spdf_jax.models.rotary import Rotary

logger = logging.getLogger('spdf_jax')

PyTree = Any

_FROM_JAX = ('xla', 'cudnn')
_BLOCK = 128  # Queries per block, more if there would be over _BLOCKS blocks.
_BLOCKS = 8


class Attention(nn.Module):
  """Causal multi-head self-attention.

  If positions are given and the collection `'cache'` is mutable, keys and
  values are written to the cache at their positions, and a query attends to all
  entries up to its own position. If a divisor is given, the scores are divided
  by it.

  Attributes:
    config: Config of the decoder.
    use_bias: Whether the projections to heads have biases.
    output_bias: Whether the projection of the heads' outputs has a bias.
    norm: Function from a name to a module that normalizes the queries or keys
      of a head, before rotation; `None`: they are not normalized.
    rotary: Rotary positions of queries and keys; `None`: no rotation, since
      positions are learned.
  """

  config: DecoderConfig
  use_bias: bool = True
  output_bias: bool = True
  norm: Callable[[str], nn.Module] | None = None
  rotary: Rotary | None = None

  @nn.compact
  def __call__(
      self,
      x_BxLxD: jax.Array,
      positions_BxL: jax.Array | None = None,
      divisor: jax.Array | None = None,
  ) -> jax.Array:
    c = self.config
    scale = 1 / c.head_size if c.attention_by_size else None
    project = lambda heads, name: decoder.dense(
        c, heads * c.head_size, name=name, use_bias=self.use_bias
    )(x_BxLxD).reshape(*x_BxLxD.shape[:-1], heads, c.head_size)
    q_BxLxHxK = project(c.n_heads, 'wq')
    k_BxLxGxK, v_BxLxGxK = project(c.kv_heads, 'wk'), project(c.kv_heads, 'wv')
    if self.norm is not None:
      q_BxLxHxK, k_BxLxGxK = (
          self.norm('q_norm')(q_BxLxHxK), self.norm('k_norm')(k_BxLxGxK)
      )
    if self.rotary is not None:
      if positions_BxL is None:
        rotations = rotary.first_rotations(
            self.rotary, c.head_size, x_BxLxD.shape[1]
        )
      else:
        rotations = rotary.rotations(self.rotary, c.head_size, positions_BxL)
      q_BxLxHxK, k_BxLxGxK = (
          rotary.rotate(x, *rotations) for x in (q_BxLxHxK, k_BxLxGxK)
      )
    if divisor is not None:
      # Kernels of attention take a constant scale only, and a scanned layer has
      # a traced divisor, so the queries are divided.
      q_BxLxHxK = (q_BxLxHxK / divisor).astype(q_BxLxHxK.dtype)
    mask_Bx1xLxS = None
    if positions_BxL is not None and self.is_mutable_collection('cache'):
      k_BxLxGxK, v_BxLxGxK, mask_Bx1xLxS = self._cached(
          k_BxLxGxK, v_BxLxGxK, positions_BxL
      )
    y_BxLxHxK = attend(
        q_BxLxHxK, k_BxLxGxK, v_BxLxGxK, mask_Bx1xLxS,
        scale=scale, implementation=c.attention,
    )
    return decoder.dense(
        c, c.d_model, name='wd', use_bias=self.output_bias, residual=True
    )(y_BxLxHxK.reshape(*x_BxLxD.shape[:-1], c.n_heads * c.head_size))

  def _cached(
      self,
      k_BxLxGxK: jax.Array,
      v_BxLxGxK: jax.Array,
      positions_BxL: jax.Array,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes keys and values; returns all cached ones and the causal mask."""
    is_initialized = self.has_variable('cache', 'key')
    # The cache has the layout [B, heads, S, K], in which the entries of a head
    # are contiguous.
    swap = lambda x: jnp.swapaxes(x, 1, 2)
    key, value = (
        self.variable('cache', name, jnp.zeros_like, swap(x_BxLxGxK))
        for name, x_BxLxGxK in (('key', k_BxLxGxK), ('value', v_BxLxGxK))
    )
    if is_initialized:
      at = jnp.arange(len(positions_BxL))[:, None], slice(None), positions_BxL
      key.value = key.value.at[at].set(k_BxLxGxK)
      value.value = value.value.at[at].set(v_BxLxGxK)
    written_S = jnp.arange(key.value.shape[2])
    mask_BxLxS = written_S <= positions_BxL[:, :, None]
    return swap(key.value), swap(value.value), mask_BxLxS[:, None]


def attend(
    q_BxLxHxK: jax.Array,
    k_BxLxGxK: jax.Array,
    v_BxLxGxK: jax.Array,
    mask_Bx1xLxS: jax.Array | None = None,
    *,
    scale: float | None = None,
    implementation: str = 'auto',
) -> jax.Array:
  """Computes attention by the implementation for the platform of the program.

  The platform is that for which the program is lowered, which may differ from
  the one on which it is traced. JAX traces cuDNN's attention only on machines
  with cuDNN.

  Args:
    q_BxLxHxK: Queries, `[batch, length, heads, head size]`.
    k_BxLxGxK: Keys, whose number of heads divides that of the queries.
    v_BxLxGxK: Values, with as many heads as the keys.
    mask_Bx1xLxS: The keys that a query attends to; `None`: those up to its own
      position.
    scale: Factor of the scores; `None`: 1 / sqrt(head size).
    implementation: One of `decoder.ATTENTIONS`: `'auto'` without a mask is
      `'blocks'` on CPUs and, where cuDNN supports the dtype, shapes and device,
      `'cudnn'` on NVIDIA's GPUs; everything else is `'xla'`, JAX's default.

  Returns:
    The weighted values, with the shape and dtype of the queries.

  Raises:
    ValueError: the implementation is `'cudnn'`, which JAX does not support
      here.

  Example:
    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attend(x, x, x).shape
    (1, 3, 2, 4)
  """
  by_jax: Callable[..., jax.Array] = functools.partial(
      jax.nn.dot_product_attention,
      scale=scale, mask=mask_Bx1xLxS, is_causal=mask_Bx1xLxS is None,
  )
  args = q_BxLxHxK, k_BxLxGxK, v_BxLxGxK
  if implementation in _FROM_JAX:
    by_jax = functools.partial(by_jax, implementation=implementation)
    error = _refusal(by_jax, *args) if implementation == 'cudnn' else None
    if error:
      raise ValueError(
          "attention is 'cudnn', which JAX does not support here for queries "
          f"{q_BxLxHxK.dtype}{list(q_BxLxHxK.shape)}; use 'auto', which uses "
          'cuDNN where it can.'
      ) from error
  on_cpu = on_cuda = by_jax
  if mask_Bx1xLxS is None and implementation == 'blocks':
    by_jax = on_cpu = on_cuda = functools.partial(causal_attention, scale=scale)
  elif mask_Bx1xLxS is None and implementation == 'auto':
    on_cpu = functools.partial(causal_attention, scale=scale)
    if q_BxLxHxK.dtype.itemsize == 2:
      by_cudnn = functools.partial(by_jax, implementation='cudnn')
      error = _refusal(by_cudnn, *args)
      if error:
        logger.debug('attention on NVIDIA GPUs is that of XLA: %s', error)
      else:
        on_cuda = by_cudnn
  if q_BxLxHxK.dtype == jnp.float16:
    on_cpu = _in_float32(on_cpu)
  others = {
      platform: attention
      for platform, attention in (('cpu', on_cpu), ('cuda', on_cuda))
      if attention is not by_jax
  }
  if not others:
    return by_jax(*args)
  return jax.lax.platform_dependent(*args, **others, default=by_jax)


def _in_float32(
    attention: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
  """Computes attention in float32, since XLA:CPU has no float16 products."""
  return lambda *args: attention(
      *(x.astype(jnp.float32) for x in args)
  ).astype(args[0].dtype)


def _refusal(
    attention: Callable[..., jax.Array], *args: jax.Array
) -> Exception | None:
  """Returns the error of an attention that JAX does not support here."""
  try:
    jax.eval_shape(attention, *args)
  # Raised where cuDNN is missing or does not support the device or the shapes.
  except (NotImplementedError, RuntimeError, ValueError) as error:
    return error
  return None


def causal_attention(
    q_BxLxHxK: jax.Array,
    k_BxLxGxK: jax.Array,
    v_BxLxGxK: jax.Array,
    scale: float | None = None,
) -> jax.Array:
  """Computes causal attention in blocks of queries.

  The result is that of `jax.nn.dot_product_attention(…, is_causal=True)`. The
  layout lets a CPU run matrix products, and most of the upper triangle is
  skipped, since each block of queries uses only the keys up to its end.

  Args:
    q_BxLxHxK: Queries, `[batch, length, heads, head size]`.
    k_BxLxGxK: Keys, whose number of heads divides that of the queries.
    v_BxLxGxK: Values, with as many heads as the keys.
    scale: Factor of the scores; `None`: 1 / sqrt(head size).

  Returns:
    The weighted values, with the shape and dtype of the queries. Scores and
    sums are computed in float32.

  Example:
    >>> x = jnp.ones((1, 3, 2, 4))
    >>> causal_attention(x, x, x).shape
    (1, 3, 2, 4)
  """
  batch, length, heads, size = q_BxLxHxK.shape
  groups = k_BxLxGxK.shape[2]
  scale = size**-0.5 if scale is None else scale
  q_BxGxQxLxK = q_BxLxHxK.reshape(
      batch, length, groups, heads // groups, size
  ).transpose(0, 2, 3, 1, 4)
  k_BxGx1xKxS = k_BxLxGxK.transpose(0, 2, 3, 1)[:, :, None]
  v_BxGx1xSxK = v_BxLxGxK.transpose(0, 2, 1, 3)[:, :, None]
  multiply = functools.partial(
      _multiply, in_bf16=bf16_matmul.is_faster(q_BxLxHxK.dtype)
  )
  step = max(_BLOCK, -(-length // _BLOCKS))
  blocks = []
  for start in range(0, length, step):
    end = min(start + step, length)
    scores = scale * multiply(
        q_BxGxQxLxK[:, :, :, start:end], k_BxGx1xKxS[..., :end]
    )
    causal = jnp.arange(end) <= jnp.arange(start, end)[:, None]
    scores = jnp.where(causal, scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jax.lax.stop_gradient(largest))
    weighted = multiply(
        weights.astype(v_BxLxGxK.dtype), v_BxGx1xSxK[..., :end, :]
    )
    blocks.append(weighted / jnp.sum(weights, axis=-1, keepdims=True))
  y_BxGxQxLxK = jnp.concatenate(blocks, axis=3)
  y_BxLxGxQxK = y_BxGxQxLxK.transpose(0, 3, 1, 2, 4)
  return y_BxLxGxQxK.reshape(q_BxLxHxK.shape).astype(q_BxLxHxK.dtype)


def _multiply(
    x_BxGxQxIxJ: jax.Array, y_BxGx1xJxN: jax.Array, *, in_bf16: bool
) -> jax.Array:
  """Multiplies stacks of matrices; the products are float32."""
  if not in_bf16:
    return jnp.matmul(
        x_BxGxQxIxJ, y_BxGx1xJxN, preferred_element_type=jnp.float32
    )
  return bf16_matmul.einsum(
      'bgqij,bgjn->bgqin', x_BxGxQxIxJ, y_BxGx1xJxN[:, :, 0], jnp.float32
  )


def create_cache(model: nn.Module, batch_size: int, length: int) -> PyTree:
  """Creates an empty cache of the keys and values of a decoder.

  With a cache, a sequence can be processed in parts, at given positions:

  .. code-block:: python

    logits, updated = model.apply(
        {'params': params, 'cache': cache}, tokens_BxL, positions_BxL,
        mutable=['cache'],
    )
    cache = updated['cache']

  Args:
    model: A `GPT` or `Llama`.
    batch_size: Number of sequences.
    length: Largest number of tokens of a sequence, at most the `max_length` of
      the model.

  Returns:
    The collection `'cache'` of zeros, with keys and values `[batch_size,
    kv_heads, length, head_size]` for every layer; scanned layers have a layer
    axis in front.

  Raises:
    ValueError: `length` is above the `max_length` of the model.

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

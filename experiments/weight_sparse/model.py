"""The weight-sparse GPT of Gao et al., as a model of one's own for configs.

A decoder as in "Weight-sparse transformers have interpretable circuits" (2025,
https://arxiv.org/abs/2511.13653) and the authors' inference code: RMSNorm
without biases, small heads, a learned attention sink per head, activations of
which only the largest stay, and an own matrix for the output. `make_model` is
the `preset` of a config; `configs/weight_sparse.py` trains it.
"""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from spdf_jax import sparsity

LOCATIONS = (
    'attn_in', 'attn_q', 'attn_k', 'attn_v', 'attn_out', 'mlp_in',
    'mlp_neuron', 'mlp_out',
)
"""Activations of a layer, by the names of the authors' code."""

Reader = Callable[[str, jax.Array], jax.Array]
"""`(name, x) -> x`: reads activations, and may replace them, by names such as
`'h_0/attn_q'` of a location, or `'h_0/attn_y'`, the outputs of the heads."""

_EPSILON = float(jnp.finfo(jnp.float32).eps)  # That of PyTorch's RMSNorm.


def keep_largest(x: jax.Array, number: int) -> jax.Array:
  """Sets all but the largest entries of each vector to zero: AbsTopK.

  Args:
    x: Activations [..., D].
    number: Number of entries of largest magnitude to keep; more are kept if
      several have the magnitude of the last one.

  Returns:
    The activations, of the dtype of `x`. Gradients pass where entries stay.

  Example:
    >>> keep_largest(jnp.array([1., -3., 2., 0.]), 2).tolist()
    [0.0, -3.0, 2.0, 0.0]
  """
  size = jnp.abs(x.astype(jnp.float32))
  bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(size), jnp.int32)

  # The bits of positive floats are ordered as they are. This finds the largest
  # threshold that `number` entries reach, ten times faster than a sort.
  def with_bit(i, threshold):
    candidate = threshold | (1 << (30 - i))
    reached = jnp.sum(bits >= candidate, axis=-1, keepdims=True)
    return jnp.where(reached >= number, candidate, threshold)

  threshold = jax.lax.fori_loop(
      0, 31, with_bit, jnp.zeros((*x.shape[:-1], 1), jnp.int32)
  )
  return jnp.where(bits >= threshold, x, jnp.zeros_like(x))


def attend(
    q_BxLxHxK: jax.Array,
    k_BxLxHxK: jax.Array,
    v_BxLxHxK: jax.Array,
    sink_H: jax.Array | None,
) -> jax.Array:
  """Computes causal attention with a sink in the denominator of the softmax.

  Args:
    q_BxLxHxK: Queries.
    k_BxLxHxK: Keys.
    v_BxLxHxK: Values.
    sink_H: A logit per head, to which no value belongs; `None`: no sink.

  Returns:
    Outputs of the heads [B, L, H, K].
  """
  length = q_BxLxHxK.shape[1]
  scores_BxHxLxL = jnp.einsum('blhk,bmhk->bhlm', q_BxLxHxK, k_BxLxHxK)
  scores_BxHxLxL *= q_BxLxHxK.shape[-1] ** -0.5
  scores_BxHxLxL = jnp.where(
      jnp.tril(jnp.ones((length, length), bool)), scores_BxHxLxL, -jnp.inf
  )
  if sink_H is None:
    weights_BxHxLxL = jax.nn.softmax(scores_BxHxLxL)
  else:
    sinks = jnp.broadcast_to(
        sink_H[:, None, None], (*scores_BxHxLxL.shape[:-1], 1)
    )
    weights_BxHxLxL = jax.nn.softmax(
        jnp.concatenate([sinks, scores_BxHxLxL], axis=-1)
    )[..., 1:]
  return jnp.einsum('bhlm,bmhk->blhk', weights_BxHxLxL, v_BxLxHxK)


class WeightSparseGPT(nn.Module):
  """A decoder from tokens [B, L] to logits [B, L, V].

  Attributes:
    vocab_size: Number of token ids.
    d_model: Width of the residual stream.
    n_layers: Number of layers.
    d_ff: Number of neurons of a layer.
    max_length: Largest sequence length.
    head_size: Width of a head.
    n_heads: Number of heads of a layer.
    kept_activations: Fraction of the activations that stay at each of the
      `locations`; 1: all.
    locations: Names of the activations that are cut, some of `LOCATIONS`.
    activation: Function of the neurons, `'gelu'` or `'relu'`.
    biases: Whether layers have biases; norms have none.
    sink: Whether heads have an attention sink.
    positions: Whether embeddings of positions are added to those of tokens.
    bigrams: Whether logits have a dense table of the token before, so that
      sparse weights need not learn the frequencies of bigrams.
    tied: Whether the output has the matrix of the embedding.
    read: Function that sees all activations, for circuits; `None`: none does.
  """

  vocab_size: int
  d_model: int
  n_layers: int
  d_ff: int
  max_length: int
  n_heads: int
  head_size: int = 16
  kept_activations: float = 0.25
  locations: tuple[str, ...] = LOCATIONS
  activation: str = 'gelu'
  biases: bool = True
  sink: bool = True
  positions: bool = False
  bigrams: bool = True
  tied: bool = False
  read: Reader | None = None

  @nn.compact
  def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
    normal = nn.initializers.normal(0.02)
    embed = nn.Embed(
        self.vocab_size, self.d_model, embedding_init=normal, name='wte'
    )
    x_BxLxD = embed(tokens_BxL)
    if self.positions:
      wpe = nn.Embed(
          self.max_length, self.d_model, embedding_init=normal, name='wpe'
      )
      x_BxLxD += wpe(jnp.arange(tokens_BxL.shape[1]))
    for i in range(self.n_layers):
      block = f'h_{i}'
      x_BxLxD = self._see(f'{block}/resid_in', x_BxLxD)
      x_BxLxD += self._attention(block, _norm(f'{block}_ln_1')(x_BxLxD))
      x_BxLxD = self._see(f'{block}/resid_mid', x_BxLxD)
      x_BxLxD += self._mlp(block, _norm(f'{block}_ln_2')(x_BxLxD))
    x_BxLxD = _norm('ln_f')(self._see('resid_final', x_BxLxD))
    if self.tied:
      logits_BxLxV = embed.attend(x_BxLxD)
    else:
      logits_BxLxV = nn.Dense(
          self.vocab_size, use_bias=False, kernel_init=normal, name='head'
      )(x_BxLxD)
    if self.bigrams:
      shape = self.vocab_size, self.vocab_size
      table_VxV = self.param('bigrams', nn.initializers.zeros, shape)
      logits_BxLxV += table_VxV[tokens_BxL]
    return logits_BxLxV

  def _attention(self, block: str, x_BxLxD: jax.Array) -> jax.Array:
    width = self.n_heads * self.head_size
    x_BxLxD = self._cut(block, 'attn_in', x_BxLxD)
    qkv = self._dense(f'{block}_qkv', 3 * width)(x_BxLxD)
    q, k, v = (
        self._cut(block, name, part).reshape(
            *part.shape[:-1], self.n_heads, self.head_size
        ) for name, part in zip(
            ('attn_q', 'attn_k', 'attn_v'), jnp.split(qkv, 3, axis=-1)
        )
    )
    sink_H = self.param(
        f'{block}_sink', nn.initializers.zeros, (self.n_heads,)
    ) if self.sink else None
    y = attend(q, k, v, sink_H).reshape(*x_BxLxD.shape[:-1], width)
    y = self._see(f'{block}/attn_y', y)
    x_BxLxD = self._dense(f'{block}_out', self.d_model, residual=True)(y)
    return self._cut(block, 'attn_out', x_BxLxD)

  def _mlp(self, block: str, x_BxLxD: jax.Array) -> jax.Array:
    act = {'gelu': lambda x: nn.gelu(x, approximate=False), 'relu': nn.relu}
    x_BxLxD = self._cut(block, 'mlp_in', x_BxLxD)
    h_BxLxF = act[self.activation](
        self._dense(f'{block}_wi', self.d_ff)(x_BxLxD)
    )
    h_BxLxF = self._cut(block, 'mlp_neuron', h_BxLxF)
    x_BxLxD = self._dense(f'{block}_wo', self.d_model, residual=True)(h_BxLxF)
    return self._cut(block, 'mlp_out', x_BxLxD)

  def _dense(self, name: str, size: int, residual: bool = False) -> nn.Dense:
    stddev = 0.02 / (2 * self.n_layers) ** 0.5 if residual else 0.02
    return nn.Dense(
        size, use_bias=self.biases, name=name,
        kernel_init=nn.initializers.normal(stddev),
    )

  def _cut(self, block: str, location: str, x: jax.Array) -> jax.Array:
    if location in self.locations and self.kept_activations < 1:
      x = keep_largest(x, int(self.kept_activations * x.shape[-1]))
    return self._see(f'{block}/{location}', x)

  def _see(self, name: str, x: jax.Array) -> jax.Array:
    return x if self.read is None else self.read(name, x)


def _norm(name: str) -> nn.RMSNorm:
  return nn.RMSNorm(epsilon=_EPSILON, name=name)


def sparsified(path: str, leaf: Any) -> sparsity.MatrixAxes | bool:
  """Selects every matrix and bias, embeddings too, but no norm or table.

  Args:
    path: Path of a parameter.
    leaf: The parameter, or its shape.

  Returns:
    `True` for a matrix [inputs, outputs], the axes of a bias, or `False`.

  Example:
    >>> sparsified('h_0_wi/bias', jnp.zeros(4))
    MatrixAxes(reduction=(), output=0, kernel=())
  """
  name = path.rsplit('/', 1)[-1]
  if name == 'bias':
    return sparsity.MatrixAxes((), 0)
  return name in ('kernel', 'embedding')


def make_model(
    *, vocab_size: int, d_model: int, max_length: int, n_layers: int = 2,
    head_size: int = 16, n_heads: int = 0, d_ff: int = 0, **options: Any,
) -> tuple[WeightSparseGPT, Callable[[str, Any], Any]]:
  """Makes the model of a config, by `model.preset`.

  Args:
    vocab_size: Number of token ids.
    d_model: Width of the residual stream.
    max_length: Largest sequence length.
    n_layers: Number of layers.
    head_size: Width of a head.
    n_heads: Number of heads; 0: as many as fill `d_model`.
    d_ff: Number of neurons of a layer; 0: four times `d_model`.
    **options: Further fields of `WeightSparseGPT`.

  Returns:
    The module, and its selection of sparsified leaves.

  Raises:
    ValueError: heads do not fill the width, a location is unknown, or no
      activation would be kept.
  """
  if not n_heads and d_model % head_size:
    raise ValueError(
        f'head_size is {head_size}, which does not divide d_model {d_model}; '
        'choose a divisor, or give n_heads'
    )
  module = WeightSparseGPT(
      vocab_size=vocab_size, d_model=d_model, max_length=max_length,
      n_layers=n_layers, head_size=head_size,
      n_heads=n_heads or d_model // head_size, d_ff=d_ff or 4 * d_model,
      **{k: tuple(v) if k == 'locations' else v for k, v in options.items()},
  )
  unknown = set(module.locations) - set(LOCATIONS)
  if unknown:
    raise ValueError(
        f'locations has {", ".join(sorted(unknown))}; use some of '
        f'{", ".join(LOCATIONS)}'
    )
  least = min(d_model, module.n_heads * head_size, module.d_ff)
  if int(module.kept_activations * least) < 1:
    raise ValueError(
        f'kept_activations is {module.kept_activations}, which keeps none of '
        f'{least} activations; raise it'
    )
  return module, sparsified

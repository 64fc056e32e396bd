# SPDX-License-Identifier: Apache-2.0
"""The common parts of all decoders: sizes, layers, and axes of parameters."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import lowerings
from spdf_jax.accelerator import bf16_matmul
from spdf_jax.models import model
from spdf_jax.models.layers import MaskedDense
from spdf_jax.sparsity import MatrixAxes

HIDDEN_KERNELS = frozenset({
    'attn/wq/kernel', 'attn/wk/kernel', 'attn/wv/kernel', 'attn/wd/kernel',
    'mlp/wi/kernel', 'mlp/wo/kernel',
    'mlp/wg/kernel',  # The gate; a GPT has none.
})
"""The sparsifiable matrices of a layer (SPDF, section 3.1), [inputs, outputs];
scanned models have a layer axis in front."""

# As in Megatron-LM, layers that read the residual stream are split over their
# outputs and layers that write to it over their inputs, so that a pair of them
# needs one all-reduce; the other axis is split for storage only.
_READERS = ('attn/wq', 'attn/wk', 'attn/wv', 'mlp/wi', 'mlp/wg')
_WRITERS = ('attn/wd', 'mlp/wo')

PARAMETER_AXES = {
    **{f'{layer}/kernel': ('fsdp', 'tensor') for layer in _READERS},
    **{f'{layer}/bias': ('tensor',) for layer in _READERS},
    **{f'{layer}/kernel': ('tensor', 'fsdp') for layer in _WRITERS},
    'wte/embedding': ('tensor', 'fsdp'),
    'wpe/embedding': (None, 'fsdp'),
    'head/kernel': ('fsdp', 'tensor'),
}
"""Mesh axes of the last axes of parameters, by the end of their path; all other
parameters (norms, biases of the residual stream) are replicated."""

Head = Callable[[jax.Array], jax.Array]
"""A function `x [..., D] -> logits [..., V]`, float32."""

ReadOut = Callable[[Head, jax.Array], Any]
"""A function `(head, x [B, L, D])` that computes the result of a model from the
output of its last layer."""

_LARGEST_SIZE = 2**24  # Products of sizes are counted in 64 bits.
_MOST_LAYERS = 10_000

DTYPES = ('float32', 'bfloat16', 'float16')
"""Dtypes in which a model can compute."""

REMAT_POLICIES = {
    'none': None,
    'dots': jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        bf16_matmul.no_batch_dims_saveable,
    ),
    'full': jax.checkpoint_policies.nothing_saveable,
}
"""Checkpoint policies of the layers, by name; `none` saves all residuals."""

ATTENTIONS = ('auto', 'blocks', 'xla', 'cudnn')
"""Implementations of attention by name."""


def read_all(head: Head, x_BxLxD: jax.Array) -> jax.Array:
  """Returns the logits of all tokens."""
  return head(x_BxLxD)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Sizes of a decoder, and the multipliers of muP.

  Attributes:
    vocab_size: Number of token ids.
    n_layers: Number of decoder layers.
    n_heads: Number of attention heads per layer; a divisor of d_model, unless
      heads have a size of their own.
    d_model: Width of the residual stream.
    d_ff: Width of the feed-forward layer.
    max_length: Number of positions, the largest sequence length.
    scan_layers: Whether to compile one layer and scan over stacked parameters.
    remat: Rematerialization in the backward pass: `none`; `dots`, of all but
      the products with weights; or `full`, of whole layers.
    attention: Implementation of attention: `blocks`, which is
      `causal_attention`; `xla`; `cudnn`, which needs a GPU and 16-bit dtypes;
      or `auto`, the fastest on the platform, see `attention.attend`.
    dtype: Dtype of the computation.
    lowering: Lowering of sparse products, see `accelerator.sparse_matmul`.
    dropout: Dropout rate in training, see `drop`, of the embeddings and of the
      outputs of attention and feed-forward layers; attention probabilities are
      not dropped.
    embeddings_scale: Factor of the embeddings, with learned positions (muP).
    logits_scale: Factor of the logits (muP).
    attention_by_size: Whether scores are divided by the head size, not by its
      square root (muP).

  Raises:
    ValueError: a size is not positive or is too large, the heads do not divide
      the width, a name is unknown, or the dropout rate is not in [0, 1).
  """

  vocab_size: int
  n_layers: int
  n_heads: int
  d_model: int
  d_ff: int
  max_length: int
  scan_layers: bool = False
  remat: str = 'none'
  attention: str = 'auto'
  dtype: str = 'float32'
  lowering: str = 'reference'
  dropout: float = 0.0
  embeddings_scale: float = 1.0
  logits_scale: float = 1.0
  attention_by_size: bool = False

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is int and value < 1:
        raise ValueError(f'{field.name} is {value}; it must be positive.')
      most = _MOST_LAYERS if field.name == 'n_layers' else _LARGEST_SIZE
      if field.type is int and value > most:
        raise ValueError(f'{field.name} is {value}; give at most {most:,}.')
    for name, known in (
        ('dtype', DTYPES), ('remat', REMAT_POLICIES), ('attention', ATTENTIONS),
    ):
      value = getattr(self, name)
      if value not in known:
        raise ValueError(f'{name} is {value!r}; use one of {", ".join(known)}.')
    if self.own_head_size is None and self.d_model % self.n_heads:
      raise ValueError(
          f'n_heads is {self.n_heads}, which does not divide d_model '
          f'{self.d_model}; choose a divisor.'
      )
    lowerings.check_lowering(self.lowering)
    if not 0 <= self.dropout < 1:
      raise ValueError(
          f'dropout is {self.dropout}; give a number in [0, 1), 0 for none.'
      )

  @property
  def kv_heads(self) -> int:
    """Number of heads of keys and values, here that of the queries."""
    return self.n_heads

  @property
  def own_head_size(self) -> int | None:
    """Width of a head if set explicitly; otherwise `None`."""
    return None

  @property
  def head_size(self) -> int:
    """Width of a head."""
    return self.own_head_size or self.d_model // self.n_heads

  @property
  def gated(self) -> bool:
    """Whether the feed-forward layer has a third matrix, the gate."""
    return False

  @property
  def attention_width(self) -> int:
    """Total width of all heads."""
    return self.n_heads * self.head_size

  @property
  def keys_width(self) -> int:
    """Total width of keys, and of values."""
    return self.kv_heads * self.head_size

  @property
  def hidden_weights(self) -> int:
    """Number of weights in the hidden matrices of a block."""
    attention = 2 * self.d_model * (self.attention_width + self.keys_width)
    return attention + (2 + self.gated) * self.d_model * self.d_ff

  @property
  def features(self) -> frozenset[str]:
    """Optional features, here all, see `models.Sizes`."""
    return frozenset({model.READ_OUT, model.CACHE, model.PACKED})

  def as_dict(self) -> dict[str, Any]:
    """Returns the fields that create the config again."""
    return dataclasses.asdict(self)

  def describe(self) -> dict[str, Any]:
    """Returns the sizes that `plan.json` records."""
    return {name: getattr(self, name) for name in _RECORDED}


_RECORDED = (
    'n_layers', 'd_model', 'n_heads', 'd_ff', 'vocab_size', 'kv_heads',
    'head_size', 'gated', 'dtype',
)


def dense(
    config: DecoderConfig,
    features: int,
    *,
    name: str,
    use_bias: bool,
    residual: bool = False,
) -> MaskedDense:
  """Returns a masked layer with the initialization of GPT-2.

  Args:
    config: Config of the decoder.
    features: Size of the output.
    name: Name of the layer.
    use_bias: Whether the layer has a bias.
    residual: Whether the layer writes to the residual stream, in which case its
      initial weights are divided by sqrt(2 n_layers).

  Returns:
    The layer.
  """
  stddev = 0.02 / (2 * config.n_layers) ** 0.5 if residual else 0.02
  return MaskedDense(
      features,
      use_bias=use_bias,
      kernel_init=nn.initializers.normal(stddev),
      dtype=config.dtype,
      lowering=config.lowering,
      name=name,
  )


def tied_logits(embedding: nn.Embed, x: jax.Array) -> jax.Array:
  """Returns the logits of a head that shares the weights of an embedding.

  Args:
    embedding: The embedding of the tokens.
    x: Outputs of the last layer, [..., D], of the dtype of the computation.

  Returns:
    Logits [..., V], float32.
  """
  if not bf16_matmul.is_faster(x.dtype):
    return embedding.attend(x).astype(jnp.float32)
  with jax.named_scope(f'{embedding.name}.attend'):
    w_VxD = embedding.embedding.astype(x.dtype)
    tokens = 'abcdefgh'[: x.ndim - 1]
    return bf16_matmul.einsum(
        f'{tokens}k,nk->{tokens}n', x, w_VxD, jnp.float32
    )


def drop(module: Any, x_BxLxD: jax.Array) -> jax.Array:
  """Applies dropout at the rate of a module's config.

  Dropout is applied only if `apply` is given a key, `rngs={'dropout': key}`, as
  in training. Each call in a model uses a key of its own; layers in a loop and
  scanned layers use different ones.

  Args:
    module: The module that calls this function in its compact method.
    x_BxLxD: Embeddings, or the output of a layer before it is added to the
      residual stream.

  Returns:
    The array, of which each element is zero with the probability `rate` and
    divided by 1 - rate otherwise; the argument itself at the rate 0 or without
    a key.

  References:
    Srivastava et al., `Dropout
    <https://jmlr.org/papers/v15/srivastava14a.html>`_, 2014
  """
  deterministic = not module.has_rng('dropout')
  return nn.Dropout(module.config.dropout)(x_BxLxD, deterministic)


def apply_layers(
    block: type[nn.Module],
    config: DecoderConfig,
    x_BxLxD: jax.Array,
    positions_BxL: jax.Array | None,
    *per_layer: np.ndarray,
) -> jax.Array:
  """Applies all layers, in a loop or by `nn.scan`.

  Args:
    block: Class of the layers, `(x, positions, *per_layer) -> (x, None)`.
    config: Config of the decoder.
    x_BxLxD: Input of the first layer.
    positions_BxL: Positions given to the decoder, or `None`.
    *per_layer: Arrays with one entry for each layer.

  Returns:
    The output of the last layer.
  """
  if config.remat != 'none':
    block = nn.remat(
        block,
        policy=REMAT_POLICIES[config.remat],
        prevent_cse=not config.scan_layers,
    )
  if config.scan_layers:
    layers = nn.scan(
        block,
        variable_axes={'params': 0, 'masks': 0, 'grad_masks': 0, 'cache': 0},
        split_rngs={'params': True, 'dropout': True},
        in_axes=(nn.broadcast, *(0 for _ in per_layer)),
        length=config.n_layers,
    )
    return layers(config, name='h')(x_BxLxD, positions_BxL, *per_layer)[0]
  for i in range(config.n_layers):
    x_BxLxD, _ = block(config, name=f'h_{i}')(
        x_BxLxD, positions_BxL, *(x[i] for x in per_layer)
    )
  return x_BxLxD


def with_lowering(module: Any, lowering: str) -> Any:
  """Returns a decoder with another lowering of its sparse products."""
  return module.clone(
      config=dataclasses.replace(module.config, lowering=lowering)
  )


def check_length(config: DecoderConfig, tokens_BxL: jax.Array) -> None:
  """Raises ValueError if a sequence is longer than the model's positions."""
  length = tokens_BxL.shape[1]
  if length > config.max_length:
    raise ValueError(
        f'the sequence has {length} tokens and the model {config.max_length} '
        'positions; shorten the sequence or raise max_length.'
    )


def sparsifiable(path: str, leaf: Any) -> MatrixAxes | bool:
  """Selects the hidden matrices of a decoder, for `where` of `sparsify`.

  These are the kernels of the attention projections and feed-forward layers.
  Embeddings, positions, norms, biases and the head are never selected.

  Args:
    path: Path of the leaf in the parameters, joined by `'/'`.
    leaf: The parameter, or its shape; not used.

  Returns:
    The axes of inputs and outputs of a hidden matrix; `False` for other leaves.

  Example:
    >>> kernel = jax.ShapeDtypeStruct((12, 64, 256), jnp.float32)
    >>> sparsifiable('h/mlp/wi/kernel', kernel)
    MatrixAxes(reduction=-2, output=-1, kernel=())
  """
  del leaf
  hidden = '/'.join(path.split('/')[-3:]) in HIDDEN_KERNELS
  return hidden and MatrixAxes(-2, -1)


def partition_spec(
    path: str, shape: Sequence[int], mesh: Mapping[str, int]
) -> jax.P:
  """Returns the partition spec of a parameter of a `GPT` or `Llama`.

  Matrices are split over `'tensor'` as in Megatron-LM, and their other axis
  over `'fsdp'`, as in ZeRO.

  Args:
    path: Path of the parameter, joined by `'/'`.
    shape: Shape of the parameter; leading axes (scanned layers) are not split.
    mesh: Sizes of the axes of the mesh by name, among them `'fsdp'` and
      `'tensor'`, e.g. `mesh.shape` of a `jax.sharding.Mesh`.

  Returns:
    A spec for `NamedSharding`. An axis is split only if the size of the mesh
    axis divides its own; parameters of other paths are replicated.

  References:
    Shoeybi et al., `Megatron-LM <https://arxiv.org/abs/1909.08053>`_, 2019,
    section 3
    Rajbhandari et al., `ZeRO <https://arxiv.org/abs/1910.02054>`_, 2020

  Example:
    >>> mesh = dict(fsdp=4, tensor=4)
    >>> tuple(partition_spec('h/mlp/wi/kernel', (12, 64, 250), mesh))
    (None, 'fsdp', None)
  """
  parts = path.split('/')
  ends = ('/'.join(parts[-3:]), '/'.join(parts[-2:]))
  axes = next((PARAMETER_AXES[e] for e in ends if e in PARAMETER_AXES), ())
  if not axes:
    return jax.P()
  sizes = shape[len(shape) - len(axes):]
  fitting = [
      axis if axis is not None and size % mesh[axis] == 0 else None
      for axis, size in zip(axes, sizes)
  ]
  return jax.P(*[None] * (len(shape) - len(axes)), *fitting)

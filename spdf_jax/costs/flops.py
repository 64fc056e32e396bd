"""FLOPs: what sparse training costs, by the formula of the papers."""

from collections.abc import Sequence
from typing import NamedTuple

from spdf_jax.models import DecoderConfig


class ModelShape(NamedTuple):
  """The sizes of a decoder that its FLOPs depend on.

  Attributes:
    n_layers: Number of blocks.
    d_model: Width of the residual stream.
    n_heads: Attention heads in each block.
    d_ff: Hidden width of the feed-forward network.
    vocab_size: Number of token ids, the head's outputs.
    kv_heads: Heads of keys and values; `None`: as many as attention heads.
    head_size: Width of a head; `None`: d_model / n_heads.
    gated: Whether the feed-forward network has a third matrix, its gate.
  """

  n_layers: int
  d_model: int
  n_heads: int
  d_ff: int
  vocab_size: int
  kv_heads: int | None = None
  head_size: int | None = None
  gated: bool = False

  @property
  def attention_width(self) -> int:
    """Width of all heads together."""
    if self.head_size is None:
      return self.d_model
    return self.n_heads * self.head_size

  @property
  def hidden_weights(self) -> int:
    """Weights in the hidden matrices of a block."""
    heads = self.n_heads if self.kv_heads is None else self.kv_heads
    keys = self.attention_width * heads // self.n_heads
    attention = 2 * self.d_model * (self.attention_width + keys)
    return attention + (2 + self.gated) * self.d_model * self.d_ff


def shape_of(config: DecoderConfig) -> ModelShape:
  """Returns the sizes of a model.

  Example:
    >>> from spdf_jax.models import PRESETS
    >>> shape_of(PRESETS['llama2-7b']).hidden_weights
    202375168
  """
  return ModelShape(**{
      name: getattr(config, name) for name in ModelShape._fields
  })


def forward_flops(
    shape: ModelShape, length: int, sparsity: float = 0.0
) -> float:
  """Counts the FLOPs of one sequence's forward pass.

  Hoffmann et al.'s count without the embedding's input side. In each layer,
  with s = length, d = d_model and h = n_heads, the hidden matrices of a GPT
  take `(1 - sparsity) * (8 s d^2 + 4 s d d_ff)` and attention, softmax counted
  and causality not, `4 s^2 d + 3 h s^2`; the head takes `2 s d vocab_size`.
  Attention's own products and the head are always dense.

  Args:
    shape: The model's sizes.
    length: Tokens in the sequence.
    sparsity: Fraction of zeros in the hidden matrices.

  Returns:
    FLOPs for one sequence; a multiplication and an addition are two.

  Raises:
    ValueError: `sparsity` is outside [0, 1] or `length` is below 1.

  Source: Hoffmann et al. 2022, "Training Compute-Optimal Large Language
  Models", appendix F; Thangarasa et al. 2023, "SPDF", appendix A.4.

  Example:
    >>> small = ModelShape(12, 768, 12, 3072, 50257)
    >>> f'{forward_flops(small, 512):.3e}'
    '1.363e+11'
  """
  if not 0 <= sparsity <= 1:
    raise ValueError(
        f'sparsity is {sparsity}; it is the fraction of zeros in the hidden '
        'matrices, from 0 (dense) to 1.'
    )
  if length < 1:
    raise ValueError(f'length is {length}; give at least one token.')
  hidden = 2 * length * shape.hidden_weights * (1 - sparsity)
  attention = 4 * length**2 * shape.attention_width
  head = 2 * length * shape.d_model * shape.vocab_size
  products = shape.n_layers * (hidden + attention) + head
  return products + softmax_flops(shape, length)


def softmax_flops(shape: ModelShape, length: int) -> int:
  """Counts the softmax of attention in one sequence's forward pass.

  Three operations for each of the `n_heads * length**2` scores of a layer.

  Args:
    shape: The model's sizes.
    length: Tokens in the sequence.

  Returns:
    FLOPs for one sequence.

  Source: Hoffmann et al. 2022, "Training Compute-Optimal Large Language
  Models", appendix F.

  Example:
    >>> softmax_flops(ModelShape(12, 768, 12, 3072, 50257), 512)
    113246208
  """
  return 3 * shape.n_layers * shape.n_heads * length**2


def training_flops(
    shape: ModelShape,
    length: int,
    sparsity: float = 0.0,
    *,
    dense_grads: bool = False,
) -> float:
  """Counts the FLOPs of training on one sequence, forward and backward.

  Three times the forward pass: the backward pass computes two products,
  for inputs and for weights, and a pruned weight needs neither. A step that
  grows connections by their gradients needs those of all weights.

  Args:
    shape: The model's sizes.
    length: Tokens in the sequence.
    sparsity: Fraction of zeros in the hidden matrices.
    dense_grads: Whether pruned weights need their gradients: the product for
      weights is then dense.

  Returns:
    FLOPs for one sequence.

  Raises:
    ValueError: As `forward_flops`.

  Source: Thangarasa et al. 2023, "SPDF", appendix table 2; for dense
  gradients Evci et al. 2020, "Rigging the Lottery", appendix H.

  Example:
    >>> xl = ModelShape(24, 2048, 16, 8192, 50257)
    >>> f'{training_flops(xl, 2048, sparsity=0.75):.3e}'
    '7.464e+12'
  """
  sparse = forward_flops(shape, length, sparsity)
  weights = forward_flops(shape, length) if dense_grads else sparse
  return 2 * sparse + weights


def effective_sparsity(
    steps: Sequence[int], sparsities: Sequence[float], reference_steps: int
) -> float:
  """Returns the one sparsity that spends as much as a list of phases.

  `1 - sum(steps_i * (1 - sparsity_i)) / reference_steps`: the share of a dense
  run's hidden-matrix work that the phases save. Negative where they take
  more than the reference.

  Args:
    steps: Steps of each phase.
    sparsities: Sparsity of each phase.
    reference_steps: Steps of the dense run compared with.

  Returns:
    The effective sparsity.

  Raises:
    ValueError: The lists differ in length, or `reference_steps` is below 1.

  Source: Cerebras 2023, "Variable Sparse Pre-training and Dense Fine-tuning".

  Example:
    >>> round(effective_sparsity([62_523, 9_379], [0.9, 0.0], 62_523), 4)
    0.75
  """
  if len(steps) != len(sparsities):
    raise ValueError(
        f'steps has {len(steps)} entries and sparsities has '
        f'{len(sparsities)}; give both for each phase.'
    )
  if reference_steps < 1:
    raise ValueError(
        f'reference_steps is {reference_steps}; give the steps of the dense '
        'run, at least 1.'
    )
  spent = sum(n * (1 - level) for n, level in zip(steps, sparsities))
  return 1 - spent / reference_steps

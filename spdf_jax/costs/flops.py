# SPDX-License-Identifier: Apache-2.0
"""FLOPs of sparse training, by the formula of the papers."""

from collections.abc import Sequence
from typing import NamedTuple

from spdf_jax.models import DecoderConfig


class ModelShape(NamedTuple):
  """The sizes of a decoder that its FLOPs depend on.

  Attributes:
    n_layers: Number of blocks.
    d_model: Width of the residual stream.
    n_heads: Number of attention heads in each block.
    d_ff: Hidden width of the feed-forward network.
    vocab_size: Number of token ids, the outputs of the head.
    kv_heads: Number of heads of keys and values; `None`: `n_heads`.
    head_size: Width of a head; `None`: d_model / n_heads.
    gated: Whether the feed-forward network has a third matrix, the gate.
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
    """Total width of all heads."""
    if self.head_size is None:
      return self.d_model
    return self.n_heads * self.head_size

  @property
  def keys_width(self) -> int:
    """Total width of keys, and of values."""
    heads = self.n_heads if self.kv_heads is None else self.kv_heads
    return self.attention_width * heads // self.n_heads

  @property
  def hidden_weights(self) -> int:
    """Number of weights in the hidden matrices of a block."""
    attention = 2 * self.d_model * (self.attention_width + self.keys_width)
    return attention + (2 + self.gated) * self.d_model * self.d_ff


class OwnShape(NamedTuple):
  """The sizes of a user's own model, whose FLOPs are those of its products.

  Attributes:
    hidden_weights: Number of weights in the sparsified matrices.
    d_model: Width of the model.
    vocab_size: Number of token ids, the outputs of the head.
  """

  hidden_weights: int
  d_model: int
  vocab_size: int

  @property
  def n_layers(self) -> int:
    """Number of blocks: the matrices are those of all of them."""
    return 1

  @property
  def n_heads(self) -> int:
    """Number of attention heads, which are not known."""
    return 0

  @property
  def attention_width(self) -> int:
    """Total width of the heads, whose products are not counted."""
    return 0


def shape_of(config: DecoderConfig) -> ModelShape:
  """Returns the sizes of a model.

  Raises:
    ValueError: the model is a user's own.

  Example:
    >>> from spdf_jax.models import PRESETS
    >>> shape_of(PRESETS['llama2-7b']).hidden_weights
    202375168
  """
  if not isinstance(config, DecoderConfig):
    raise ValueError(
        'the model is your own, whose layers this command does not know; set '
        'model.preset to one of spdf_jax.models.PRESETS.'
    )
  return ModelShape(**{
      name: getattr(config, name) for name in ModelShape._fields
  })


def forward_flops(
    shape: ModelShape | OwnShape, length: int, sparsity: float = 0.0
) -> float:
  """Returns the FLOPs of one sequence's forward pass.

  The count of Hoffmann et al. without the embedding of inputs. In each layer,
  with s = length, d = d_model and h = n_heads, the hidden matrices of a GPT
  take `(1 - sparsity) * (8 s d^2 + 4 s d d_ff)`, and attention takes
  `4 s^2 d + 3 h s^2`, including softmax and ignoring causality; the head takes
  `2 s d vocab_size`. The head and the products of activations in attention are
  always dense.

  Args:
    shape: Sizes of the model.
    length: Number of tokens in the sequence.
    sparsity: Fraction of zeros in the hidden matrices.

  Returns:
    FLOPs for one sequence; a multiply-add counts as two.

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


def softmax_flops(shape: ModelShape | OwnShape, length: int) -> int:
  """Returns the FLOPs of attention's softmax in one sequence's forward pass.

  Each of the `n_heads * length**2` scores of a layer takes three operations.

  Args:
    shape: Sizes of the model.
    length: Number of tokens in the sequence.

  Returns:
    FLOPs for one sequence.

  Source: Hoffmann et al. 2022, "Training Compute-Optimal Large Language
  Models", appendix F.

  Example:
    >>> softmax_flops(ModelShape(12, 768, 12, 3072, 50257), 512)
    113246208
  """
  return 3 * shape.n_layers * shape.n_heads * length**2


def embedding_flops(shape: ModelShape | OwnShape, length: int) -> int:
  """Returns the FLOPs of the input embedding, counted as a product.

  `2 s d vocab_size`, the product of one-hot tokens and the embedding. An
  embedding is looked up, which takes none, and no other count includes it. A
  train step counts it three times, as all products.

  Args:
    shape: Sizes of the model.
    length: Number of tokens in the sequence.

  Returns:
    FLOPs for one sequence and one pass.

  Source: Hoffmann et al. 2022, "Training Compute-Optimal Large Language
  Models", appendix F.

  Example:
    >>> f'{embedding_flops(ModelShape(12, 768, 12, 3072, 50257), 512):.3e}'
    '3.952e+10'
  """
  return 2 * length * shape.d_model * shape.vocab_size


def training_flops(
    shape: ModelShape | OwnShape,
    length: int,
    sparsity: float = 0.0,
    *,
    dense_grads: bool = False,
) -> float:
  """Returns the FLOPs of training on one sequence, forward and backward.

  Training takes three times the forward pass: the backward pass computes two
  products, the gradients of inputs and of weights, both without pruned weights.
  A step that grows weights by their gradients computes those of all weights.

  Args:
    shape: Sizes of the model.
    length: Number of tokens in the sequence.
    sparsity: Fraction of zeros in the hidden matrices.
    dense_grads: Whether gradients of pruned weights are computed, which makes
      the product for gradients of weights dense.

  Returns:
    FLOPs for one sequence.

  Raises:
    ValueError: `sparsity` is outside [0, 1] or `length` is below 1.

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
  """Returns the constant sparsity with the same cost as a list of phases.

  `1 - sum(steps_i * (1 - sparsity_i)) / reference_steps`: the fraction of a
  dense run's FLOPs in hidden matrices that the phases save. It is negative if
  the phases cost more than the dense run.

  Args:
    steps: Number of steps of each phase.
    sparsities: Sparsity of each phase.
    reference_steps: Number of steps of the dense run.

  Returns:
    The effective sparsity.

  Raises:
    ValueError: The lengths of the lists differ, or `reference_steps` is below
      1.

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
  spent = sum(n * (1 - sparsity) for n, sparsity in zip(steps, sparsities))
  return 1 - spent / reference_steps

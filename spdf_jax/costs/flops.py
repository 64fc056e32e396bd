# SPDX-License-Identifier: Apache-2.0
"""FLOPs of sparse training, by the formula of the papers."""

from collections.abc import Sequence

from spdf_jax.models import Sizes


def forward_flops(
    config: Sizes, length: int, sparsity: float = 0.0
) -> float:
  """Returns the FLOPs of one sequence's forward pass.

  The count is that of Hoffmann et al. without the input embedding, which is a
  lookup. With s = length, d = d_model and h = n_heads, the hidden matrices of a
  GPT layer (the weights of attention and MLP) take
  `(1 - sparsity) * (8 s d^2 + 4 s d d_ff)`. The scores of attention take
  `4 s^2 d + 3 h s^2` in each layer, including softmax and ignoring causality,
  and the head takes `2 s d vocab_size` once; both are always dense.

  Args:
    config: Config of the model, e.g. `GPTConfig` or an entry of `PRESETS`.
    length: Number of tokens in the sequence.
    sparsity: Fraction of zeros in the hidden matrices.

  Returns:
    FLOPs for one sequence; a multiply-add counts as two.

  Raises:
    ValueError: `sparsity` is outside [0, 1] or `length` is below 1.

  References:
    Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models",
    appendix F; Thangarasa et al. 2023, "SPDF", appendix A.4.

  Example:
    >>> from spdf_jax.models import PRESETS
    >>> small = PRESETS['gpt2-small']
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
  hidden = 2 * length * config.hidden_weights * (1 - sparsity)
  attention = 4 * length**2 * config.attention_width
  head = 2 * length * config.d_model * config.vocab_size
  products = config.n_layers * (hidden + attention) + head
  return products + softmax_flops(config, length)


def softmax_flops(config: Sizes, length: int) -> int:
  """Returns the FLOPs of attention's softmax in one sequence's forward pass.

  Each of the `n_heads * length**2` scores of a layer takes three operations.

  Args:
    config: Config of the model.
    length: Number of tokens in the sequence.

  Returns:
    FLOPs for one sequence.

  References:
    Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models",
    appendix F.

  Example:
    >>> from spdf_jax.models import PRESETS
    >>> softmax_flops(PRESETS['gpt2-small'], 512)
    113246208
  """
  return 3 * config.n_layers * config.n_heads * length**2


def embedding_flops(config: Sizes, length: int) -> int:
  """Returns the FLOPs of the input embedding, counted as a product.

  It is `2 s d vocab_size`, the product of one-hot tokens and the embedding. A
  lookup takes no FLOPs, so no other count includes it. A train step counts it
  three times, as it does all products.

  Args:
    config: Config of the model.
    length: Number of tokens in the sequence.

  Returns:
    FLOPs for one sequence and one pass.

  References:
    Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models",
    appendix F.

  Example:
    >>> from spdf_jax.models import PRESETS
    >>> f"{embedding_flops(PRESETS['gpt2-small'], 512):.3e}"
    '3.952e+10'
  """
  return 2 * length * config.d_model * config.vocab_size


def training_flops(
    config: Sizes,
    length: int,
    sparsity: float = 0.0,
    *,
    dense_grads: bool = False,
) -> float:
  """Returns the FLOPs of training on one sequence, forward and backward.

  Training takes three times the FLOPs of the forward pass: for each product of
  it, the backward pass computes two, for the gradients of the inputs and of the
  weights. Both skip pruned weights. Steps that choose the weights to grow by
  their gradients, as in RigL, compute the gradients of all weights.

  Args:
    config: Config of the model, as in `forward_flops`.
    length: Number of tokens in the sequence.
    sparsity: Fraction of zeros in the hidden matrices.
    dense_grads: Whether the gradients of pruned weights are computed too, so
      that the product for the gradients of weights is dense.

  Returns:
    FLOPs for one sequence.

  Raises:
    ValueError: `sparsity` is outside [0, 1] or `length` is below 1.

  References:
    Thangarasa et al. 2023, "SPDF", appendix table 2; for dense gradients
    Evci et al. 2020, "Rigging the Lottery", appendix H.

  Example:
    >>> from spdf_jax.models import PRESETS
    >>> xl = PRESETS['gpt3-xl']
    >>> f'{training_flops(xl, 2048, sparsity=0.75):.3e}'
    '7.464e+12'
  """
  sparse = forward_flops(config, length, sparsity)
  weights = forward_flops(config, length) if dense_grads else sparse
  return 2 * sparse + weights


def effective_sparsity(
    steps: Sequence[int], sparsities: Sequence[float], reference_steps: int
) -> float:
  """Returns the constant sparsity with the same cost as a list of phases.

  `1 - sum(steps_i * (1 - sparsity_i)) / reference_steps`: the fraction that the
  phases save of the FLOPs that a dense run spends in the sparsified matrices.
  It is negative if the phases cost more than the dense run. Variable SPDF
  pre-trains sparsely, then densely; its dense run has the steps of both phases
  if they share one learning-rate schedule, and those of the sparse phase alone
  if the dense phase has a schedule of its own.

  Args:
    steps: Number of steps of each phase, or of tokens if the batches differ.
    sparsities: Sparsity of each phase, in [0, 1].
    reference_steps: Number of steps, or of tokens, of the dense run.

  Returns:
    The effective sparsity.

  Raises:
    ValueError: the lengths of the lists differ, or `reference_steps` is below
      1.

  References:
    Cerebras 2023, "Variable Sparse Pre-training and Dense Fine-tuning".

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

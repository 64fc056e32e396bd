# SPDX-License-Identifier: Apache-2.0
"""FLOPs of sparse training, by the formula of the papers."""

from collections.abc import Sequence

from spdf_jax.models import Sizes


def forward_flops(
    config: Sizes, length: int, sparsity: float = 0.0
) -> float:
  """Returns the FLOPs of one sequence's forward pass.

  The count of Hoffmann et al. without the embedding of inputs. In each layer,
  with s = length, d = d_model and h = n_heads, the hidden matrices of a GPT
  take `(1 - sparsity) * (8 s d^2 + 4 s d d_ff)`, and attention takes
  `4 s^2 d + 3 h s^2`, including softmax and ignoring causality; the head takes
  `2 s d vocab_size`. The head and the products of activations in attention are
  always dense.

  Args:
    config: Config of the model.
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

  `2 s d vocab_size`, the product of one-hot tokens and the embedding. An
  embedding is looked up, which takes none, and no other count includes it. A
  train step counts it three times, as all products.

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

  Training takes three times the forward pass: the backward pass computes two
  products, the gradients of inputs and of weights, both without pruned weights.
  A step that grows weights by their gradients computes those of all weights.

  Args:
    config: Config of the model.
    length: Number of tokens in the sequence.
    sparsity: Fraction of zeros in the hidden matrices.
    dense_grads: Whether gradients of pruned weights are computed, which makes
      the product for gradients of weights dense.

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

  `1 - sum(steps_i * (1 - sparsity_i)) / reference_steps`: the fraction of a
  dense run's FLOPs in hidden matrices that the phases save. It is negative if
  the phases cost more than the dense run. The dense run of Variable SPDF has
  the steps of both phases where they share one learning-rate schedule, and
  those of the sparse phase where the dense phase has a schedule of its own.

  Args:
    steps: Number of steps of each phase.
    sparsities: Sparsity of each phase.
    reference_steps: Number of steps of the dense run.

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

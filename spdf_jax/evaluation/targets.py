# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a task's targets, e.g. of summaries."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from spdf_jax.data import encode_pairs
from spdf_jax.data import evaluation_batches
from spdf_jax.data import Pair
from spdf_jax.data import Tokenizer
from spdf_jax.evaluation.perplexity import ApplyFn
from spdf_jax.evaluation.perplexity import evaluate_loss


def target_perplexity(
    apply_fn: ApplyFn,
    params: Any,
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    *,
    length: int,
    batch_size: int,
) -> Mapping[str, Any]:
  """Computes the perplexity of targets, including their end tokens.

  SPDF reports this number on Curation Corpus. Tokens of the contexts have no
  weight; contexts are truncated on the right so that the target fits
  (`encode_pairs`).

  Args:
    apply_fn: `(params, tokens_BxL) -> logits_BxLxV`.
    params: Parameters of the model.
    pairs: Contexts and targets, e.g. the `test` split of a task.
    tokenizer: Tokenizer of the model.
    length: Maximum sequence length of the model, in tokens.
    batch_size: Number of pairs in a batch.

  Returns:
    `protocol`, `perplexity`, `loss` (nats per token) and `tokens`.

  Raises:
    ValueError: There are no pairs, or a size is not positive.

  Source: Thangarasa et al. 2023, "SPDF", section 3.

  Example:
    >>> import jax.numpy as jnp
    >>> from spdf_jax.data import ByteTokenizer
    >>> uniform = lambda params, tokens: jnp.zeros(tokens.shape + (257,))
    >>> scores = target_perplexity(
    ...     uniform, None, [Pair('An article', 'It')], ByteTokenizer(),
    ...     length=16, batch_size=2)
    >>> round(scores['perplexity'], 2), scores['tokens']  # ' It' and its end
    (257.0, 4)
  """
  examples = encode_pairs(pairs, tokenizer, length + 1)
  batches = evaluation_batches(
      examples, batch_size=batch_size, length=length, max_batches=len(pairs)
  )
  loss = evaluate_loss(apply_fn, params, batches)
  return {
      'protocol': 'target_tokens',
      'perplexity': loss.perplexity,
      'loss': loss.loss,
      'tokens': int(loss.tokens),
  }

"""Perplexity of a task's targets: what a summary's tokens cost."""

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
  """Measures perplexity over the tokens of targets, their end included.

  What SPDF reports on Curation Corpus. Contexts count for nothing, and are
  cut on the right so that the target fits (`encode_pairs`).

  Args:
    apply_fn: `(params, tokens_BxL) -> logits_BxLxV`.
    params: The model's parameters.
    pairs: Contexts and targets, e.g. a task's `test`.
    tokenizer: The model's.
    length: Most tokens that the model sees at once.
    batch_size: Pairs computed together.

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

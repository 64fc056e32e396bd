"""One-shot pruning of imported models, for `experiments.convert --prune`."""

from collections.abc import Callable, Mapping
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import interop
from spdf_jax import models
from spdf_jax import names
from spdf_jax.data.tasks import files as task_files
from spdf_jax.sparsity import one_shot

_MOST_TOKENS = 2048  # Of a sequence, as in the papers.
_MOST_EVALUATED = 32  # Sequences.

Sparsity = one_shot.Sparsity | Mapping[str, float]
"""A fraction of zeros, N:M, or fractions by patterns of paths."""

Prune = Callable[[interop.HFModel], tuple[interop.HFModel, str]]
"""A function that prunes a model and describes the result in a sentence."""


def parse(prune: str) -> tuple[one_shot.Pruner, Sparsity]:
  """Parses a method and a sparsity.

  Args:
    prune: `'METHOD:SPARSITY'`, with a method of `one_shot.PRUNERS`, and a
      fraction, N:M, or fractions by patterns of paths, `PATTERN=0.5,…`; of
      these the first that matches a matrix holds, and others stay dense.

  Returns:
    The pruner and the sparsity.

  Raises:
    ValueError: the text has another form.

  Example:
    >>> parse('wanda:0.5')[1], parse('magnitude:2:4')[1]
    (0.5, '2:4')
    >>> parse('wanda:*/attn/*=0.5,*/mlp/*=0.75')[1]
    {'*/attn/*': 0.5, '*/mlp/*': 0.75}
  """
  method, _, given = prune.partition(':')
  pruner = names.lookup('prune', method, one_shot.PRUNERS)()
  try:
    if '=' in given:
      pairs = [part.rsplit('=', 1) for part in given.split(',')]
      return pruner, {pattern: float(value) for pattern, value in pairs}
    return pruner, given if ':' in given else float(given)
  except ValueError as error:
    raise ValueError(
        f'prune is {prune!r}; write METHOD:0.5, METHOD:2:4, or sparsities by '
        "pattern, 'METHOD:*/attn/*=0.5,*/mlp/*=0.75'."
    ) from error


def read_sequences(
    path: str | os.PathLike[str],
    tokenizer: data.Tokenizer,
    length: int,
    number: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Reads sequences to calibrate with, and others to evaluate with.

  Args:
    path: File of UTF-8 text.
    tokenizer: Tokenizer of the model.
    length: Number of tokens of a sequence.
    number: Number of sequences to calibrate with, the first ones.

  Returns:
    Tokens `[number, length]` to calibrate with, and `[n, length + 1]` of the
    following text, at most 32 sequences.

  Raises:
    ValueError: the text cannot be read or is too short.
  """
  try:
    text = task_files.read_text(pathlib.Path(path)).replace('\r\n', '\n')
  except (OSError, ValueError) as error:
    raise ValueError(
        f'calibration is {str(path)!r}, which cannot be read ({error}); give a '
        'file of UTF-8 text.'
    ) from error
  tokens = np.asarray(tokenizer.encode(text), np.int32)
  rest = tokens[number * length:]
  evaluated = min(len(rest) // (length + 1), _MOST_EVALUATED)
  if number < 1 or not evaluated:
    raise ValueError(
        f'calibration {str(path)!r} has {len(tokens):,} tokens, and '
        f'--sequences={number} of {length} and one to evaluate with take '
        f'{(number + 1) * length + 1:,}; give more text, or at least one '
        'sequence that it has.'
    )
  return (
      tokens[:number * length].reshape(number, length),
      rest[:evaluated * (length + 1)].reshape(evaluated, length + 1),
  )


def perplexity(
    apply_fn: Callable[..., jax.Array],
    params: object,
    tokens_NxL: np.ndarray,
) -> float:
  """Computes the perplexity of sequences, one at a time."""
  ones = np.ones((1, tokens_NxL.shape[1] - 1), np.float32)
  batches = [
      data.Batch(tokens_L[None, :-1], tokens_L[None, 1:], ones)
      for tokens_L in tokens_NxL
  ]
  return evaluation.evaluate_loss(apply_fn, params, batches).perplexity


def pruner_of(
    directory: str | os.PathLike[str],
    prune: str,
    calibration: str | None,
    sequences: int,
) -> Prune:
  """Returns a function that prunes the model of a Hugging Face directory.

  Args:
    directory: Directory with the tokenizer of the model.
    prune: Argument of `parse`.
    calibration: Argument of `read_sequences`.
    sequences: Number of sequences to calibrate with.

  Returns:
    A function that prunes a model in place, without a second copy of its
    weights. It returns the model with its mask, and a sentence with the
    perplexity before and after. It raises ValueError for a text that is too
    short, or a sparsity that the model cannot have.

  Raises:
    ValueError: the method or the sparsity is unknown, or there is no text.
  """
  pruner, sparsity = parse(prune)
  if calibration is None:
    raise ValueError(
        f'prune is {prune!r} and there is no calibration; give a file of text '
        'by --calibration.'
    )

  def prune_model(loaded):
    config, params, _ = loaded
    # JAX aligns its arrays, and does not copy them at each call on a CPU.
    for name in params:
      params[name] = jax.tree.map(
          lambda x: np.asarray(jnp.asarray(x)), params[name]
      )
    length = min(config.max_length, _MOST_TOKENS)
    tokens_NxL, evaluated_NxL = read_sequences(
        calibration, data.open_tokenizer(directory), length, sequences
    )
    model = models.model_of(config)
    apply = lambda params, tokens: model.apply({'params': params}, tokens)
    before = perplexity(apply, params, evaluated_NxL)
    mask = jax.tree.map(lambda _: None, params)
    for block in models.prune_blocks(
        config, params, tokens_NxL, pruner, sparsity
    ):
      params[block.name], mask[block.name] = block.params, block.mask
    after = perplexity(apply, params, evaluated_NxL)
    return loaded._replace(mask=mask), (
        f'the perplexity of {len(evaluated_NxL)} sequences of {length} tokens '
        f'after the calibration text is {before:.4g} before and {after:.4g} '
        f'after {prune}. '
    )

  return prune_model

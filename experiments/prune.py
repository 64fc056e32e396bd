r"""Prunes a model of Hugging Face in one shot, over a calibration text.

  python -m experiments.prune --model=gpt2/ --to=gpt2-wanda/ \
    --method=wanda:0.5 --calibration=text.txt

Prunes by magnitude, wanda or sparsegpt, to a fraction of zeros, to N:M as in
sparsegpt:2:4, or to fractions by patterns of paths,
wanda:PATTERN=0.5,PATTERN=0.75. It calibrates with the first sequences of a
text, and prints the perplexity of the text after them. Masks lie beside the
weights; experiments.convert imports both into a workdir, from which training
keeps the zeros with the algorithm's init='nonzero'.
"""

from collections.abc import Callable, Mapping
import os
import pathlib

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments.launch import console
from experiments.scores import hf_directories
from spdf_jax import data
from spdf_jax import evaluation
from spdf_jax import interop
from spdf_jax import models
from spdf_jax import names
from spdf_jax.data.tasks import files as task_files
from spdf_jax.sparsity import one_shot
from spdf_jax.training.loop import processes

FLAGS = flags.FlagValues()
_MODEL = flags.DEFINE_string(
    'model', None, 'Directory of a GPT-2, Llama, Mistral or Qwen.',
    required=True, flag_values=FLAGS,
)
_TO = flags.DEFINE_string(
    'to', None, 'Directory to write.', required=True, flag_values=FLAGS
)
_METHOD = flags.DEFINE_string(
    'method', None, 'Method and sparsity, as wanda:0.5.',
    required=True, flag_values=FLAGS,
)
_CALIBRATION = flags.DEFINE_string(
    'calibration', None, 'File of text.', required=True, flag_values=FLAGS
)
_SEQUENCES = flags.DEFINE_integer(
    'sequences', 128, 'Number of sequences to calibrate with.',
    flag_values=FLAGS,
)

_MOST_TOKENS = 2048  # Longest sequence, as in the papers.
_MOST_EVALUATED = 32  # Number of sequences to evaluate.

Sparsity = one_shot.Sparsity | Mapping[str, float]
"""A fraction of zeros, N:M, or fractions by patterns of paths."""


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, _prune)


def _prune() -> str:
  hf_directories.check_other(_MODEL.value, _TO.value, 'to')
  pruner, sparsity = parse(_METHOD.value)
  # Freed matrices are larger, and are returned to the system.
  processes.keep_freed_memory(largest=2**20)
  loaded, text = prune_model(
      _MODEL.value, pruner, sparsity, _CALIBRATION.value, _SEQUENCES.value
  )
  written = hf_directories.rewrite(loaded, _MODEL.value, _TO.value)
  return f'{text} after {_METHOD.value}. {written}'


def parse(method: str) -> tuple[one_shot.Pruner, Sparsity]:
  """Parses a method and a sparsity.

  Args:
    method: `'METHOD:SPARSITY'`, with a method of `one_shot.PRUNERS`, and a
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
  name, _, given = method.partition(':')
  pruner = names.lookup('method', name, one_shot.PRUNERS)()
  try:
    if '=' in given:
      pairs = [part.rsplit('=', 1) for part in given.split(',')]
      return pruner, {pattern: float(value) for pattern, value in pairs}
    return pruner, given if ':' in given else float(given)
  except ValueError as error:
    raise ValueError(
        f'method is {method!r}; write METHOD:0.5, METHOD:2:4, or sparsities by '
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


def prune_model(
    directory: str | os.PathLike[str],
    pruner: one_shot.Pruner,
    sparsity: Sparsity,
    calibration: str | os.PathLike[str],
    sequences: int,
) -> tuple[interop.HFModel, str]:
  """Prunes the model of a Hugging Face directory.

  The memory holds the weights once.

  Args:
    directory: Directory with the model and its tokenizer.
    pruner: Pruning method.
    sparsity: Sparsity of the hidden matrices.
    calibration: Argument of `read_sequences`.
    sequences: Number of sequences to calibrate with.

  Returns:
    The model with its mask, and a sentence with the perplexities.

  Raises:
    ValueError: the text is too short, or the model cannot have the sparsity.
  """
  loaded = interop.load_hf(directory)
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
      f'after the calibration text is {before:.4g} before and {after:.4g}'
  )


if __name__ == '__main__':
  console.start(main, FLAGS)

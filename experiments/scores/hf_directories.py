"""Hugging Face directories that commands write from another one."""

import os
import pathlib
from typing import Any

import jax

from spdf_jax import data
from spdf_jax import interop
from spdf_jax.interop import configs
from spdf_jax.interop import tensors


def rewrite(
    loaded: interop.HFModel,
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    format: str = 'dense',
    dtype: str = 'float32',
    vocab_size: int | None = None,
) -> str:
  """Writes a model with the tokenizer and other settings of its directory.

  Args:
    loaded: The model; without a mask, that of its zeros is written.
    source: Directory that the model is from, with its tokenizer.
    directory: Directory to write.
    format: Format of the weights.
    dtype: Dtype of the weights.
    vocab_size: Number of tokens to keep; `None`: all.

  Returns:
    A sentence about the result.
  """
  config, params, mask = loaded
  mask = interop.mask_of_zeros(params) if mask is None else mask
  interop.save_hf(
      directory, config, params, mask, format=format, dtype=dtype,
      vocab_size=vocab_size, tokenizer=data.tokenizer_paths(source),
      **stated(source),
  )
  return f'{directory} is written; {describe_mask(mask)}'


def check_other(
    source: str | os.PathLike[str], directory: str | os.PathLike[str], flag: str
) -> None:
  """Raises ValueError if a directory is to be written over its source."""
  if pathlib.Path(source).resolve() == pathlib.Path(directory).resolve():
    raise ValueError(
        f'model and {flag} are both {directory}; give another directory to '
        'write.'
    )


def stated(directory: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads the settings of a directory that are not part of the model.

  These are the ids that begin and end a text, and the other fields of
  generation_config.json.
  """
  fields = tensors.read_json(pathlib.Path(directory, tensors.CONFIG))
  path = pathlib.Path(directory, tensors.GENERATION)
  generation = tensors.read_json(path) if path.is_file() else {}
  return {
      'end_of_text': configs.read_end_of_text(fields, generation),
      'begin_of_text': configs.read_begin_of_text(fields, generation),
      'generation': {
          name: value for name, value in generation.items()
          if name not in ('bos_token_id', 'eos_token_id')
      },
  }


def describe_mask(mask: Any) -> str:
  """Returns the sparsity of a mask in words."""
  leaves = jax.tree.leaves(mask)
  kept, size = sum(int(m.sum()) for m in leaves), sum(m.size for m in leaves)
  return (
      f'sparsity {1 - kept / size:.2%} in {len(leaves)} matrices'
      if size else 'no sparse matrices'
  )

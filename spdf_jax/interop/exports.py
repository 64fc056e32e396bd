# SPDX-License-Identifier: Apache-2.0
"""Writer of model directories of transformers."""

from collections.abc import Iterable
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import numpy as np

from spdf_jax.data import tokenizer_paths
from spdf_jax.interop import compact_files
from spdf_jax.interop import layouts
from spdf_jax.interop import tensor_files
from spdf_jax.interop.checks import check_masks
from spdf_jax.interop.checks import refuse_other_shapes
from spdf_jax.interop.configs import write_config
from spdf_jax.interop.tensor_files import CONFIG
from spdf_jax.interop.tensor_files import GENERATION
from spdf_jax.models import GPTConfig
from spdf_jax.models import LlamaConfig
from spdf_jax.names import lookup
from spdf_jax.sparsity.paths import by_name

PyTree = Any
Arrays = dict[str, np.ndarray]

_WRITING = '.writing_'
"""Beginning of the name of an unfinished export's folder."""

_OURS = frozenset({
    CONFIG, GENERATION, tensor_files.MASKS, *tensor_files.FORMATS.values()
})


def save_hf(
    directory: str | os.PathLike[str],
    config: GPTConfig | LlamaConfig,
    params: PyTree,
    mask: PyTree | None = None,
    *,
    dtype: str = 'float32',
    format: str = 'dense',
    vocab_size: int | None = None,
    end_of_text: int | list[int] | None = None,
    tokenizer: Iterable[str | os.PathLike[str]] | None = None,
) -> None:
  """Writes a model that transformers or `load_hf` can read.

  Pruned weights are written as zeros, and the mask to `masks.safetensors`,
  under the names of the weights. The format `compact` can be read by `load_hf`
  only, see `spdf_jax.interop.compact_files`.

  Args:
    directory: Directory to write, created if missing; an earlier export in it
      is replaced.
    config: Config of the model.
    params: Parameters of the model, scanned or not.
    mask: Booleans in the structure of the parameters, `None` for dense leaves.
    dtype: Dtype of the weights in the file: float32, bfloat16 or float16.
    format: `dense` or `compact`.
    vocab_size: Number of tokens to keep, which removes padding of the
      vocabulary; `None`: all.
    end_of_text: Id or ids of the tokens that end a text, for config.json and
      generation_config.json, where other programs look them up; `None`: they
      are not written.
    tokenizer: Paths of files of a tokenizer, which are copied and replace all
      files of tokenizers in the directory; `None`: those files stay.

  Raises:
    ValueError: parameters or mask do not fit the config; a name is unknown;
      the model has multipliers of muP; a weight is too large for the dtype;
      `end_of_text` is not in the vocabulary; or the directory holds a model
      that spdf_jax did not export.
    ImportError: the directory holds an export and safetensors is not installed.

  Example:
    See `load_hf`.
  """
  directory = pathlib.Path(directory)
  lookup('format', format, tensor_files.FORMATS)
  file_dtype = tensor_files.dtype_of(dtype)
  if format == 'compact' and not jax.tree.leaves(mask):
    raise ValueError(
        "format is 'compact' and the model has no mask; use 'dense'."
    )
  config, vocab_size = _cut_config(config, vocab_size)
  fields = write_config(config, dtype, end_of_text)
  shapes = layouts.shapes_of(layouts.abstract_params(config))
  leaves = _leaves(params, vocab_size)
  masks = _leaves({} if mask is None else mask, vocab_size)
  refuse_other_shapes('params', layouts.shapes_of(leaves), shapes)
  check_masks('mask', masks, shapes)
  tensors = layouts.tensors_of(config)
  leaves = {
      path: _cast(path, _masked(x, masks.get(path)), file_dtype)
      for path, x in leaves.items()
  }
  found = layouts.to_tensors(tensors, leaves, shapes)
  kept = layouts.to_tensors(tensors, masks, shapes)
  _check_ours(directory)
  directory.mkdir(parents=True, exist_ok=True)
  for unfinished in directory.glob(f'{_WRITING}*'):  # Of an export killed.
    shutil.rmtree(unfinished)
  with tempfile.TemporaryDirectory(prefix=_WRITING, dir=directory) as name:
    source = pathlib.Path(name)
    if format == 'compact':
      tensor_files.write_tensors(
          source / tensor_files.COMPACT, compact_files.pack(found, kept)
      )
    else:
      tensor_files.write_tensors(source / tensor_files.WEIGHTS, found)
      if kept:
        tensor_files.write_tensors(source / tensor_files.MASKS, kept)
    _write_json(source / CONFIG, fields)
    if end_of_text is not None:
      ids = {k: fields[k] for k in ('bos_token_id', 'eos_token_id')}
      _write_json(source / GENERATION, ids)
    replaced = [directory / name for name in _OURS]
    if tokenizer is not None:
      replaced += tokenizer_paths(directory)
      for path in map(pathlib.Path, tokenizer):
        shutil.copyfile(path, source / path.name)
    _replace_files(directory, source, replaced)


def _write_json(path: pathlib.Path, fields: dict[str, Any]) -> None:
  path.write_text(json.dumps(fields, indent=2) + '\n')


def _cut_config(
    config: GPTConfig | LlamaConfig, vocab_size: int | None
) -> tuple[GPTConfig | LlamaConfig, int]:
  if vocab_size is None:
    vocab_size = config.vocab_size
  if not 1 <= vocab_size <= config.vocab_size:
    raise ValueError(
        f'vocab_size is {vocab_size}; give 1 to {config.vocab_size}, the '
        'vocabulary of the model.'
    )
  unscanned = dataclasses.replace(
      config, vocab_size=vocab_size, scan_layers=False
  )
  return unscanned, vocab_size


def _leaves(tree: PyTree, vocab_size: int) -> Arrays:
  """Returns the leaves of the unscanned model by path, vocabulary cut."""
  tree = layouts.unstack_layers(jax.tree.map(np.asarray, tree))
  cuts = {
      'wte/embedding': np.s_[:vocab_size], 'head/kernel': np.s_[:, :vocab_size],
  }
  return {
      path: x[cuts[path]] if path in cuts else x
      for path, x in by_name(tree).items()
  }


def _masked(x: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
  return x if mask is None else np.where(mask, x, np.zeros_like(x))


def _cast(path: str, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
  with np.errstate(over='ignore'):
    cast = x.astype(dtype)
  if not np.array_equal(np.isfinite(cast), np.isfinite(x)):
    raise ValueError(
        f'{path!r} holds weights too large for {dtype}; use bfloat16 or '
        'float32.'
    )
  return cast


def _check_ours(directory: pathlib.Path) -> None:
  """Raises ValueError if a directory holds a model that we did not export.

  Args:
    directory: Directory of the next export; may be missing.

  Raises:
    ValueError: the directory has a model that `write_tensors` did not write,
      or is a file.
  """
  if not directory.is_dir():
    if directory.exists():
      raise ValueError(f'{directory} is a file; give a directory.')
    return
  names = {path.name for path in directory.iterdir()}
  kinds = ('.safetensors', '.bin', tensor_files.INDEX)
  models = {name for name in names if name.endswith(kinds)}
  foreign = sorted(
      name for name in models
      if name not in _OURS or not _is_ours(directory / name)
  )
  if not models and CONFIG in names:
    foreign = [CONFIG]
  if foreign:
    raise ValueError(
        f'{directory} holds {foreign[0]}, which spdf_jax did not export; give '
        'another directory, or empty this one.'
    )


def _replace_files(
    directory: pathlib.Path,
    source: pathlib.Path,
    replaced: Iterable[pathlib.Path],
) -> None:
  """Moves an exported model to its place, replacing an earlier export.

  The config is deleted first and moved last, since a directory without it is
  not read as a model.

  Args:
    directory: Directory of the model.
    source: A directory on the same file system, with all files of the model.
    replaced: Paths of the files of the earlier export; may be missing.
  """
  (directory / CONFIG).unlink(missing_ok=True)
  for path in replaced:
    path.unlink(missing_ok=True)
  for path in sorted(source.iterdir()):
    if path.name != CONFIG:
      os.replace(path, directory / path.name)
  os.replace(source / CONFIG, directory / CONFIG)


def _is_ours(path: pathlib.Path) -> bool:
  with tensor_files.open_safetensors(path) as file:
    return (file.metadata() or {}).get('writer') == tensor_files.WRITER

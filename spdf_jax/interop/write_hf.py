# SPDX-License-Identifier: Apache-2.0
"""Writer of model directories of transformers."""

from collections.abc import Iterable, Mapping
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import numpy as np

from spdf_jax import files
from spdf_jax import names
from spdf_jax.data import tokenizer_paths
from spdf_jax.interop import configs
from spdf_jax.interop import layouts
from spdf_jax.interop import tensors
from spdf_jax.models import GPTConfig
from spdf_jax.models import LlamaConfig
from spdf_jax.sparsity import trees

PyTree = Any
Arrays = dict[str, np.ndarray]

_WRITING = '.writing_'
"""Beginning of the name of an unfinished export's folder."""

_OURS = frozenset({
    tensors.CONFIG, tensors.GENERATION, tensors.MASKS, *tensors.FORMATS.values()
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
    begin_of_text: int | None = None,
    generation: Mapping[str, Any] | None = None,
    tokenizer: Iterable[str | os.PathLike[str]] | None = None,
) -> None:
  """Writes a model that transformers or `load_hf` can read.

  Pruned weights are written as zeros, and the mask to `masks.safetensors`,
  under the names of the weights. The format `'compact'` stores only the values
  of kept weights and a bit per weight, see `spdf_jax.interop.tensors`;
  transformers cannot read it, but `load_hf` and `load_listed` can.

  Args:
    directory: Directory to write, created if missing; an earlier export in it
      is replaced.
    config: Config of the model.
    params: Parameters of the model, scanned or not.
    mask: Booleans in the structure of the parameters, `None` for dense leaves;
      `None`: the model is dense.
    dtype: Dtype of the weights in the file: `'float32'`, `'bfloat16'` or
      `'float16'`.
    format: `'dense'` or `'compact'`.
    vocab_size: Number of token ids to keep, the first ones, which removes
      padding of the vocabulary; `None`: all.
    end_of_text: Id or ids of the tokens that end a text, for config.json and
      generation_config.json, where other programs look them up; `None`: they
      are not written.
    begin_of_text: Id of the token that begins a text; `None`: `end_of_text`, if
      the model is a GPT and that is one id, otherwise none.
    generation: Other fields of generation_config.json, such as `temperature`;
      `None`: there are none.
    tokenizer: Paths of files of a tokenizer, which are copied and replace all
      files of tokenizers in the directory; `None`: those files stay.

  Raises:
    ValueError: parameters or mask do not fit the config; `dtype` or `format` is
      unknown, or the format is compact and there is no mask; a GPT has
      multipliers of muP; a weight is too large for the dtype; `vocab_size` or
      `end_of_text` is out of range; or the directory is a file, or holds a
      model that spdf_jax did not export.
    ImportError: the directory holds an export and safetensors is not installed.

  Example:
    See `load_hf`.
  """
  directory = pathlib.Path(directory)
  names.lookup('format', format, tensors.FORMATS)
  file_dtype = tensors.dtype_of(dtype)
  if format == 'compact' and not jax.tree.leaves(mask):
    raise ValueError(
        "format is 'compact', but no mask is given; give it, or use 'dense'."
    )
  config, vocab_size = _cut_config(config, vocab_size)
  fields = configs.write_config(config, dtype, end_of_text, begin_of_text)
  shapes = layouts.shapes_of(layouts.abstract_params(config))
  leaves = _leaves(params, vocab_size)
  masks = _leaves({} if mask is None else mask, vocab_size)
  layouts.refuse_other_shapes('params', layouts.shapes_of(leaves), shapes)
  layouts.check_masks('mask', masks, shapes)
  layout = layouts.tensors_of(config)
  leaves = {
      path: _cast(path, _masked(x, masks.get(path)), file_dtype)
      for path, x in leaves.items()
  }
  arrays = layouts.to_tensors(layout, leaves, shapes)
  kept = layouts.to_tensors(layout, masks, shapes)
  _check_ours(directory)
  directory.mkdir(parents=True, exist_ok=True)
  # Left by an export that was killed.
  for unfinished in directory.glob(f'{_WRITING}*'):
    shutil.rmtree(unfinished)
  with (
      files.writing(directory),
      tempfile.TemporaryDirectory(prefix=_WRITING, dir=directory) as name,
  ):
    source = pathlib.Path(name)
    if format == 'compact':
      tensors.write_tensors(
          source / tensors.COMPACT, tensors.pack_tensors(arrays, kept)
      )
    else:
      tensors.write_tensors(source / tensors.WEIGHTS, arrays)
      if kept:
        tensors.write_tensors(source / tensors.MASKS, kept)
    _write_json(source / tensors.CONFIG, fields)
    settings = dict(generation or {})
    if end_of_text is not None:
      settings |= {k: fields[k] for k in ('bos_token_id', 'eos_token_id')}
    if settings:
      _write_json(source / tensors.GENERATION, settings)
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
  """Returns the unscanned leaves by path, without padded token ids."""
  tree = layouts.unstack_layers(jax.tree.map(np.asarray, tree))
  cuts = {
      'wte/embedding': np.s_[:vocab_size], 'head/kernel': np.s_[:, :vocab_size],
  }
  return {
      path: x[cuts[path]] if path in cuts else x
      for path, x in trees.by_name(tree).items()
  }


def _masked(x: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
  if mask is None or not np.any(x, where=~mask):
    return x
  return np.where(mask, x, np.zeros_like(x))


def _cast(path: str, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
  with np.errstate(over='ignore'):
    cast = x.astype(dtype, copy=False)
  if not np.array_equal(np.isfinite(cast), np.isfinite(x)):
    raise ValueError(
        f'{path!r} holds weights too large for {dtype}; use float32, or '
        'bfloat16 instead of float16.'
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
  present = {path.name for path in directory.iterdir()}
  kinds = ('.safetensors', '.bin', tensors.INDEX)
  models = {name for name in present if name.endswith(kinds)}
  foreign = sorted(
      name for name in models
      if name not in _OURS or not _is_ours(directory / name)
  )
  if not models and tensors.CONFIG in present:
    foreign = [tensors.CONFIG]
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
  (directory / tensors.CONFIG).unlink(missing_ok=True)
  for path in replaced:
    path.unlink(missing_ok=True)
  for path in sorted(source.iterdir()):
    if path.name != tensors.CONFIG:
      os.replace(path, directory / path.name)
  os.replace(source / tensors.CONFIG, directory / tensors.CONFIG)


def _is_ours(path: pathlib.Path) -> bool:
  with tensors.open_safetensors(path) as file:
    return (file.metadata() or {}).get('writer') == tensors.WRITER

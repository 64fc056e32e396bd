"""Reader and writer of model directories of transformers."""

import dataclasses
import json
import os
import pathlib
import re
import tempfile
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from spdf_jax.interop import compact_files
from spdf_jax.interop import layouts
from spdf_jax.interop import tensor_files
from spdf_jax.interop.configs import read_config
from spdf_jax.interop.configs import write_config
from spdf_jax.interop.layouts import unstack_layers
from spdf_jax.models import GPTConfig
from spdf_jax.models import LlamaConfig
from spdf_jax.names import lookup
from spdf_jax.sparsity.selection import by_name

PyTree = Any
Arrays = dict[str, np.ndarray]

_BUFFERS = re.compile(r'\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$')
"""Names of buffers, which older files contain besides weights."""


class HFModel(NamedTuple):
  """A model loaded by `load_hf`."""

  config: GPTConfig | LlamaConfig
  """Config of the model, unscanned and with float32 computation."""

  params: PyTree
  """Parameters, NumPy float32."""

  mask: PyTree | None
  """Mask, with `None` for dense leaves; `None` for a dense model."""


def load_hf(directory: str | os.PathLike) -> HFModel:
  """Reads GPT-2, Cerebras-GPT or Llama, as transformers or `save_hf` saved it.

  Args:
    directory: Directory with config.json and weights: `model.safetensors`,
      `model.compact.safetensors`, `pytorch_model.bin` (which needs torch), or
      shards and their index; in float32, float16 or bfloat16.

  Returns:
    Config, parameters and mask. GPT-2 stores the three projections of attention
    in one tensor, so that if one of them has a mask, all have; that of a dense
    projection is all `True`.

  Raises:
    ValueError: our models do not support the architecture or an option of it;
      or tensors are missing, unexpected, damaged or of another shape.
    ImportError: safetensors is not installed, or torch for a .bin file.

  Example:
    >>> from spdf_jax import models
    >>> config = models.GPTConfig(64, 2, 2, 16, 64, 32)
    >>> params = jax.tree.map(lambda x: np.ones(x.shape, np.float32),
    ...                       layouts.abstract_params(config))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...   save_hf(directory, config, params)
    ...   loaded = load_hf(directory)
    >>> loaded.config == config, loaded.params['ln_f']['bias'].shape
    (True, (16,))
  """
  directory = pathlib.Path(directory)
  config = read_config(tensor_files.read_json(directory / tensor_files.CONFIG))
  params = layouts.abstract_params(config)
  shapes = layouts.shapes_of(params)
  tensors = layouts.tensors_of(config)
  expected = {tensor.name: tensor.shape(shapes) for tensor in tensors}
  found, masks = _read(directory, expected)
  found = _without_head(_normalized(found, config), tensors[0].name, expected)
  layouts.refuse_other_shapes(str(directory), _shapes(found), expected)
  _check_masks(directory, masks, expected)
  leaves = layouts.from_tensors(tensors, _as_float32(found), shapes)
  kept = layouts.from_tensors(tensors, masks, shapes)
  return HFModel(
      config,
      layouts.fill(params, leaves),
      layouts.fill(params, kept) if kept else None,
  )


def save_hf(
    directory: str | os.PathLike,
    config: GPTConfig | LlamaConfig,
    params: PyTree,
    mask: PyTree | None = None,
    *,
    dtype: str = 'float32',
    format: str = 'dense',
    vocab_size: int | None = None,
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

  Raises:
    ValueError: parameters or mask do not fit the config; a name is unknown;
      the model has multipliers of muP; a weight is too large for the dtype; or
      the directory holds a model that spdf_jax did not export.
    ImportError: safetensors is not installed.

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
  fields = write_config(config, dtype)
  shapes = layouts.shapes_of(layouts.abstract_params(config))
  leaves = _leaves(params, vocab_size)
  masks = _leaves({} if mask is None else mask, vocab_size)
  layouts.refuse_other_shapes('params', _shapes(leaves), shapes)
  _check_masks('mask', masks, shapes)
  tensors = layouts.tensors_of(config)
  leaves = {
      path: _cast(path, _masked(x, masks.get(path)), file_dtype)
      for path, x in leaves.items()
  }
  found = layouts.to_tensors(tensors, leaves, shapes)
  kept = layouts.to_tensors(tensors, masks, shapes)
  tensor_files.check_ours(directory)
  directory.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(prefix='.writing_', dir=directory) as name:
    source = pathlib.Path(name)
    if format == 'compact':
      tensor_files.write_tensors(
          source / tensor_files.COMPACT, compact_files.pack(found, kept)
      )
    else:
      tensor_files.write_tensors(source / tensor_files.WEIGHTS, found)
      if kept:
        tensor_files.write_tensors(source / tensor_files.MASKS, kept)
    (source / tensor_files.CONFIG).write_text(
        json.dumps(fields, indent=2) + '\n'
    )
    tensor_files.replace_files(directory, source)


def _read(
    directory: pathlib.Path, expected: layouts.Shapes
) -> tuple[Arrays, Arrays]:
  """Reads weights and masks of either format."""
  if (directory / tensor_files.COMPACT).exists():
    packed = tensor_files.read_tensors(directory / tensor_files.COMPACT)
    return compact_files.unpack(packed, expected)
  found = tensor_files.read_weights(directory)
  masks = directory / tensor_files.MASKS
  return found, tensor_files.read_tensors(masks) if masks.exists() else {}


def _normalized(found: Arrays, config: GPTConfig | LlamaConfig) -> Arrays:
  """Removes buffers, and adds the prefix that names in old files lack."""
  found = {k: x for k, x in found.items() if not _BUFFERS.search(k)}
  if isinstance(config, LlamaConfig):
    return found
  prefix = 'transformer.'
  return {
      k if k.startswith(prefix) or k == layouts.HEAD else prefix + k: x
      for k, x in found.items()
  }


def _without_head(
    found: Arrays, embedding: str, expected: layouts.Shapes
) -> Arrays:
  """Removes the tied head, after checking that it equals the embedding."""
  if layouts.HEAD in expected or layouts.HEAD not in found:
    return found
  rest = {k: x for k, x in found.items() if k != layouts.HEAD}
  if not np.array_equal(found[layouts.HEAD], rest.get(embedding)):
    raise ValueError(
        f'{layouts.HEAD} differs from {embedding}; only models that tie the '
        'two can be read here.'
    )
  return rest


def _as_float32(found: Arrays) -> Arrays:
  for name, x in found.items():
    if x.dtype.name not in tensor_files.DTYPES:
      raise ValueError(
          f'{name!r} is of type {x.dtype}; only '
          f'{", ".join(tensor_files.DTYPES)} can be read.'
      )
  return {name: x.astype(np.float32) for name, x in found.items()}


def _check_masks(what: Any, masks: Arrays, shapes: layouts.Shapes) -> None:
  for name, x in masks.items():
    if x.dtype != bool or x.shape != shapes.get(name):
      raise ValueError(
          f'{what} has for {name!r} a mask {x.dtype}{list(x.shape)}; it must '
          f'be boolean and have the shape of a weight, {shapes.get(name)}.'
      )


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
  tree = unstack_layers(jax.tree.map(np.asarray, tree))
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


def _shapes(arrays: Arrays) -> layouts.Shapes:
  return {name: x.shape for name, x in arrays.items()}

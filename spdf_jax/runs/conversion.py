"""Conversion of models between our checkpoints and Hugging Face."""

import dataclasses
import json
import logging
import pathlib
from typing import Any

import jax
import numpy as np

from spdf_jax import interop
from spdf_jax import models
from spdf_jax import training
from spdf_jax.sparsity.selection import path_name
from spdf_jax.training.checkpoints import read_masks
from spdf_jax.training.checkpoints import write_params
from spdf_jax.training.workdir import read_meta

logger = logging.getLogger('spdf_jax')

_PRESETS = {models.GPTConfig: 'gpt2-small', models.LlamaConfig: 'llama2-7b'}
"""A preset of each kind; all of its sizes are overridden."""


def import_model(directory: str, workdir: str, *, scan_layers: bool) -> str:
  """Writes a checkpoint from a Hugging Face directory.

  Args:
    directory: As `interop.load_hf` reads it.
    workdir: Where the checkpoint goes.
    scan_layers: Whether the model that reads it scans its layers.

  Returns:
    What was written, with the `config.model` that reads it, as a sentence.

  Raises:
    ValueError: the directory cannot be read, or the workdir has checkpoints.
  """
  loaded = interop.load_hf(directory)
  config = dataclasses.replace(loaded.config, scan_layers=scan_layers)
  params = loaded.params
  if scan_layers:
    params = interop.stack_layers(params)
  model = {'preset': _PRESETS[type(config)]} | dataclasses.asdict(config)
  checkpoint = write_params(workdir, params, {'model': model})
  return f'{checkpoint} is written; its config.model is {json.dumps(model)}'


def export_model(
    source: str,
    directory: str,
    *,
    format: str,
    dtype: str,
    vocab_size: int | None,
) -> str:
  """Writes a Hugging Face directory from a checkpoint.

  Args:
    source: `'WORKDIR'` or `'WORKDIR@PHASE'`.
    directory: Where the model goes.
    format: See `interop.save_hf`, as the rest.
    dtype: Type of the weights in the file.
    vocab_size: Tokens to keep.

  Returns:
    What was written, as a sentence.

  Raises:
    ValueError: there is no such checkpoint, or the model cannot be written.
  """
  checkpoint = training.find_checkpoint(source)
  meta = read_meta(checkpoint)
  if 'model' not in meta['config']:
    raise ValueError(
        f'checkpoint {checkpoint} does not say which model it is of; give one '
        'that experiments.train or experiments.convert wrote.'
    )
  model = models.create_model(**meta['config']['model'])
  tokens = np.zeros((1, 1), np.int32)
  init = jax.eval_shape(model.init, jax.random.key(0), tokens)
  params = training.read_params(checkpoint, init['params'])
  mask = mask_of(checkpoint, params)
  interop.save_hf(
      directory, model.config, params, mask, format=format, dtype=dtype,
      vocab_size=vocab_size,
  )
  leaves = jax.tree.leaves(mask)
  kept, size = sum(int(m.sum()) for m in leaves), sum(m.size for m in leaves)
  sparsity = f'{1 - kept / size:.2%} of {len(leaves)} matrices' if size else (
      'none of its matrices'
  )
  return f'{directory} is written; zero are {sparsity}'


def mask_of(checkpoint: pathlib.Path, params: Any) -> Any:
  """Returns the mask a checkpoint's parameters were trained with.

  Args:
    checkpoint: Its directory.
    params: Of a model of ours.

  Returns:
    Booleans, `None` for dense leaves, and instead of a tree that prunes
    nothing. Where the checkpoint holds parameters only, see `mask_of_zeros`.
  """
  masks = read_masks(checkpoint)
  if not masks:
    logger.warning(
        'checkpoint %s holds parameters only: its zeros are taken for its '
        'mask.', checkpoint,
    )
    return mask_of_zeros(params)
  if all(mask.all() for mask in masks.values()):
    return None
  return jax.tree_util.tree_map_with_path(
      lambda path, _: masks.get(path_name(path)), params
  )


def mask_of_zeros(params: Any) -> Any:
  """Guesses the mask of parameters, which are zero where it is `False`.

  A kept weight that is zero cannot be told from a pruned one.

  Args:
    params: Of a model of ours.

  Returns:
    Booleans for hidden matrices that have zeros; `None` for all other leaves,
    and instead of a tree without any mask.
  """
  def mask_of(path, x):
    kept = np.asarray(x) != 0
    selected = models.sparsifiable(path_name(path), x) is not False
    return kept if selected and not kept.all() else None

  mask = jax.tree_util.tree_map_with_path(mask_of, params)
  return mask if jax.tree.leaves(mask) else None

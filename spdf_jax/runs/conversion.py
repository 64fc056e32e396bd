# SPDX-License-Identifier: Apache-2.0
"""Conversion of models: from and to Hugging Face, and from sparse to dense."""

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import json
import logging
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np

from spdf_jax import data
from spdf_jax import interop
from spdf_jax import models
from spdf_jax import training
from spdf_jax.interop.checks import check_masks
from spdf_jax.interop.checks import refuse_pruned_weights
from spdf_jax.interop.configs import read_end_of_text
from spdf_jax.interop.json_fields import read_json
from spdf_jax.interop.layouts import shapes_of
from spdf_jax.interop.tensor_files import CONFIG
from spdf_jax.interop.tensor_files import read_tensors
from spdf_jax.interop.tensor_files import write_tensors
from spdf_jax.sparsity.paths import by_name
from spdf_jax.sparsity.paths import path_name
from spdf_jax.training.best_checkpoints import describe_best
from spdf_jax.training.checkpoint_files import read_masks
from spdf_jax.training.checkpoint_files import write_params
from spdf_jax.training.densified import densify_checkpoint
from spdf_jax.training.identity import read_config
from spdf_jax.training.workdir import read_meta
from spdf_jax.training.workdir import refuse_saved

logger = logging.getLogger('spdf_jax')

_PRESETS = {models.GPTConfig: 'gpt2-small', models.LlamaConfig: 'llama2-7b'}
"""A preset of each architecture; all sizes are overridden."""

_MASKS = 'imported_masks.safetensors'
"""File in the workdir of an imported model, beside its checkpoint."""


def convert(
    *,
    from_hf: str | None,
    checkpoint: str | None,
    densify: str | None,
    to: str | None,
    to_hf: str | None,
    scan_layers: bool,
    moments: str,
    format: str,
    dtype: str,
    vocab_size: int | None,
    check: bool,
    allow_non_finite: bool,
    trust_code: bool,
) -> Iterator[str]:
  """Converts a model from one of three sources.

  Args:
    from_hf: Hugging Face directory to import, see `import_model`, or to
      write again, see `rewrite_model`.
    checkpoint: `'WORKDIR'`, `'WORKDIR@PHASE'` or `'WORKDIR@PHASE:best'` to
      export, see `export_model`.
    densify: `'WORKDIR'` or `'WORKDIR@PHASE'` to make dense, see
      `densify_checkpoint`.
    to: Workdir to write, for `from_hf` and `densify`.
    to_hf: Directory to write, for `checkpoint` and `from_hf`.
    scan_layers: Whether the model scans its layers, see `import_model`.
    moments: Treatment of the optimizer's moments, see `densify_checkpoint`.
    format: Format of the weights, see `export_model`.
    dtype: Type of the weights in the file, see `export_model`.
    vocab_size: Number of tokens to export, see `export_model`.
    check: Whether to compare logits with those of transformers.
    allow_non_finite: Whether weights to import may be infinite or NaN.
    trust_code: Whether code named in the checkpoint to densify may be run.

  Yields:
    Sentences: the written paths, and the difference of logits.

  Raises:
    ValueError: Source and target do not match, or a model cannot be read,
      written or checked.
    ImportError: `check` is set and transformers is not installed.
  """
  sources = {'from_hf': from_hf, 'checkpoint': checkpoint, 'densify': densify}
  targets = {'to': to, 'to_hf': to_hf}
  given = {name for name, x in (sources | targets).items() if x}
  if given not in (
      {'from_hf', 'to'}, {'checkpoint', 'to_hf'}, {'from_hf', 'to_hf'},
      {'densify', 'to'},
  ):
    raise ValueError(
        'give --from_hf and --to, or --checkpoint and --to_hf, or --from_hf '
        'and --to_hf, or --densify and --to.'
    )
  if check and to_hf and format == 'compact':
    raise ValueError(
        "format is 'compact', which transformers cannot read; leave --check "
        "out or use 'dense'."
    )
  if from_hf and to:
    yield import_model(
        from_hf, to, scan_layers=scan_layers, allow_non_finite=allow_non_finite
    )
  elif densify and to:
    written = densify_checkpoint(
        densify, to, moments=moments, trust_code=trust_code
    )
    yield f'{written} is written: dense, with moments: {moments}'
  elif checkpoint and to_hf:
    yield export_model(
        checkpoint, to_hf, format=format, dtype=dtype, vocab_size=vocab_size
    )
  elif from_hf and to_hf:
    yield rewrite_model(
        from_hf, to_hf, format=format, dtype=dtype, vocab_size=vocab_size,
        allow_non_finite=allow_non_finite,
    )
  exchanged = to_hf or from_hf
  if check and exchanged:
    difference = interop.check_hf(
        exchanged, allow_non_finite=allow_non_finite
    )
    yield f'logits differ from those of transformers by {difference:.2g}'


def import_model(
    directory: str,
    workdir: str,
    *,
    scan_layers: bool,
    allow_non_finite: bool = False,
) -> str:
  """Writes a checkpoint from a Hugging Face directory.

  The mask is written beside the checkpoint, for `mask_of`.

  Args:
    directory: Directory that `interop.load_hf` can read.
    workdir: Folder for the checkpoint.
    scan_layers: Whether to stack the layers, for a model that scans them.
    allow_non_finite: Whether weights may be infinite or NaN.

  Returns:
    A sentence with the written path and the `config.model` of the checkpoint.

  Raises:
    ValueError: The directory cannot be read, or the workdir has checkpoints.
  """
  loaded = interop.load_hf(directory, allow_non_finite=allow_non_finite)
  end_of_text = read_end_of_text(read_json(pathlib.Path(directory, CONFIG)))
  config = dataclasses.replace(loaded.config, scan_layers=scan_layers)
  params = loaded.params
  if scan_layers:
    params = interop.stack_layers(params)
  model = {'preset': _PRESETS[type(config)]} | dataclasses.asdict(config)
  refuse_saved(workdir)
  masks = pathlib.Path(workdir, _MASKS)
  masks.parent.mkdir(parents=True, exist_ok=True)
  masks.unlink(missing_ok=True)
  if loaded.mask is not None:
    # Precedes the checkpoint, which would have another mask without the file.
    write_tensors(masks, by_name(loaded.mask))
  checkpoint = write_params(
      workdir, params, {'model': model, 'end_of_text': end_of_text}
  )
  return f'{checkpoint} is written; its config.model is {json.dumps(model)}'


def export_model(
    source: str,
    directory: str,
    *,
    format: str,
    dtype: str,
    vocab_size: int | None,
) -> str:
  """Writes a Hugging Face directory from a checkpoint, with its tokenizer.

  Args:
    source: `'WORKDIR'`, `'WORKDIR@PHASE'` or `'WORKDIR@PHASE:best'`.
    directory: Folder for the model.
    format: Format of the weights, see `interop.save_hf`.
    dtype: Type of the weights in the file.
    vocab_size: Number of tokens to export; `None`: all.

  Returns:
    A sentence with the written path and the sparsity, and the best step of a
    phase whose best weights these are.

  Raises:
    ValueError: There is no such checkpoint, or the model cannot be written.
  """
  checkpoint = training.find_checkpoint(source)
  meta = read_meta(checkpoint)
  if 'model' not in meta['config']:
    raise ValueError(
        f'checkpoint {checkpoint} does not record its model; give one that '
        'experiments.train or experiments.convert wrote.'
    )
  model = models.create_model(**meta['config']['model'])
  tokens = np.zeros((1, 1), np.int32)
  init = jax.eval_shape(model.init, jax.random.key(0), tokens)
  params = training.read_params(checkpoint, init['params'])
  mask = mask_of(checkpoint, params)
  tokenizer = tokenizer_of(checkpoint, model.config.vocab_size)
  with tempfile.TemporaryDirectory() as folder:
    paths = []
    if tokenizer is not None:
      paths = [pathlib.Path(folder, 'tokenizer.json')]
      data.export_tokenizer(paths[0], tokenizer)
    interop.save_hf(
        directory, model.config, params, mask, format=format, dtype=dtype,
        vocab_size=vocab_size, tokenizer=paths or None,
        end_of_text=meta['config'].get('end_of_text') if tokenizer is None
        else tokenizer.end_of_text,
    )
  best = describe_best(meta, int(checkpoint.name))
  best_text = f', {best}' if best else ''
  return f'{directory} is written{best_text}; {_describe_mask(mask)}'


def rewrite_model(
    source: str,
    directory: str,
    *,
    format: str,
    dtype: str,
    vocab_size: int | None,
    allow_non_finite: bool = False,
) -> str:
  """Writes a Hugging Face directory from another, with its tokenizer.

  Args:
    source: Directory that `interop.load_hf` can read. Without a mask of its own
      it has that of `mask_of_zeros`.
    directory: Folder for the model; a tokenizer in it is replaced.
    format: Format of the weights, see `interop.save_hf`.
    dtype: Type of the weights in the file.
    vocab_size: Number of tokens to export; `None`: all.
    allow_non_finite: Whether weights may be infinite or NaN.

  Returns:
    A sentence with the written path and the sparsity.

  Raises:
    ValueError: The source cannot be read, the model cannot be written, or both
      directories are the same.
  """
  old, new = pathlib.Path(source), pathlib.Path(directory)
  if old.resolve() == new.resolve():
    raise ValueError(
        f'from_hf and to_hf are both {directory}; give another directory to '
        'write.'
    )
  config, params, mask = interop.load_hf(
      old, allow_non_finite=allow_non_finite
  )
  mask = mask_of_zeros(params) if mask is None else mask
  interop.save_hf(
      new, config, params, mask, format=format, dtype=dtype,
      vocab_size=vocab_size,
      end_of_text=read_end_of_text(read_json(old / CONFIG)),
      tokenizer=data.tokenizer_paths(old),
  )
  return f'{directory} is written; {_describe_mask(mask)}'


def _describe_mask(mask: Any) -> str:
  leaves = jax.tree.leaves(mask)
  kept, size = sum(int(m.sum()) for m in leaves), sum(m.size for m in leaves)
  return (
      f'sparsity {1 - kept / size:.2%} in {len(leaves)} matrices'
      if size else 'no sparse matrices'
  )


def mask_of(checkpoint: pathlib.Path, params: Any) -> Any:
  """Returns the mask of a checkpoint's parameters.

  Args:
    checkpoint: Directory of the checkpoint.
    params: Parameters of one of our models.

  Returns:
    A tree of booleans, with `None` for dense leaves; `None` if no weight is
    pruned. If the checkpoint has only parameters, the mask that `import_model`
    wrote, in the structure of the unscanned parameters, or else the result of
    `mask_of_zeros`.

  Raises:
    ValueError: The mask of `import_model` does not fit the parameters.
  """
  masks: Mapping[str, Any] = read_masks(checkpoint)
  imported = checkpoint.parent.parent / _MASKS
  if masks and all(mask.all() for mask in masks.values()):
    return None
  if not masks and imported.exists():
    params = interop.unstack_layers(jax.tree.map(np.asarray, params))
    masks = read_tensors(imported)
    check_masks(str(imported), masks, shapes_of(params))
    refuse_pruned_weights(str(imported), by_name(params), masks)
  elif not masks:
    logger.warning(
        'checkpoint %s holds only parameters: the mask is derived from their '
        'zeros.', checkpoint,
    )
    return mask_of_zeros(params)
  return jax.tree_util.tree_map_with_path(
      lambda path, _: masks.get(path_name(path)), params
  )


def tokenizer_of(
    checkpoint: pathlib.Path, vocab_size: int
) -> data.Tokenizer | None:
  """Returns the tokenizer of the corpus that a checkpoint was trained on.

  Args:
    checkpoint: Directory of the checkpoint.
    vocab_size: Number of tokens of the model.

  Returns:
    The tokenizer; `None` for an imported checkpoint, or if the tokenizer cannot
    be read, with a warning.
  """
  stored = read_meta(checkpoint)['config']
  if 'data' not in stored:
    return None
  try:
    config = read_config(stored, f'checkpoint {checkpoint}').data
    tokenizer = data.read_tokenizer(
        config.corpus, tokenizer=config.tokenizer, cache_dir=config.cache_dir
    )
    if tokenizer.vocab_size > vocab_size:
      raise ValueError(
          f'it has {tokenizer.vocab_size} tokens and the model {vocab_size}'
      )
  except (ImportError, OSError, ValueError) as error:
    logger.warning(
        'the export has no tokenizer and names no end of text, since the '
        'tokenizer of checkpoint %s cannot be used (%s); set eos_token_id in '
        'its config.json.', checkpoint, error,
    )
    return None
  return tokenizer


def mask_of_zeros(params: Any) -> Any:
  """Derives a mask from the zeros of parameters.

  Kept weights that are exactly zero are indistinguishable from pruned ones.

  Args:
    params: Parameters of one of our models.

  Returns:
    A tree of booleans for hidden matrices with zeros and `None` for all other
    leaves; `None` if there is no such matrix.
  """
  def mask_of(path, x):
    kept = np.asarray(x) != 0
    selected = models.sparsifiable(path_name(path), x) is not False
    return kept if selected and not kept.all() else None

  mask = jax.tree_util.tree_map_with_path(mask_of, params)
  return mask if jax.tree.leaves(mask) else None

"""Converts models: sparse to dense, from Hugging Face, and to there.

  python -m experiments.convert --from_hf=DIR --to=WORKDIR
  python -m experiments.convert --checkpoint=WORKDIR@pretrain --to_hf=DIR
  python -m experiments.convert --densify=WORKDIR@pretrain --to=OTHER

The first writes what --config.init_from=WORKDIR reads, and prints the
config.model that training then needs. The second exports a run with its mask.
--check compares logits with those of transformers.

The third makes a sparse checkpoint dense, at the end of a phase: the mask goes,
weights, step and schedules stay, and the optimizer's moments too, or they start
anew with --moments=restart. The config that goes on has the same phases so far
and a dense one after them, which need not have been known before:

  python -m experiments.train --config=C --workdir=a \\
    --config.phases.order="('pretrain',)"
  python -m experiments.convert --densify=a --to=b
  python -m experiments.train --config=C --workdir=c --config.resume=b \\
    --config.phases.order="('pretrain', 'more')"

It ends as one launch of all phases would, whose `restart` is that of --moments.
What a phase with the learning rate 'continue' does is part of the phase that it
continues: it must have been in the first launch.
"""

import dataclasses
import json
import pathlib
from typing import Any

from absl import app
from absl import flags
from absl import logging
import jax
import numpy as np

from experiments.launch import console
from spdf_jax import interop
from spdf_jax import models
from spdf_jax import training
from spdf_jax.interop.tensor_files import DTYPES
from spdf_jax.interop.tensor_files import FORMATS
from spdf_jax.sparsity.selection import path_name
from spdf_jax.training.checkpoints import read_masks
from spdf_jax.training.checkpoints import write_params
from spdf_jax.training.densified import densify_checkpoint
from spdf_jax.training.densified import MOMENTS
from spdf_jax.training.workdir import read_meta

_FROM_HF = flags.DEFINE_string(
    'from_hf', None, 'Directory of a GPT-2, Cerebras-GPT or Llama to read.'
)
_TO = flags.DEFINE_string('to', None, 'Workdir to write the checkpoint to.')
_SCAN_LAYERS = flags.DEFINE_bool(
    'scan_layers', False, 'With --to: for a model that scans its layers.'
)
_DENSIFY = flags.DEFINE_string(
    'densify', None, 'WORKDIR or WORKDIR@PHASE of a sparse run to go on from.'
)
_MOMENTS = flags.DEFINE_enum(
    'moments', 'keep', MOMENTS, "With --densify: of the optimizer's state."
)
_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None, 'WORKDIR or WORKDIR@PHASE of a run to export.'
)
_TO_HF = flags.DEFINE_string('to_hf', None, 'Directory to export it to.')
_FORMAT = flags.DEFINE_enum(
    'format', 'dense', list(FORMATS),
    'With --to_hf: compact keeps no zeros; only spdf_jax reads it.',
)
_DTYPE = flags.DEFINE_enum(
    'dtype', 'float32', DTYPES, 'With --to_hf: of the weights in the file.'
)
_VOCAB_SIZE = flags.DEFINE_integer(
    'vocab_size', None, 'With --to_hf: tokens to keep; cuts padding.'
)
_CHECK = flags.DEFINE_bool(
    'check', False, 'Compare logits with transformers, which must be installed.'
)

_COMMANDS = (
    {'from_hf', 'to'}, {'checkpoint', 'to_hf'}, {'densify', 'to'},
)
_PRESETS = {models.GPTConfig: 'gpt2-small', models.LlamaConfig: 'llama2-7b'}
"""A preset of each kind; all of its sizes are overridden."""


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  given = {
      name for name in ('from_hf', 'to', 'checkpoint', 'to_hf', 'densify')
      if flags.FLAGS[name].value
  }
  if given not in _COMMANDS:
    raise app.UsageError(
        'give --from_hf and --to, or --checkpoint and --to_hf, or --densify '
        'and --to.'
    )
  console.prepare()
  try:
    if _CHECK.value and _TO_HF.value and _FORMAT.value == 'compact':
      raise ValueError(
          "format is 'compact', which transformers cannot read; leave --check "
          "out or use 'dense'."
      )
    if _FROM_HF.value:
      import_model(_FROM_HF.value, _TO.value, scan_layers=_SCAN_LAYERS.value)
    elif _DENSIFY.value:
      checkpoint = densify_checkpoint(
          _DENSIFY.value, _TO.value, moments=_MOMENTS.value
      )
      print(f'{checkpoint} is written: dense, with moments: {_MOMENTS.value}')
    else:
      export_model(
          _CHECKPOINT.value, _TO_HF.value, format=_FORMAT.value,
          dtype=_DTYPE.value, vocab_size=_VOCAB_SIZE.value,
      )
    if _CHECK.value and not _DENSIFY.value:
      difference = interop.check_hf(_FROM_HF.value or _TO_HF.value)
      print(f'logits differ from those of transformers by {difference:.2g}')
  except (ValueError, OSError, ImportError) as error:
    # Bad input: the sentence says it all.
    logging.error('%s', error)
    return 1
  return 0


def import_model(directory: str, workdir: str, *, scan_layers: bool) -> None:
  """Writes a checkpoint from a Hugging Face directory; prints its config.

  Args:
    directory: As `interop.load_hf` reads it.
    workdir: Where the checkpoint goes.
    scan_layers: Whether the model that reads it scans its layers.

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
  print(f'{checkpoint} is written; its config.model is {json.dumps(model)}')


def export_model(
    source: str,
    directory: str,
    *,
    format: str,
    dtype: str,
    vocab_size: int | None,
) -> None:
  """Writes a Hugging Face directory from a checkpoint.

  Args:
    source: `'WORKDIR'` or `'WORKDIR@PHASE'`.
    directory: Where the model goes.
    format: See `interop.save_hf`, as the rest.
    dtype: Of the weights.
    vocab_size: Tokens to keep.

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
  print(f'{directory} is written; zero are {sparsity}')


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
    logging.warning(
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


if __name__ == '__main__':
  app.run(main)

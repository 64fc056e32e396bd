"""Converts models from Hugging Face directories to workdirs, and back.

  python -m experiments.convert --model=DIR --to=WORKDIR
  python -m experiments.convert --model=WORKDIR@pretrain --to_hf=DIR
  python -m experiments.convert --model=DIR --to_hf=OTHER --format=compact

The first imports weights into a workdir that --config.init_from=WORKDIR reads,
and prints the flags that training needs. The second exports the weights and the
mask of a run, the third those of a Hugging Face directory, with its tokenizer;
without masks.safetensors the mask is derived from the zeros. --check compares
the logits with those of transformers.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import pathlib
import shutil
import tempfile
from typing import Any

from absl import flags

from experiments.launch import console
from experiments.scores import hf_directories
from experiments.scores import language_models
from spdf_jax import data
from spdf_jax import files
from spdf_jax import interop
from spdf_jax import models
from spdf_jax.data import special_tokens
from spdf_jax.interop import tensors
from spdf_jax.sparsity import trees
from spdf_jax.training.checkpoints import files as checkpoint_files
from spdf_jax.training.checkpoints import workdir as workdirs
from spdf_jax.training.configs import early_stop

FLAGS = flags.FlagValues()
_MODEL = flags.DEFINE_string(
    'model', None,
    'WORKDIR, WORKDIR@PHASE or WORKDIR@PHASE:best, or a Hugging Face directory '
    'of a GPT-2, Llama, Mistral or Qwen.',
    required=True, flag_values=FLAGS,
)
_TO = flags.DEFINE_string(
    'to', None, 'Workdir to write the checkpoint to.', flag_values=FLAGS
)
_TO_HF = flags.DEFINE_string(
    'to_hf', None, 'Directory of the export.', flag_values=FLAGS
)
_SCAN_LAYERS = flags.DEFINE_bool(
    'scan_layers', False, 'With --to: write scanned (stacked) layers.',
    flag_values=FLAGS,
)
_FORMAT = flags.DEFINE_enum(
    'format', 'dense', list(tensors.FORMATS),
    'With --to_hf: compact omits the zeros; only spdf_jax reads it.',
    flag_values=FLAGS,
)
_DTYPE = flags.DEFINE_enum(
    'dtype', 'float32', tensors.DTYPES,
    'With --to_hf: dtype of the exported weights.',
    flag_values=FLAGS,
)
_VOCAB_SIZE = flags.DEFINE_integer(
    'vocab_size', None,
    'With --to_hf: tokens to keep, which removes rows of padding.',
    flag_values=FLAGS,
)
_ALLOW_NON_FINITE = flags.DEFINE_bool(
    'allow_non_finite', False,
    'Read infinite and NaN weights of a Hugging Face directory.',
    flag_values=FLAGS,
)
_CHECK = flags.DEFINE_bool(
    'check', False, 'Compare logits with transformers (must be installed).',
    flag_values=FLAGS,
)

_NEEDED = {
    'format': 'to_hf', 'dtype': 'to_hf', 'vocab_size': 'to_hf',
    'scan_layers': 'to',
}
"""Flags that need another one."""
_SIZES = (
    'vocab_size', 'n_layers', 'n_heads', 'd_model', 'd_ff', 'max_length'
)
_MODEL_FLAGS = ('preset', *_SIZES, 'scan_layers')
_PRESETS = {models.GPTConfig: 'gpt2-small', models.LlamaConfig: 'llama2-7b'}
"""A preset of each architecture; all sizes are overridden."""
_TOKENIZER_COPY = 'imported_tokenizer'
"""Folder in the workdir of an imported model, for its export."""


def convert() -> Iterator[str]:
  """Converts the model of the flags; yields the sentences to print."""
  model, workdir, directory = _MODEL.value, _TO.value, _TO_HF.value
  if bool(workdir) == bool(directory):
    raise ValueError('give --to or --to_hf.')
  if _CHECK.value and directory and _FORMAT.value == 'compact':
    raise ValueError(
        "format is 'compact', which transformers cannot read; leave --check "
        "out or use 'dense'."
    )
  for name, needed in _NEEDED.items():
    if FLAGS[name].present and not FLAGS[needed].value:
      raise ValueError(
          f'{name} is given, which needs --{needed}; add it, or leave '
          f'--{name} out.'
      )
  is_hf = language_models.is_hf(pathlib.Path(model))
  if workdir and not is_hf:
    raise ValueError(
        f'model is {model!r}, which is no Hugging Face directory, as --to '
        'needs; give one, or --to_hf to export a run.'
    )
  if _ALLOW_NON_FINITE.value and not is_hf:
    raise ValueError(
        f'allow_non_finite is given, and model is {model!r}, a run; leave '
        '--allow_non_finite out.'
    )
  finite = dict(allow_non_finite=_ALLOW_NON_FINITE.value)
  how = dict(
      format=_FORMAT.value, dtype=_DTYPE.value, vocab_size=_VOCAB_SIZE.value
  )
  if workdir:
    yield import_model(model, workdir, scan_layers=_SCAN_LAYERS.value, **finite)
  elif is_hf:
    yield rewrite_model(model, directory, **how, **finite)
  else:
    yield export_model(model, directory, **how)
  if _CHECK.value:
    difference = interop.check_hf(directory or model, **finite)
    yield f'logits differ from those of transformers by {difference:.2g}'


def import_model(
    directory: str,
    workdir: str,
    *,
    scan_layers: bool,
    allow_non_finite: bool = False,
) -> str:
  """Writes a checkpoint, and the mask beside it; returns sentences."""
  workdirs.refuse_saved(workdir)
  loaded = interop.load_hf(directory, allow_non_finite=allow_non_finite)
  config = dataclasses.replace(loaded.config, scan_layers=scan_layers)
  params = loaded.params
  if scan_layers:
    params = interop.stack_layers(params)
  model = {'preset': _PRESETS[type(config)]} | dataclasses.asdict(config)
  masks = pathlib.Path(workdir, language_models.IMPORTED_MASKS)
  masks.parent.mkdir(parents=True, exist_ok=True)
  masks.unlink(missing_ok=True)
  if loaded.mask is not None:
    # Written before the checkpoint: a run that restores it without this file
    # would draw another mask.
    tensors.write_tensors(masks, trees.by_name(loaded.mask))
  copies = pathlib.Path(workdir, _TOKENIZER_COPY)
  shutil.rmtree(copies, ignore_errors=True)
  tokenizer = data.tokenizer_paths(directory)
  for path in tokenizer:
    copies.mkdir(exist_ok=True)
    with files.replacing(copies / path.name) as temporary:
      shutil.copyfile(path, temporary)
  checkpoint = checkpoint_files.write_params(
      workdir, params,
      {'model': model, **hf_directories.stated(directory)},
  )
  chosen = [f'--config.init_from={workdir}'] + [
      f'--config.model.{name}={model[name]}' for name in _MODEL_FLAGS
  ]
  text = f'{checkpoint} is written; train from it with {" ".join(chosen)}'
  preset = models.PRESETS[model['preset']]
  others = {
      name: value for name, value in dataclasses.asdict(config).items()
      if name not in _MODEL_FLAGS and value != getattr(preset, name)
  }
  if others:
    text += f' and, in the config, model.update({others})'
  if tokenizer:
    text += (
        '. Prepare the corpus with its tokenizer, by experiments.prepare '
        f'--tokenizer={directory}'
    )
  return f'{text}.'


def export_model(
    source: str,
    directory: str,
    *,
    format: str,
    dtype: str,
    vocab_size: int | None,
) -> str:
  """Writes a checkpoint, with its mask and tokenizer; returns a sentence."""
  def read(checkpoint):
    model, params = language_models.model_at(checkpoint)
    mask = language_models.mask_of(checkpoint, params)
    return checkpoint, workdirs.read_meta(checkpoint), model, params, mask

  checkpoint, meta, model, params, mask = workdirs.read_source(source, read)
  tokenizer = language_models.tokenizer_of(checkpoint, model.config.vocab_size)
  if tokenizer and vocab_size and vocab_size < tokenizer.vocab_size:
    raise ValueError(
        f'vocab_size is {vocab_size} and the tokenizer has '
        f'{tokenizer.vocab_size} tokens; keep at least as many.'
    )
  with tempfile.TemporaryDirectory() as folder:
    paths = data.tokenizer_paths(checkpoint.parents[1] / _TOKENIZER_COPY)
    if tokenizer is not None:
      paths = data.export_tokenizer(
          pathlib.Path(folder, 'tokenizer.json'), tokenizer
      )
    interop.save_hf(
        directory, model.config, params, mask, format=format, dtype=dtype,
        vocab_size=vocab_size, tokenizer=paths,
        **_stated_of(meta['config'], tokenizer),
    )
  best = early_stop.describe_best(meta, int(checkpoint.name))
  best_text = f', {best}' if best else ''
  mask_text = hf_directories.describe_mask(mask)
  return f'{directory} is written{best_text}; {mask_text}'


def rewrite_model(
    source: str,
    directory: str,
    *,
    format: str,
    dtype: str,
    vocab_size: int | None,
    allow_non_finite: bool = False,
) -> str:
  """Writes a Hugging Face directory from another; returns sentences."""
  hf_directories.check_other(source, directory, 'to_hf')
  loaded = interop.load_hf(source, allow_non_finite=allow_non_finite)
  return hf_directories.rewrite(
      loaded, source, directory, format=format, dtype=dtype,
      vocab_size=vocab_size,
  )


def _stated_of(
    config: Mapping[str, Any], tokenizer: data.Tokenizer | None
) -> dict[str, Any]:
  """Returns what an export states beside a checkpoint's model."""
  if tokenizer is None:
    names = ('end_of_text', 'begin_of_text', 'generation')
    return {name: config.get(name) for name in names}
  special = special_tokens.special_of(tokenizer)
  ends = list(special.ends)
  return {
      'end_of_text': ends[0] if len(ends) == 1 else ends,
      'begin_of_text': special.begin,
  }


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, convert)


if __name__ == '__main__':
  console.start(main, FLAGS)

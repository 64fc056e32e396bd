r"""Converts checkpoints: from and to Hugging Face, and from sparse to dense.

  python -m experiments.convert --from_hf=DIR --to=WORKDIR
  python -m experiments.convert --checkpoint=WORKDIR@pretrain --to_hf=DIR
  python -m experiments.convert --from_hf=DIR --to_hf=OTHER --format=compact
  python -m experiments.convert --from_hf=DIR --to=WORKDIR --prune=wanda:0.5 \
    --calibration=TEXT
  python -m experiments.convert --densify=WORKDIR@pretrain --to=OTHER
  python -m experiments.convert --verify=FOLDER

The first imports weights into a workdir that --config.init_from=WORKDIR reads,
and prints the flags that training needs. The second exports the weights
and the mask of a run, the third those of a Hugging Face directory, with its
tokenizer; without masks.safetensors the mask is derived from the zeros. --check
compares the logits with those of transformers.

--prune prunes imported weights in one shot: by magnitude, wanda or sparsegpt,
to a fraction of zeros, to N:M as in sparsegpt:2:4, or to fractions by patterns
of paths, wanda:PATTERN=0.5,PATTERN=0.75. It calibrates with the first sequences
of a text, and prints the perplexity of the text after them. Training from the
workdir keeps the zeros with the algorithm's init='nonzero'.

--densify makes a sparse checkpoint at the end of a phase dense: it removes the
mask and keeps weights, step, schedules and the optimizer's moments, which
--moments=reset initializes anew. The config that continues from it has the
same phases and a dense one after them, which the first launch need not have
had:

  python -m experiments.train --config=configs/quickstart.py --workdir=a \
    --config.phases.order="('pretrain',)"
  python -m experiments.convert --densify=a --to=b
  python -m experiments.train --config=configs/quickstart.py --workdir=c \
    --config.resume=b --config.phases.order="('pretrain', 'finetune')"

The result equals that of one launch of all phases whose `reset_moments` agrees
with --moments. A phase with the learning rate 'continue' changes the schedule
of the phase before it, so it must have been part of the first launch.

--verify converts nothing: it reads all checkpoints of a workdir, or a prepared
corpus, and compares them with the digests that were saved with them.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import os
import pathlib
import shutil
import tempfile
from typing import Any

from absl import flags
import jax

from experiments import pruning
from experiments.launch import console
from experiments.scores import language_models
from spdf_jax import data
from spdf_jax import files
from spdf_jax import interop
from spdf_jax import models
from spdf_jax.data import corpora
from spdf_jax.data import special_tokens
from spdf_jax.interop import configs
from spdf_jax.interop import tensors
from spdf_jax.sparsity import trees
from spdf_jax.training.checkpoints import densified
from spdf_jax.training.checkpoints import files as checkpoint_files
from spdf_jax.training.checkpoints import workdir as workdirs
from spdf_jax.training.configs import early_stop
from spdf_jax.training.loop import processes

_FROM_HF = flags.DEFINE_string(
    'from_hf', None, 'Directory to read: of a GPT-2, Llama, Mistral or Qwen.'
)
_TO = flags.DEFINE_string('to', None, 'Workdir to write the checkpoint to.')
_SCAN_LAYERS = flags.DEFINE_bool(
    'scan_layers', False, 'With --from_hf: write scanned (stacked) layers.'
)
_DENSIFY = flags.DEFINE_string(
    'densify', None, 'WORKDIR or WORKDIR@PHASE of a sparse run to make dense.'
)
_MOMENTS = flags.DEFINE_enum(
    'moments', 'keep', densified.MOMENTS,
    "With --densify: the optimizer's moments.",
)
_TRUST_CODE = flags.DEFINE_bool(
    'trust_code', False,
    'With --densify: run a user-defined algorithm that the checkpoint names.',
)
_VERIFY = flags.DEFINE_string(
    'verify', None, 'Workdir or prepared corpus to verify.'
)
_CHECKPOINT = flags.DEFINE_string(
    'checkpoint', None,
    'WORKDIR, WORKDIR@PHASE or WORKDIR@PHASE:best of a run to export.',
)
_TO_HF = flags.DEFINE_string('to_hf', None, 'Directory of the export.')
_FORMAT = flags.DEFINE_enum(
    'format', 'dense', list(tensors.FORMATS),
    'With --to_hf: compact omits the zeros; only spdf_jax reads it.',
)
_DTYPE = flags.DEFINE_enum(
    'dtype', 'float32', tensors.DTYPES,
    'With --to_hf: dtype of the exported weights.',
)
_VOCAB_SIZE = flags.DEFINE_integer(
    'vocab_size', None,
    'With --to_hf: tokens to keep, which removes rows of padding.',
)
_ALLOW_NON_FINITE = flags.DEFINE_bool(
    'allow_non_finite', False, 'With --from_hf: read infinite and NaN weights.'
)
_PRUNE = flags.DEFINE_string(
    'prune', None, 'With --from_hf: method and sparsity, as wanda:0.5.'
)
_CALIBRATION = flags.DEFINE_string(
    'calibration', None, 'With --prune: file of text.'
)
_SEQUENCES = flags.DEFINE_integer(
    'sequences', 128, 'With --prune: number of sequences to calibrate with.'
)
_CHECK = flags.DEFINE_bool(
    'check', False, 'Compare logits with transformers (must be installed).'
)


_NEEDED = {
    'format': ('to_hf',), 'dtype': ('to_hf',), 'vocab_size': ('to_hf',),
    'allow_non_finite': ('from_hf',), 'prune': ('from_hf',),
    'calibration': ('prune',), 'sequences': ('prune',),
    'check': ('from_hf', 'to_hf'), 'scan_layers': ('from_hf',),
    'moments': ('densify',), 'trust_code': ('densify',),
}
"""Flags that need one of others."""
_SIZES = (
    'vocab_size', 'n_layers', 'n_heads', 'd_model', 'd_ff', 'max_length'
)
_MODEL_FLAGS = ('preset', *_SIZES, 'scan_layers')
_PRESETS = {models.GPTConfig: 'gpt2-small', models.LlamaConfig: 'llama2-7b'}
"""A preset of each architecture; all sizes are overridden."""
_TOKENIZER_COPY = 'imported_tokenizer'
"""Folder in the workdir of an imported model, for its export."""


def convert() -> Iterator[str]:
  """Converts a model as the flags give it; yields sentences."""
  given = {
      flag.name for flag in (_FROM_HF, _CHECKPOINT, _DENSIFY, _TO, _TO_HF)
      if flag.value
  }
  if given not in (
      {'from_hf', 'to'}, {'checkpoint', 'to_hf'}, {'from_hf', 'to_hf'},
      {'densify', 'to'},
  ):
    raise ValueError(
        'give --from_hf and --to, or --checkpoint and --to_hf, or --from_hf '
        'and --to_hf, or --densify and --to.'
    )
  if _CHECK.value and _TO_HF.value and _FORMAT.value == 'compact':
    raise ValueError(
        "format is 'compact', which transformers cannot read; leave --check "
        "out or use 'dense'."
    )
  for name, needed in _NEEDED.items():
    if flags.FLAGS[name].present and not any(
        flags.FLAGS[other].value for other in needed
    ):
      raise ValueError(
          f'{name} is given, which needs --{" or --".join(needed)}; add it, or '
          f'leave --{name} out.'
      )
  prune = None
  if _PRUNE.value:
    processes.keep_freed_memory(largest=2**20)  # Not whole matrices.
    prune = pruning.pruner_of(
        _FROM_HF.value, _PRUNE.value, _CALIBRATION.value, _SEQUENCES.value
    )
  finite = dict(allow_non_finite=_ALLOW_NON_FINITE.value)
  how = dict(
      format=_FORMAT.value, dtype=_DTYPE.value, vocab_size=_VOCAB_SIZE.value
  )
  if given == {'from_hf', 'to'}:
    yield import_model(
        _FROM_HF.value, _TO.value, scan_layers=_SCAN_LAYERS.value, prune=prune,
        **finite,
    )
  elif given == {'densify', 'to'}:
    written = densified.densify_checkpoint(
        _DENSIFY.value, _TO.value, moments=_MOMENTS.value,
        trust_code=_TRUST_CODE.value,
    )
    yield f'{written} is written: dense, with moments: {_MOMENTS.value}'
  elif given == {'checkpoint', 'to_hf'}:
    yield export_model(_CHECKPOINT.value, _TO_HF.value, **how)
  else:
    yield rewrite_model(
        _FROM_HF.value, _TO_HF.value, prune=prune, **how, **finite
    )
  exchanged = _TO_HF.value or _FROM_HF.value
  if _CHECK.value and exchanged:
    difference = interop.check_hf(exchanged, **finite)
    yield f'logits differ from those of transformers by {difference:.2g}'


def import_model(
    directory: str,
    workdir: str,
    *,
    scan_layers: bool,
    allow_non_finite: bool = False,
    prune: pruning.Prune | None = None,
) -> str:
  """Writes a checkpoint, and the mask beside it; returns sentences."""
  workdirs.refuse_saved(workdir)
  loaded = interop.load_hf(directory, allow_non_finite=allow_non_finite)
  loaded, said = prune(loaded) if prune else (loaded, '')
  config = dataclasses.replace(loaded.config, scan_layers=scan_layers)
  params = loaded.params
  if scan_layers:
    params = interop.stack_layers(params)
  model = {'preset': _PRESETS[type(config)]} | dataclasses.asdict(config)
  masks = pathlib.Path(workdir, language_models.IMPORTED_MASKS)
  masks.parent.mkdir(parents=True, exist_ok=True)
  masks.unlink(missing_ok=True)
  if loaded.mask is not None:
    # Precedes the checkpoint, which would have another mask without the file.
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
      {'model': model, **_stated(directory)},
  )
  chosen = [f'--config.init_from={workdir}'] + [
      f'--config.model.{name}={model[name]}' for name in _MODEL_FLAGS
  ]
  text = f'{said}{checkpoint} is written; train from it with {" ".join(chosen)}'
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
  return f'{directory} is written{best_text}; {_describe_mask(mask)}'


def rewrite_model(
    source: str,
    directory: str,
    *,
    format: str,
    dtype: str,
    vocab_size: int | None,
    allow_non_finite: bool = False,
    prune: pruning.Prune | None = None,
) -> str:
  """Writes a Hugging Face directory from another; returns sentences."""
  old, new = pathlib.Path(source), pathlib.Path(directory)
  if old.resolve() == new.resolve():
    raise ValueError(
        f'from_hf and to_hf are both {directory}; give another directory to '
        'write.'
    )
  loaded = interop.load_hf(old, allow_non_finite=allow_non_finite)
  loaded, said = prune(loaded) if prune else (loaded, '')
  config, params, mask = loaded
  mask = interop.mask_of_zeros(params) if mask is None else mask
  interop.save_hf(
      new, config, params, mask, format=format, dtype=dtype,
      vocab_size=vocab_size,
      tokenizer=data.tokenizer_paths(old), **_stated(source),
  )
  return f'{said}{directory} is written; {_describe_mask(mask)}'


def _stated(directory: str) -> dict[str, Any]:
  """Returns what a directory's files state beside the model.

  Ids that begin and end a text, and other fields of generation_config.json.
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


def _describe_mask(mask: Any) -> str:
  leaves = jax.tree.leaves(mask)
  kept, size = sum(int(m.sum()) for m in leaves), sum(m.size for m in leaves)
  return (
      f'sparsity {1 - kept / size:.2%} in {len(leaves)} matrices'
      if size else 'no sparse matrices'
  )


def verify(folder: str | os.PathLike[str]) -> Iterator[str]:
  """Checks the digests of all checkpoints of a workdir, or of a corpus."""
  folder = pathlib.Path(folder).expanduser().absolute()
  if (folder / 'train.json').exists():
    corpus = corpora.verify_corpus(folder)
    yield f'{folder}: all {corpus.train.tokens.size:,} training tokens'
    return
  steps = workdirs.saved_steps(folder)
  if not steps:
    raise ValueError(
        f'{str(folder)!r} holds neither checkpoints nor a corpus; give the '
        'workdir of a run, or the output of experiments.prepare.'
    )
  damaged = []
  for step in steps:
    try:
      path = folder / 'checkpoints' / str(step)
      number = checkpoint_files.verify_checkpoint(path)
    except Exception as error:  # Damage may raise any exception.
      damaged.append(f'{step}: {str(error).splitlines()[0]}')
    else:
      yield f'checkpoint {step}: {number} arrays are what was saved'
  if damaged:
    raise ValueError(
        f'{len(damaged)} of {len(steps)} checkpoints in {str(folder)!r} are '
        f'not what was saved: {" ".join(damaged)}'
    )


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if _VERIFY.value:
    return console.run(argv, verify, _VERIFY.value)
  return console.run(argv, convert)


if __name__ == '__main__':
  console.start(main)

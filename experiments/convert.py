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

from absl import app
from absl import flags
from absl import logging

from experiments.launch import console
from spdf_jax import interop
from spdf_jax.interop.tensor_files import DTYPES
from spdf_jax.interop.tensor_files import FORMATS
from spdf_jax.runs import conversion
from spdf_jax.training.densified import densify_checkpoint
from spdf_jax.training.densified import MOMENTS

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
      print(conversion.import_model(
          _FROM_HF.value, _TO.value, scan_layers=_SCAN_LAYERS.value
      ))
    elif _DENSIFY.value:
      checkpoint = densify_checkpoint(
          _DENSIFY.value, _TO.value, moments=_MOMENTS.value
      )
      print(f'{checkpoint} is written: dense, with moments: {_MOMENTS.value}')
    else:
      print(conversion.export_model(
          _CHECKPOINT.value, _TO_HF.value, format=_FORMAT.value,
          dtype=_DTYPE.value, vocab_size=_VOCAB_SIZE.value,
      ))
    if _CHECK.value and not _DENSIFY.value:
      difference = interop.check_hf(_FROM_HF.value or _TO_HF.value)
      print(f'logits differ from those of transformers by {difference:.2g}')
  except (ValueError, OSError, ImportError) as error:
    # Bad input: the sentence says it all.
    logging.error('%s', error)
    return 1
  return 0


if __name__ == '__main__':
  app.run(main)

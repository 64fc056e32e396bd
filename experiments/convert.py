r"""Converts checkpoints: from and to Hugging Face, and from sparse to dense.

  python -m experiments.convert --from_hf=DIR --to=WORKDIR
  python -m experiments.convert --checkpoint=WORKDIR@pretrain --to_hf=DIR
  python -m experiments.convert --from_hf=DIR --to_hf=OTHER --format=compact
  python -m experiments.convert --densify=WORKDIR@pretrain --to=OTHER
  python -m experiments.convert --verify=FOLDER

The first imports weights into a workdir that --config.init_from=WORKDIR reads,
and prints the config.model that training needs. The second exports the weights
and the mask of a run, the third those of a Hugging Face directory, with its
tokenizer; without masks.safetensors the mask is derived from the zeros. --check
compares the logits with those of transformers.

--densify makes a sparse checkpoint at the end of a phase dense: it removes the
mask and keeps weights, step, schedules and the optimizer's moments, which
--moments=restart initializes anew. The config that continues from it has the
same phases and a dense one after them, which the first launch need not have
had:

  python -m experiments.train --config=C --workdir=a \
    --config.phases.order="('pretrain',)"
  python -m experiments.convert --densify=a --to=b
  python -m experiments.train --config=C --workdir=c --config.resume=b \
    --config.phases.order="('pretrain', 'more')"

The result equals that of one launch of all phases whose `restart` agrees with
--moments. A phase with the learning rate 'continue' changes the schedule of the
phase before it, so it must have been part of the first launch.

--verify converts nothing: it reads all checkpoints of a workdir, or a prepared
corpus, and compares them with the digests that were saved with them.
"""

from absl import flags

from experiments.launch import console
from spdf_jax.interop.tensor_files import DTYPES
from spdf_jax.interop.tensor_files import FORMATS
from spdf_jax.runs.conversion import convert
from spdf_jax.runs.verification import verify
from spdf_jax.training.densified import MOMENTS

_FROM_HF = flags.DEFINE_string(
    'from_hf', None, 'Directory of a GPT-2, Cerebras-GPT or Llama to read.'
)
_TO = flags.DEFINE_string('to', None, 'Workdir to write the checkpoint to.')
_SCAN_LAYERS = flags.DEFINE_bool(
    'scan_layers', False, 'With --from_hf: write scanned (stacked) layers.'
)
_DENSIFY = flags.DEFINE_string(
    'densify', None, 'WORKDIR or WORKDIR@PHASE of a sparse run to make dense.'
)
_MOMENTS = flags.DEFINE_enum(
    'moments', 'keep', MOMENTS, "With --densify: the optimizer's moments."
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
    'format', 'dense', list(FORMATS),
    'With --to_hf: compact omits the zeros; only spdf_jax reads it.',
)
_DTYPE = flags.DEFINE_enum(
    'dtype', 'float32', DTYPES, 'With --to_hf: dtype of the exported weights.'
)
_VOCAB_SIZE = flags.DEFINE_integer(
    'vocab_size', None,
    'With --to_hf: tokens to keep, which removes rows of padding.',
)
_ALLOW_NON_FINITE = flags.DEFINE_bool(
    'allow_non_finite', False, 'With --from_hf: read infinite and NaN weights.'
)
_CHECK = flags.DEFINE_bool(
    'check', False, 'Compare logits with transformers (must be installed).'
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if _VERIFY.value:
    return console.run(argv, verify, _VERIFY.value)
  return console.run(
      argv, convert, from_hf=_FROM_HF.value, checkpoint=_CHECKPOINT.value,
      densify=_DENSIFY.value, to=_TO.value, to_hf=_TO_HF.value,
      scan_layers=_SCAN_LAYERS.value, moments=_MOMENTS.value,
      format=_FORMAT.value, dtype=_DTYPE.value,
      vocab_size=_VOCAB_SIZE.value, check=_CHECK.value,
      allow_non_finite=_ALLOW_NON_FINITE.value,
      trust_code=_TRUST_CODE.value,
  )


if __name__ == '__main__':
  console.start(main)

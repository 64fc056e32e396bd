"""Compares checkpoints or a corpus with the digests that were saved with them.

  python -m experiments.verify --folder=runs/a

Reads all checkpoints of a workdir, or a prepared corpus, and changes nothing.
A checkpoint is read onto one device; with JAX_PLATFORMS=cpu that is the host.
"""

from collections.abc import Iterator
import os
import pathlib

from absl import flags

from experiments.launch import console
from spdf_jax.data import corpora
from spdf_jax.training.checkpoints import files as checkpoint_files
from spdf_jax.training.checkpoints import workdir as workdirs

FLAGS = flags.FlagValues()
_FOLDER = flags.DEFINE_string(
    'folder', None, 'Workdir, or prepared corpus.',
    required=True, flag_values=FLAGS,
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  return console.run(argv, verify, _FOLDER.value)


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


if __name__ == '__main__':
  console.start(main, FLAGS)

# SPDX-License-Identifier: Apache-2.0
"""Verification of what is on disk: checkpoints and corpora."""

from collections.abc import Iterator
import os
import pathlib

from spdf_jax.data.corpora import verify_corpus
from spdf_jax.training.checkpoint_files import verify_checkpoint
from spdf_jax.training.workdir import saved_steps


def verify(folder: str | os.PathLike[str]) -> Iterator[str]:
  """Reads all checkpoints of a workdir, or a corpus, and checks their digests.

  Args:
    folder: Working directory of a run, or folder of a prepared corpus.

  Yields:
    A sentence for each checkpoint or split that is what was saved.

  Raises:
    ValueError: Something is damaged; the message names all checkpoints that
      are. Or the folder is neither a workdir with checkpoints nor a corpus.
  """
  folder = pathlib.Path(folder).expanduser().absolute()
  if (folder / 'train.json').exists():
    corpus = verify_corpus(folder)
    yield f'{folder}: all {corpus.train.tokens.size:,} training tokens'
    return
  steps = saved_steps(folder)
  if not steps:
    raise ValueError(
        f'{str(folder)!r} holds neither checkpoints nor a corpus; give the '
        'workdir of a run, or the output of experiments.prepare.'
    )
  damaged = []
  for step in steps:
    try:
      number = verify_checkpoint(folder / 'checkpoints' / str(step))
    except Exception as error:  # Damage may raise any exception.
      damaged.append(f'{step}: {str(error).splitlines()[0]}')
    else:
      yield f'checkpoint {step}: {number} arrays are what was saved'
  if damaged:
    raise ValueError(
        f'{len(damaged)} of {len(steps)} checkpoints in {str(folder)!r} are '
        f'not what was saved: {" ".join(damaged)}'
    )

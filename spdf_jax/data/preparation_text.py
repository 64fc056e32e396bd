# SPDX-License-Identifier: Apache-2.0
"""The printed output of a preparation: a progress line and the corpus."""

from collections.abc import Callable
import time
from typing import TextIO

from spdf_jax.data.corpora import Corpus
from spdf_jax.data.corpora import SPLITS
from spdf_jax.data.unfinished import Progress
from spdf_jax.live_line import LiveLine


class ProgressLine:
  """A printer of the progress of a preparation.

  On a terminal and in a notebook one line is overwritten twice a second;
  elsewhere a new line is printed every ten seconds.

  Args:
    out: Output stream; `None`: stderr.
    clock: Monotonic clock, in seconds.
  """

  def __init__(
      self,
      out: TextIO | None = None,
      clock: Callable[[], float] = time.monotonic,
  ):
    self._line = LiveLine(out)
    self._clock = clock
    self._last = float('-inf')

  def __call__(self, progress: Progress) -> None:
    """Prints the progress if a line is due."""
    now = self._clock()
    if now - self._last < (0.5 if self._line.overwrites else 10):
      return
    self._last = now
    self._line.show(
        f'{progress.read / 1e6:,.0f} MB, {progress.tokens / 1e6:,.1f}M tokens,'
        f' {progress.files} of {progress.total_files} files,'
        f' {progress.seconds:,.0f} s'
    )


def format_corpus(corpus: Corpus, output: str) -> str:
  """Formats the sizes of a corpus' splits and the skipped documents.

  Args:
    corpus: A corpus that `prepare_files` has written.
    output: Folder of the corpus.

  Returns:
    One line for each split, one for each reason to skip documents, and one with
    the folder and the corpus' fingerprint.
  """
  lines = []
  for split in SPLITS:
    about = getattr(corpus, split).description
    lines.append(
        f'{split:<10} {about["documents"]:>10,} documents'
        f' {about["bytes"] / 1e6:>10,.2f} MB {about["tokens"]:>14,} tokens'
    )
  skipped = corpus.train.description['source']['skipped']
  lines += [f'skipped: {n:,} {reason}' for reason, n in skipped.items()]
  lines.append(f'{output} is written, fingerprint {corpus.fingerprint}')
  return '\n'.join(lines)

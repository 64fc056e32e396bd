"""Turns files of text into a corpus, or shows what a task holds.

  python -m experiments.prepare --input=books/ --tokenizer=bpe-8192 \
    --output=corpora/books

Reads text, JSON lines (also .zst), Parquet, Hugging Face datasets on disk and
nanoGPT's .bin; the tokenizer is learned (bpe-N), `bytes`, or a path to a
tokenizer.json, to GPT-2's vocabulary or to a model of sentencepiece. Killed,
it goes on where it was. Within a folder, files or folders whose name begins
with validation, valid, val, dev or test are that split. Train with
--config.data.corpus=./corpora/books --config.data.tokenizer=''.

  python -m experiments.prepare --task=e2e --input=DIR --dry_run

prints the sizes of a fine-tuning task's splits.
"""

import os
import sys
import time

from absl import app
from absl import flags
from absl import logging

from experiments.launch import console
from spdf_jax import data

_INPUT = flags.DEFINE_string('input', None, 'A file or folder to read.')
_TOKENIZER = flags.DEFINE_string(
    'tokenizer', None, 'bytes, bpe-N to learn one, or the path of one.'
)
_OUTPUT = flags.DEFINE_string('output', None, 'Where the corpus goes.')
_FIELD = flags.DEFINE_string('field', 'text', 'Field that holds the text.')
_VALIDATION = flags.DEFINE_float(
    'validation', 0.005,
    'Share of documents to validate on, where no file is named after it.',
)
_TEST = flags.DEFINE_float(
    'test', 0.005, 'Share of documents to test on, in the same way.'
)
_MAX_FAULTS = flags.DEFINE_float(
    'max_faults', 0.001, 'Largest share of faulty documents to leave out.'
)
_WORKERS = flags.DEFINE_integer(
    'workers', len(os.sched_getaffinity(0)), 'Processes that tokenize.'
)
_TASK = flags.DEFINE_string('task', None, 'A task instead of a corpus.')
_DRY_RUN = flags.DEFINE_bool(
    'dry_run', False, 'With --task: print the sizes of its splits.'
)


class _Line:
  """Rewrites one line on a terminal, now and then a new one elsewhere."""

  def __init__(self):
    self._last = 0.0
    self._terminal = sys.stderr.isatty()

  def __call__(self, progress: data.Progress) -> None:
    now = time.monotonic()
    if now - self._last < (0.5 if self._terminal else 10):
      return
    self._last = now
    print(
        f'{progress.read / 1e6:,.0f} MB, {progress.tokens / 1e6:,.1f}M tokens,'
        f' {progress.files} of {progress.total_files} files,'
        f' {progress.seconds:,.0f} s',
        end='\r' if self._terminal else '\n', file=sys.stderr, flush=True,
    )


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  console.prepare()
  try:
    if _TASK.value:
      print(data.format_sizes(data.load_task(_TASK.value, _INPUT.value)))
      return 0
    for flag in (_INPUT, _TOKENIZER, _OUTPUT):
      if not flag.value:
        raise app.UsageError(f'give --{flag.name}, or --task to see its sizes.')
    corpus = data.prepare_files(
        _INPUT.value,
        tokenizer=_TOKENIZER.value,
        output=_OUTPUT.value,
        field=_FIELD.value,
        validation=_VALIDATION.value,
        test=_TEST.value,
        max_faults=_MAX_FAULTS.value,
        workers=_WORKERS.value,
        report=_Line(),
    )
  except (ValueError, OSError, ImportError) as error:
    logging.error('%s', error)
    return 1
  for split in ('train', 'validation', 'test'):
    about = getattr(corpus, split).description
    print(
        f'{split:<10} {about["documents"]:>10,} documents'
        f' {about["bytes"] / 1e6:>10,.2f} MB {about["tokens"]:>14,} tokens'
    )
  for reason, count in corpus.train.description['source']['skipped'].items():
    print(f'left out: {count:,} {reason}')
  print(f'{_OUTPUT.value} is written, fingerprint {corpus.fingerprint}')
  return 0


if __name__ == '__main__':
  app.run(main)

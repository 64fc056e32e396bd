r"""Prepares a corpus from text files, or prints the sizes of a task's splits.

  python -m experiments.prepare --input=books/ --tokenizer=bpe-8192 \
    --output=corpora/books

Reads text and JSON lines (also .gz and .zst), Parquet, Hugging Face datasets on
disk and nanoGPT's .bin; --input=hf:PATH or hf:PATH,CONFIG, either with
@REVISION, streams a dataset of Hugging Face, and a URL streams a file. The
tokenizer is learned (bpe-N), `bytes`, or the path of a tokenizer.json, of
GPT-2's vocabulary or of a sentencepiece model. If killed, the same command
continues where it stopped. Files and folders of the input whose names begin
with validation, valid, val, dev or test are that split. Train on it with
--config.data.corpus=./corpora/books --config.data.tokenizer=''.

On n machines, start the same command with --shard=1/n to n/n, and when all have
ended, on one of them:

  python -m experiments.prepare --join --output=corpora/books

The corpus is token for token that of one machine.

To print the sizes of a fine-tuning task's splits:

  python -m experiments.prepare --task=e2e --input=DIR --dry_run
"""

from collections.abc import Callable
import os
import time
from typing import Any, TextIO

from absl import app
from absl import flags

from experiments import preparation
from experiments.launch import console
from spdf_jax import data
from spdf_jax.data import corpora
from spdf_jax.data import tasks
from spdf_jax.training.loop.progress import LiveLine

FLAGS = flags.FlagValues()
_INPUT = flags.DEFINE_string(
    'input', None, 'A file or folder to read.', flag_values=FLAGS
)
_TOKENIZER = flags.DEFINE_string(
    'tokenizer', None, 'bytes, bpe-N to learn a tokenizer, or a path.',
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    'output', None, 'Folder for the corpus.', flag_values=FLAGS
)
_FIELD = flags.DEFINE_string(
    'field', 'text', 'Field that holds the text.', flag_values=FLAGS
)
_VALIDATION = flags.DEFINE_float(
    'validation', 0.005,
    'Share of documents for validation, if no file is named for that split.',
    flag_values=FLAGS,
)
_TEST = flags.DEFINE_float(
    'test', 0.005,
    'Share of documents for testing, if no file is named for that split.',
    flag_values=FLAGS,
)
_MAX_FAULTS = flags.DEFINE_float(
    'max_faults', 0.001, 'Largest share of faulty documents that is skipped.',
    flag_values=FLAGS,
)
_WORKERS = flags.DEFINE_integer(
    'workers', len(os.sched_getaffinity(0)), 'Number of tokenizing processes.',
    flag_values=FLAGS,
)
_SPECIAL_TOKENS = flags.DEFINE_bool(
    'special_tokens', False,
    'Encode text that spells a special token as that token, not as text.',
    flag_values=FLAGS,
)
_SHARD = flags.DEFINE_string(
    'shard', None, 'Shard to prepare on this machine, i/n with i from 1 to n.',
    flag_values=FLAGS,
)
_JOIN = flags.DEFINE_bool(
    'join', False, 'Join the shards in --output, which are all prepared.',
    flag_values=FLAGS,
)
_TASK = flags.DEFINE_string(
    'task', None, 'Task to read instead of a corpus.', flag_values=FLAGS
)
_DRY_RUN = flags.DEFINE_bool(
    'dry_run', False, 'With --task: print the sizes of its splits.',
    flag_values=FLAGS,
)


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

  def __call__(self, progress: preparation.PreparationProgress) -> None:
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


def format_corpus(corpus: data.Corpus, output: str) -> str:
  """Formats the sizes of a corpus' splits and the skipped documents.

  Args:
    corpus: A corpus that `prepare_files` has written.
    output: Folder of the corpus.

  Returns:
    One line for each split, one for each reason to skip documents, one with the
    folder and the corpus' fingerprint, and the flags to train on it.
  """
  lines = []
  for split in corpora.SPLITS:
    about = getattr(corpus, split).description
    lines.append(
        f'{split:<10} {about["documents"]:>10,} documents'
        f' {about["bytes"] / 1e6:>10,.2f} MB {about["tokens"]:>14,} tokens'
    )
  skipped = corpus.train.description['source']['skipped']
  lines += [f'skipped: {n:,} {reason}' for reason, n in skipped.items()]
  lines.append(f'{output} is written, fingerprint {corpus.fingerprint}')
  # A name without a separator is that of a built-in corpus.
  folder = output if os.sep in output else os.path.join('.', output)
  lines.append(
      f"train on it with --config.data.corpus={folder} "
      "--config.data.tokenizer='' "
      f'--config.model.vocab_size={corpus.tokenizer.vocab_size}'
  )
  return '\n'.join(lines)


def prepare_shard(**arguments: Any) -> str:
  """Prepares the shard of the flags; returns a sentence with what is next."""
  done = preparation.prepare_shard(_INPUT.value, _SHARD.value, **arguments)
  if isinstance(done, data.Corpus):
    return (
        f'{_OUTPUT.value} is prepared already, with fingerprint'
        f' {done.fingerprint}'
    )
  left = ', '.join(map(str, done))
  following = f'{left} to go' if left else 'join the shards'
  return f'shard {_SHARD.value} is prepared; {following}'


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if _TASK.value:
    load = lambda: data.load_task(_TASK.value, _INPUT.value)
    return console.run(argv, lambda: tasks.format_sizes(load()))
  if _DRY_RUN.value:
    raise app.UsageError('--dry_run is for --task.')
  if _JOIN.value:
    if not _OUTPUT.value or _INPUT.value or _SHARD.value:
      raise app.UsageError('--join takes --output, the folder of the shards.')
    join = lambda: preparation.join_shards(
        _OUTPUT.value,
        max_faults=_MAX_FAULTS.value if _MAX_FAULTS.present else None,
    )
    return console.run(argv, lambda: format_corpus(join(), _OUTPUT.value))
  for flag in (_INPUT, _TOKENIZER, _OUTPUT):
    if not flag.value:
      raise app.UsageError(f'give --{flag.name}, or --task to see its sizes.')
  arguments = dict(
      tokenizer=_TOKENIZER.value, output=_OUTPUT.value, field=_FIELD.value,
      validation=_VALIDATION.value, test=_TEST.value,
      max_faults=_MAX_FAULTS.value, workers=_WORKERS.value,
      special_tokens=_SPECIAL_TOKENS.value, report=ProgressLine(),
  )
  if _SHARD.value:
    return console.run(argv, lambda: prepare_shard(**arguments))
  return console.run(argv, lambda: format_corpus(
      preparation.prepare_files(_INPUT.value, **arguments), _OUTPUT.value
  ))


if __name__ == '__main__':
  console.start(main, FLAGS)

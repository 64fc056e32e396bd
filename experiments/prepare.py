r"""Prepares a corpus from text files, or prints the sizes of a task's splits.

  python -m experiments.prepare --input=books/ --tokenizer=bpe-8192 \
    --output=corpora/books

Reads text, JSON lines (also .zst), Parquet, Hugging Face datasets on disk and
nanoGPT's .bin; --input=hf:PATH or hf:PATH,CONFIG, either with @REVISION,
streams a dataset of Hugging Face (extra stream). The tokenizer is learned
(bpe-N), `bytes`, or the path of a tokenizer.json, of GPT-2's vocabulary or of a
sentencepiece model. If killed, the same command continues where it stopped.
Files and folders of the input whose names begin with validation, valid, val,
dev or test are that split. Train on the corpus with
--config.data.corpus=./corpora/books --config.data.tokenizer=''.

On n machines, start the same command with --part=1/n to n/n, and when all have
ended, on one of them:

  python -m experiments.prepare --join --output=corpora/books

The corpus is token for token that of one machine.

To print the sizes of a fine-tuning task's splits:

  python -m experiments.prepare --task=e2e --input=DIR --dry_run
"""

import os

from absl import app
from absl import flags

from experiments.launch import console
from spdf_jax import data
from spdf_jax.data.preparation_text import format_corpus
from spdf_jax.data.preparation_text import ProgressLine

_INPUT = flags.DEFINE_string('input', None, 'A file or folder to read.')
_TOKENIZER = flags.DEFINE_string(
    'tokenizer', None, 'bytes, bpe-N to learn a tokenizer, or a path.'
)
_OUTPUT = flags.DEFINE_string('output', None, 'Folder for the corpus.')
_FIELD = flags.DEFINE_string('field', 'text', 'Field that holds the text.')
_VALIDATION = flags.DEFINE_float(
    'validation', 0.005,
    'Share of documents for validation, if no file is named for that split.',
)
_TEST = flags.DEFINE_float(
    'test', 0.005,
    'Share of documents for testing, if no file is named for that split.',
)
_MAX_FAULTS = flags.DEFINE_float(
    'max_faults', 0.001, 'Largest share of faulty documents that is skipped.'
)
_WORKERS = flags.DEFINE_integer(
    'workers', len(os.sched_getaffinity(0)), 'Number of tokenizing processes.'
)
_SPECIAL_TOKENS = flags.DEFINE_bool(
    'special_tokens', False,
    'Encode text that spells a special token as that token, not as text.',
)
_PART = flags.DEFINE_string(
    'part', None, 'Part to prepare on this machine, i/n with i from 1 to n.'
)
_JOIN = flags.DEFINE_bool(
    'join', False, 'Join the parts in --output, which are all prepared.'
)
_TASK = flags.DEFINE_string('task', None, 'Task to read instead of a corpus.')
_DRY_RUN = flags.DEFINE_bool(
    'dry_run', False, 'With --task: print the sizes of its splits.'
)


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit status."""
  if _TASK.value:
    load = lambda: data.load_task(_TASK.value, _INPUT.value)
    return console.run(argv, lambda: data.format_sizes(load()))
  if _DRY_RUN.value:
    raise app.UsageError('--dry_run is for --task.')
  if _JOIN.value:
    if not _OUTPUT.value or _INPUT.value or _PART.value:
      raise app.UsageError('--join takes --output, the folder of the parts.')
    join = lambda: data.join_parts(_OUTPUT.value)
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
  if _PART.value:
    return console.run(
        argv, data.prepare_part, _INPUT.value, _PART.value, **arguments
    )
  return console.run(argv, lambda: format_corpus(
      data.prepare_files(_INPUT.value, **arguments), _OUTPUT.value
  ))


if __name__ == '__main__':
  console.start(main)

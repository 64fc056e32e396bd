"""Preparation of token files from documents: parallel and resumable."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import os
from pathlib import Path
import time
from typing import Any

from experiments.preparation import documents
from experiments.preparation import encoding
from experiments.preparation import inputs
from experiments.preparation import shards
from experiments.preparation import splits
from experiments.preparation import state
from experiments.preparation.documents import Skipped
from experiments.preparation.encoding import DocumentBatch
from experiments.preparation.shards import FilePart
from experiments.preparation.shards import Shard
from experiments.preparation.state import PreparationProgress
from experiments.preparation.state import Unfinished
from spdf_jax.data import corpora
from spdf_jax.data import tokenizer_files
from spdf_jax.data import tokenizers
from spdf_jax.data.corpora import Corpus
from spdf_jax.data.tokenizers import Tokenizer
from spdf_jax.files import refuse_url

_RECIPE_VERSION = 2
Read = Callable[..., Iterator[documents.Piece | Skipped]]
_BATCH = 1 << 20  # Characters encoded together.
_SAVE_EVERY = 1 << 26  # Bytes of text between states on disk.
_LEARN_FROM = 10**8  # Characters that a tokenizer is learned on.
_SMALL = 10**8  # Bytes up to which splits are checked for being empty.


def prepare_files(
    input: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str],
    output: str | os.PathLike[str],
    field: str = 'text',
    validation: float = 0.005,
    test: float = 0.005,
    max_faults: float = 0.001,
    workers: int = 1,
    special_tokens: bool = False,
    report: Callable[[PreparationProgress], None] = lambda progress: None,
) -> Corpus:
  """Tokenizes files into a corpus that `open_corpus` opens.

  A text file is one document; in other files a document is a line, a row, or
  the tokens up to an end of text. The split of a document is given by the name
  of its file or folder within `input`, if that begins with validation, valid,
  val, dev or test, and otherwise by a hash of its text (or the beginning of a
  long text). The end-of-text token is appended to every document. Progress is
  saved every 64 MiB of text or 30 seconds; after a kill, the same call
  continues from there and gives the same files.

  Args:
    input: A folder or file of text (`.txt`, `.md`) or JSON lines (`.jsonl`),
      also with `.gz` or `.zst` appended, `.parquet`, `.arrow`, or token ids of
      nanoGPT or llm.c (`.bin`); a dataset of `save_to_disk`; or, to stream it,
      the URL of a file, or `'hf:PATH[,CONFIG][@REVISION]'`, a dataset of the
      Hugging Face hub.
    tokenizer: `'bytes'`, `'bpe-N'` (N tokens learned on the training
      documents, at most the first 10^8 characters), or a path that
      `open_tokenizer` reads.
    output: Folder to write, not a URL; created if missing. If it is within
      `input`, its files are not read.
    field: Name of the field or column with the text.
    validation: Share of documents for validation, in [0, 1); not used if a file
      is named after that split. An input of at most 100 MB has at least
      one document for it.
    test: Share of documents for testing, in the same way.
    max_faults: Largest share of faulty documents (broken UTF-8, not a JSON
      object, no text), in [0, 1); they are skipped.
    workers: Number of processes that tokenize.
    special_tokens: Whether text that spells a special token, such as
      `'<|endoftext|>'`, is encoded as that token, as transformers does, see
      `with_special_tokens`.
    report: Function called with the progress after every batch of documents;
      by default nothing is reported.

  Returns:
    The corpus.

  Raises:
    ImportError: a library of the extra `prepare` or `data` is missing.
    OSError: `output` cannot be written.
    ValueError: an argument or the input is not valid, `output` holds another
      corpus, or another process writes to it.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'a.jsonl').write_text(
    ...     ''.join(f'{{"text": "Text {i}."}}\\n' for i in range(100)))
    >>> corpus = prepare_files(folder, tokenizer='bytes',
    ...     output=folder / 'out', validation=0.1, test=0.1)
    >>> files = corpus.train, corpus.validation, corpus.test
    >>> sum(file.description['documents'] for file in files)
    100
  """
  done = _tokenize(
      input, None, tokenizer=tokenizer, output=output, field=field,
      validation=validation, test=test, max_faults=max_faults, workers=workers,
      special_tokens=special_tokens, report=report,
  )
  if isinstance(done, Corpus):
    return done
  work, made_with = done
  return work.finish(made_with)


def prepare_shard(
    input: str | os.PathLike[str], shard: str, **arguments: Any
) -> Corpus | list[Shard]:
  """Tokenizes one of n shards of an input, for `join_shards`.

  The files, one after another, are cut into n ranges of about equal size. Cuts
  are at line breaks in uncompressed files of JSON lines; other files, and those
  of a data set that is streamed, stay whole. Every shard has a folder of its
  own in `output/partial`, so that machines that share `output` can prepare
  shards at the same time; if they do not share it, copy these folders into one
  `output/partial` before joining. With a tokenizer `'bpe-N'`, every shard
  learns it again, from the same documents. After a kill, the same call
  continues.

  Args:
    input: Argument of `prepare_files`, the same for all shards.
    shard: Shard to prepare, `'i/n'` with i from 1 to n.
    **arguments: Other arguments of `prepare_files`, the same for all shards.

  Returns:
    The shards that are not finished yet; the corpus, if it was joined before.

  Raises:
    ImportError: a library of the extra `prepare` or `data` is missing.
    OSError: `output` cannot be written.
    ValueError: an argument or the input is not valid, another process prepares
      this shard, or `output` holds another corpus or another division.

  Example:
    >>> import tempfile
    >>> from experiments.preparation import join_shards
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / 'a.jsonl').write_text(
    ...     ''.join(f'{{"text": "Text {i}."}}\\n' for i in range(100)))
    >>> settings = dict(tokenizer='bytes', output=folder / 'out',
    ...     validation=0.1, test=0.1)
    >>> for shard in ('1/2', '2/2'):
    ...   _ = prepare_shard(folder, shard, **settings)
    >>> join_shards(folder / 'out').train.tokens.size > 0
    True
  """
  parsed = shards.parse_shard(shard)
  done = _tokenize(input, parsed, **arguments)
  if isinstance(done, Corpus):
    return done
  work, _ = done
  work.finish_shard()
  return shards.unfinished_shards(arguments['output'], parsed.total)


def _tokenize(
    input: str | os.PathLike[str],
    shard: Shard | None,
    *,
    tokenizer: str | os.PathLike[str],
    output: str | os.PathLike[str],
    field: str = 'text',
    validation: float = 0.005,
    test: float = 0.005,
    max_faults: float = 0.001,
    workers: int = 1,
    special_tokens: bool = False,
    report: Callable[[PreparationProgress], None] = lambda progress: None,
) -> Corpus | tuple[Unfinished, Tokenizer]:
  """Tokenizes the documents of an input, or of a shard of it.

  Returns the corpus, if it was finished before; otherwise what is to be
  finished, all of whose documents are tokenized, and the tokenizer.
  """
  _check(validation, test, max_faults, workers)
  refuse_url(output, 'output')
  output = Path(output).expanduser()
  root = Path(input).expanduser()
  files = [f for f in inputs.list_inputs(input) if not _within(f, output)]
  made_from: dict[str, Any] = {
      'recipe': _RECIPE_VERSION,
      'corpus': output.name,
      'inputs': inputs.describe_inputs(files, root),
      'field': field,
      'shares': {'validation': validation, 'test': test},
      'tokenizer': _identify(tokenizer, special_tokens),
  }
  if (output / 'train.json').exists() and not (output / 'partial').exists():
    return _already_there(output, made_from)
  shards.check_shards(output, shard)
  modified = inputs.modification_times(files)
  if shard is None:
    work = Unfinished(output, made_from, modified)
    spans = [FilePart(file) for file in files]
  else:
    work = Unfinished(
        output, made_from | {'shard': str(shard)}, modified, shard.folder
    )
    work.state['max_faults'] = max_faults
    sizes = [inputs.size_of(file) for file in files]
    spans = shards.spans_of(files, sizes, shard)
  # One text has no documents to validate on unless it is cut.
  cut = len(files) == 1 and inputs.is_text(files[0])
  read = functools.partial(inputs.read_documents, field=field, cut=cut)
  assigned = _choose_splits(files, root, read, validation, test)

  def make():
    made = _make_tokenizer(tokenizer, files, read, assigned)
    return tokenizers.with_special_tokens(made) if special_tokens else made

  encoder = work.tokenizer(make)
  read = functools.partial(
      read, end_of_text=encoder.end_of_text, vocab_size=encoder.vocab_size
  )
  started = last_saved = time.monotonic()
  unsaved = 0
  batches = _batches(
      spans, read, assigned, max_faults, work.state['position'],
      whole=shard is None,
  )
  for batch, encoded in encoding.encode_batches(
      batches, work.tokenizer_path, workers
  ):
    unsaved += work.append(encoded, batch.position)
    now = time.monotonic()
    if unsaved > _SAVE_EVERY or now - last_saved > 30:
      work.save()
      unsaved, last_saved = 0, now
    report(work.progress(len(spans), now - started))
  work.save()
  return work, encoder


def _check(
    validation: float, test: float, max_faults: float, workers: int
) -> None:
  for name, share in (
      ('validation', validation), ('test', test), ('max_faults', max_faults)
  ):
    if not 0 <= share < 1:
      raise ValueError(
          f'{name}={share} is not a share; give a number in [0, 1).'
      )
  if not 0 < validation + test < 1:
    raise ValueError(
        f'validation={validation} and test={test} leave nothing to validate'
        ' or to train on; give shares with a sum above 0 and below 1.'
    )
  if workers < 1:
    raise ValueError(f'workers={workers} is not positive; use 1 or more.')


def _within(file: Path, folder: Path) -> bool:
  return folder.resolve() in file.resolve().parents


def _identify(tokenizer: str | os.PathLike[str], special_tokens: bool) -> str:
  """Identifies a tokenizer, independent of its path.

  Raises ValueError if it has no special tokens and needs them.
  """
  name = str(tokenizer)
  known = tokenizers.tokenizer_maker(name) is not None
  if not special_tokens:
    return name if known else tokenizer_files.open_tokenizer(
        tokenizer
    ).fingerprint
  if known and name != 'bytes':
    return f'{name}, special tokens'
  opened = tokenizers.ByteTokenizer(
      ) if known else tokenizer_files.open_tokenizer(tokenizer)
  return tokenizers.with_special_tokens(opened).fingerprint


def _choose_splits(
    files: list[Path], root: Path, read: Read, validation: float, test: float
) -> splits.Splits:
  small = (
      all(file.is_file() and file.suffix != '.bin' for file in files)
      and sum(file.stat().st_size for file in files) <= _SMALL
  )
  named = splits.name_splits(files, root) if root not in files else {}
  return splits.choose_splits(
      files, named, read if small else None, validation=validation, test=test
  )


def _make_tokenizer(
    tokenizer: str | os.PathLike[str],
    files: Sequence[Path],
    read: Read,
    assigned: splits.Splits,
) -> Tokenizer:
  make = tokenizers.tokenizer_maker(str(tokenizer))
  if make is None:
    return tokenizer_files.open_tokenizer(tokenizer)

  def texts() -> Iterator[str]:
    seen, split = 0, None
    for file in files:
      for item in read(file):
        if not isinstance(item, documents.Piece):
          continue
        if not isinstance(item.content, str):
          raise ValueError(
              f'{file} holds tokens, so no tokenizer can be learned on it;'
              ' give the tokenizer that made them.'
          )
        split = split or assigned.split_of(file, item)
        if split == 'train':
          yield item.content
          seen += len(item.content)
        if item.last:
          split = None
        if seen > _LEARN_FROM:
          return

  return make(texts())


def _batches(
    spans: Sequence[FilePart],
    read: Read,
    assigned: splits.Splits,
    max_faults: float,
    position: Mapping[str, Any],
    *,
    whole: bool,
) -> Iterator[DocumentBatch]:
  """Groups pieces into batches; their positions are those of the next ones."""
  skipped = Counter(position['skipped'])
  count, split = position['documents'], position['split']
  pieces, size, last_skipped = [], 0, None
  for number in range(position['file'], len(spans)):
    already = position['items'] if number == position['file'] else 0
    file, start, stop = spans[number]
    items = read(file, start=start, stop=stop)
    for taken, item in enumerate(items, start=1):
      if taken <= already:
        continue
      if isinstance(item, Skipped):
        skipped[item.reason] += 1
        last_skipped = item
        documents.check_faults(skipped, count, max_faults, item, done=False)
      else:
        split = split or assigned.split_of(file, item)
        pieces.append((split, item))
        size += len(item.content)
        count += item.last
        split = None if item.last else split
      if size >= _BATCH:
        yield DocumentBatch(pieces, dict(
            file=number, items=taken, skipped=dict(skipped),
            documents=count, split=split,
        ))
        pieces, size = [], 0
    yield DocumentBatch(pieces, dict(
        file=number + 1, items=0, skipped=dict(skipped), documents=count,
        split=split,
    ))
    pieces, size = [], 0
  documents.check_faults(skipped, count, max_faults, last_skipped, done=whole)


def _already_there(output: Path, made_from: dict[str, Any]) -> Corpus:
  state.remove_leftover(output)
  corpus = corpora.open_corpus(output)
  source = {
      k: v for k, v in corpus.train.description['source'].items()
      if k in made_from
  }
  if source != made_from:
    raise ValueError(
        f'output={str(output)!r} holds a corpus that was prepared differently'
        f' (other {state.differences(source, made_from)}); give another folder,'
        ' or delete this one.'
    )
  return corpus

# SPDX-License-Identifier: Apache-2.0
"""Preparation of token files from text: streamed, parallel and resumable."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import hashlib
import os
from pathlib import Path
import time
from typing import Any

from spdf_jax.data.corpora import Corpus
from spdf_jax.data.corpora import open_corpus
from spdf_jax.data.documents import list_inputs
from spdf_jax.data.documents import read_documents
from spdf_jax.data.encoding import Batch
from spdf_jax.data.encoding import encode_batches
from spdf_jax.data.pieces import EMPTY
from spdf_jax.data.pieces import Piece
from spdf_jax.data.pieces import Skipped
from spdf_jax.data.shares import check_parts
from spdf_jax.data.shares import Part
from spdf_jax.data.shares import Span
from spdf_jax.data.shares import spans_of
from spdf_jax.data.splits import choose_splits
from spdf_jax.data.splits import name_splits
from spdf_jax.data.splits import Splits
from spdf_jax.data.streams import identify_stream
from spdf_jax.data.streams import is_stream
from spdf_jax.data.tokenizer_files import open_tokenizer
from spdf_jax.data.tokenizers import ByteTokenizer
from spdf_jax.data.tokenizers import Tokenizer
from spdf_jax.data.tokenizers import tokenizer_maker
from spdf_jax.data.tokenizers import with_special_tokens
from spdf_jax.data.unfinished import differences
from spdf_jax.data.unfinished import Progress
from spdf_jax.data.unfinished import remove_leftover
from spdf_jax.data.unfinished import Unfinished
from spdf_jax.files import refuse_url

_RECIPE_VERSION = 2
_BATCH = 1 << 20  # Characters encoded together.
_SAVE_EVERY = 1 << 26  # Bytes of text between states on disk.
_LEARN_FROM = 10**8  # Characters that a tokenizer is learned on.
_FEW = 1000  # Documents before the share of faults is checked.
_SMALL = 10**8  # Bytes up to which splits are checked for being empty.
_PROBE = 1 << 20  # Bytes at both ends of a file that identify it.

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
    report: Callable[[Progress], None] = lambda progress: None,
) -> Corpus:
  """Tokenizes files into a corpus that `open_corpus` opens.

  The split of a document is given by the name of its file or folder within
  `input`, if that begins with validation, valid, val, dev or test, and
  otherwise by a hash of its text (or the beginning of a long text). Every
  document ends with the end of text. Progress is saved every 64 MiB of text or
  30 seconds; after a kill, the same call continues from there and gives the
  same files.

  Args:
    input: A file or folder, as `list_inputs` and `read_documents` take it, or
      `'hf:PATH,CONFIG'`, either with `@REVISION`, to stream a dataset of
      Hugging Face.
    tokenizer: `'bytes'`, `'bpe-N'` (N tokens learned on the training
      documents, at most the first 10^8 characters), or a path that
      `open_tokenizer` reads.
    output: Folder to write; created if missing. If it is within `input`, its
      files are not read.
    field: Name of the field or column with the text.
    validation: Share of validation documents, if no file is named after that
      split; at least one document of a small input.
    test: Share of test documents, in the same way.
    max_faults: Largest share of faulty documents (broken UTF-8, not a JSON
      object, no text, a line above 64 MiB), which are skipped.
    workers: Number of processes that tokenize.
    special_tokens: Whether text that spells a special token is encoded as that
      token, as by other tokenizers, see `with_special_tokens`.
    report: Function called with the progress after every batch.

  Returns:
    The corpus.

  Raises:
    ImportError: A library of the extra `prepare` is missing.
    ValueError: An argument or the input is not valid, or `output` holds
      another corpus.

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
  done = prepare(
      input, None, tokenizer=tokenizer, output=output, field=field,
      validation=validation, test=test, max_faults=max_faults, workers=workers,
      special_tokens=special_tokens, report=report,
  )
  if isinstance(done, Corpus):
    return done
  work, made_with = done
  return work.finish(made_with)


def prepare(
    input: str | os.PathLike[str],
    part: Part | None,
    *,
    tokenizer: str | os.PathLike[str],
    output: str | os.PathLike[str],
    field: str = 'text',
    validation: float = 0.005,
    test: float = 0.005,
    max_faults: float = 0.001,
    workers: int = 1,
    special_tokens: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Corpus | tuple[Unfinished, Tokenizer]:
  """Tokenizes an input, or a part of it, as `prepare_files` and `prepare_part`.

  Args:
    input: Argument of `prepare_files`, as are all others but `part`.
    part: The part; `None`: the whole input.
    tokenizer: Argument of `prepare_files`.
    output: Argument of `prepare_files`.
    field: Argument of `prepare_files`.
    validation: Argument of `prepare_files`.
    test: Argument of `prepare_files`.
    max_faults: Argument of `prepare_files`.
    workers: Argument of `prepare_files`.
    special_tokens: Argument of `prepare_files`.
    report: Argument of `prepare_files`.

  Returns:
    The corpus, if it was finished before; otherwise what is to be finished, all
    of whose documents are tokenized, and the tokenizer.

  Raises:
    ImportError: A library of the extra `prepare` is missing.
    ValueError: An argument or the input is not valid, or `output` holds
      another corpus, or other parts.
  """
  _check(validation, test, max_faults, workers)
  refuse_url(output, 'output')
  output = Path(output).expanduser()
  if part is not None and is_stream(Path(input)):
    raise ValueError(
        f'part={part} of input={str(input)!r}: a stream is not divided into'
        ' parts; download the files, or prepare it on one machine.'
    )
  files = [f for f in list_inputs(input) if not _within(f, output)]
  made_from: dict[str, Any] = {
      'recipe': _RECIPE_VERSION,
      'corpus': output.name,
      'inputs': _describe(files, Path(input).expanduser()),
      'field': field,
      'shares': {'validation': validation, 'test': test},
      'tokenizer': _identify(tokenizer, special_tokens),
  }
  if (output / 'train.json').exists() and not (output / 'partial').exists():
    return _already_there(output, made_from)
  check_parts(output, part)
  if part is None:
    work = Unfinished(output, made_from)
    spans = [Span(file) for file in files]
  else:
    work = Unfinished(output, made_from | {'part': str(part)}, part.folder)
    work.state['max_faults'] = max_faults
    sizes = [size for _, size, _ in made_from['inputs']]
    spans = spans_of(files, sizes, part)
  splits = _choose_splits(files, Path(input), field, validation, test)

  def make():
    made = _make_tokenizer(tokenizer, files, field, splits)
    return with_special_tokens(made) if special_tokens else made

  encoder = work.tokenizer(make)
  end = encoder.end_of_text
  started = last_saved = time.monotonic()
  unsaved = 0
  batches = _batches(
      spans, field, end, splits, max_faults, work.state['position'],
      whole=part is None,
  )
  for batch, encoded in encode_batches(batches, work.tokenizer_path, workers):
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


def _describe(files: list[Path], root: Path) -> list[list[Any]]:
  """Identifies inputs by name, size and a hash of both ends of each file."""
  described = []
  for file in files:
    if is_stream(file):
      described.append(identify_stream(file))
      continue
    digest, size = hashlib.sha256(), 0
    for part in sorted(file.glob('*.arrow')) if file.is_dir() else [file]:
      length = part.stat().st_size
      size += length
      with part.open('rb') as opened:
        digest.update(opened.read(_PROBE))
        opened.seek(max(length - _PROBE, 0))
        digest.update(opened.read(_PROBE))
    name = file.name if file == root else file.relative_to(root).as_posix()
    described.append([name, size, digest.hexdigest()])
  return described


def _identify(tokenizer: str | os.PathLike[str], special_tokens: bool) -> str:
  """Identifies a tokenizer, independent of its path.

  Raises ValueError if it has no special tokens and needs them.
  """
  name = str(tokenizer)
  known = tokenizer_maker(name) is not None
  if not special_tokens:
    return name if known else open_tokenizer(tokenizer).fingerprint
  if known and name != 'bytes':
    return f'{name}, special tokens'
  found = ByteTokenizer() if known else open_tokenizer(tokenizer)
  return with_special_tokens(found).fingerprint


def _choose_splits(
    files: list[Path], root: Path, field: str, validation: float, test: float
) -> Splits:
  root = root.expanduser()
  small = (
      all(file.is_file() and file.suffix != '.bin' for file in files)
      and sum(file.stat().st_size for file in files) <= _SMALL
  )
  read = functools.partial(read_documents, field=field) if small else None
  named = name_splits(files, root) if root not in files else {}
  return choose_splits(files, named, read, validation=validation, test=test)


def _make_tokenizer(
    tokenizer: str | os.PathLike[str],
    files: Sequence[Path],
    field: str,
    splits: Splits,
) -> Tokenizer:
  make = tokenizer_maker(str(tokenizer))
  if make is None:
    return open_tokenizer(tokenizer)

  def texts() -> Iterator[str]:
    seen, split = 0, None
    for file in files:
      for item in read_documents(file, field=field):
        if not isinstance(item, Piece):
          continue
        if not isinstance(item.content, str):
          raise ValueError(
              f'{file} holds tokens, so no tokenizer can be learned on it;'
              ' give the tokenizer that made them.'
          )
        split = split or splits.split_of(file, item)
        if split == 'train':
          yield item.content
          seen += len(item.content)
        if item.last:
          split = None
        if seen > _LEARN_FROM:
          return

  return make(texts())


def _batches(
    spans: Sequence[Span],
    field: str,
    end: int,
    splits: Splits,
    max_faults: float,
    position: Mapping[str, Any],
    *,
    whole: bool,
) -> Iterator[Batch]:
  """Groups pieces into batches; their positions are those of the next ones."""
  skipped = Counter(position['skipped'])
  documents, split = position['documents'], position['split']
  pieces, size, last_skipped = [], 0, None
  for number in range(position['file'], len(spans)):
    already = position['items'] if number == position['file'] else 0
    file, start, stop = spans[number]
    items = read_documents(
        file, field=field, end_of_text=end, start=start, stop=stop
    )
    for count, item in enumerate(items, start=1):
      if count <= already:
        continue
      if isinstance(item, Skipped):
        skipped[item.reason] += 1
        last_skipped = item
        check_faults(skipped, documents, max_faults, item, done=False)
      else:
        split = split or splits.split_of(file, item)
        pieces.append((split, item))
        size += len(item.content)
        documents += item.last
        split = None if item.last else split
      if size >= _BATCH:
        yield Batch(pieces, dict(
            file=number, items=count, skipped=dict(skipped),
            documents=documents, split=split,
        ))
        pieces, size = [], 0
    yield Batch(pieces, dict(
        file=number + 1, items=0, skipped=dict(skipped), documents=documents,
        split=split,
    ))
    pieces, size = [], 0
  check_faults(skipped, documents, max_faults, last_skipped, done=whole)


def check_faults(
    skipped: Mapping[str, int],
    documents: int,
    max_faults: float,
    item: Skipped | None,
    *,
    done: bool,
) -> None:
  """Checks the share of faulty documents among those read so far.

  Args:
    skipped: Numbers of skipped documents, by reason.
    documents: Number of documents that were not skipped.
    max_faults: Largest share of faulty documents.
    item: The last skipped document, for the error message.
    done: Whether all documents are read; before, a share of few documents is
      not checked.

  Raises:
    ValueError: The share is exceeded.
  """
  faults = {k: n for k, n in skipped.items() if k != EMPTY}
  bad = sum(faults.values())
  total = documents + bad
  if bad > max_faults * total and (done or total >= _FEW):
    counts = ', '.join(f'{n} {reason}' for reason, n in faults.items())
    at = f', the last at {item.where}' if item else ''
    raise ValueError(
        f'{bad} of {total} documents are faulty ({counts}{at}), more than'
        f' max_faults={max_faults} allows; repair the input or raise'
        ' max_faults.'
    )


def _already_there(output: Path, made_from: dict[str, Any]) -> Corpus:
  remove_leftover(output)
  corpus = open_corpus(output)
  found = {
      k: v for k, v in corpus.train.description['source'].items()
      if k in made_from
  }
  if found != made_from:
    raise ValueError(
        f'output={str(output)!r} holds a corpus of other'
        f' {differences(found, made_from)}; give another folder, or delete'
        ' this one.'
    )
  return corpus

"""Inputs: files, datasets on disk, and streams that `datasets` reads.

The library `datasets` also reads JSON lines, Zstandard and Parquet, but not as
this needs, so that `documents` does, with pyarrow: its JSON reader stops at the
first faulty line, its Zstandard reader takes a truncated file for a whole one,
and its Parquet reader holds a row group.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import hashlib
import logging
import os
from pathlib import Path
import re
from typing import Any
import urllib.parse

from experiments.preparation import documents
from experiments.preparation.documents import Piece
from experiments.preparation.documents import Skipped
from spdf_jax import extras
from spdf_jax import names
from spdf_jax.files import is_url
from spdf_jax.files import reading

logger = logging.getLogger('spdf_jax')

_NAMED = 3  # Files of an input that are named, of those that are not read.
_HUB = 'hf:'  # Beginning of an input that names a dataset, not a file.
_SAMPLES, _SAMPLE = 256, 1 << 16  # Number and bytes that identify a file.

_BUILDERS = {
    '.jsonl': 'json', '.txt': 'text', '.md': 'text', '.parquet': 'parquet',
    '.arrow': 'arrow',
}
"""Builders of `datasets` for the files behind URLs."""


def is_stream(path: Path) -> bool:
  """Returns whether an input is read from elsewhere than this file system.

  Example:
    >>> [is_stream(Path(name)) for name in (
    ...     'hf:owner/name', 'https://a.org/b.jsonl.gz', 'a/hf:b')]
    [True, True, False]
  """
  return str(path).startswith(_HUB) or is_url(path)


def list_inputs(path: str | os.PathLike[str]) -> list[Path]:
  """Lists the files of a corpus, in a fixed order.

  Args:
    path: A file, a Hugging Face dataset on disk, or a folder of files; or, to
      stream it, the URL of a file, or `'hf:PATH'` or `'hf:PATH,CONFIG'`, either
      also with `'@REVISION'`, where PATH is a dataset of the hub or a folder,
      and all parts are arguments of `datasets.load_dataset`.

  Returns:
    Files, and the folders of datasets, sorted by path; of a stream, a path for
    each of its files that ends with the split and the number of the file.

  Raises:
    ImportError: `datasets` is needed and not installed.
    ValueError: the path does not exist, cannot be read, is of an unknown kind,
      or holds no file with text or several splits of a dataset.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ('b.txt', 'a.jsonl', 'c.py'):
    ...   _ = (folder / name).write_text('')
    >>> [file.name for file in list_inputs(folder)]
    ['a.jsonl', 'b.txt']
  """
  if is_stream(Path(path)):
    _load.cache_clear()  # The files may have changed since the last call.
    return [
        Path(path, split, str(number))
        for split, dataset in _load(Path(path)).items()
        for number in range(dataset.num_shards)
    ]
  path = Path(path).expanduser()
  if (path / 'dataset_dict.json').exists():
    raise ValueError(
        f'input={str(path)!r} is a dataset of several splits; give the folder'
        ' of one, e.g. its subfolder train.'
    )
  if path.is_dir() and not (path / 'state.json').exists():
    every = sorted(file for file in path.rglob('*') if file.is_file())
    readable = [file for file in every if _suffix(file) in _READERS]
    if not readable:
      raise ValueError(
          f'input={str(path)!r} holds no file with text; give files with one of'
          f' the suffixes {", ".join(sorted(_READERS))}.'
      )
    if not all(map(is_text, readable)):  # A card describes the rows beside it.
      readable = [file for file in readable if file.name.lower() != 'readme.md']
    kept = set(readable)
    left = [file.relative_to(path) for file in every if file not in kept]
    left = [file for file in left if not any(
        part.startswith('.') for part in file.parts
    )]
    if left:
      some = ', '.join(file.as_posix() for file in left[:_NAMED])
      more = f' and {len(left) - _NAMED} more' if len(left) > _NAMED else ''
      logger.warning(
          'input=%r: %s%s are not read: documents are in %s, and a README.md '
          'beside rows is none', str(path), some, more,
          ', '.join(sorted(_READERS)),
      )
    return readable
  if not path.exists():
    raise ValueError(
        f'input={str(path)!r} does not exist; give a file or a folder.'
    )
  if path.is_file():
    names.lookup('kind of file', _suffix(path), _READERS)
  return [path]


def describe_inputs(files: list[Path], root: Path) -> list[list[Any]]:
  """Identifies inputs by name, size and a hash of samples throughout.

  Args:
    files: Files of `list_inputs`.
    root: The input that was listed.

  Returns:
    A list [name, bytes, SHA-256] for each file: of its whole content up to 16
    MiB, else of 256 evenly spaced blocks and the end. For each split of a
    stream, the size is 0, and the hash changes with the commit of the hub, or
    with what the file system or server says of a file.
  """
  if is_stream(root):
    load = extras.require('datasets', 'prepare').load_dataset_builder
    with _wording(root)():
      builder = load(**_arguments(root))
    facts = f'{builder.name} {builder.config_id} {builder.hash}'
    digest = hashlib.sha256(facts.encode()).hexdigest()
    return [
        [split, 0, digest]
        for split in dict.fromkeys(file.parent.name for file in files)
    ]
  described = []
  for file in files:
    sha256 = hashlib.sha256()
    for part in _parts(file):
      size = part.stat().st_size
      starts = range(0, size, max(size // _SAMPLES, _SAMPLE))
      with part.open('rb') as opened:
        for start in [*starts, max(size - _SAMPLE, 0)]:
          opened.seek(start)
          sha256.update(opened.read(_SAMPLE))
    name = file.name if file == root else file.relative_to(root).as_posix()
    described.append([name, size_of(file), sha256.hexdigest()])
  return described


def modification_times(files: list[Path]) -> list[int]:
  """Returns the times at which files were modified, in ns; 0 for a stream.

  Args:
    files: Files of `list_inputs`.
  """
  return [
      0 if is_stream(file)
      else max((part.stat().st_mtime_ns for part in _parts(file)), default=0)
      for file in files
  ]


def size_of(file: Path) -> int:
  """Returns the bytes of a file or dataset on disk; 1 for a streamed file.

  Args:
    file: A path of `list_inputs`.
  """
  if is_stream(file):
    return 1
  return sum(part.stat().st_size for part in _parts(file))


def read_documents(
    path: Path,
    *,
    field: str = 'text',
    end_of_text: int | None = None,
    vocab_size: int = 1,
    cut: bool = False,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Piece | Skipped]:
  """Reads the documents of one file.

  A text file is one document. In JSON lines, Parquet and Hugging Face datasets,
  a document is the field of a line or row; in a `.bin` of nanoGPT or llm.c it
  extends to the next end of text. Text and JSON lines may be compressed, as
  `.gz` or `.zst`.

  Args:
    path: A file, the folder of a dataset, or a path of `list_inputs`.
    field: Name of the field or column with the text.
    end_of_text: Id that ends documents in a `.bin`.
    vocab_size: Number of ids of the tokenizer of a `.bin`.
    cut: Whether a text file is cut into documents, see `documents.read_text`.
    start: Byte of a `.jsonl` from which lines are read, see `FilePart`.
    stop: Byte from which no line is read; `None`: the end of the file.

  Yields:
    Pieces of documents, and skipped documents.

  Raises:
    ImportError: a library of the extra `prepare` is missing.
    ValueError: the file as a whole cannot be read.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'a.jsonl'
    >>> _ = path.write_text('{"text": "one"}\\n[]\\n')
    >>> for item in read_documents(path):
    ...   print(item[:1])
    ('one',)
    ('not a JSON object',)
  """
  if is_stream(path):
    root, split = path.parent.parent, path.parent.name
    dataset = _load(root)[split]
    dataset = dataset.shard(dataset.num_shards, int(path.name))
    yield from _read_rows(dataset, field, path.parent, _wording(root))
    return
  if path.is_dir():
    yield from _read_dataset(path, field)
    return
  read = names.lookup('kind of file', _suffix(path), _READERS)
  if read is documents.read_tokens:
    yield from documents.read_tokens(path, end_of_text, vocab_size)
  elif read is documents.read_text:
    yield from documents.read_text(path, cut)
  elif read is documents.read_json_lines:
    yield from documents.read_json_lines(path, field, start, stop)
  else:
    yield from read(path, field)


def _parts(file: Path) -> list[Path]:
  return sorted(file.glob('*.arrow')) if file.is_dir() else [file]


def _suffix(path: Path) -> str:
  suffixes = path.suffixes[-2:]
  compressed = suffixes and suffixes[-1] in documents.COMPRESSIONS
  return ''.join(suffixes) if compressed else path.suffix


def _read_dataset(path: Path, field: str) -> Iterator[Piece | Skipped]:
  """Reads a dataset that `save_to_disk` wrote, or one Arrow file of it."""
  datasets = extras.require('datasets', 'prepare')
  wrap = functools.partial(reading, path, 'save it again.')
  with wrap():
    if path.is_dir():
      dataset = datasets.load_from_disk(str(path)).with_format(None)
    else:
      dataset = datasets.load_dataset(
          'arrow', data_files=[str(path)], split='train', streaming=True
      )
  yield from _read_rows(dataset, field, path, wrap)


def _read_rows(
    dataset: Any, field: str, path: Path,
    wrap: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[Piece | Skipped]:
  """Reads a column of a streamed dataset; `wrap` words its errors."""
  rows, number = iter(dataset), 0
  while True:
    with wrap():
      row = next(rows, None)
    if row is None:
      return
    if number == 0:
      documents.check_column(field, row, path)
    yield from documents.check_text(row.get(field), f'{path} row {number}')
    number += 1


@functools.lru_cache(maxsize=1)  # It can take seconds, for each of many files.
def _load(root: Path) -> dict[str, Any]:
  """Returns the splits of a streamed input, as datasets to iterate over."""
  load = extras.require('datasets', 'prepare').load_dataset
  arguments = _arguments(root)
  with _wording(root)():
    return load(**arguments, streaming=True)


def _arguments(root: Path) -> dict[str, Any]:
  """Returns the arguments of `datasets.load_dataset` for a streamed input.

  Example:
    >>> _arguments(Path('hf:allenai/c4,en@1ddc917'))
    {'path': 'allenai/c4', 'name': 'en', 'revision': '1ddc917'}
    >>> _arguments(Path('https://a.org/b.jsonl.gz'))
    {'path': 'json', 'data_files': ['https://a.org/b.jsonl.gz']}
  """
  name = str(root)
  if name.startswith(_HUB):
    rest, _, revision = name.removeprefix(_HUB).partition('@')
    path, _, config = rest.partition(',')
    return dict(path=path, name=config or None, revision=revision or None)
  url = re.sub(':/+', '://', name, count=1)
  file = Path(urllib.parse.urlsplit(url).path)
  if file.suffix in documents.COMPRESSIONS:
    file = file.with_suffix('')
  builder = names.lookup('kind of file', file.suffix, _BUILDERS)
  arguments = dict(path=builder, data_files=[url])
  return arguments | ({'sample_by': 'document'} if builder == 'text' else {})


def _wording(
    root: Path,
) -> Callable[[], contextlib.AbstractContextManager[None]]:
  return functools.partial(
      extras.one_sentence, f'input={str(root)!r} cannot be streamed',
      'give hf:PATH or hf:PATH,CONFIG of a dataset, or the URL of a file, that'
      ' can be reached, or download the files.',
  )


def is_text(path: Path) -> bool:
  """Returns whether a file is text, which is one document."""
  return _READERS.get(_suffix(path)) is documents.read_text


_Reader = Callable[..., Iterator[Piece | Skipped]]
_TEXT_READERS: dict[str, _Reader] = {
    '.txt': documents.read_text,
    '.md': documents.read_text,
    '.jsonl': documents.read_json_lines,
}
_READERS: dict[str, _Reader] = {
    suffix + compression: read
    for suffix, read in _TEXT_READERS.items()
    for compression in ('', *documents.COMPRESSIONS)
}
_READERS |= {
    '.parquet': documents.read_parquet,
    '.arrow': _read_dataset,
    '.bin': documents.read_tokens,
}

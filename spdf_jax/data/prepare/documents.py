# SPDX-License-Identifier: Apache-2.0
"""Documents of files and datasets, streamed in little memory.

Text, JSON lines and Parquet are read here; the library `datasets` reads the
hub, URLs and Arrow. It also reads the other formats, but not as this needs: its
JSON reader stops at the first faulty line, its Zstandard reader takes a
truncated file for a whole one, and its Parquet reader holds a row group.
"""

import codecs
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import functools
import gzip
import hashlib
import io
import json
import os
from pathlib import Path
import re
from typing import Any
from typing import BinaryIO
from typing import cast
from typing import NamedTuple
import urllib.parse
import zlib

import numpy as np

from spdf_jax.extras import one_sentence
from spdf_jax.extras import require
from spdf_jax.files import is_url
from spdf_jax.names import lookup

_PIECE = 1 << 20  # Characters or tokens of a part of a long document.
_LONGEST_LINE = 1 << 26  # Bytes of a line of JSON.
_PROBE = 1 << 20  # Bytes at both ends of a file that identify it.
_FEW = 1000  # Documents before the share of faults is checked.

# Four compressed bytes are at most 128 KiB of data, so a piece is 32 MiB.
_COMPRESSED = 1 << 10
_LARGEST_WINDOW = 1 << 27  # Bytes; that of `zstd --long`.

_HUB = 'hf:'  # Beginning of an input that names a dataset, not a file.


class Piece(NamedTuple):
  """A document, or a part of a long one.

  Attributes:
    content: Text, or token ids [tokens].
    last: Whether this is the last piece of its document.
  """

  content: str | np.ndarray
  last: bool = True


class Skipped(NamedTuple):
  """A skipped document.

  Attributes:
    reason: Reason, identical for all faults of a kind.
    where: File and position in it.
  """

  reason: str
  where: str


EMPTY = 'empty'
"""The only reason to skip a document that is not counted as a fault."""


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
    ValueError: The path does not exist, cannot be read, is of an unknown kind,
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
    found = sorted(
        file for file in path.rglob('*') if _suffix(file) in _READERS
        and file.is_file()
    )
    if not found:
      raise ValueError(
          f'input={str(path)!r} holds no file with text; use files of'
          f' {", ".join(sorted(_READERS))}.'
      )
    return found
  if not path.exists():
    raise ValueError(
        f'input={str(path)!r} does not exist; give a file or a folder.'
    )
  if path.is_file():
    lookup('kind of file', _suffix(path), _READERS)
  return [path]


def describe_inputs(files: list[Path], root: Path) -> list[list[Any]]:
  """Identifies inputs by name, size and a hash.

  Args:
    files: Files of `list_inputs`.
    root: The input that was listed.

  Returns:
    A list [name, bytes, SHA-256 of both ends] for each file. For each split of
    a stream, the size is 0, and the hash changes with the commit of the hub, or
    with what the file system or server says of a file.
  """
  if is_stream(root):
    load = require('datasets', 'prepare').load_dataset_builder
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
      with part.open('rb') as opened:
        sha256.update(opened.read(_PROBE))
        opened.seek(max(part.stat().st_size - _PROBE, 0))
        sha256.update(opened.read(_PROBE))
    name = file.name if file == root else file.relative_to(root).as_posix()
    described.append([name, size_of(file), sha256.hexdigest()])
  return described


def size_of(file: Path) -> int:
  """Returns the bytes of a file or dataset on disk; 1 for a file of a stream.

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
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Piece | Skipped]:
  """Reads the documents of one file.

  A text file is one document. In JSON lines, Parquet and Hugging Face datasets,
  a document is the field of a line or row; in a `.bin` of nanoGPT (uint16 ids)
  it extends to the next end of text. Text and JSON lines may be compressed, as
  `.gz` or `.zst`. Lines above 64 MiB are skipped.

  Args:
    path: A file, the folder of a dataset, or a path of `list_inputs`.
    field: Name of the field or column with the text.
    end_of_text: Id that ends documents in a `.bin`.
    start: Byte of a `.jsonl` from which lines are read, see `Span`.
    stop: Byte from which no line is read; `None`: the end of the file.

  Yields:
    Pieces of documents, and skipped documents.

  Raises:
    ImportError: A library of the extra `prepare` is missing.
    ValueError: The file as a whole cannot be read.

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
    for file in _arrow_files(path):
      yield from _read_arrow(file, field)
    return
  read = lookup('kind of file', _suffix(path), _READERS)
  if read is _read_tokens:
    yield from _read_tokens(path, end_of_text)
  elif read is _read_text:
    yield from _read_text(path)
  elif read is _read_json_lines:
    yield from _read_json_lines(path, field, start, stop)
  else:
    yield from read(path, field)


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


def _parts(file: Path) -> list[Path]:
  return sorted(file.glob('*.arrow')) if file.is_dir() else [file]


def _suffix(path: Path) -> str:
  suffixes = path.suffixes[-2:]
  compressed = suffixes and suffixes[-1] in _COMPRESSIONS
  return ''.join(suffixes) if compressed else path.suffix


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
  """Opens a file, and decompresses it by its suffix; truncation is an error."""
  with path.open('rb') as file:
    if path.suffix == '.gz':
      try:
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file))
      except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f'{path} is not a valid gzip file ({error}); download it again.'
        ) from error
    elif path.suffix == '.zst':
      yield io.BufferedReader(_Zstandard(file, path), 1 << 20)
    else:
      yield file


class _Zstandard(io.RawIOBase):
  """A stream of all frames of a Zstandard file, in bounded memory.

  Truncation is an error.
  """

  def __init__(self, file: BinaryIO, path: Path):
    self._library = require('zstandard', 'prepare')
    self._decompressor = self._library.ZstdDecompressor(
        max_window_size=_LARGEST_WINDOW
    )
    self._file, self._path = file, path
    self._frame: Any = None
    self._left = b''  # Compressed bytes that belong to the next frame.
    self._data = memoryview(b'')

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    while not self._data:
      chunk = self._left or self._file.read(_COMPRESSED)
      self._left = b''
      if not chunk:
        if self._frame is not None:
          raise ValueError(
              f'{self._path} ends in the middle of a Zstandard frame; it is'
              ' truncated, download it again.'
          )
        return 0
      if self._frame is None:
        self._frame = self._decompressor.decompressobj()
      try:
        self._data = memoryview(self._frame.decompress(chunk))
      except self._library.ZstdError as error:
        raise ValueError(
            f'{self._path} is not a valid Zstandard file ({error}); download'
            ' it again.'
        ) from error
      if self._frame.eof:
        self._left, self._frame = self._frame.unused_data, None
    size = min(len(buffer), len(self._data))
    buffer[:size] = self._data[:size]
    self._data = self._data[size:]
    return size


def _checked(value: object, where: str) -> Iterator[Piece | Skipped]:
  """Yields the value of a text field, or the reason to skip the document."""
  if not isinstance(value, str):
    yield Skipped('text is missing', where)
  elif not value.strip():
    yield Skipped(EMPTY, where)
  else:
    try:
      value.encode('utf-8')
    except UnicodeEncodeError:
      yield Skipped('broken UTF-8', where)
      return
    yield Piece(value)


def _lines(
    file: BinaryIO, stop: int | None = None
) -> Iterator[bytes | None]:
  """Yields lines; `None` instead of a line that is too long to hold.

  Lines that start at byte `stop` or later are not read.
  """
  while (stop is None or file.tell() < stop) and (
      line := file.readline(_LONGEST_LINE + 1)
  ):
    too_long = len(line) > _LONGEST_LINE
    while too_long and line and not line.endswith(b'\n'):
      line = file.readline(_PIECE)
    yield None if too_long else line


def _read_json_lines(
    path: Path, field: str, start: int = 0, stop: int | None = None
) -> Iterator[Piece | Skipped]:
  with _opened(path) as file:
    if start:
      file.seek(start - 1)  # A line that starts at `start` follows a newline.
      while (rest := file.readline(_PIECE)) and not rest.endswith(b'\n'):
        pass
      start = file.tell()
    after = f' after byte {start}' if start else ''
    for number, line in enumerate(_lines(file, stop), start=1):
      where = f'{path} line {number}{after}'
      if line is None:
        yield Skipped('line too long', where)
        continue
      if not line.strip():
        continue
      try:
        fields = json.loads(line)
      except UnicodeDecodeError:
        yield Skipped('broken UTF-8', where)
      except (ValueError, RecursionError):
        yield Skipped('not JSON', where)
      else:
        if isinstance(fields, dict):
          yield from _checked(fields.get(field), where)
        else:
          yield Skipped('not a JSON object', where)


def _read_text(path: Path) -> Iterator[Piece | Skipped]:
  fault = _fault_of_text(path)
  if fault:
    yield Skipped(fault, str(path))
    return
  with _opened(path) as binary:
    file = io.TextIOWrapper(binary, encoding='utf-8-sig', newline='')
    held = ''
    while chunk := file.read(_PIECE):
      held += chunk
      cut = _last_cut(held)
      if len(held) > _PIECE and cut:
        yield Piece(held[:cut], last=False)
        held = held[cut:]
    yield Piece(held)


def _last_cut(text: str) -> int:
  """Returns the last position before a space that no token can span, or 0."""
  cut = text.rfind(' ')
  while cut > 0 and text[cut - 1].isspace():
    cut = text.rfind(' ', 0, cut)
  return max(cut, 0)


def _fault_of_text(path: Path) -> str | None:
  """Returns the fault of a text file, if any.

  The whole file is checked before any piece of it is yielded, since a broken
  document must be skipped as a whole.
  """
  decoder = codecs.getincrementaldecoder('utf-8-sig')()
  empty = True
  with _opened(path) as file:
    try:
      while chunk := file.read(1 << 20):
        empty = not decoder.decode(chunk).strip() and empty
      decoder.decode(b'', final=True)
    except UnicodeDecodeError:
      return 'broken UTF-8'
  return EMPTY if empty else None


def _read_tokens(
    path: Path, end_of_text: int | None
) -> Iterator[Piece | Skipped]:
  if path.stat().st_size % 2:
    raise ValueError(
        f'{path} has an odd number of bytes, so it does not hold uint16 token'
        ' ids; it is truncated or of another format.'
    )
  held, begun = None, False
  with path.open('rb') as file:
    while chunk := file.read(2 * _PIECE):
      ids = np.frombuffer(chunk, '<u2')
      parts = np.split(ids, np.nonzero(ids == end_of_text)[0] + 1)
      for part in parts:
        if not part.size:
          continue
        ends = part[-1] == end_of_text
        part = part[:-1] if ends else part
        if held is not None:
          yield Piece(held, last=False)
          begun = True
        held = part
        if ends:
          if held.size or begun:
            yield Piece(held)
          else:
            yield Skipped(EMPTY, str(path))
          held, begun = None, False
  if held is not None:
    yield Piece(held)


def _read_parquet(path: Path, field: str) -> Iterator[Piece | Skipped]:
  parquet = require('pyarrow.parquet', 'prepare')
  errors = require('pyarrow', 'prepare').ArrowException
  number = 0
  try:
    with parquet.ParquetFile(path) as file:
      _check_column(field, file.schema_arrow.names, path)
      for batch in file.iter_batches(batch_size=64, columns=[field]):
        for value in batch.column(0):
          where = f'{path} row {number}'
          try:
            text = value.as_py()
          except UnicodeDecodeError:
            yield Skipped('broken UTF-8', where)
          else:
            yield from _checked(text, where)
          number += 1
  except (errors, OSError) as error:
    raise ValueError(
        f'{path} is not a valid Parquet file ({" ".join(str(error).split())});'
        ' download it again.'
    ) from error


def _arrow_files(folder: Path) -> list[Path]:
  """Returns the files of a dataset that `save_to_disk` wrote, all in it."""
  try:
    state = json.loads((folder / 'state.json').read_bytes())
    return [folder / Path(f['filename']).name for f in state['_data_files']]
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    raise ValueError(
        f'{folder} is not a dataset of save_to_disk'
        f' ({" ".join(str(error).split())}); save it again.'
    ) from error


def _read_arrow(path: Path, field: str) -> Iterator[Piece | Skipped]:
  load = require('datasets', 'prepare').load_dataset
  wrap = functools.partial(
      one_sentence, f'{path} is not a valid Arrow file', 'save it again.'
  )
  with wrap():
    dataset = load(
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
      _check_column(field, row, path)
    yield from _checked(row.get(field), f'{path} row {number}')
    number += 1


def _check_column(field: str, names: Iterable[str], path: Path) -> None:
  if field not in names:
    raise ValueError(
        f'{path} has no column {field!r} but {", ".join(names)}; set field to'
        ' the column with the text.'
    )


@functools.lru_cache(maxsize=1)  # It can take seconds, for each of many files.
def _load(root: Path) -> dict[str, Any]:
  """Returns the splits of a streamed input, as datasets to iterate over."""
  load = require('datasets', 'prepare').load_dataset
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
  if file.suffix in _COMPRESSIONS:
    file = file.with_suffix('')
  builder = lookup('kind of file', file.suffix, _BUILDERS)
  arguments = dict(path=builder, data_files=[url])
  return arguments | ({'sample_by': 'document'} if builder == 'text' else {})


def _wording(
    root: Path,
) -> Callable[[], contextlib.AbstractContextManager[None]]:
  return functools.partial(
      one_sentence, f'input={str(root)!r} cannot be streamed',
      'give hf:PATH or hf:PATH,CONFIG of a dataset, or the URL of a file, that'
      ' can be reached, or download the files.',
  )


_COMPRESSIONS = ('.gz', '.zst')

_BUILDERS = {
    '.jsonl': 'json', '.txt': 'text', '.md': 'text', '.parquet': 'parquet',
    '.arrow': 'arrow',
}
"""Builders of `datasets` for the files behind URLs."""

_Reader = Callable[..., Iterator[Piece | Skipped]]
_TEXT_READERS: dict[str, _Reader] = {
    '.txt': _read_text, '.md': _read_text, '.jsonl': _read_json_lines,
}
_READERS: dict[str, _Reader] = {
    suffix + compression: read
    for suffix, read in _TEXT_READERS.items()
    for compression in ('', *_COMPRESSIONS)
}
_READERS |= {
    '.parquet': _read_parquet, '.arrow': _read_arrow, '.bin': _read_tokens,
}

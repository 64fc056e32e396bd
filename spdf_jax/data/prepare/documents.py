# SPDX-License-Identifier: Apache-2.0
"""Documents of files and datasets, streamed in little memory."""

import codecs
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any
from typing import BinaryIO
from typing import NamedTuple

import numpy as np

from spdf_jax.extras import one_sentence
from spdf_jax.extras import require
from spdf_jax.names import lookup

_PIECE = 1 << 20  # Characters or tokens of a part of a long document.
_LONGEST_LINE = 1 << 26  # Bytes of a line of JSON.
_PROBE = 1 << 20  # Bytes at both ends of a file that identify it.
_FEW = 1000  # Documents before the share of faults is checked.

# Four compressed bytes are at most 128 KiB of data, so a piece is 32 MiB.
_COMPRESSED = 1 << 10
_LARGEST_WINDOW = 1 << 27  # Bytes; that of `zstd --long`.
PREFIX = 'hf:'
"""Beginning of an input that names a dataset, not a file."""


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


def text_or_fault(value: object, where: str) -> Iterator[Piece | Skipped]:
  """Yields a document, or the reason to skip it.

  Args:
    value: Value of the text field.
    where: File and position in it.

  Yields:
    One piece, or one skipped document.

  Example:
    >>> list(text_or_fault(3, 'a.jsonl line 1'))
    [Skipped(reason='text is missing', where='a.jsonl line 1')]
  """
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


def list_inputs(path: str | os.PathLike[str]) -> list[Path]:
  """Lists the files of a corpus, in a fixed order.

  Args:
    path: A file, a Hugging Face dataset on disk, or a folder of files; or the
      name of a dataset to stream, see `list_streams`.

  Returns:
    Files, and the folders of datasets, sorted by path; or splits to stream.

  Raises:
    ValueError: The path does not exist, is of an unknown kind, or holds no file
      with text or several splits of a dataset.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ('b.txt', 'a.jsonl', 'c.py'):
    ...   _ = (folder / name).write_text('')
    >>> [file.name for file in list_inputs(folder)]
    ['a.jsonl', 'b.txt']
  """
  if is_stream(Path(path)):
    return list_streams(str(path))
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
  """Identifies inputs by name, size and a hash of both ends of each file.

  Args:
    files: Files of `list_inputs`.
    root: The input that was listed.

  Returns:
    A list [name, bytes, SHA-256] for each file.
  """
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


def read_documents(
    path: Path,
    *,
    field: str = 'text',
    end_of_text: int | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Piece | Skipped]:
  """Reads the documents of one file.

  A text file is one document. In JSON lines (plain or compressed by Zstandard),
  Parquet and Hugging Face datasets, a document is the field of a line or row;
  in a `.bin` of nanoGPT (uint16 ids) it extends to the next end of text. Lines
  above 64 MiB are skipped.

  Args:
    path: A file, or the folder of a dataset.
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
    yield from read_stream(path, field)
    return
  if path.is_dir():
    yield from read_dataset(path, field)
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


def _suffix(path: Path) -> str:
  suffixes = path.suffixes[-2:]
  if suffixes and suffixes[-1] == '.zst':
    return ''.join(suffixes)
  return path.suffix


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


def _read_lines(
    file: BinaryIO, path: Path, field: str, stop: int | None = None
) -> Iterator[Piece | Skipped]:
  start = 0 if stop is None else file.tell()
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
        yield from text_or_fault(fields.get(field), where)
      else:
        yield Skipped('not a JSON object', where)


def _read_json_lines(
    path: Path, field: str, start: int = 0, stop: int | None = None
) -> Iterator[Piece | Skipped]:
  with path.open('rb') as file:
    if start:
      file.seek(start - 1)  # A line that starts at `start` follows a newline.
      while (rest := file.readline(_PIECE)) and not rest.endswith(b'\n'):
        pass
    yield from _read_lines(file, path, field, stop)


def _read_compressed_lines(
    path: Path, field: str
) -> Iterator[Piece | Skipped]:
  with path.open('rb') as file:
    stream = io.BufferedReader(Zstandard(file, path), 1 << 20)
    yield from _read_lines(stream, path, field)


def _read_text(path: Path) -> Iterator[Piece | Skipped]:
  fault = _fault_of_text(path)
  if fault:
    yield Skipped(fault, str(path))
    return
  with path.open(encoding='utf-8-sig', newline='') as file:
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
  with path.open('rb') as file:
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


class Zstandard(io.RawIOBase):
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


def read_parquet(path: Path, field: str) -> Iterator[Piece | Skipped]:
  """Reads a column of a Parquet file, 64 rows at a time."""
  parquet = require('pyarrow.parquet', 'prepare')
  errors = require('pyarrow', 'prepare').ArrowException
  try:
    with parquet.ParquetFile(path) as file:
      _check_column(field, file.schema_arrow.names, path)
      batches = file.iter_batches(batch_size=64, columns=[field])
      yield from _read_batches(batches, path)
  except (errors, OSError) as error:
    raise ValueError(
        f'{path} is not a valid Parquet file ({_line(error)}); download it'
        ' again.'
    ) from error


def read_dataset(folder: Path, field: str) -> Iterator[Piece | Skipped]:
  """Reads a column of a dataset that `save_to_disk` wrote."""
  try:
    state = json.loads((folder / 'state.json').read_bytes())
    files = [folder / Path(f['filename']).name for f in state['_data_files']]
  except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
    raise ValueError(
        f'{folder} is not a dataset of save_to_disk ({_line(error)}); save it'
        ' again.'
    ) from error
  for path in files:
    yield from read_arrow(path, field)


def read_arrow(path: Path, field: str) -> Iterator[Piece | Skipped]:
  """Reads a column of a file in Arrow's streaming format."""
  arrow = require('pyarrow', 'prepare')
  ipc = require('pyarrow.ipc', 'prepare')
  try:
    with arrow.memory_map(str(path)) as source:
      with ipc.open_stream(source) as reader:
        _check_column(field, reader.schema.names, path)
        column = reader.schema.get_field_index(field)
        batches = (batch.select([column]) for batch in reader)
        yield from _read_batches(batches, path)
  except (arrow.ArrowException, OSError) as error:
    raise ValueError(
        f'{path} is not a valid Arrow file ({_line(error)}); save it again.'
    ) from error


def _read_batches(
    batches: Iterable[Any], path: Path
) -> Iterator[Piece | Skipped]:
  number = 0
  for batch in batches:
    for value in batch.column(0):
      try:
        text = value.as_py()
      except UnicodeDecodeError:
        yield Skipped('broken UTF-8', f'{path} row {number}')
      else:
        yield from text_or_fault(text, f'{path} row {number}')
      number += 1


def _check_column(field: str, names: list[str], path: Path) -> None:
  if field not in names:
    raise ValueError(
        f'{path} has no column {field!r} but {", ".join(names)}; set field to'
        ' the column with the text.'
    )


def _line(error: Exception) -> str:
  return ' '.join(str(error).split())


def is_stream(path: Path) -> bool:
  """Returns whether a path, or the name of a dataset, is to be streamed.

  Example:
    >>> is_stream(Path('hf:owner/name/train')), is_stream(Path('a/hf:b'))
    (True, False)
  """
  return bool(path.parts) and path.parts[0].startswith(PREFIX)


def list_streams(name: str) -> list[Path]:
  """Lists the splits of a dataset.

  Args:
    name: `'hf:PATH'` or `'hf:PATH,CONFIG'`, either also with `'@REVISION'`;
      PATH is a dataset of the hub or a folder, and all parts are arguments of
      `datasets.load_dataset`.

  Returns:
    A path for each split, whose last part is the split.

  Raises:
    ImportError: `datasets` is not installed.
    ValueError: The dataset cannot be read.
  """
  return [Path(name) / split for split in _load(name)]


def identify_stream(path: Path) -> list[Any]:
  """Identifies a split by its name and the state of the dataset's files.

  Args:
    path: A path of `list_streams`.

  Returns:
    The split, 0 for the size, which is not known, and a hash, which changes
    with the commit of the hub, or with the times of local files.
  """
  library = require('datasets', 'stream')
  with _one_sentence(str(path.parent)):
    builder = library.load_dataset_builder(**_arguments(str(path.parent)))
  facts = f'{builder.name} {builder.config_id} {builder.hash}'
  return [path.name, 0, hashlib.sha256(facts.encode()).hexdigest()]


def read_stream(path: Path, field: str) -> Iterator[Piece | Skipped]:
  """Reads the documents of a split.

  Args:
    path: A path of `list_streams`.
    field: Name of the column with the text.

  Yields:
    Pieces of documents, and skipped documents.

  Raises:
    ImportError: `datasets` is not installed.
    ValueError: The dataset cannot be read, or has no such column.
  """
  dataset = _load(str(path.parent))[path.name]
  rows = iter(dataset)
  number = 0
  while True:
    with _one_sentence(str(path.parent)):
      row = next(rows, None)
    if row is None:
      return
    if number == 0 and field not in row:
      raise ValueError(
          f'{path} has no column {field!r} but {", ".join(row)}; set field to'
          ' the column with the text.'
      )
    yield from text_or_fault(row.get(field), f'{path} row {number}')
    number += 1


def _arguments(name: str) -> dict[str, str | None]:
  """Returns the arguments of `datasets.load_dataset` that a name gives.

  Example:
    >>> _arguments('hf:allenai/c4,en@1ddc917')
    {'path': 'allenai/c4', 'name': 'en', 'revision': '1ddc917'}
  """
  rest, _, revision = name.removeprefix(PREFIX).partition('@')
  path, _, config = rest.partition(',')
  return dict(path=path, name=config or None, revision=revision or None)


def _load(name: str) -> dict[str, Any]:
  load = require('datasets', 'stream').load_dataset
  with _one_sentence(name):
    return load(**_arguments(name), streaming=True)


def _one_sentence(name: str) -> contextlib.AbstractContextManager[None]:
  return one_sentence(
      f'input={name!r} cannot be streamed',
      'give hf:PATH or hf:PATH,CONFIG of a dataset that can be reached.',
  )


_READERS: dict[str, Callable[..., Iterator[Piece | Skipped]]] = {
    '.txt': _read_text,
    '.md': _read_text,
    '.jsonl': _read_json_lines,
    '.jsonl.zst': _read_compressed_lines,
    '.parquet': read_parquet,
    '.arrow': read_arrow,
    '.bin': _read_tokens,
}

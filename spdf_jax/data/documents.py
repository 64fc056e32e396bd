"""Documents of many formats, read one after another in little memory."""

import codecs
from collections.abc import Callable
from collections.abc import Iterator
import io
import json
from pathlib import Path
from typing import BinaryIO
from typing import NamedTuple

import numpy as np

from spdf_jax.extras import require
from spdf_jax.names import lookup

_PIECE = 1 << 20  # Characters of a part of a long text, or tokens.


class Piece(NamedTuple):
  """A document, or a part of a long one.

  Attributes:
    content: Text, or token ids [tokens].
    last: Whether the document ends with it.
  """

  content: str | np.ndarray
  last: bool = True


class Skipped(NamedTuple):
  """A document that is left out.

  Attributes:
    reason: Why, the same words for the same kind of fault.
    where: File and place.
  """

  reason: str
  where: str


EMPTY = 'empty'
"""The one reason for leaving out that is no fault."""

Reader = Callable[..., Iterator[Piece | Skipped]]


def list_inputs(path: Path | str) -> list[Path]:
  """Lists the files of a corpus, in a fixed order.

  Args:
    path: A file, a Hugging Face dataset on disk, or a folder of files.

  Returns:
    Files, and datasets as their folders, sorted by path.

  Raises:
    ValueError: There is none.

  Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ('b.txt', 'a.jsonl', 'c.py'):
    ...   _ = (folder / name).write_text('')
    >>> [file.name for file in list_inputs(folder)]
    ['a.jsonl', 'b.txt']
  """
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
          f'input={str(path)!r} holds no file with text; known are'
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


def read_documents(
    path: Path, *, field: str = 'text', end_of_text: int | None = None
) -> Iterator[Piece | Skipped]:
  """Reads the documents of one file.

  A text file is one document. In JSON lines, plain or compressed by
  Zstandard, Parquet and datasets of Hugging Face it is the field of a line
  or row; in a `.bin` of nanoGPT (uint16 ids) it goes to the next end of text.

  Args:
    path: A file, or the folder of a dataset.
    field: Which field or column holds the text.
    end_of_text: The id that ends documents in a `.bin`.

  Yields:
    Pieces, and what had to be left out.

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
  if path.is_dir():
    yield from _read_dataset(path, field)
    return
  read = lookup('kind of file', _suffix(path), _READERS)
  if read is _read_tokens:
    yield from _read_tokens(path, end_of_text)
  elif read is _read_text:
    yield from _read_text(path)
  else:
    yield from read(path, field)


def _suffix(path: Path) -> str:
  suffixes = path.suffixes[-2:]
  if suffixes and suffixes[-1] == '.zst':
    return ''.join(suffixes)
  return path.suffix


def _text_or_fault(value: object, where: str) -> Iterator[Piece | Skipped]:
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


def _read_lines(file: BinaryIO, path: Path, field: str):
  for number, line in enumerate(file, start=1):
    if not line.strip():
      continue
    where = f'{path} line {number}'
    try:
      fields = json.loads(line)
    except UnicodeDecodeError:
      yield Skipped('broken UTF-8', where)
    except ValueError:
      yield Skipped('not JSON', where)
    else:
      if isinstance(fields, dict):
        yield from _text_or_fault(fields.get(field), where)
      else:
        yield Skipped('not a JSON object', where)


def _read_json_lines(path: Path, field: str) -> Iterator[Piece | Skipped]:
  with path.open('rb') as file:
    yield from _read_lines(file, path, field)


def _read_compressed_lines(
    path: Path, field: str
) -> Iterator[Piece | Skipped]:
  with path.open('rb') as file:
    stream = io.BufferedReader(_Zstandard(file, path), 1 << 20)
    yield from _read_lines(stream, path, field)


class _Zstandard(io.RawIOBase):
  """Frames of Zstandard as one stream; a cut one is an error."""

  def __init__(self, file: BinaryIO, path: Path):
    self._library = require('zstandard', 'prepare')
    self._file, self._path = file, path
    self._frame = None
    self._left = b''  # Compressed bytes that belong to the next frame.
    self._data = b''

  def readable(self) -> bool:
    return True

  def readinto(self, buffer) -> int:
    while not self._data:
      chunk = self._left or self._file.read(1 << 17)
      self._left = b''
      if not chunk:
        if self._frame is not None:
          raise ValueError(
              f'{self._path} ends in the middle of a Zstandard frame; it is'
              ' truncated, download it again.'
          )
        return 0
      if self._frame is None:
        self._frame = self._library.ZstdDecompressor().decompressobj()
      try:
        self._data = self._frame.decompress(chunk)
      except self._library.ZstdError as error:
        raise ValueError(
            f'{self._path} is no sound Zstandard file ({error}); download it'
            ' again.'
        ) from error
      if self._frame.eof:
        self._left, self._frame = self._frame.unused_data, None
    size = min(len(buffer), len(self._data))
    buffer[:size] = self._data[:size]
    self._data = self._data[size:]
    return size


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
  """Returns the last place before a space that no token can span, or 0."""
  cut = text.rfind(' ')
  while cut > 0 and text[cut - 1].isspace():
    cut = text.rfind(' ', 0, cut)
  return max(cut, 0)


def _fault_of_text(path: Path) -> str | None:
  """Reads a file once, so that no half of a broken document is kept."""
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


def _read_parquet(path: Path, field: str) -> Iterator[Piece | Skipped]:
  parquet = require('pyarrow.parquet', 'prepare')
  errors = require('pyarrow', 'prepare').ArrowException
  try:
    with parquet.ParquetFile(path) as file:
      _check_column(field, file.schema_arrow.names, path)
      batches = file.iter_batches(batch_size=64, columns=[field])
      yield from _read_batches(batches, path)
  except (errors, OSError) as error:
    raise ValueError(
        f'{path} is no sound Parquet file ({_line(error)}); download it again.'
    ) from error


def _read_dataset(folder: Path, field: str) -> Iterator[Piece | Skipped]:
  try:
    state = json.loads((folder / 'state.json').read_bytes())
    files = [folder / Path(f['filename']).name for f in state['_data_files']]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
        f'{folder} is no dataset as save_to_disk writes it ({_line(error)});'
        ' save it again.'
    ) from error
  for path in files:
    yield from _read_arrow(path, field)


def _read_arrow(path: Path, field: str) -> Iterator[Piece | Skipped]:
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
        f'{path} is no sound Arrow file ({_line(error)}); save it again.'
    ) from error


def _read_batches(batches, path: Path) -> Iterator[Piece | Skipped]:
  number = 0
  for batch in batches:
    for value in batch.column(0):
      try:
        text = value.as_py()
      except UnicodeDecodeError:
        yield Skipped('broken UTF-8', f'{path} row {number}')
      else:
        yield from _text_or_fault(text, f'{path} row {number}')
      number += 1


def _read_tokens(path: Path, end_of_text: int) -> Iterator[Piece | Skipped]:
  if path.stat().st_size % 2:
    raise ValueError(
        f'{path} has an odd number of bytes, so it holds no uint16 token ids;'
        ' it is truncated or of another format.'
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


def _check_column(field: str, names: list[str], path: Path) -> None:
  if field not in names:
    raise ValueError(
        f'{path} has no column {field!r} but {", ".join(names)}; set field to'
        ' the one with the text.'
    )


def _line(error: Exception) -> str:
  return ' '.join(str(error).split())


_READERS = {
    '.txt': _read_text,
    '.md': _read_text,
    '.jsonl': _read_json_lines,
    '.jsonl.zst': _read_compressed_lines,
    '.parquet': _read_parquet,
    '.arrow': _read_arrow,
    '.bin': _read_tokens,
}

# SPDX-License-Identifier: Apache-2.0
"""Documents of many formats, streamed in little memory."""

import codecs
from collections.abc import Callable
from collections.abc import Iterator
import io
import json
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from spdf_jax.data.compressed import Zstandard
from spdf_jax.data.pieces import EMPTY
from spdf_jax.data.pieces import Piece
from spdf_jax.data.pieces import Skipped
from spdf_jax.data.pieces import text_or_fault
from spdf_jax.data.streams import is_stream
from spdf_jax.data.streams import list_streams
from spdf_jax.data.streams import read_stream
from spdf_jax.data.tables import read_arrow
from spdf_jax.data.tables import read_dataset
from spdf_jax.data.tables import read_parquet
from spdf_jax.names import lookup

_PIECE = 1 << 20  # Characters or tokens of a part of a long document.
_LONGEST_LINE = 1 << 26  # Bytes of a line of JSON.

Reader = Callable[..., Iterator[Piece | Skipped]]


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


_READERS: dict[str, Callable[..., Iterator[Piece | Skipped]]] = {
    '.txt': _read_text,
    '.md': _read_text,
    '.jsonl': _read_json_lines,
    '.jsonl.zst': _read_compressed_lines,
    '.parquet': read_parquet,
    '.arrow': read_arrow,
    '.bin': _read_tokens,
}

"""Documents of text files, JSON lines, Parquet and files of tokens."""

import codecs
from collections.abc import Iterable, Iterator, Mapping
import contextlib
import gzip
import io
import json
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from spdf_jax import extras
from spdf_jax import files

# First integers of the files of token ids of llm.c, and their widths.
_LLM_C = {20240520: '<u2', 20240801: '<u4'}
_LLM_C_HEADER = 1024  # bytes
_PIECE = 1 << 20  # Characters or tokens of a part of a long document.
_FIELDS = 5  # Most fields that an error about a line without text names.
_FEW = 1000  # Documents before the share of faults is checked.
_AGAIN = 'download it again.'

COMPRESSIONS = ('.gz', '.zst')
"""Suffixes of compressed files of text or JSON lines."""


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
    ValueError: the share is exceeded.
  """
  faults = {k: n for k, n in skipped.items() if k != EMPTY}
  bad = sum(faults.values())
  total = documents + bad
  if bad > max_faults * total and (done or total >= _FEW):
    counts = ', '.join(f'{n} {reason}' for reason, n in faults.items())
    at = f', the last at {item.where}' if item else ''
    raise ValueError(
        f'{bad} of {total} documents are faulty ({counts}{at}), more than'
        f' max_faults={max_faults} allows; repair the input, set field to the'
        ' one with the text, or raise max_faults.'
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
  """Opens a file, and decompresses it by its suffix; truncation is an error."""
  with files.reading(path, _AGAIN), contextlib.ExitStack() as stack:
    if path.suffix == '.gz':
      file: Any = gzip.open(path)
    elif path.suffix == '.zst':
      arrow = extras.require('pyarrow', 'prepare')
      file = io.BufferedReader(arrow.input_stream(str(path)), 1 << 20)
    else:
      file = path.open('rb')
    yield stack.enter_context(file)


def check_text(value: object, where: str) -> Iterator[Piece | Skipped]:
  """Yields the value of a text field, or the reason to skip the document."""
  if value is None:
    yield Skipped('text is missing', where)
  elif not isinstance(value, str):
    kind = type(value).__name__
    article = 'an' if kind[0] in 'aeiou' else 'a'
    yield Skipped(f'text is {article} {kind}', where)
  elif not value.strip():
    yield Skipped(EMPTY, where)
  else:
    try:
      value.encode('utf-8')
    except UnicodeEncodeError:
      yield Skipped('broken UTF-8', where)
      return
    yield Piece(value)


def read_json_lines(
    path: Path, field: str, start: int = 0, stop: int | None = None
) -> Iterator[Piece | Skipped]:
  """Reads a field of the lines of a file, or of a range of its bytes.

  Args:
    path: File of JSON lines, which may be compressed.
    field: Name of the field.
    start: Byte at which the first line starts, or that precedes its start; not
      for compressed files.
    stop: Byte from which no line is read; `None`: the end of the file.

  Yields:
    Pieces and skipped documents.

  Raises:
    ValueError: the compressed data is damaged.
  """
  with _opened(path) as file:
    if start:
      file.seek(start - 1)  # A line that starts at `start` follows a newline.
      file.readline()
      start = file.tell()
    after = f' after byte {start}' if start else ''
    number = 0
    while (stop is None or file.tell() < stop) and (line := file.readline()):
      number += 1
      where = f'{path} line {number}{after}'
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
          if fields and field not in fields:
            present = ', '.join(list(fields)[:_FIELDS])
            more = ' and more' if len(fields) > _FIELDS else ''
            where += f', which has {present:.200}{more}'
          yield from check_text(fields.get(field), where)
        else:
          yield Skipped('not a JSON object', where)


def read_text(path: Path, cut: bool = False) -> Iterator[Piece | Skipped]:
  """Reads a file as one document, in pieces.

  Args:
    path: File of text, which may be compressed.
    cut: Whether every piece is a document of its own: some 200 of them, at
      most, that end with a line.

  Yields:
    Pieces, or one skipped document.

  Raises:
    ValueError: the compressed data is damaged.
  """
  fault = _fault_of_text(path)
  if fault:
    yield Skipped(fault, str(path))
    return
  size = _PIECE
  if cut:
    size = min(max(path.stat().st_size // 200, 1 << 10), _PIECE)
  with _opened(path) as binary:
    file = io.TextIOWrapper(binary, encoding='utf-8-sig', newline='')
    held = ''
    while chunk := file.read(size):
      held += chunk
      place = cut and held.rfind('\n') + 1 or _last_cut(held)
      if len(held) > size and place:
        yield Piece(held[:place], last=cut)
        held = held[place:]
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


def read_tokens(
    path: Path, end_of_text: int | None, vocab_size: int = 1
) -> Iterator[Piece | Skipped]:
  """Reads a file of token ids of nanoGPT or llm.c.

  Those of nanoGPT are uint16, or uint32 if the vocabulary needs it; those of
  llm.c have a header that states it.

  Args:
    path: The file.
    end_of_text: Id that ends documents.
    vocab_size: Number of ids of the tokenizer.

  Yields:
    Pieces of token ids, and skipped documents.

  Raises:
    ValueError: the file does not hold whole ids, or its ids have another width.
  """
  dtype, start = _width_of(path, vocab_size)
  held, begun = None, False
  with path.open('rb') as file:
    file.seek(start)
    while chunk := file.read(dtype.itemsize * _PIECE):
      ids = np.frombuffer(chunk, dtype)
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


def _width_of(path: Path, vocab_size: int) -> tuple[np.dtype, int]:
  """Returns the dtype of a file of token ids, and where they begin."""
  with path.open('rb') as file:
    first = file.read(1 << 16)
  magic = int.from_bytes(first[:4], 'little')
  start = _LLM_C_HEADER if magic in _LLM_C else 0
  width = _LLM_C.get(magic) or ('<u2' if vocab_size <= 1 << 16 else '<u4')
  dtype = np.dtype(width)
  if (path.stat().st_size - start) % dtype.itemsize:
    raise ValueError(
        f'{path} does not hold whole ids of {dtype.name}; it is truncated or '
        'of another format, so write it again.'
    )
  pairs = np.frombuffer(first[:len(first) // 4 * 4], '<u2').reshape(-1, 2)
  if width == '<u2' and not start and len(pairs) > 1 and (
      not pairs[:, 1].any() and pairs[:, 0].any()
  ):
    raise ValueError(
        f'every second uint16 of {path} is 0, so its ids are uint32, but those '
        f'of a vocabulary of {vocab_size:,} are read as uint16; convert them: '
        "numpy.fromfile(path, '<u4').astype('<u2').tofile(path)."
    )
  return dtype, start


def read_parquet(path: Path, field: str) -> Iterator[Piece | Skipped]:
  """Reads a column of a Parquet file, 64 rows at a time.

  Args:
    path: The file.
    field: Name of the column.

  Yields:
    Pieces and skipped documents.

  Raises:
    ValueError: the file is damaged or has no such column.
  """
  parquet = extras.require('pyarrow.parquet', 'prepare')
  number = 0
  with files.reading(path, _AGAIN), parquet.ParquetFile(path) as file:
    check_column(field, file.schema_arrow.names, path)
    for batch in file.iter_batches(64, columns=[field]):
      for value in batch.column(0):
        where = f'{path} row {number}'
        try:
          text = value.as_py()
        except UnicodeDecodeError:
          yield Skipped('broken UTF-8', where)
        else:
          yield from check_text(text, where)
        number += 1


def check_column(field: str, names: Iterable[str], path: Path) -> None:
  """Raises ValueError if a column is not among those of a file or dataset."""
  if field not in names:
    raise ValueError(
        f'{path} has no column {field!r}; its columns are {", ".join(names)};'
        ' set field to the one with the text.'
    )

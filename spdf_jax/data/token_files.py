# SPDX-License-Identifier: Apache-2.0
"""Token files: flat arrays of token ids on disk."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any, final
import zlib

import numpy as np

from spdf_jax import files

FORMAT_VERSION = 1


@final
@dataclasses.dataclass(frozen=True, eq=False)
class TokenFile:
  """A memory-mapped token file and its description.

  Attributes:
    path: Path of the file, without the suffixes `.bin` and `.json`.
    tokens: Token ids [tokens], memory-mapped, read-only.
    description: Format version, `dtype`, `vocab_size`, `tokens`,
      `documents`, `bytes` (of the text in UTF-8, for bits per byte),
      `fingerprint` and the writer's `source`.
  """

  path: Path
  tokens: np.ndarray
  description: Mapping[str, Any]

  @property
  def fingerprint(self) -> str:
    """SHA-256 over dtype and tokens, in hexadecimal."""
    return self.description['fingerprint']

  @property
  def vocab_size(self) -> int:
    """Number of token ids of the vocabulary."""
    return self.description['vocab_size']


def write_token_file(
    path: Path | str,
    documents: Iterable[tuple[Sequence[int], int]],
    *,
    vocab_size: int,
    source: Mapping[str, Any],
) -> TokenFile:
  """Writes documents one after another to `<path>.bin` and `<path>.json`.

  Ids are little-endian uint16, or uint32 if `vocab_size` is above 65,536.
  Documents are streamed. The description is written last, so that an
  incomplete file cannot be opened.

  Args:
    path: Path to write in an existing folder, without a suffix.
    documents: Pairs (token ids, number of UTF-8 bytes of the text); the ids
      include the end of text, if it is needed.
    vocab_size: Number of token ids; every id must be below it.
    source: Description of the origin of the tokens, JSON-able; it is stored.

  Returns:
    The file, opened.

  Raises:
    ValueError: an id is not an integer in [0, vocab_size), or `vocab_size`
      does not fit 32 bits.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'train'
    >>> file = write_token_file(
    ...     path, [([1, 2, 0], 2), ([3, 0], 1)], vocab_size=4, source={})
    >>> file.tokens.tolist(), file.description['documents']
    ([1, 2, 0, 3, 0], 2)
  """
  path = Path(path)
  dtype = dtype_of(vocab_size)
  source = json.loads(json.dumps(dict(source)))  # Raises before any writing.
  digest = hashlib.sha256(dtype.encode())
  tokens = num_documents = num_bytes = 0
  with (
      files.replacing(_bin_path(path)) as temporary,
      temporary.open('xb') as file,
  ):
    for num_documents, (ids, size) in enumerate(documents, start=1):
      data = _checked(ids, num_documents, vocab_size).astype(dtype).tobytes()
      file.write(data)
      digest.update(data)
      tokens += len(data) // np.dtype(dtype).itemsize
      num_bytes += size
    # Deleted first, so that an old description never belongs to new tokens.
    _json_path(path).unlink(missing_ok=True)
  _describe(path, {
      'format_version': FORMAT_VERSION,
      'dtype': dtype,
      'vocab_size': vocab_size,
      'tokens': tokens,
      'documents': num_documents,
      'bytes': num_bytes,
      'fingerprint': digest.hexdigest(),
      'source': source,
  })
  return open_token_file(path)


def adopt_token_file(
    path: Path | str,
    raw: Path | str,
    *,
    size: int,
    crc32: int,
    vocab_size: int,
    documents: int,
    num_bytes: int,
    source: Mapping[str, Any],
) -> TokenFile:
  """Turns a file of raw ids into a token file, without copying it.

  Args:
    path: Path of the token file, without a suffix, on the file system of `raw`.
    raw: A file that contains only ids, of `dtype_of(vocab_size)`; it is moved.
    size: Number of bytes that were written to `raw`.
    crc32: CRC-32 of these bytes.
    vocab_size: Number of token ids; every id must be below it.
    documents: Number of documents.
    num_bytes: Bytes of the text in UTF-8.
    source: Description of the origin of the tokens, JSON-able.

  Returns:
    The file, opened.

  Raises:
    ValueError: `raw` holds other bytes than were written, and is not moved.

  Example:
    >>> import tempfile
    >>> folder, data = Path(tempfile.mkdtemp()), bytes([1, 0, 2, 0])
    >>> _ = (folder / 'raw').write_bytes(data)
    >>> adopt_token_file(
    ...     folder / 'train', folder / 'raw', size=4, crc32=zlib.crc32(data),
    ...     vocab_size=3, documents=1, num_bytes=2, source={}).tokens.tolist()
    [1, 2]
  """
  path, raw = Path(path), Path(raw)
  dtype = dtype_of(vocab_size)
  digest, actual_size, actual_crc32 = hashlib.sha256(dtype.encode()), 0, 0
  for chunk in _chunks(raw):
    digest.update(chunk)
    actual_size += len(chunk)
    actual_crc32 = zlib.crc32(chunk, actual_crc32)
  if (actual_size, actual_crc32) != (size, crc32):
    raise ValueError(
        f'{raw} holds {actual_size} bytes with CRC-32 {actual_crc32:08x}, and'
        f' {size} with {crc32:08x} were written; another process changed it or'
        f' it is damaged: delete {path.parent} and prepare the corpus again.'
    )
  _json_path(path).unlink(missing_ok=True)
  os.replace(raw, _bin_path(path))
  _describe(path, {
      'format_version': FORMAT_VERSION,
      'dtype': dtype,
      'vocab_size': vocab_size,
      'tokens': size // np.dtype(dtype).itemsize,
      'documents': documents,
      'bytes': num_bytes,
      'fingerprint': digest.hexdigest(),
      'source': dict(source),
  })
  return open_token_file(path)


def dtype_of(vocab_size: int) -> str:
  """Returns the dtype in which ids below `vocab_size` are stored.

  Example:
    >>> dtype_of(50_257), dtype_of(128_256)
    ('<u2', '<u4')
  """
  if not 0 < vocab_size <= 2**32:
    raise ValueError(
        f'vocab_size={vocab_size} cannot be stored; use 1 to 2**32.'
    )
  return '<u2' if vocab_size <= 2**16 else '<u4'


def open_token_file(path: Path | str) -> TokenFile:
  """Opens a token file without reading its tokens.

  Args:
    path: Path of the token file, without a suffix.

  Returns:
    The file, its tokens memory-mapped read-only.

  Raises:
    FileNotFoundError: the tokens (.bin) or their description (.json) are
      missing.
    ValueError: the description is damaged, as its digest shows, or of another
      format, or there are more or fewer tokens than it says.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'train'
    >>> _ = write_token_file(path, [([1, 0], 1)], vocab_size=2, source={})
    >>> open_token_file(path).tokens.tolist()
    [1, 0]
  """
  path = Path(path)
  for part in (_bin_path(path), _json_path(path)):
    if not part.exists():
      raise FileNotFoundError(
          f'{part} is missing; write the token file {path} again.'
      )
  description = _read_description(_json_path(path))
  dtype = np.dtype(description['dtype'])
  expected = description['tokens'] * dtype.itemsize
  size = _bin_path(path).stat().st_size
  if size != expected:
    raise ValueError(
        f'{_bin_path(path)} holds {size} bytes and its description requires'
        f' {expected}; it is truncated or damaged, write it again.'
    )
  if size == 0:  # An empty file cannot be mapped.
    tokens = np.zeros((0,), dtype)
  else:
    tokens = np.memmap(_bin_path(path), dtype=dtype, mode='r')
  return TokenFile(path=path, tokens=tokens, description=description)


def verify_token_file(token_file: TokenFile) -> None:
  """Reads all tokens and compares them with the fingerprint.

  Takes about a second per gigabyte.

  Args:
    token_file: The file to check.

  Raises:
    ValueError: the tokens differ from those that were written.

  Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / 'train'
    >>> verify_token_file(
    ...     write_token_file(path, [([1, 0], 1)], vocab_size=2, source={}))
  """
  digest = _digest(_bin_path(token_file.path), token_file.description['dtype'])
  if digest != token_file.fingerprint:
    raise ValueError(
        f'{_bin_path(token_file.path)} holds other tokens than were written'
        ' (its fingerprint differs); write it again.'
    )


def _digest(path: Path, dtype: str) -> str:
  digest = hashlib.sha256(dtype.encode())
  for chunk in _chunks(path):
    digest.update(chunk)
  return digest.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
  with path.open('rb') as file:
    while chunk := file.read(1 << 22):
      yield chunk


def _describe(path: Path, description: Mapping[str, Any]) -> None:
  text = json.dumps(files.seal(description), indent=2)
  files.write_atomically(_json_path(path), text)


def _checked(ids: Sequence[int], number: int, vocab_size: int) -> np.ndarray:
  array = np.asarray(ids)
  if array.size == 0:
    return array
  if array.dtype.kind not in 'iu' or array.ndim != 1:
    raise ValueError(
        f'document {number} is not a flat sequence of integers (dtype'
        f' {array.dtype}, shape {array.shape}); give token ids.'
    )
  beyond = (array < 0) | (array >= vocab_size)
  if beyond.any():
    raise ValueError(
        f'document {number} holds token id {array[beyond][0]}, outside the'
        f' vocabulary [0, {vocab_size}); use the tokenizer whose vocab_size'
        ' was given.'
    )
  return array


def _read_description(path: Path) -> dict[str, Any]:
  again = 'write the token file again.'
  description = files.read_object(path, again)
  with files.reading(path, again):
    if description['format_version'] != FORMAT_VERSION:
      raise ValueError(f'{path} has another format version; {again}')
    if description['dtype'] not in ('<u2', '<u4'):
      raise ValueError(f'{path} has another dtype; {again}')
    return files.unseal(description, path)


def _bin_path(path: Path) -> Path:
  return path.with_name(path.name + '.bin')


def _json_path(path: Path) -> Path:
  return path.with_name(path.name + '.json')

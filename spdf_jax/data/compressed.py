# SPDX-License-Identifier: Apache-2.0
"""Zstandard files, decompressed as a stream."""

import io
from pathlib import Path
from typing import Any
from typing import BinaryIO

from spdf_jax.extras import require

# Four compressed bytes are at most 128 KiB of data, so a piece is 32 MiB.
_PIECE = 1 << 10
_LARGEST_WINDOW = 1 << 27  # Bytes; that of `zstd --long`.


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
      chunk = self._left or self._file.read(_PIECE)
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

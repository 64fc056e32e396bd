# SPDX-License-Identifier: Apache-2.0
"""Corpora in buckets, copied to a cache before they are read."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
import hashlib
import logging
import os
from pathlib import Path
import time

from spdf_jax.data.library_errors import one_sentence
from spdf_jax.extras import require
from spdf_jax.files import FolderInUse
from spdf_jax.files import is_url
from spdf_jax.files import lock_folder

_logger = logging.getLogger(__name__)

_SMALL = ('tokenizer.json', 'train.json', 'validation.json', 'test.json')
_LARGE = ('train.bin', 'validation.bin', 'test.bin')
_CHUNK = 1 << 24  # Bytes copied at a time.
_SECONDS = 1.0  # Between attempts to lock the folder of a copy.


def local_folder(name: str, cache_dir: str | os.PathLike[str]) -> Path:
  """Returns the folder of a corpus, after copying one that is in a bucket.

  The token files are copied once; if their descriptions, which contain their
  digests, have changed in the bucket, they are copied again. If another process
  copies them, this one waits for it.

  Args:
    name: Folder, or URL as `etils.epath` takes it, that `prepare_files` wrote.
    cache_dir: Folder of prepared corpora, for copies.

  Returns:
    The folder, or that of the copy in `cache_dir`.

  Raises:
    OSError: `cache_dir` cannot be written.
    ValueError: The corpus cannot be read from its URL.

  Example:
    >>> local_folder('./corpora/books', '').as_posix()
    'corpora/books'
  """
  folder = copy_of(name, cache_dir)
  if not is_url(name):
    return folder
  small = {file: b''.join(_read(name, file)) for file in _SMALL}
  if _is_copied(folder, small):
    return folder
  folder.mkdir(parents=True, exist_ok=True)
  release = _wait_for_lock(folder)
  try:
    if not _is_copied(folder, small):  # By the process that held the lock.
      _logger.info('Copying the corpus %s to %s, once.', name, folder)
      for file in _LARGE:
        _write(folder / file, _read(name, file))
      for file, content in small.items():
        _write(folder / file, [content])
  finally:
    release()
  return folder


def copy_of(name: str, cache_dir: str | os.PathLike[str]) -> Path:
  """Returns the folder of a corpus, or of its copy; copies nothing.

  Args:
    name: Folder, or URL, of the corpus.
    cache_dir: Folder of prepared corpora, for copies.

  Example:
    >>> copy_of('gs://bucket/books/', 'cache').name
    'books'
  """
  if not is_url(name):
    return Path(name).expanduser()
  name = name.rstrip('/')
  digest = hashlib.sha256(name.encode()).hexdigest()[:16]
  place = Path(cache_dir).expanduser() / 'copies' / digest
  return place / name.rpartition('/')[2]


def _is_copied(folder: Path, small: Mapping[str, bytes]) -> bool:
  """Returns whether all files are there, and the small ones are the same."""
  found = {
      file: (folder / file).read_bytes() for file in _SMALL
      if (folder / file).exists()
  }
  return found == small and all((folder / file).exists() for file in _LARGE)


def _wait_for_lock(folder: Path) -> Callable[[], None]:
  """Locks the folder of a copy, after the process that has locked it."""
  while True:
    try:
      return lock_folder(folder, 'cache_dir')
    except FolderInUse:
      time.sleep(_SECONDS)


def _read(name: str, file: str) -> Iterator[bytes]:
  """Yields the content of a file of a corpus in a bucket."""
  epath = require('etils.epath', 'prepare')
  with one_sentence(
      f'corpus={name!r} cannot be read',
      'give the URL of a corpus that `python -m experiments.prepare` wrote, and'
      ' install the library of its scheme, such as gcsfs or s3fs.',
  ):
    with (epath.Path(name) / file).open('rb') as opened:
      while chunk := opened.read(_CHUNK):
        yield chunk


def _write(path: Path, chunks: Iterable[bytes]) -> None:
  """Writes a temporary file that then replaces `path`."""
  # Always the same name, so that the next copy replaces what a kill has left.
  temporary = path.with_name(f'.{path.name}.tmp')
  try:
    with temporary.open('wb') as target:
      target.writelines(chunks)
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)

# SPDX-License-Identifier: Apache-2.0
"""Copies of folders in buckets, kept in the cache of corpora."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import hashlib
import logging
import os
from pathlib import Path
import time

from spdf_jax import extras
from spdf_jax import files

_CHUNK = 1 << 24  # Bytes copied at a time.

_logger = logging.getLogger(__name__)


def local_path(name: str, cache_dir: Path | str) -> Path:
  """Returns the folder of a corpus, or of its copy in `cache_dir`."""
  if not files.is_url(name):
    return Path(name).expanduser()
  name = name.rstrip('/')
  digest = hashlib.sha256(name.encode()).hexdigest()[:16]
  place = Path(cache_dir).expanduser() / 'copies' / digest
  return place / name.rpartition('/')[2]


def fetch(
    name: str,
    cache_dir: Path | str,
    *,
    compared: Iterable[str],
    copied: Sequence[str],
) -> Path:
  """Returns the folder of a corpus, after copying one that is in a bucket.

  Files are copied once; if one of `compared`, such as the descriptions with the
  digests of the others, has changed in the bucket, they are copied again. If
  another process copies them, this one waits for it.

  Args:
    name: Path or URL of the folder.
    cache_dir: Folder of copies.
    compared: Names of the files that are read at every call.
    copied: Names of the large files, which are only read to copy them.

  Returns:
    The folder, or its copy.

  Raises:
    ImportError: the library that reads URLs is not installed.
    ValueError: a file in the bucket cannot be read.
  """
  folder = local_path(name, cache_dir)
  if not files.is_url(name):
    return folder
  small = {file: b''.join(_read_remote(name, file)) for file in compared}
  if _is_copied(folder, small, copied):
    return folder
  folder.mkdir(parents=True, exist_ok=True)
  release = _wait_for_lock(folder)
  try:
    # The process that held the lock may have copied them.
    if not _is_copied(folder, small, copied):
      _logger.info('Copying the corpus %s to %s, once.', name, folder)
      for file in copied:
        _write_copy(folder / file, _read_remote(name, file))
      for file, content in small.items():
        _write_copy(folder / file, [content])
  finally:
    release()
  return folder


def _is_copied(
    folder: Path, small: Mapping[str, bytes], large: Iterable[str]
) -> bool:
  """Returns whether all files are there, and the small ones are the same."""
  return all((folder / file).exists() for file in large) and all(
      (folder / file).exists() and (folder / file).read_bytes() == content
      for file, content in small.items()
  )


def _wait_for_lock(folder: Path) -> Callable[[], None]:
  """Locks the folder of a copy, after waiting for the holder of the lock."""
  while True:
    try:
      return files.lock_folder(folder, 'cache_dir')
    except files.FolderInUse:
      time.sleep(1)


def _read_remote(name: str, file: str) -> Iterator[bytes]:
  """Yields the content of a file of a corpus in a bucket."""
  epath = extras.require('etils.epath', 'prepare')
  with extras.one_sentence(
      f'corpus={name!r} cannot be read',
      'give the URL of a corpus that `python -m experiments.prepare` wrote, and'
      ' install the library of its scheme, such as gcsfs or s3fs.',
  ):
    with (epath.Path(name) / file).open('rb') as opened:
      while chunk := opened.read(_CHUNK):
        yield chunk


def _write_copy(path: Path, chunks: Iterable[bytes]) -> None:
  """Writes a temporary file that then replaces `path`."""
  # Always the same name, so that the next copy replaces what a kill has left.
  temporary = path.with_name(f'.{path.name}.tmp')
  try:
    temporary.unlink(missing_ok=True)
    with temporary.open('xb') as target:
      target.writelines(chunks)
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)

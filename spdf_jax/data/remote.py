# SPDX-License-Identifier: Apache-2.0
"""Corpora in buckets, copied to a cache before they are read."""

import hashlib
import io
import logging
import os
from pathlib import Path
import shutil
from typing import BinaryIO
import uuid

from spdf_jax.extras import require
from spdf_jax.urls import is_url

_logger = logging.getLogger(__name__)

_SMALL = ('tokenizer.json', 'train.json', 'validation.json', 'test.json')
_LARGE = ('train.bin', 'validation.bin', 'test.bin')


def local_folder(name: str, cache_dir: str | os.PathLike[str]) -> Path:
  """Returns the folder of a corpus, after copying one that is in a bucket.

  The token files are copied once; if their descriptions, which contain their
  digests, have changed in the bucket, they are copied again. Several processes
  may copy at the same time.

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
  small = {file: _read(name, file) for file in _SMALL}
  found = {
      file: (folder / file).read_bytes() for file in _SMALL
      if (folder / file).exists()
  }
  if found == small and all((folder / file).exists() for file in _LARGE):
    return folder
  _logger.info('Copying the corpus %s to %s, once.', name, folder)
  folder.mkdir(parents=True, exist_ok=True)
  for file in _LARGE:
    with _open(name, file) as source:
      _write(folder / file, source)
  for file, content in small.items():
    _write(folder / file, io.BytesIO(content))
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


def _open(name: str, file: str) -> BinaryIO:
  epath = require('etils.epath', 'prepare')
  try:
    return (epath.Path(name) / file).open('rb')
  except Exception as error:  # Backends raise errors of their own.
    text = ' '.join(str(error).split())[:300]
    raise ValueError(
        f'corpus={name!r} cannot be read ({type(error).__name__}: {text}); give'
        ' the URL of a corpus that `python -m experiments.prepare` wrote, and'
        ' install the library of its scheme, such as gcsfs or s3fs.'
    ) from error


def _read(name: str, file: str) -> bytes:
  with _open(name, file) as opened:
    return opened.read()


def _write(path: Path, source: BinaryIO) -> None:
  """Copies to a temporary file that then replaces `path`."""
  temporary = path.with_name(f'.{path.name}.{uuid.uuid4().hex}.tmp')
  try:
    with temporary.open('xb') as target:
      shutil.copyfileobj(source, target, 1 << 24)
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)

# SPDX-License-Identifier: Apache-2.0
"""Files and folders: replaced, locked, private, sealed, and URLs refused."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import errno
import hashlib
import json
import logging
import os
import pathlib
import re
import socket
import stat
from typing import Any
import uuid

try:
  import fcntl
except ImportError:  # Windows has no flock.
  fcntl = None  # type: ignore[assignment]

_logger = logging.getLogger('spdf_jax')
_DISK_ERRORS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO
_held: dict[pathlib.Path, int] = {}  # File descriptors by path of the lock.
_DIGEST = 'sha256'
"""Field of a sealed JSON object with the digest of all others."""


class FolderInUse(ValueError):
  """An error for a folder that another process has locked."""


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """Replaces a file atomically by one that is written inside the context.

  A link at the path is replaced, never written through.

  Args:
    path: The file to replace or create.

  Yields:
    Path of a temporary file to write, in the same folder and with the same
    suffix. If the context raises, it is deleted and the old file stays.

  Example:
    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), 'a.txt')
    >>> with replacing(path) as temporary:
    ...   _ = temporary.write_text('whole')
    >>> path.read_text()
    'whole'
  """
  path = pathlib.Path(path)
  # Process ids are not unique: several machines may write the same file.
  temporary = path.with_name(f'.{path.stem}.{uuid.uuid4().hex}{path.suffix}')
  try:
    with writing(path):
      yield temporary
      with temporary.open('r+b') as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
  """Adds a path to errors of a disk that name none, e.g. that it is full.

  Args:
    path: The file or folder that is written in the context.

  Raises:
    OSError: the context raised it.

  Example:
    >>> with writing('a.txt'):
    ...   raise OSError(28, 'No space left on device')
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device: 'a.txt'
  """
  try:
    yield
  except OSError as error:
    if error.errno in _DISK_ERRORS and error.filename is None:
      error.filename = os.fspath(path)
    raise


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
  """Writes a text file in UTF-8 by `replacing` it."""
  with replacing(path) as temporary:
    temporary.write_text(text, encoding='utf-8')


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> int:
  """Opens a file to read and write it in place, and creates a missing one.

  Folders that others sent may hold links to files of the user, and pipes that
  block whoever opens them.

  Args:
    path: The file.
    flags: Flags of `os.open`, e.g. `os.O_APPEND`.

  Returns:
    The file descriptor.

  Raises:
    OSError: the file cannot be opened.
    ValueError: the path is a link, a pipe or a device.
  """
  return _open(path, os.O_RDWR | os.O_CREAT | flags)


def _open(path: str | os.PathLike[str], flags: int) -> int:
  # Windows has neither flag.
  flags |= getattr(os, 'O_NOFOLLOW', 0) | getattr(os, 'O_NONBLOCK', 0)
  if not os.path.islink(path):
    descriptor = os.open(path, flags, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
      return descriptor
    os.close(descriptor)
  raise ValueError(
      f'{os.fspath(path)!r} is a link, a pipe or a device, and only regular '
      'files are written in place; remove it.'
  )


def lock_folder(
    folder: str | os.PathLike[str], name: str
) -> Callable[[], None]:
  """Locks a folder for this process, until it releases the lock or exits.

  The lock is a `flock` of the file `.lock` in the folder, so it also ends when
  the process is killed. A process that already holds the lock may lock the
  folder again. Where a file system does not support `flock`, a warning says so
  and nothing is locked.

  Args:
    folder: An existing folder.
    name: Name of the folder for the error message, e.g. `'workdir'`.

  Returns:
    Function that releases the lock; for a lock that this process already held,
    it does nothing.

  Raises:
    FolderInUse: another process holds the lock; the message has its host and
      process id.
    ValueError: `.lock` is not a regular file, see `open_regular`.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   release = lock_folder(folder, 'workdir')
    ...   release()
  """
  path = pathlib.Path(folder).resolve() / '.lock'
  if path in _held or fcntl is None:
    return lambda: None
  descriptor = open_regular(path)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    error = _in_use(folder, name, descriptor)
    os.close(descriptor)
    raise error from None
  except OSError as error:
    os.close(descriptor)
    _logger.warning(
        '%s %r cannot be locked on this file system (%s); start only one '
        'process that writes to it.', name, str(folder), error,
    )
    return lambda: None
  owner = f'process {os.getpid()} on {socket.gethostname()}'
  with writing(path):
    os.truncate(descriptor, 0)
    os.write(descriptor, owner.encode())
  _held[path] = descriptor

  def release() -> None:
    if _held.get(path) == descriptor:
      del _held[path]
      os.close(descriptor)

  return release


def refuse_locked(folder: str | os.PathLike[str], name: str) -> None:
  """Raises if another process has locked a folder; writes nothing.

  Args:
    folder: A folder; it need not exist, or be writable.
    name: Name of the folder for the error message, e.g. `'workdir'`.

  Raises:
    FolderInUse: another process holds the lock.
    ValueError: `.lock` is not a regular file, see `open_regular`.
  """
  path = pathlib.Path(folder).resolve() / '.lock'
  if path in _held or fcntl is None or not os.path.lexists(path):
    return
  descriptor = _open(path, os.O_RDONLY)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except BlockingIOError:
    raise _in_use(folder, name, descriptor) from None
  except OSError:  # The file system has no locks.
    pass
  finally:
    os.close(descriptor)


def _in_use(
    folder: str | os.PathLike[str], name: str, descriptor: int
) -> FolderInUse:
  owner = os.read(descriptor, 200).decode(errors='replace').strip()
  return FolderInUse(
      f'{name} {str(folder)!r} is in use by {owner or "another process"}; '
      'wait until it has ended, or give another folder.'
  )


def create_private(folder: str | os.PathLike[str]) -> None:
  """Creates a folder with mode 0700, or checks the one that exists.

  Missing parents are created with this mode too.

  Args:
    folder: The folder.

  Raises:
    OSError: the folder cannot be created.
    ValueError: the folder is not private, see `check_private`.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   create_private(folder)
  """
  path = pathlib.Path(folder)
  missing = [place for place in path.parents if not place.exists()]
  for place in (*reversed(missing), path):
    place.mkdir(mode=0o700, exist_ok=True)
  check_private(path)


def check_private(path: str | os.PathLike[str]) -> None:
  """Raises unless this user owns a file or folder and only they can write it.

  Does nothing on Windows, whose files have no such modes.

  Args:
    path: An existing file or folder.

  Raises:
    ValueError: the path belongs to another user, or its group or others can
      write to it.
  """
  if not hasattr(os, 'geteuid'):
    return
  info = os.stat(path)
  if info.st_uid != os.geteuid():
    raise ValueError(
        f'{path} belongs to the user with the id {info.st_uid}, who could '
        'replace the compiled code there; use a cache folder of your own, e.g. '
        'by setting XDG_CACHE_HOME.'
    )
  if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
    raise ValueError(
        f'{path} has mode {stat.S_IMODE(info.st_mode):o}, so that other users '
        'could replace the compiled code there; delete it, or run chmod -R '
        'go-w on it if you trust its files.'
    )


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], fix: str) -> Iterator[None]:
  """Turns whatever goes wrong while a file is read into one sentence.

  Code in the context takes fields for granted: a `KeyError` of a missing one
  ends in a sentence too.

  Args:
    path: The file, or a text that names what is read.
    fix: End of the sentence: what to do if the file cannot be read.

  Raises:
    OSError: an error of the system that names the file.
    ValueError: the context raised another error; one whose text names the file,
      or is such a sentence about a file inside it, is kept as it is.

  Example:
    >>> try:
    ...   with reading('a.json', 'write it again.'):
    ...     {}['step']
    ... except ValueError as error:
    ...   print(error)
    a.json cannot be read (KeyError: 'step'); write it again.
  """
  try:
    usual = os.path.isfile(path), os.path.isdir(path)
    if os.path.exists(path) and not any(usual):  # It would block its reader.
      raise ValueError(f'{path} is a pipe or a device; {fix}')
    yield
  except (ImportError, InterruptedError):
    raise
  except Exception as error:  # Parsers and backends raise any.
    is_named = os.fspath(path) in str(error) and '\n' not in str(error)
    if isinstance(error, OSError) and (is_named or error.filename):
      raise
    is_said = ' cannot be read (' in str(error)
    if isinstance(error, ValueError) and (is_named or is_said):
      raise
    text = ' '.join(str(error).split())[:300]
    raise ValueError(
        f'{path} cannot be read ({type(error).__name__}: {text}); {fix}'
    ) from error


def read_object(path: str | os.PathLike[str], fix: str) -> dict[str, Any]:
  """Reads a JSON object from a file.

  Args:
    path: The file.
    fix: End of the error message: what to do if the file cannot be read.

  Returns:
    The object.

  Raises:
    OSError: the file is missing, or its device fails.
    ValueError: it is not a regular file, or does not hold a JSON object.

  Example:
    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), 'a.json')
    >>> _ = path.write_text('[3]')
    >>> read_object(path, 'write it again.')  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: .../a.json holds no JSON object; write it again.
  """
  path = pathlib.Path(path)
  if path.exists() and not path.is_file():
    raise ValueError(f'{path} is not a regular file; {fix}')
  with reading(path, fix):
    value = json.loads(path.read_bytes())
  if not isinstance(value, dict):
    raise ValueError(f'{path} holds no JSON object; {fix}')
  return value


def seal(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Adds the digest of the fields, so that `unseal` detects changes.

  The digest is the SHA-256 of the fields as JSON with sorted keys.

  Args:
    fields: JSON-able fields.

  Returns:
    The fields as JSON stores them, and their digest `'sha256'`.

  Example:
    >>> sorted(seal({'step': 3, 'shape': (2, 1)}).items())[1:]
    [('shape', [2, 1]), ('step', 3)]
  """
  plain = json.loads(json.dumps(_without_digest(fields)))
  return {**plain, _DIGEST: _digest(plain)}


def unseal(
    fields: Mapping[str, Any], place: Any,
    fix: str = 'restore the file from a copy, or create it again.',
) -> dict[str, Any]:
  """Removes the digest of the fields, after comparing it with them.

  Args:
    fields: Fields that `seal` returned.
    place: File of the fields, for the error message.
    fix: End of the error message.

  Returns:
    The fields without the digest.

  Raises:
    ValueError: the fields have no digest, or differ from it.

  Example:
    >>> unseal(seal({'step': 3}), 'meta.json')
    {'step': 3}
    >>> unseal({**seal({'step': 3}), 'step': 2}, 'meta.json')
    Traceback (most recent call last):
    ...
    ValueError: meta.json is damaged, because its fields do not have the \
digest in its field 'sha256'; restore the file from a copy, or create it again.
  """
  plain = _without_digest(fields)
  if fields.get(_DIGEST) != _digest(plain):
    raise ValueError(
        f'{place} is damaged, because its fields do not have the digest in its '
        f'field {_DIGEST!r}; {fix}'
    )
  return plain


def _without_digest(fields: Mapping[str, Any]) -> dict[str, Any]:
  return {key: value for key, value in fields.items() if key != _DIGEST}


def _digest(fields: Mapping[str, Any]) -> str:
  text = json.dumps(fields, sort_keys=True)
  return hashlib.sha256(text.encode('utf-8')).hexdigest()


def is_url(path: str | os.PathLike[str]) -> bool:
  """Returns whether a path is a URL, such as `gs://bucket/folder`.

  Example:
    >>> is_url('gs://a/b'), is_url('./a'), is_url('C:/a'), is_url('a=1')
    (True, False, False, False)
  """
  # `pathlib.Path` makes one slash of two.
  return bool(re.match(r'[a-z][a-z0-9+.-]+:/', os.fspath(path)))


def refuse_url(path: str | os.PathLike[str], name: str) -> None:
  """Raises if a folder to write to is a URL, not a path.

  Args:
    path: The folder.
    name: Name of the folder for the error message, e.g. `'workdir'`.

  Raises:
    ValueError: the path is a URL.

  Example:
    >>> refuse_url('runs/a', 'workdir')
  """
  if is_url(path):
    raise ValueError(
        f'{name} {os.fspath(path)!r} is a URL, but files in this folder are '
        'locked, renamed and appended to, which buckets do not support; give a '
        'folder on a disk, or mount the bucket as a file system.'
    )

# SPDX-License-Identifier: Apache-2.0
"""Locks of folders: one process at a time writes to a folder."""

from collections.abc import Callable
import logging
import os
import pathlib
import socket

try:
  import fcntl
except ImportError:  # Windows has no flock.
  fcntl = None  # type: ignore[assignment]

_logger = logging.getLogger('spdf_jax')
_held: dict[pathlib.Path, int] = {}  # File descriptors by path of the lock.


class FolderInUse(ValueError):
  """An error for a folder that another process has locked."""


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

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   release = lock_folder(folder, 'workdir')
    ...   release()
  """
  path = pathlib.Path(folder).resolve() / '.lock'
  if path in _held or fcntl is None:
    return lambda: None
  descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    owner = os.read(descriptor, 200).decode(errors='replace').strip()
    os.close(descriptor)
    raise FolderInUse(
        f'{name} {str(folder)!r} is in use by {owner or "another process"}; '
        'wait until it has ended, or give another folder.'
    ) from None
  except OSError as error:
    os.close(descriptor)
    _logger.warning(
        '%s %r cannot be locked on this file system (%s); start only one '
        'process that writes to it.', name, str(folder), error,
    )
    return lambda: None
  os.truncate(descriptor, 0)
  os.write(
      descriptor, f'process {os.getpid()} on {socket.gethostname()}'.encode()
  )
  _held[path] = descriptor

  def release() -> None:
    if _held.get(path) == descriptor:
      del _held[path]
      os.close(descriptor)

  return release

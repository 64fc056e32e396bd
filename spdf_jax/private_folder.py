# SPDX-License-Identifier: Apache-2.0
"""Private folders: caches of machine code that no other user can write to."""

import os
import pathlib
import stat


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
  """Raises unless a file or folder is ours and only we can write to it.

  Does nothing on Windows, whose files have no such modes.

  Args:
    path: An existing file or folder.

  Raises:
    ValueError: the path belongs to another user, or its group or others can
      write to it.
  """
  if not hasattr(os, 'geteuid'):
    return
  found = os.stat(path)
  if found.st_uid != os.geteuid():
    raise ValueError(
        f'{path} belongs to user {found.st_uid}, who could replace the machine '
        'code in it; use a cache of your own, e.g. by XDG_CACHE_HOME.'
    )
  if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
    raise ValueError(
        f'{path} has mode {stat.S_IMODE(found.st_mode):o}, so that other users '
        'could replace the machine code in it; delete it, or run chmod -R go-w '
        'on it if you trust its files.'
    )

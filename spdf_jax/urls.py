# SPDX-License-Identifier: Apache-2.0
"""URLs where folders are expected."""

import os
import re


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
    ValueError: The path is a URL.

  Example:
    >>> refuse_url('runs/a', 'workdir')
  """
  if is_url(path):
    raise ValueError(
        f'{name} {os.fspath(path)!r} is a URL, and files are locked, renamed '
        'and appended to in it, which buckets do not offer; give a folder of a '
        'disk, or of the bucket mounted as a file system.'
    )

# SPDX-License-Identifier: Apache-2.0
"""The sources of the running Python's standard library, as a corpus."""

from collections.abc import Iterator
import logging
from pathlib import Path
import platform
import sys
import sysconfig
import tokenize
from typing import Literal
import zlib

Split = Literal['train', 'validation', 'test']

# Tests, tables, and sources that newer versions of Python have removed.
EXCLUDED_FOLDERS = frozenset({
    'test', 'tests', 'encodings', 'idlelib', 'pydoc_data', 'distutils',
    'lib2to3', '__pycache__',
})

# Files written by the build or the distributor of an interpreter, which differ
# between machines with the same version of Python.
_GENERATED_PREFIXES = ('_sysconfigdata', 'sitecustomize', 'usercustomize')

# The best of 2,000 salts: in both Python 3.11 and 3.13, the shares of modules,
# bytes and docstrings in both held-out splits are closest to 5 %, and no large
# module dominates one. Changing it changes every corpus and task.
_SPLIT_SALT = 1531

_logger = logging.getLogger(__name__)


def module_split(module_name: str) -> Split:
  """Returns the split of a module, by a hash of its name.

  About 90 % of the modules (and of their text) are for training and 5 % each
  for validation and test. The pre-training corpus and the docstring task both
  use this function, so that no test example of the task is in the training
  split of the corpus.

  Args:
    module_name: Dotted name, e.g. `'asyncio.queues'`.

  Returns:
    `'train'`, `'validation'` or `'test'`, the same on every machine.

  Example:
    >>> module_split('bisect'), module_split('asyncio.sslproto')
    ('train', 'validation')
  """
  bucket = zlib.crc32(f'{_SPLIT_SALT}:{module_name}'.encode()) % 100
  if bucket < 90:
    return 'train'
  return 'validation' if bucket < 95 else 'test'


def python_identity() -> dict[str, str]:
  """Returns the identity of the interpreter, independent of the machine.

  Returns:
    Implementation and full version, for descriptions and fingerprints.

  Example:
    >>> sorted(python_identity())
    ['implementation', 'python']
  """
  return {
      'implementation': sys.implementation.name,
      'python': platform.python_version(),
  }


def module_sources(root: Path | None = None) -> list[tuple[str, str]]:
  """Reads the sources of Python's standard library.

  Tests, encodings, `idlelib`, `pydoc_data`, `distutils`, `lib2to3`, installed
  packages, and files written by the build of an interpreter are excluded.
  Files are decoded by their declared encoding (PEP 263), and newlines are
  normalized to `'\\n'`.

  Args:
    root: Folder to read; `None`: the running interpreter's library.

  Returns:
    Pairs (dotted module name, text) of all modules, sorted by path; files that
    cannot be read or decoded are skipped with a warning.

  Raises:
    RuntimeError: `root` holds no Python sources, as in interpreters that
      ship their library as a zip file.

  Example:
    >>> sources = dict(module_sources())
    >>> sources['heapq'].startswith('\"\"\"Heap queue algorithm')
    True
  """
  root = Path(sysconfig.get_path('stdlib') if root is None else root)
  sources = list(_read_modules(root))
  if not sources:
    raise RuntimeError(
        f'{root} holds no Python sources; use a Python that ships its'
        ' standard library as .py files.'
    )
  return sources


def _read_modules(root: Path) -> Iterator[tuple[str, str]]:
  relative = (path.relative_to(root) for path in root.rglob('*.py'))
  for path in sorted(relative, key=lambda path: path.parts):
    parts = path.with_suffix('').parts
    if not _is_library(parts):
      continue
    try:
      with tokenize.open(root / path) as file:
        text = file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
      _logger.warning('Skipped %s: %s.', root / path, error)
      continue
    yield '.'.join(parts[:-1] if parts[-1] == '__init__' else parts), text


def _is_library(parts: tuple[str, ...]) -> bool:
  # Identifiers only, which excludes site-packages and config-3.11.
  return (
      all(part.isidentifier() for part in parts)
      and EXCLUDED_FOLDERS.isdisjoint(parts[:-1])
      and not parts[0].startswith(_GENERATED_PREFIXES)
  )

"""The running Python's own library, module by module: text for everyone."""

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

# Tests, tables and sources that newer Pythons have dropped.
EXCLUDED_FOLDERS = frozenset({
    'test', 'tests', 'encodings', 'idlelib', 'pydoc_data', 'distutils',
    'lib2to3', '__pycache__',
})

# Written by the build or the distributor of an interpreter, not by Python's
# authors: they differ between machines of one Python version.
_GENERATED_PREFIXES = ('_sysconfigdata', 'sitecustomize', 'usercustomize')

# Of 2,000 salts the one under which, in Python 3.11 and 3.13 alike, modules,
# bytes and docstrings of both held-out splits come nearest to 5 % and no
# large module fills one. Changing it changes every corpus and task.
_SPLIT_SALT = 1531

_logger = logging.getLogger(__name__)


def module_split(module_name: str) -> Split:
  """Says which split a module belongs to, by a hash of its name.

  About 90 % of the modules (and of their text) are for training and 5 % each
  for validation and test. The pre-training corpus and the docstring task both
  ask this function, so what the task is tested on was never pre-trained on.

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
  """Names the interpreter whose library is read, whatever the machine.

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

  Tests, encodings, `idlelib`, `pydoc_data`, `distutils`, `lib2to3` and
  installed packages are left out, and so are files that the build of an
  interpreter writes. Files are decoded as they declare (PEP 263), with
  newlines made `'\\n'`.

  Args:
    root: The folder to read; None reads the running interpreter's library.

  Returns:
    (dotted module name, text) of every module, sorted by path.

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
      _logger.warning('Left out %s: %s.', root / path, error)
      continue
    yield '.'.join(parts[:-1] if parts[-1] == '__init__' else parts), text


def _is_library(parts: tuple[str, ...]) -> bool:
  # Folders such as site-packages and config-3.11 are no identifiers.
  return (
      all(part.isidentifier() for part in parts)
      and EXCLUDED_FOLDERS.isdisjoint(parts[:-1])
      and not parts[0].startswith(_GENERATED_PREFIXES)
  )

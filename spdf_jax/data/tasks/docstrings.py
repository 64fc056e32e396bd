# SPDX-License-Identifier: Apache-2.0
"""A task from Python signatures to the first lines of their docstrings."""

import ast
from collections.abc import Iterator, Mapping
import functools
import json
import logging
import os
from pathlib import Path
from typing import Any
import warnings

from spdf_jax import files
from spdf_jax.data import stdlib
from spdf_jax.data.tasks.task import Pair
from spdf_jax.data.tasks.task import SPLITS
from spdf_jax.data.tasks.task import Task

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_NAME = 'python-docstrings'

# To be raised when the pairs of an unchanged interpreter change.
_RECIPE_VERSION = 1

_logger = logging.getLogger(__name__)


@functools.cache
def python_docstrings(cache_dir: str | os.PathLike[str] | None = None) -> Task:
  """Reads the task of writing the first line of a docstring, given a signature.

  Each pair has the signature of a function or method of the running Python's
  standard library, and the first line of its docstring.

  The splits are those of the modules (`module_split`), so that the training
  split of the corpus `'python-stdlib'` contains no module of the validation and
  test pairs.

  Args:
    cache_dir: Folder for a file of the pairs, which saves seconds of parsing
      when the task is read again; created if missing. `None`: no file.

  Returns:
    The task of about 5,800 pairs, which depend on the version of Python only.

  Raises:
    RuntimeError: the standard library is not there as `.py` files.

  Example:
    >>> task = python_docstrings()
    >>> [pair.target for pair in task.validation if
    ...  pair.context == 'heapq heappush(heap, item)']
    ['Push item onto heap, maintaining the heap invariant.']
  """
  if cache_dir is None:
    return _parse_library()
  identity = {'recipe': _RECIPE_VERSION, **stdlib.python_identity()}
  folder = Path(cache_dir).expanduser()
  path = folder / f'{_NAME}-{identity["python"]}.json'
  if path.exists():
    try:
      return _read(path, identity)
    except (OSError, ValueError) as error:
      _logger.warning('Parsing the docstrings again: %s', error)
  task = _parse_library()
  pairs = {split: getattr(task, split) for split in SPLITS}
  try:
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, json.dumps(files.seal(identity | pairs)))
  except OSError as error:
    _logger.warning('The docstrings will be parsed again: %s', error)
  return task


def _read(path: Path, identity: Mapping[str, Any]) -> Task:
  """Reads the file of the pairs; raises ValueError if it is not of `identity`.
  """
  stored = files.unseal(files.read_object(path, 'delete it.'), path)
  found = {name: stored.get(name) for name in identity}
  if found != identity:
    raise ValueError(f'{path} was made for {found}, not for {identity}.')
  train, validation, test = (
      tuple(Pair(*pair) for pair in stored[split]) for split in SPLITS
  )
  return Task(_NAME, train, validation, test)


def _parse_library() -> Task:
  splits: dict[str, list[Pair]] = {split: [] for split in SPLITS}
  for module, text in stdlib.module_sources():
    splits[stdlib.module_split(module)].extend(docstring_pairs(module, text))
  train, validation, test = (tuple(splits[split]) for split in SPLITS)
  return Task(_NAME, train, validation, test)


def docstring_pairs(module: str, text: str) -> list[Pair]:
  """Lists the documented functions and methods of one module.

  If a function is defined more than once with the same signature, as for
  several platforms, the first definition is used. First lines without a letter,
  or with an interactive prompt, are skipped, since they describe nothing.

  Args:
    module: Dotted name of the module.
    text: Source of the module.

  Returns:
    Pairs of a signature and the first line of its docstring, in source order.

  Raises:
    SyntaxError: `text` is not Python.

  Example:
    >>> docstring_pairs('zoo', '''
    ... class Cat:
    ...   def purr(self, times=1) -> str:
    ...     \"\"\"Purrs.
    ...
    ...     More often when fed.
    ...     \"\"\"
    ... ''')
    [Pair(context='zoo Cat.purr(self, times=1) -> str', target='Purrs.')]
  """
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # Old sources contain invalid escapes.
    tree = ast.parse(text)
  pairs: dict[str, str] = {}
  for path, function in _functions(tree, ()):
    target = _first_line(function)
    if target:
      context = f'{module} {".".join(path)}{_signature(function)}'
      pairs.setdefault(context, target)
  return [Pair(context, target) for context, target in pairs.items()]


def _functions(
    node: ast.AST, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], _Function]]:
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.expr):
      continue  # Expressions contain no definitions.
    inner = path
    if isinstance(child, _Function | ast.ClassDef):
      inner = (*path, child.name)
    if isinstance(child, _Function):
      yield inner, child
    yield from _functions(child, inner)


def _first_line(function: _Function) -> str:
  lines = (ast.get_docstring(function) or '').strip().splitlines()
  line = lines[0].strip() if lines else ''
  describes = any(c.isalpha() for c in line) and not line.startswith('>>>')
  return line if describes else ''


def _signature(function: _Function) -> str:
  returns = f' -> {ast.unparse(function.returns)}' if function.returns else ''
  return f'({ast.unparse(function.args)}){returns}'

# SPDX-License-Identifier: Apache-2.0
"""A task from Python signatures to the first lines of their docstrings."""

import ast
from collections.abc import Iterator
import functools
import warnings

from spdf_jax.data import stdlib
from spdf_jax.data.tasks.task import Pair
from spdf_jax.data.tasks.task import Task

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def python_docstrings() -> Task:
  """Reads the task of writing the first line of a docstring, given a signature.

  Each pair has the signature of a function or method of the running Python's
  standard library, and the first line of its docstring.

  The splits are those of the modules (`module_split`), so that the training
  split of the corpus `'python-stdlib'` contains no module of the validation and
  test pairs.

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
  splits: dict[str, list[Pair]] = {'train': [], 'validation': [], 'test': []}
  for module, text in stdlib.module_sources():
    splits[stdlib.module_split(module)].extend(docstring_pairs(module, text))
  return Task(
      'python-docstrings', tuple(splits['train']), tuple(splits['validation']),
      tuple(splits['test']),
  )


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

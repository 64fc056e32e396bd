"""Tests of the signatures of spdf_jax."""

import ast
import pathlib

import spdf_jax

PACKAGE = pathlib.Path(spdf_jax.__file__).parent


def public_functions(body):
  """Yields (function, is_method) of functions and methods without `_`."""
  for node in body:
    if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
      yield from ((method, True) for method, _ in public_functions(node.body))
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      if not node.name.startswith('_'):
        yield node, False
    elif isinstance(node, (ast.If, ast.Try)):
      yield from public_functions([*node.body, *node.orelse])


def bare_parts(function, is_method):
  """Returns the arguments without annotation, and `'return'` likewise."""
  given = function.args
  names = [*given.posonlyargs, *given.args]
  decorators = {ast.unparse(d) for d in function.decorator_list}
  if is_method and 'staticmethod' not in decorators:
    names = names[1:]
  names += [*given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
  bare = [name.arg for name in names if name.annotation is None]
  return bare + ['return'] * (function.returns is None)


def bare_signatures(source):
  """Returns (line, name, parts) of incompletely annotated functions."""
  return [
      (function.lineno, function.name, parts)
      for function, is_method in public_functions(ast.parse(source).body)
      if (parts := bare_parts(function, is_method))
  ]


def test_public_functions_are_fully_annotated():
  assert {
      str(path.relative_to(PACKAGE)): found
      for path in sorted(PACKAGE.rglob('*.py'))
      if (found := bare_signatures(path.read_text()))
  } == {}

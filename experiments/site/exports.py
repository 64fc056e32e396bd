"""The directive `exports`: the public names of a package.

  .. exports:: spdf_jax.models

documents every name in `__all__`, after a table of them; with content, the
names in it. Functions come before classes.
"""

import ast
import importlib
import inspect
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Exports(SphinxDirective):
  """Documents the names of a package."""

  required_arguments = 1
  has_content = True

  def run(self) -> list[nodes.Node]:
    """Returns the nodes of a table and of every name."""
    package = importlib.import_module(self.arguments[0])
    names = ' '.join(self.content).split() or sorted(
        package.__all__, key=lambda name: (_order(package, name), name.lower())
    )
    # The table would show the docstring of a value's type.
    listed = [name for name in names if not _is_value(getattr(package, name))]
    lines = [
        f'.. currentmodule:: {package.__name__}', '', '.. autosummary::',
        '  :nosignatures:', '', *(f'  {name}' for name in listed), '',
    ]
    for name in names:
      lines += [*_directive(package, name), '']
    return self.parse_text_to_nodes('\n'.join(lines))


def _order(package: Any, name: str) -> int:
  found = getattr(package, name)
  return 2 if _is_value(found) else 1 if inspect.isclass(found) else 0


def _is_value(found: Any) -> bool:
  return not inspect.isclass(found) and not inspect.isfunction(
      inspect.unwrap(found)
  )


def _directive(package: Any, name: str) -> list[str]:
  found = getattr(package, name)
  if inspect.isclass(found):
    return [f'.. autoclass:: {name}', '  :members:']
  if not _is_value(found):
    return [f'.. autofunction:: {name}']
  return [f'.. autodata:: {_home(package, name)}', '  :no-value:']


def _home(package: Any, name: str) -> str:
  """Returns where a value is defined, which is where its docstring is."""
  for node in ast.walk(ast.parse(inspect.getsource(package))):
    imported = [a.name for a in getattr(node, 'names', ())]
    if isinstance(node, ast.ImportFrom) and name in imported:
      return f'{node.module}.{name}'
  return f'{package.__name__}.{name}'


def setup(app: Sphinx) -> dict[str, Any]:
  """Adds the directive."""
  app.add_directive('exports', Exports)
  return {'parallel_read_safe': True, 'parallel_write_safe': True}

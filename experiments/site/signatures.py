"""Signatures as they are written in the source.

Sphinx would evaluate them: `PyTree` and other aliases would be `Any` or long
unions.
"""

import ast
import inspect
import textwrap
from typing import Any

from sphinx.application import Sphinx


def _as_written(
    app: Sphinx,
    what: str,
    name: str,
    found: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
  if what == 'class' and signature:
    # The types of fields are shown with the fields.
    return f'({", ".join(inspect.signature(found).parameters)})', None
  if not inspect.isfunction(found):
    return None
  node = ast.parse(textwrap.dedent(inspect.getsource(found))).body[0]
  if not isinstance(node, ast.FunctionDef):
    return None
  if what == 'method' and node.args.args[:1]:
    del node.args.args[0]
  return (
      f'({ast.unparse(node.args)})',
      node.returns and ast.unparse(node.returns),
  )


def setup(app: Sphinx) -> dict[str, Any]:
  """Connects the handler of signatures."""
  app.setup_extension('sphinx.ext.autodoc')
  app.connect('autodoc-process-signature', _as_written)
  return {'parallel_read_safe': True, 'parallel_write_safe': True}

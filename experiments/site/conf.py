"""Sphinx configuration of the site; `python -m experiments.docs` builds it."""

import ast
import inspect
import os
import pathlib
import re
import sys
import textwrap
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

_ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(_ROOT))
os.environ['PYTHONPATH'] = str(_ROOT)  # Notebooks import this clone.

import spdf_jax  # noqa: E402
from spdf_jax.extras import REPOSITORY  # noqa: E402

project = 'spdf_jax'
author = 'The spdf_jax authors'
copyright = f'2026, {author}'
version = release = spdf_jax.__version__

extensions = [
    'myst_nb',
    'sphinx.ext.autodoc',
    'sphinx.ext.napoleon',
    'sphinx_copybutton',
    'sphinx_design',
]
include_patterns = [
    'index.md',
    'guides/*.md',
    'colabs/*.ipynb',
    'site/**',
    'results/README.md',
    'results/*/README.md',
    'results/claims-*/PROTOCOL*.md',
    'results/claims-*/table.md',
    'results/quickstart/report.md',
    'results/race/table.md',
]
# Single backticks are code, and a link where they are one public name.
default_role = 'py:obj'
suppress_warnings = ['myst.header', 'ref.python']

myst_enable_extensions = ['colon_fence']
myst_heading_anchors = 3

nb_execution_mode = 'cache'
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 3600
nb_merge_streams = True

add_module_names = False
autodoc_default_options = {'members': True}
autodoc_member_order = 'groupwise'
autodoc_preserve_defaults = True
autodoc_typehints_format = 'short'
maximum_signature_line_length = 72
napoleon_use_ivar = True
python_use_unqualified_type_names = True
toc_object_entries_show_parents = 'hide'

html_context = {'default_mode': 'auto'}
html_theme = 'sphinx_book_theme'
html_title = 'spdf_jax'
html_copy_source = True
html_show_sourcelink = False
html_favicon = 'static/favicon.svg'
html_static_path = ['static']
html_css_files = ['site.css']
html_theme_options = {
    'home_page_in_toc': True,
    'path_to_docs': 'experiments',
    'repository_branch': 'main',
    'repository_url': REPOSITORY,
    'show_navbar_depth': 1,
    'show_toc_level': 2,
    'use_download_button': True,
    'use_repository_button': bool(REPOSITORY),
}
if REPOSITORY:
  html_theme_options['launch_buttons'] = {
      'colab_url': 'https://colab.research.google.com'
  }


def _write_inline(writer: HTML5Translator, node: nodes.math) -> None:
  """Writes mathematics as MathML, which needs no scripts or fonts."""
  writer.body.append(latex2mathml.tex2mathml(node.astext()))
  raise nodes.SkipNode


def _write_block(writer: HTML5Translator, node: nodes.math_block) -> None:
  math = latex2mathml.tex2mathml(node.astext(), as_block=True)
  writer.body.append(f'<div class="math">{math}</div>\n')
  raise nodes.SkipNode


def _write_signature(
    app: Sphinx,
    what: str,
    name: str,
    obj: Any,
    options: Any,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
  """Returns a signature as the source code writes it.

  Sphinx would evaluate it: `PyTree` and other aliases would be `Any` or long
  unions.
  """
  if what == 'class' and signature:
    # The types of fields are shown with the fields.
    return f'({", ".join(inspect.signature(obj).parameters)})', None
  if not inspect.isfunction(obj):
    return None
  node = ast.parse(textwrap.dedent(inspect.getsource(obj))).body[0]
  if not isinstance(node, ast.FunctionDef):
    return None
  if what == 'method' and node.args.args[:1]:
    del node.args.args[0]
  return (
      f'({ast.unparse(node.args)})',
      node.returns and ast.unparse(node.returns),
  )


def _redirect_links(app: Sphinx, page: str, source: list[str]) -> None:
  """Redirects links between registered protocols, which keep their bytes.

  When they were registered, all lay in one folder.
  """
  del app
  if '/PROTOCOL' in page:
    source[0] = re.sub(
        r'\]\((PROTOCOL[-\d]*\.md)\)', lambda link: f']({_moved(link[1])})',
        source[0],
    )


def _moved(name: str) -> str:
  """Returns the path of a protocol from the folder of another one."""
  results = pathlib.Path(__file__).parents[1] / 'results'
  (path,) = results.glob(f'*/{name}')
  return f'../{path.relative_to(results)}'


def setup(app: Sphinx) -> None:
  """Chooses the renderer of mathematics, and the one of signatures."""
  app.connect('source-read', _redirect_links)
  app.add_html_math_renderer(
      'mathml', (_write_inline, None), (_write_block, None)
  )
  app.config.html_math_renderer = 'mathml'
  app.connect('autodoc-process-signature', _write_signature)

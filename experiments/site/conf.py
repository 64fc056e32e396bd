"""Sphinx configuration of the site; `python -m experiments.docs` builds it."""

import os
import pathlib
import sys

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
    'experiments.site.exports',
    'experiments.site.mathml',
    'experiments.site.signatures',
    'myst_nb',
    'sphinx.ext.autodoc',
    'sphinx.ext.autosummary',
    'sphinx.ext.napoleon',
    'sphinx_copybutton',
    'sphinx_design',
]
include_patterns = [
    'index.md',
    'guides/*.md',
    'colabs/*.ipynb',
    'site/**',
    'results/PROTOCOL.md',
    'results/*/README.md',
    'results/claims-fair/table.md',
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
autodoc_preserve_defaults = True
autodoc_typehints_format = 'short'
autosummary_generate = False
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

"""The API reference: it has every package, and its pages can be read."""

import ast
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

import spdf_jax

PACKAGE = pathlib.Path(spdf_jax.__file__).parent
GUIDE = PACKAGE.parent / 'experiments' / 'guides' / 'reference.md'
SECONDS = 600  # of patience with a child process.


def command():
  """Returns the words of the guide's command after `python`."""
  text = GUIDE.read_text().replace('\\\n', ' ')
  return re.search(r'^python (-m pdoc .*)', text, re.M)[1].split()


def test_the_command_has_every_package():
  named = [word for word in command() if word.startswith('spdf_jax')]
  packages = {
      f'spdf_jax.{path.parent.name}' for path in PACKAGE.glob('*/__init__.py')
  }
  assert packages <= set(named)
  for name in named:
    assert importlib.import_module(name).__all__
    assert f'| `{name}` |' in GUIDE.read_text()


def test_code_in_docstrings_is_marked_as_code():
  # Two colons make code of it for Sphinx only: write `.. code-block:: python`.
  for path in PACKAGE.rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
        text = ast.get_docstring(node) or ''
        assert not re.search(r'[^:\s]::$', text, re.M), (path, text)


@pytest.mark.slow
def test_the_pages_are_built(tmp_path):
  pytest.importorskip('pdoc')
  words = [
      f'--output-directory={tmp_path}' if '=reference' in word else word
      for word in command()
  ]
  done = subprocess.run(
      [sys.executable, *words], cwd=PACKAGE.parent, capture_output=True,
      text=True, timeout=SECONDS, check=False,
  )
  assert done.returncode == 0, done.stderr
  for name in (word for word in words if word.startswith('spdf_jax')):
    page = (tmp_path / f'{name.replace(".", "/")}.html').read_text()
    for public in importlib.import_module(name).__all__:
      assert f'id="{public}"' in page, f'{name}.{public}'

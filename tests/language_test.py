"""What can be checked of CONTRIBUTING's language rules."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ('spdf_jax', 'experiments', 'configs')
# Entries of Args and the like that lean on the name before them.
LEANING = re.compile(r' {2,}[`*\w.]+: (Of|Its|Whose|Where|It|They|Those)\b')
# Words for which the project has another one; see CONTRIBUTING.
BANNED = re.compile(
    r'\b(lineages?|competitions?|stretch(es)?|alive|levels? of (sparsity|zeros)'
    r')\b', re.I,
)


def docstrings():
  """Yields (path, node, docstring) of every module, class and function."""
  for folder in FOLDERS:
    for path in sorted((ROOT / folder).rglob('*.py')):
      for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
          text = ast.get_docstring(node, clean=False)
          if text is not None:
            yield path.relative_to(ROOT), node, text


def is_function(node):
  """Returns whether a node is a function that is called as one."""
  return isinstance(node, ast.FunctionDef) and not any(
      'property' in ast.unparse(decorator) for decorator in node.decorator_list
  )


pytestmark = pytest.mark.skipif(
    not (ROOT / 'experiments').is_dir(), reason='needs the checkout'
)


def test_entries_stand_alone():
  assert [
      f'{path}: {line.strip()}' for path, _, text in docstrings()
      for line in text.splitlines() if LEANING.match(line)
  ] == []


def test_functions_begin_with_a_verb_in_the_third_person():
  assert [
      f'{path}: {node.name}: {text.splitlines()[0]}'
      for path, node, text in docstrings()
      if is_function(node) and not re.match(r'[A-Z][a-z-]*s\b', text)
  ] == []


def test_one_word_is_used_for_one_thing():
  assert [
      f'{path}:{number}: {line.strip()}'
      for folder in FOLDERS for path in sorted((ROOT / folder).rglob('*.py'))
      for number, line in enumerate(path.read_text().splitlines(), 1)
      if BANNED.search(line)
  ] == []

"""The site: every public name has a place, and broken links are found."""

import ast
import importlib
import pathlib
import pkgutil
import re

import pytest

from experiments import docs
from experiments import notebooks
from experiments.site import links
import spdf_jax
from spdf_jax import extras

PACKAGE = pathlib.Path(spdf_jax.__file__).parent
EXPERIMENTS = PACKAGE.parent / 'experiments'
PAGES = sorted((EXPERIMENTS / 'site' / 'reference').glob('*.rst'))
INDEX = (EXPERIMENTS / 'guides' / 'reference.md').read_text()
GITHUB = 'https://github.com/someone/spdf_jax'


def documented(page):
  """Yields the full names of what a page of the reference documents."""
  package = ''
  for directive, name in re.findall(
      r'^\.\. (automodule|currentmodule|auto\w+):: (\S+)$', page.read_text(),
      re.M,
  ):
    if directive in ('automodule', 'currentmodule'):
      package = name
    if directive == 'automodule':
      module = importlib.import_module(package)
      for public in module.__all__:
        # Values are documented one by one, where they are defined.
        if callable(getattr(module, public)):
          yield f'{package}.{public}'
    elif directive == 'autodata':
      module, _, value = name.rpartition('.')
      assert hasattr(importlib.import_module(module), value), name
      yield name
    elif directive != 'currentmodule':
      assert hasattr(importlib.import_module(package), name)
      yield f'{package}.{name}'


def test_the_contents_list_pages_that_exist():
  text = (EXPERIMENTS / 'index.md').read_text()
  trees = '\n'.join(re.findall(r'```\{toctree\}\n(.*?)```', text, re.S))
  pages = re.findall(r'^\w.*/.*$', trees, re.M)
  assert len(pages) > 30
  for page in pages:
    assert list(EXPERIMENTS.glob(f'{page}.*')), page


def docstrings():
  """Yields every docstring of the library, and the path of its file."""
  for path in sorted(PACKAGE.rglob('*.py')):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        yield path, ast.get_docstring(node) or ''


def test_markup_of_docstrings_ends_before_a_space_or_punctuation():
  # Sphinx warns of others, when all notebooks have been executed.
  assert [
      f'{path.name}: {match[0]}' for path, text in docstrings()
      for match in re.finditer(r'`+[^`]+`+([^\W_])?', text) if match[1]
  ] == []


@pytest.mark.slow
def test_no_page_has_a_warning(tmp_path, capfd):
  pytest.importorskip('sphinx')
  pytest.importorskip('myst_nb')
  try:
    docs.render(tmp_path / 'site', tmp_path / 'trees', 'nb_execution_mode=off')
  except ValueError:
    pytest.fail(capfd.readouterr().err)
  assert (tmp_path / 'site' / 'index.html').exists()


def test_every_public_name_is_on_one_page():
  listed = [name for page in PAGES for name in documented(page)]
  assert sorted({name for name in listed if listed.count(name) > 1}) == []
  # Classes that a package repeats from its parent are documented there.
  names = {name.rpartition('.')[2] for name in listed}
  for info in pkgutil.walk_packages([str(PACKAGE)], 'spdf_jax.'):
    if not info.ispkg or info.name == 'spdf_jax.sparsity.algorithms':
      continue
    package = importlib.import_module(info.name)
    public = getattr(package, '__all__', ())
    modules = {
        name for name in public
        if isinstance(getattr(package, name), type(ast))
    }
    assert set(public) - modules <= names, info.name
    assert not public or re.search(rf'^\| .?{info.name}[`\]]', INDEX, re.M)


def test_every_page_is_linked_and_sparsify_comes_first():
  text = (EXPERIMENTS / 'site' / 'results.md').read_text()
  for path in (EXPERIMENTS / 'results').glob('*/README.md'):
    assert f'\n../results/{path.parent.name}/README\n' in text
  linked = re.findall(r'\]\(\.\./site/reference/(\w+)\.rst\)', INDEX)
  assert set(linked) == {page.stem for page in PAGES}
  assert linked[0] == 'spdf_jax'
  page = EXPERIMENTS / 'site' / 'reference' / 'spdf_jax.rst'
  assert next(documented(page)) == 'spdf_jax.sparsify'
  sidebar = (EXPERIMENTS / 'index.md').read_text()
  guides = sorted((EXPERIMENTS / 'guides').glob('*.md'))
  for folder, paths in (('guides', guides), ('site/reference', PAGES)):
    for path in paths:
      assert f'\n{folder}/{path.stem}\n' in sidebar, path


def test_code_in_docstrings_is_marked_as_code():
  # Two colons alone make code without colors: write `.. code-block:: python`.
  for path, text in docstrings():
    match = re.search(r'^(?!\s*\.\. ).*\S::$', text, re.M)
    assert not match, f'{path}: {match[0]}'


@pytest.mark.parametrize('link, problem', [
    ('other.html#part', ''), ('#here', ''), ('https://example.org', ''),
    ('missing.html', 'missing.html is missing'),
    ('other.html#whole', 'other.html#whole has no such anchor'),
    ('../outside.html', '../outside.html leaves the site'),
])
def test_links_that_lead_nowhere_are_found(link, problem, tmp_path):
  site = tmp_path / 'site'
  site.mkdir()
  (site / 'index.html').write_text(f'<a id="here" href="{link}">a</a>')
  (site / 'other.html').write_text('<h1 id="part">b</h1>')
  (tmp_path / 'outside.html').write_text('')
  expected = [f'index.html: {problem}'] if problem else []
  assert links.check(site) == (2, 1, expected)


def test_what_is_loaded_from_another_host_is_found(tmp_path):
  address = 'https://example.org/a.js'
  (tmp_path / 'index.html').write_text(f'<script src="{address}">')
  (problem,) = links.check(tmp_path).broken
  assert problem == f'index.html: {address} is loaded from another host'


def test_a_site_without_the_extra_is_one_sentence(monkeypatch, tmp_path):
  monkeypatch.setattr(docs, '_NEEDED', ('sphinx_of_another_world',))
  with pytest.raises(ImportError, match='^sphinx_of.*is not installed; .*docs'):
    docs.build(tmp_path)
  assert not list(tmp_path.iterdir())


class FakeSphinx:
  """Writes one page, as `sphinx.cmd.build` does."""

  def __init__(self, name, link=''):
    self.name, self.link = name, link

  def build_main(self, words):
    output = pathlib.Path(words[-1])
    output.mkdir(parents=True, exist_ok=True)
    (output / '.buildinfo').touch()
    (output / self.name).write_text(f'<a href="{self.link}">a</a>')
    return 0


def test_a_build_replaces_the_site_once_it_is_checked(tmp_path, monkeypatch):
  output = tmp_path / 'new' / 'site'
  run = lambda sphinx: monkeypatch.setattr(
      docs, 'require', lambda *names: sphinx
  ) or docs.build(output)
  names = lambda: sorted(path.name for path in output.iterdir())
  assert ': 1 pages, 0 links, 0 broken' in run(FakeSphinx('stale.html'))
  with pytest.raises(ValueError, match='1 broken links: a.html: b.html is mis'):
    run(FakeSphinx('a.html', 'b.html'))
  assert names() == ['.buildinfo', 'stale.html']
  assert ': 1 pages, 0 links, 0 broken' in run(FakeSphinx('index.html'))
  assert names() == ['.buildinfo', 'index.html']
  assert [path.name for path in output.parent.iterdir()] == ['site']


@pytest.mark.parametrize('names', [['index.html'], ['.buildinfo', '.git']])
def test_a_build_does_not_replace_other_files(names, tmp_path, monkeypatch):
  monkeypatch.setattr(docs, 'require', lambda *names: FakeSphinx('a.html'))
  for name in names:
    (tmp_path / name).touch()
  with pytest.raises(ValueError, match='other files than those of a site'):
    docs.build(tmp_path)
  assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_errors_install_from_the_clone_until_there_is_an_address():
  assert extras.install_command('viz', '').startswith('`pip install ".[viz]"')
  assert f'git+{GITHUB}"`' in extras.install_command('viz', GITHUB)


@pytest.mark.parametrize('script', sorted(notebooks.FOLDER.glob('*.py')))
def test_a_notebook_takes_the_address_and_gives_it_back(script):
  text = script.read_text()
  assert notebooks.addressed(text, script.stem, extras.REPOSITORY) == text
  released = notebooks.addressed(text, script.stem, GITHUB)
  assert f"  repository = '{GITHUB}'\n" in released
  link = (
      'https://colab.research.google.com/github/someone/spdf_jax/blob/main/'
      f'experiments/colabs/{script.name}'.replace('.py', '.ipynb')
  )
  assert f'# [Open in Colab]({link})\n' in released
  assert notebooks.addressed(released, script.stem, GITHUB) == released
  assert notebooks.addressed(released, script.stem, '') == notebooks.addressed(
      text, script.stem, ''
  )


def test_the_citation_has_the_version_and_the_address():
  text = (PACKAGE.parent / 'CITATION.cff').read_text()
  assert f'\nversion: {spdf_jax.__version__}\n' in text
  address = re.findall(r'^repository-code: "?(\S+?)"?$', text, re.MULTILINE)
  assert address == [extras.REPOSITORY] * bool(extras.REPOSITORY)

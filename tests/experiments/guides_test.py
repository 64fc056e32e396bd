"""The guides and README: scripts run, commands parse, results are true."""

import ast
import importlib
import importlib.util
import pathlib
import re
import shlex
import sys

from absl import flags
from ml_collections import config_flags
import pytest

from experiments import benchmarks
from experiments.launch.grid import parse_grid
from experiments.launch.grid import points
from spdf_jax import training

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = sorted((ROOT / 'experiments' / 'guides').glob('*.md'))
NAMES = [path.stem for path in GUIDES]
RESULTS = sorted((ROOT / 'experiments' / 'results').glob('*/README.md'))
# Commands of closed studies are those of an earlier commit, which they name.
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *GUIDES, *(
    page for page in RESULTS if 'the code of commit' not in page.read_text()
)]
OF_OTHERS = 'pytest', 'build', 'pip', 'venv'
"""Modules that `python -m` runs and that are not ours."""


def scripts(guide):
  """Yields (file name or '', script) of a guide; lines count as in it."""
  text = guide.read_text()
  pattern = r'(?:<!-- file: (\S+) -->\n)?```python\n(.*?)```'
  for match in re.finditer(pattern, text, re.S):
    yield match[1] or '', '\n' * text[:match.start(2)].count('\n') + match[2]


def commands(page):
  """Yields the shell commands of a page, each as its words."""
  text = page.read_text()
  inline = re.findall(r'(?<!`)`(python -m [^`]+)`(?!`)', text)
  for block in [*re.findall(r'```sh\n(.*?)```', text, re.S), *inline]:
    for line in block.replace('\\\n', ' ').splitlines():
      words = shlex.split(line, comments=True)
      if words:
        yield words


def examples():
  """Yields the commands in the docstrings of modules, with their files."""
  paths = [
      # experiment_configs_test covers configs.
      path for folder in ('experiments', 'spdf_jax')
      for path in sorted((ROOT / folder).rglob('*.py'))
  ]
  for path in paths:
    text = ast.get_docstring(ast.parse(path.read_text())) or ''
    for line in text.replace('\\\n', ' ').splitlines():
      if line.startswith('  python -m '):
        yield path.stem, shlex.split(line, comments=True)


COMMANDS = [
    pytest.param(words, id=f'{"-".join(page.parts[-2:])}-{i}')
    for page in PAGES for i, words in enumerate(commands(page))
] + [
    pytest.param(words, id=f'docstring-{name}-{i}')
    for i, (name, words) in enumerate(examples())
]


@pytest.fixture
def clone(tmp_path, monkeypatch):
  """Changes to a folder with the files that the guides tell readers to save."""
  (tmp_path / 'configs').symlink_to(ROOT / 'configs')
  for guide in GUIDES:
    for name, script in scripts(guide):
      if name:
        (tmp_path / name).write_text(script)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)


def test_there_are_the_guides_that_readme_lists():
  linked = re.findall(
      r'\]\(experiments/guides/(\w+)\.md\)', (ROOT / 'README.md').read_text()
  )
  assert sorted(set(linked)) == NAMES
  for guide in GUIDES:
    assert 30 <= len(guide.read_text().splitlines()) <= 150, guide


@pytest.mark.ci
@pytest.mark.parametrize('guide', GUIDES, ids=NAMES)
def test_the_scripts_of_a_guide_run(guide, clone):
  names = {'__name__': guide.stem}
  for _, script in scripts(guide):
    exec(compile(script, str(guide), 'exec'), names)


@pytest.mark.parametrize('words', COMMANDS)
def test_commands_of_the_guides_can_be_parsed(words, clone, monkeypatch):
  if words[:2] == ['python', '-c']:
    check_imports(words[2])
  if words[:2] != ['python', '-m']:
    return
  module, *arguments = words[2:]
  assert module in OF_OTHERS or importlib.util.find_spec(module)
  if not module.startswith('experiments.'):
    return
  if '--' in arguments:  # A launcher, and the command that it launches.
    launched = arguments.index('--') + 1
    test_commands_of_the_guides_can_be_parsed(
        arguments[launched:], clone, monkeypatch
    )
    arguments = arguments[:launched - 1]
  known = defined_flags(module)
  for word in arguments:
    name, _, value = word.removeprefix('--').partition('=')
    assert word.startswith('--') and name.split('.')[0] in {*known, 'help'}
    assert name != 'suite' or value in {*benchmarks.SUITES, 'NAME'}, word
  if any(word.startswith(('--config=', '--config.')) for word in arguments):
    check_config(arguments, monkeypatch)


def defined_flags(module):
  """Returns the flags of a command and of the experiments that it imports."""
  source = (ROOT / f'{module.replace(".", "/")}.py').read_text()
  known = re.findall(r"DEFINE_\w+\(\s*'(\w+)'", source)
  for package, name in re.findall(
      r'^from (experiments[.\w]*) import (\w+)$', source, re.M
  ):
    if (ROOT / package.replace('.', '/') / f'{name}.py').exists():
      known += defined_flags(f'{package}.{name}')
  return known


def check_imports(script):
  for node in ast.walk(ast.parse(script)):
    if isinstance(node, ast.ImportFrom):
      for alias in node.names:
        assert hasattr(importlib.import_module(node.module), alias.name)


def check_config(arguments, monkeypatch):
  """Reads a command's config as the command does, and plans its phases."""
  given = [word for word in arguments if word.startswith('--config')]
  if not any(word.startswith('--config=') for word in given):
    given.insert(0, '--config=configs/quickstart.py')
  monkeypatch.setattr(sys, 'argv', ['command', *given])
  values = flags.FlagValues()
  config = config_flags.DEFINE_config_file('config', flag_values=values)
  values(sys.argv)
  grid = [w.split('=', 1)[1] for w in arguments if w.startswith('--grid')]
  config.value.update_from_flattened_dict(points(parse_grid(grid))[0])
  phases = training.parse(config.value).phases
  plan = training.create_plan(
      phases,
      tokens_per_epoch={
          'corpus': lambda length: 1_300_000, 'task': lambda length: 335_872
      },
      parameters=742_528,
  )
  assert len(plan.phases) == len(config.value.phases.order)


@pytest.mark.parametrize('guide', GUIDES, ids=NAMES)
def test_paths_named_in_guides_exist(guide):
  text = guide.read_text()
  for path in re.findall(r'`((?:configs|tests|experiments)/[\w./]+)`', text):
    assert (ROOT / path).exists(), path
  for name in re.findall(r'`(\w+)\.md`', text):
    assert name in NAMES or name == 'report', name


def test_links_between_pages_lead_to_files():
  tops = 'experiments', 'spdf_jax', 'configs', 'tests'
  pages = [*ROOT.glob('*.md'), *(
      page for top in tops for page in (ROOT / top).rglob('*.md')
  )]
  broken = []
  for page in pages:
    text = re.sub(r'```.*?```', '', page.read_text(), flags=re.S)
    # Registered protocols keep their bytes, with links of that time.
    if page.name.startswith('PROTOCOL'):
      text = re.sub(r'\]\(PROTOCOL[-\d]*\.md\)', '', text)
    for link in re.findall(r'\]\(([^)#\s]+)', text):
      if '://' not in link and not (page.parent / link).exists():
        broken.append(f'{page.relative_to(ROOT)}: {link}')
  assert len(pages) > 50
  assert broken == []

"""Contracts of the house: layers, imports, signatures, language and help."""

import ast
import graphlib
import importlib
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import textwrap

import pytest

import spdf_jax

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = pathlib.Path(spdf_jax.__file__).parent
LAYERS = {
    'sparsity': 0,
    'accelerator': 1,
    'models': 2, 'data': 2,
    'training': 3, 'evaluation': 3, 'interop': 3,
    'costs': 4, 'runs': 5,
}
SMALL = {
    'names', 'extras', 'files', 'packing', 'lowerings',
}
"""Modules beside the packages, which every package may import."""
EXCEPT = {
    # Packages of a lower layer that a package may not import, in addition to
    # those of its own layer.
    'data': {'sparsity', 'accelerator'},
}
# Where heavy libraries may appear; others only inside functions.
LIBRARIES = {
    'sparsity': {'jax', 'numpy', 'optax'},
    'accelerator': {'jax', 'numpy'},
    'models': {'jax', 'numpy', 'flax'},
    'data': {'numpy'},
    'training': {'jax', 'numpy', 'optax', 'flax', 'orbax'},
    'evaluation': {'jax', 'numpy'},
    'interop': {'jax', 'numpy'},
    'costs': {'jax', 'numpy'},
    'runs': {'jax', 'numpy'},
}
CORE = (
    'jax', 'jaxlib', 'optax', 'numpy', 'ml_dtypes', 'scipy', 'opt_einsum',
    'absl',
)


def imports(path):
  """Yields (module, whether at module level) of a file's imports."""
  tree = ast.parse(path.read_text())
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      names = [f'{node.module}.{alias.name}' for alias in node.names]
    else:
      continue
    for name in names:
      yield name, node in tree.body


def modules():
  """Yields (package, path) of every module in a package of the library."""
  for package in LAYERS:
    for path in sorted((PACKAGE / package).rglob('*.py')):
      yield package, path


def points_down(package, name):
  """Returns whether a module of a package may import a name."""
  parts = name.split('.')
  if parts[0] in ('experiments', 'configs'):
    return False
  if parts[0] != 'spdf_jax' or len(parts) < 2 or parts[1] in {package} | SMALL:
    return True
  other = parts[1]
  return (
      other in LAYERS and LAYERS[other] < LAYERS[package]
      and other not in EXCEPT.get(package, ())
  )


def test_packages_import_only_packages_of_lower_layers():
  assert [
      f'{path.relative_to(PACKAGE)} imports {name}'
      for package, path in modules() for name, _ in imports(path)
      if not points_down(package, name)
  ] == []


def test_packages_import_only_their_libraries():
  ours = {'spdf_jax'} | set(sys.stdlib_module_names)
  assert [
      f'{path.relative_to(PACKAGE)} imports {name}'
      for package, path in modules() for name, at_top in imports(path)
      if at_top and name.partition('.')[0] not in LIBRARIES[package] | ours
  ] == []


def test_every_package_has_a_layer():
  packages = {path.parent.name for path in PACKAGE.glob('*/__init__.py')}
  assert packages == set(LAYERS)


def test_orbax_appears_in_checkpoints_only():
  users = {
      p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob('*.py')
      if any(name.startswith('orbax') for name, _ in imports(p))
  }
  assert users == {
      'training/checkpoints/files.py', 'training/checkpoints/manager.py',
  }


def test_storage_of_weights_is_known_in_few_places():
  calls, users = [], set()
  for path in sorted(PACKAGE.rglob('*.py')):
    name = path.relative_to(PACKAGE).as_posix()
    for node in ast.walk(ast.parse(path.read_text())):
      call = node.func if isinstance(node, ast.Call) else ast.Name('')
      if ast.unparse(call).endswith('is_packed') and name != 'packing.py':
        calls.append(name)
      if getattr(node, 'attr', getattr(node, 'id', '')) == 'PackedMask':
        users.add(name)
  assert calls == [
      'sparsity/sparsify.py', 'sparsity/state.py', 'training/step/storage.py',
  ]
  assert users == {
      'packing.py', 'accelerator/operands.py', 'accelerator/primitives.py',
      'accelerator/reference.py', 'interop/tensors.py', 'models/layers.py',
  }


def paths_in(*folders):
  """Returns the paths of all modules in folders of the checkout."""
  return [p for name in folders for p in sorted((ROOT / name).rglob('*.py'))]


def named_modules(*folders):
  """Returns the files of all modules in folders by the names of the modules."""
  return {
      '.'.join(path.relative_to(ROOT).with_suffix('').parts)
      .removesuffix('.__init__'): path for path in paths_in(*folders)
  }


def with_parents(name):
  """Returns a dotted name and the names of what it is in, the longest first."""
  parts = name.split('.')
  return ['.'.join(parts[:i]) for i in range(len(parts), 0, -1)]


def import_graph(files):
  """Returns the modules that each module imports while it is imported.

  Importing a module imports the packages that it is in, too.
  """
  graph = {}
  for name, path in files.items():
    graph[name] = set()
    for imported, at_top in imports(path):
      ours = [parent for parent in with_parents(imported) if parent in files]
      if at_top and ours:
        graph[name] |= {ours[0], *set(ours) - set(with_parents(name))}
  return graph


def test_no_modules_import_one_another_in_a_circle():
  files = named_modules('spdf_jax', 'experiments')
  # Raises CycleError, which names the modules.
  graphlib.TopologicalSorter(import_graph(files)).prepare()


def test_a_circle_of_imports_is_found(tmp_path):
  sources = {
      'a': 'from p import b', 'p': '', 'p.b': 'import p.c', 'q': 'import p.c',
      'p.c': 'def f():\n  import a',
  }
  files = {name: tmp_path / name for name in sources}
  for name, source in sources.items():
    files[name].write_text(source)
  assert import_graph(files) == {
      'a': {'p', 'p.b'}, 'p': set(), 'p.b': {'p.c'}, 'q': {'p', 'p.c'},
      'p.c': set(),
  }
  graphlib.TopologicalSorter(import_graph(files)).prepare()
  files['p'].write_text('from q import x')
  with pytest.raises(graphlib.CycleError):
    graphlib.TopologicalSorter(import_graph(files)).prepare()


def used_names(source):
  """Yields the full names that a script imports, or reads of what it imports.
  """
  nodes = list(ast.walk(ast.parse(source)))
  bound = {}
  for node in nodes:
    for alias in getattr(node, 'names', ()):
      if isinstance(node, ast.ImportFrom):
        bound[alias.asname or alias.name] = f'{node.module}.{alias.name}'
      elif isinstance(node, ast.Import):
        bound[alias.asname or alias.name] = alias.name
  yield from bound.values()
  for node in nodes:
    if isinstance(node, ast.Attribute):
      first, _, rest = ast.unparse(node).partition('.')
      if first in bound:
        yield f'{bound[first]}.{rest}'


def test_every_name_that_a_package_exports_is_imported_somewhere():
  sources = [
      path.read_text() for path in
      named_modules('spdf_jax', 'experiments', 'configs', 'tests').values()
  ]
  for page in (ROOT / 'README.md', *ROOT.glob('experiments/guides/*.md')):
    sources += re.findall(r'```python\n(.*?)```', page.read_text(), re.S)
  used = {
      re.sub(r'^spdf_jax\.sparsity\.(?=\w+$)', 'spdf_jax.', name)
      for source in sources for name in used_names(source)
  }
  packages = {
      name: importlib.import_module(name)
      for name, path in named_modules('spdf_jax', 'experiments').items()
      if path.name == '__init__.py' and name != 'spdf_jax.sparsity'
  }
  assert len(packages['spdf_jax'].__all__) > 30
  assert sorted(
      f'{package}.{name}' for package, module in packages.items()
      for name in getattr(module, '__all__', ())
      if f'{package}.{name}' not in used
  ) == []


@pytest.mark.skipif(
    not (ROOT / 'experiments').is_dir(), reason='needs the checkout'
)
def test_configs_import_nothing_of_ours():
  for path in (ROOT / 'configs').glob('*.py'):
    assert not [n for n, _ in imports(path) if n.startswith('spdf_jax')]


@pytest.fixture(scope='module')
def run_with_core_only(tmp_path_factory):
  """Runs code where jax, optax, numpy, what they need, and we are installed."""
  installed = tmp_path_factory.mktemp('core')
  (installed / 'spdf_jax').symlink_to(PACKAGE)
  for path in pathlib.Path(sysconfig.get_path('purelib')).iterdir():
    if re.split(r'[-.]', path.name)[0] in CORE:
      (installed / path.name).symlink_to(path)

  def run(code):
    return subprocess.run(
        [sys.executable, '-S', '-c', code],  # -S excludes site-packages.
        env=os.environ | {'PYTHONPATH': str(installed)},
        cwd=installed,
        capture_output=True, text=True, timeout=300, check=False,
    )

  assert "No module named 'flax'" in run('import flax').stderr
  return run


@pytest.mark.process
def test_import_needs_jax_optax_and_numpy_only(run_with_core_only):
  code = textwrap.dedent('''
      import sys
      import spdf_jax
      heavy = {'flax', 'orbax', 'ml_collections'} & set(sys.modules)
      assert not heavy, heavy
      assert set(spdf_jax.__all__) <= set(dir(spdf_jax))
  ''')
  done = run_with_core_only(code)
  assert done.returncode == 0, done.stderr


@pytest.mark.process
@pytest.mark.skipif(
    not (ROOT / 'README.md').exists(), reason='needs the checkout'
)
def test_readme_script_runs_with_jax_optax_and_numpy_only(run_with_core_only):
  readme = (ROOT / 'README.md').read_text()
  script = re.search(r'```python\n(.*?)```', readme, re.S)[1]
  assert 'spdf.sparsify' in script
  assert len([line for line in script.splitlines() if line]) <= 22
  done = run_with_core_only(script)
  assert done.returncode == 0, done.stderr
  sparse, dense = done.stdout.split('loss ')[1:]
  assert 'all parameters: 75.00% zeros of 524,288' in sparse
  assert 'all parameters: 0.00% zeros of 524,288' in dense
  # And both learned: the targets' variance is about one half.
  assert float(dense.split()[0]) < float(sparse.split()[0]) < 0.5


def test_every_file_of_the_wheel_names_its_license():
  signs = {'.py': '#', '.h': '//', '.cc': '//'}
  assert [
      f'{path.relative_to(PACKAGE)}: begin with {line}'
      for path in sorted(PACKAGE.rglob('*'))
      if path.suffix in signs and path.stat().st_size
      for line in [f'{signs[path.suffix]} SPDX-License-Identifier: Apache-2.0']
      if not path.read_text('utf-8').startswith(line + '\n')
  ] == []


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
      str(path.relative_to(PACKAGE)): bare
      for path in sorted(PACKAGE.rglob('*.py'))
      if (bare := bare_signatures(path.read_text()))
  } == {}


FOLDERS = ('spdf_jax', 'experiments', 'configs')
# Entries of Args that cannot be understood without the name before them.
LEANING = re.compile(r' {2,}[`*\w.]+: (Of|Its|Whose|Where|It|They|Those)\b')
# Words for which the project has another one; see CONTRIBUTING.
BANNED = re.compile(
    r'\b(lineages?|competitions?|stretch(es)?|alive|levels? of (sparsity|zeros)'
    r')\b', re.I,
)
# Entries of Raises begin in lower case, but for names.
SHOUTING = re.compile(r' +\w*(Error|Exit|Interrupt): (?!METEOR|N |Ray)[A-Z]')
# Words of test names for which there is a plainer one.
TALKING = re.compile(
    r'_(says?|said|tells?|asks?|asked|answered|go_on|goes_on|comes?_back'
    r'|what_cannot_be|stretch)(_|$)'
)


def docstrings():
  """Yields (path, node, docstring) of every module, class and function."""
  for path in paths_in(*FOLDERS):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
        text = ast.get_docstring(node, clean=False)
        if text is not None:
          yield path.relative_to(ROOT), node, text


def of_docstrings(pattern):
  """Returns the lines of docstrings that a pattern matches."""
  return [
      f'{path}: {line.strip()}' for path, _, text in docstrings()
      for line in text.splitlines() if pattern.match(line)
  ]


def is_function(node):
  """Returns whether a node is a function that is called as one."""
  return isinstance(node, ast.FunctionDef) and not any(
      'property' in ast.unparse(decorator) for decorator in node.decorator_list
  )


def test_entries_of_docstrings_do_not_lean_on_their_name():
  assert of_docstrings(LEANING) == []


def test_raises_and_references_have_one_format():
  assert of_docstrings(SHOUTING) == []
  assert of_docstrings(re.compile(r' *(Sources?|Reference):')) == []


def test_names_of_tests_use_plain_words():
  assert [
      f'{path.name}: {name}' for path in paths_in('tests')
      for name in re.findall(r'^def (test_\w+)', path.read_text(), re.M)
      if TALKING.search(name)
  ] == []


def test_functions_begin_with_a_verb_in_the_third_person():
  assert [
      f'{path}: {node.name}: {text.splitlines()[0]}'
      for path, node, text in docstrings()
      if is_function(node) and not re.match(r'[A-Z][a-z-]*s\b', text)
  ] == []


def test_banned_synonyms_are_not_used():
  assert [
      f'{path}:{number}: {line.strip()}'
      for path in paths_in(*FOLDERS)
      for number, line in enumerate(path.read_text().splitlines(), 1)
      if BANNED.search(line)
  ] == []


# Draws of jax.random, and which of their arguments is the dtype. What they
# draw by default depends on jax_enable_x64.
DTYPES = {
    'bits': 2, 'uniform': 2, 'normal': 2, 'gumbel': 2, 'exponential': 2,
    'truncated_normal': 4, 'randint': 4,
}


def test_draws_state_their_dtype():
  silent = []
  for path in paths_in('spdf_jax', 'experiments'):
    if path.parent.name == 'colabs':
      continue
    for node in ast.walk(ast.parse(path.read_text())):
      if not isinstance(node, ast.Call):
        continue
      module, _, draw = ast.unparse(node.func).rpartition('.')
      if module in ('jax.random', 'random') and draw in DTYPES and not (
          len(node.args) > DTYPES[draw]
          or any(keyword.arg == 'dtype' for keyword in node.keywords)
      ):
        silent.append(f'{path.name}: {ast.unparse(node)}')
  assert silent == []


COMMANDS = [
    path for path in sorted((ROOT / 'experiments').glob('*.py'))
    if 'console.start(main, FLAGS)' in path.read_text()
]
assert len(COMMANDS) > 20


@pytest.mark.parametrize('path', COMMANDS, ids=[p.stem for p in COMMANDS])
def test_the_examples_of_a_command_can_be_copied(path):
  # A backslash at the end of a line of a docstring that is not raw joins the
  # lines: examples would run together and beyond the width of a terminal.
  lines = ast.get_docstring(ast.parse(path.read_text())).splitlines()
  assert max(map(len, lines)) <= 80
  examples = [i for i, x in enumerate(lines) if x.startswith('  python -m ')]
  assert any(f'experiments.{path.stem}' in lines[i] for i in examples)
  for first in examples:
    last = first
    while lines[last].endswith('\\'):
      last += 1
      assert lines[last].startswith('    ')

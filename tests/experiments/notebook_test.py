"""Every notebook runs as a script, and has the cells of its script."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / 'experiments' / 'colabs').glob('*.py'))
SECONDS = 300  # Timeout of a notebook.
NEEDS = {'own_loop': 'equinox'}  # Packages besides those of the quickstart.


def names(paths):
  return [path.stem for path in paths]


def run(script, tmp_path):
  """Runs a notebook as a script, and asserts that it has no warnings."""
  library = NEEDS.get(script.stem, 'matplotlib')
  pytest.importorskip(library, reason=f'{script.stem} needs {library}')
  path = [str(ROOT), os.environ.get('PYTHONPATH')]
  environment = os.environ | {
      'HOME': str(tmp_path),  # where corpora are cached
      'MPLBACKEND': 'Agg',
      'PYTHONPATH': os.pathsep.join(filter(None, path)),
      'TMPDIR': str(tmp_path),
  }
  environment.pop('DISPLAY', None)
  done = subprocess.run(
      [sys.executable, str(script)],
      cwd=ROOT,
      env=environment,
      capture_output=True,
      text=True,
      timeout=SECONDS,
      check=False,
  )
  assert done.returncode == 0, done.stderr
  assert 'Traceback' not in done.stderr and 'Warning' not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize('script', SCRIPTS, ids=names(SCRIPTS))
def test_all_notebooks_run_without_a_display(script, tmp_path):
  run(script, tmp_path)


def code_cells(script):
  jupytext = pytest.importorskip('jupytext')
  notebook = jupytext.read(script.with_suffix('.ipynb'))
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


@pytest.mark.parametrize('script', SCRIPTS, ids=names(SCRIPTS))
def test_a_notebook_has_the_cells_of_its_script(script):
  jupytext = pytest.importorskip('jupytext')
  cells = [
      [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]
      for path in (script, script.with_suffix('.ipynb'))
  ]
  assert cells[0] == cells[1], 'make it anew: python -m experiments.notebooks'


def test_notebooks_store_no_outputs_and_share_the_cell_that_installs():
  cells = [code_cells(script) for script in SCRIPTS]
  assert len({code[0].source for code in cells}) == 1
  for cell in (cell for code in cells for cell in code):
    assert not cell.outputs and not cell.execution_count


@pytest.mark.parametrize('repository, source', [
    ('', SCRIPTS[0].parents[2].as_uri()),
    ('https://github.com/a/b', 'git+https://github.com/a/b'),
])
def test_the_first_cell_installs_from_the_clone_or_the_repository(
    repository, source, monkeypatch, tmp_path
):
  cell = code_cells(SCRIPTS[0])[0].source
  cell = re.sub("repository = '.*'", f'repository = {repository!r}', cell)
  commands = []
  record = lambda command, check: commands.append(command)
  monkeypatch.setattr(subprocess, 'run', record)
  exec(cell, {})  # Nothing is installed, since the library is there.
  assert commands == []
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  monkeypatch.chdir(SCRIPTS[0].parent)
  exec(cell, {})
  (command,) = commands
  assert command[-1] == f'spdf_jax[notebooks] @ {source}'
  monkeypatch.chdir(tmp_path)
  if repository:
    exec(cell, {})
  else:
    with pytest.raises(SystemExit, match='experiments/colabs of a clone'):
      exec(cell, {})

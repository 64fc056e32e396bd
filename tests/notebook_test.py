"""Every notebook runs as a script, and has the cells of its script."""

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / 'experiments' / 'colabs').glob('*.py'))
IN_CI = 'quickstart'
SECONDS = 300  # of patience
NEEDS = {'own_loop': 'equinox'}  # beside what the quickstart needs


def names(paths):
  return [path.stem for path in paths]


def test_there_are_notebooks_of_what_readers_ask_for():
  assert {
      'native_speed', 'own_algorithm', 'own_loop', 'paper_tables', 'quickstart',
      'wafer', 'wafer_run',
  } <= set(names(SCRIPTS))


def run(script, tmp_path):
  """Runs a notebook as a script, and asserts that it has no warnings."""
  library = NEEDS.get(script.stem, 'matplotlib')
  pytest.importorskip(library, reason=f'{script.stem} needs {library}')
  path = [str(ROOT), os.environ.get('PYTHONPATH')]
  environment = os.environ | {
      'HOME': str(tmp_path),  # where corpora are cached
      'MPLBACKEND': 'Agg',
      'PYTHONDONTWRITEBYTECODE': '1',
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


def test_a_notebook_runs_without_a_display(tmp_path):
  run(SCRIPTS[names(SCRIPTS).index(IN_CI)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize('script', SCRIPTS, ids=names(SCRIPTS))
def test_all_notebooks_run_without_a_display(script, tmp_path):
  run(script, tmp_path)


@pytest.mark.parametrize('script', SCRIPTS, ids=names(SCRIPTS))
def test_a_notebook_has_the_cells_of_its_script(script):
  jupytext = pytest.importorskip('jupytext')
  cells = [
      [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]
      for path in (script, script.with_suffix('.ipynb'))
  ]
  make = f'make it anew: jupytext --to ipynb {script.relative_to(ROOT)}'
  assert cells[0] == cells[1], make


@pytest.mark.parametrize('script', SCRIPTS, ids=names(SCRIPTS))
def test_a_notebook_stores_no_outputs_and_installs_on_colab_only(script):
  jupytext = pytest.importorskip('jupytext')
  notebook = jupytext.read(script.with_suffix('.ipynb'))
  code = [cell for cell in notebook.cells if cell.cell_type == 'code']
  extra = 'notebooks' if script.stem in NEEDS else 'quickstart'
  assert not any(cell.outputs or cell.execution_count for cell in code)
  assert "if 'google.colab' in sys.modules:" in code[0].source
  assert f'spdf_jax[{extra}]' in code[0].source

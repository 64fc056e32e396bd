"""Every notebook runs as a script, and is what its script says."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / 'experiments' / 'colabs').glob('*.py'))
SECONDS = 180  # of patience; about 30 on two idle cores


def names(paths):
  return [path.stem for path in paths]


def test_there_is_a_notebook():
  assert 'quickstart' in names(SCRIPTS)


@pytest.mark.parametrize('script', SCRIPTS, ids=names(SCRIPTS))
def test_a_notebook_runs_without_a_display(script, tmp_path):
  path = [str(ROOT), os.environ.get('PYTHONPATH')]
  environment = os.environ | {
      'HOME': str(tmp_path),  # where corpora are cached
      'MPLBACKEND': 'Agg',
      'PYTHONDONTWRITEBYTECODE': '1',
      'PYTHONPATH': os.pathsep.join(filter(None, path)),
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
  assert not any(cell.outputs or cell.execution_count for cell in code)
  assert "if 'google.colab' in sys.modules:" in code[0].source
  assert 'spdf_jax[quickstart]' in code[0].source

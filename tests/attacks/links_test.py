"""Files of a folder are written in it alone, never through links or pipes."""

import ast
import os
import pathlib

import pytest

from experiments.preparation.files import prepare_files
from spdf_jax import files
from spdf_jax import training
from spdf_jax.runs import report
from spdf_jax.runs.read import PhaseRecord
from spdf_jax.runs.read import RunRecord
from tests.tiny_run import make_run

ROOT = pathlib.Path(__file__).parents[2]
PRIVATE = {
    'spdf_jax/files.py': 'what this test is about',
    'experiments/scores/metrics/meteor.py': 'in a temporary folder',
    'spdf_jax/interop/write_hf.py': 'in a temporary folder',
    'spdf_jax/training/loop/loop.py': 'os.devnull',
    'spdf_jax/accelerator/native/library.py': 'in the private cache',
    'experiments/launch/executors.py': 'in a folder with mode 0700',
    'experiments/pool/worker.py': 'in a folder of its own',
    'experiments/notebooks.py': 'in the sources',
    'experiments/colabs/paper_tables.py': 'in a folder that it creates',
    'experiments/launch/mirror.py': 'in a bucket',
}
"""Why a module may create files by other means than `files`."""


def writes(call):
  """Whether a call may write to a file by its path."""
  name = getattr(call.func, 'attr', getattr(call.func, 'id', ''))
  if isinstance(call.func, ast.Attribute):
    receiver = ast.unparse(call.func.value)
    if receiver == 'temporary':  # The path that `files.replacing` gives.
      return False
    if name == 'savefig':
      return ast.unparse(call.args[0]) != 'temporary'
    if receiver == 'os' and name == 'open':
      return len(call.args) > 2 or 'O_CREAT' in ast.unparse(call)
  if name == 'open':  # Mode 'x' does not follow links.
    modes = [a.value for a in call.args if isinstance(a, ast.Constant)]
    return any(set(str(mode)) & set('wa+') for mode in modes)
  return name in ('write_text', 'write_bytes', 'touch')


def test_all_modules_write_by_the_functions_of_files():
  modules = set()
  for package in ('spdf_jax', 'experiments'):
    for path in (ROOT / package).rglob('*.py'):
      tree = ast.parse(path.read_text('utf-8'))
      if any(writes(n) for n in ast.walk(tree) if isinstance(n, ast.Call)):
        modules.add(str(path.relative_to(ROOT)))
  assert modules == set(PRIVATE)


@pytest.fixture
def victim(tmp_path):
  path = tmp_path / 'victim.txt'
  path.write_text('mine\n')
  yield path
  assert path.read_text() == 'mine\n'


def test_a_received_workdir_does_not_overwrite_what_its_links_name(
    tmp_path, victim
):
  phase = PhaseRecord('tune', 0, 8, 2, 8, 'text', 0.0, 64, 9.0, 9.0)
  run = RunRecord('toy', (phase,), ({'step': 6, 'validation/loss': 2.0},))
  workdir = tmp_path / 'workdir'
  workdir.mkdir()
  for name in ('report.md', 'loss_over_flops.png', 'loss_over_steps.png'):
    (workdir / name).symlink_to(victim)
  report.write_report(workdir, {'toy': run})
  assert not any(path.is_symlink() for path in workdir.iterdir())


@pytest.mark.parametrize('name', ['.lock', 'metrics_cut.jsonl'])
@pytest.mark.parametrize('kind', ['link', 'dangling', 'pipe'])
def test_a_link_or_a_pipe_in_a_workdir_is_refused_by_name(
    tmp_path, victim, name, kind
):
  workdir = tmp_path / 'workdir'
  training.train(make_run().open(workdir))
  if name == 'metrics_cut.jsonl':
    with (workdir / 'metrics.jsonl').open('a') as rows:
      rows.write('{"step": 99}\n')
  (workdir / name).unlink(missing_ok=True)
  if kind == 'pipe':
    os.mkfifo(workdir / name)
  else:
    (workdir / name).symlink_to(victim if kind == 'link' else tmp_path / 'new')
  with pytest.raises(ValueError, match=rf'{name}. is a link, a pipe or a devi'):
    training.train(make_run().open(workdir))
  assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize('name', ['checkpoints', 'checkpoints/3', 'profile'])
def test_a_link_to_a_folder_in_a_workdir_is_refused(tmp_path, name):
  own, workdir = tmp_path / 'own', tmp_path / 'workdir'
  (own / '3').mkdir(parents=True)
  (own / '3' / 'thesis').write_text('mine')
  (workdir / name).parent.mkdir(parents=True)
  (workdir / name).symlink_to(own)
  with pytest.raises(ValueError, match=f'{name} is a link to the folder'):
    make_run().open(workdir)
  assert (own / '3' / 'thesis').read_text() == 'mine'
  workdir.rename(tmp_path / 'moved')
  (tmp_path / 'moved' / name).unlink()
  workdir.symlink_to(tmp_path / 'moved')  # The whole workdir may be a link.
  make_run().open(workdir).close()


def test_an_unfinished_corpus_does_not_overwrite_what_its_links_name(
    tmp_path, victim
):
  text, output = tmp_path / 'a.txt', tmp_path / 'out'
  text.write_text('a text\n')
  partial = output / 'partial'
  partial.mkdir(parents=True)
  for name in ('state.json.tmp', '.state.json.tmp'):
    (partial / name).symlink_to(victim)
  (partial / 'train.ids').symlink_to(victim)
  with pytest.raises(ValueError, match='train.ids. is a link'):
    prepare_files(text, tokenizer='bytes', output=output)


def test_open_regular_creates_a_file_and_appends_to_it(tmp_path):
  path = tmp_path / 'a'
  for text in (b'one', b'two'):
    descriptor = files.open_regular(path, os.O_APPEND)
    os.write(descriptor, text)
    os.close(descriptor)
  assert path.read_bytes() == b'onetwo'

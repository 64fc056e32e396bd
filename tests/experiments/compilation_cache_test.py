"""Cached programs are used again, and give bit-identical results."""

import os
import shutil

from absl import flags
from absl.testing import flagsaver
import jax
import pytest

from experiments.launch import compilation_cache
from spdf_jax.accelerator import native
from spdf_jax.training import Run
from tests.quickstart_runs import finish
from tests.quickstart_runs import small_config
from tests.quickstart_runs import start_command
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import rows_in

CONFIG = dict(
    data__task='', phases__order=('pretrain', 'continuation'),
    phases__pretrain__duration='4 steps', phases__continuation__duration=(
        '4 steps'
    ),
    matmul='native', eval_every=8,
)


@pytest.fixture
def environment(monkeypatch):
  """Returns a user's environment that caches fast compilations as well."""
  monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR', raising=False)
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')
  if native.is_available():
    monkeypatch.setenv('SPDF_NATIVE', 'require')


def run(workdir, *arguments, **changes):
  child = start_command(
      'experiments.train', '--config=configs/quickstart.py',
      f'--workdir={workdir}', *arguments, **CONFIG | changes,
  )
  return finish(child)


def programs(directory):
  """Returns the names of the cached programs, which are their digests."""
  return {p.name for p in directory.rglob('jit_train_step-*-cache')}


def final(workdir):
  run = Run.create(small_config(**CONFIG))
  assert (run.programs.sparse_steps is not None) == native.is_available()
  run = run.open(workdir)
  run.close()
  return run.state


@pytest.mark.slow
def test_programs_are_found_by_the_next_run_and_compute_the_same_bits(
    environment, tmp_path
):
  cache = f'--compilation_cache={tmp_path / "cache"}'
  run(tmp_path / 'none', '--compilation_cache=')
  run(tmp_path / 'first', cache)
  kept = programs(tmp_path / 'cache')
  assert kept
  output = run(tmp_path / 'second', cache)
  assert programs(tmp_path / 'cache') == kept
  # Reading the cache raised no error.
  assert 'persistent compilation cache' not in output
  rows = [rows_in(tmp_path / name) for name in ('none', 'first', 'second')]
  assert rows[0] == rows[1] == rows[2]
  states = [final(tmp_path / name) for name in ('none', 'first', 'second')]
  assert_same_arrays(states[0], states[1])
  assert_same_arrays(states[0], states[2])
  # A stopped run also continues with cached programs.
  shutil.rmtree(tmp_path / 'first' / 'checkpoints' / '8')
  run(tmp_path / 'first', cache)
  assert_same_arrays(final(tmp_path / 'first'), states[0])


@pytest.mark.slow
def test_damaged_programs_are_compiled_anew(environment, tmp_path):
  cache = f'--compilation_cache={tmp_path / "cache"}'
  run(tmp_path / 'a', cache)
  for path in (tmp_path / 'cache').rglob('*-cache'):
    path.write_bytes(path.read_bytes()[:100])
  run(tmp_path / 'b', cache)
  assert_same_arrays(final(tmp_path / 'a'), final(tmp_path / 'b'))


@pytest.fixture
def settings():
  """Restores the JAX settings that the tests change in this process."""
  names = ('jax_compilation_cache_dir', 'jax_enable_compilation_cache')
  before = {name: getattr(jax.config, name) for name in names}
  yield
  for name, value in before.items():
    jax.config.update(name, value)


def prepare(directory):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(compilation_cache=directory):
    compilation_cache.prepare()


def test_by_default_the_cache_is_the_environments_or_the_users(
    settings, monkeypatch, tmp_path
):
  jax.config.update('jax_compilation_cache_dir', 'given')
  prepare(None)
  assert jax.config.jax_compilation_cache_dir == 'given'
  jax.config.update('jax_compilation_cache_dir', None)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  prepare(None)
  directory = jax.config.jax_compilation_cache_dir
  assert directory.startswith(f'{tmp_path}/spdf_jax/compiled/')
  assert os.path.isdir(directory)


def test_without_a_directory_there_is_no_cache(settings):
  prepare('')
  assert not jax.config.jax_enable_compilation_cache


def test_a_cache_that_cannot_be_written_is_logged_and_left_out(
    settings, tmp_path, caplog
):
  jax.config.update('jax_compilation_cache_dir', None)
  (tmp_path / 'file').write_text('')
  prepare(str(tmp_path / 'file'))
  assert jax.config.jax_compilation_cache_dir is None
  assert 'file/' in caplog.text and 'cannot be written (Not a' in caplog.text

"""Machine code that others could have planted in a cache is not run."""

import logging
import os
import pathlib
import platform
import time

from absl import flags
from absl.testing import flagsaver
import jax
import numpy as np
import pytest

from spdf_jax.accelerator.native import library
from spdf_jax.files import create_private

pytestmark = pytest.mark.skipif(
    platform.system() != 'Linux', reason='the kernels are for Linux'
)


@pytest.fixture
def built(tmp_path, monkeypatch):
  """Returns the path of a library that is built in an instant."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(library, 'find_compiler', lambda: '/bin/true')
  monkeypatch.setattr(
      library, '_compile', lambda _, __, made: made.write_bytes(b'code')
  )
  before = os.umask(0)  # Caches are private under any umask.
  yield library.build()
  os.umask(before)


def mode(path):
  return path.stat().st_mode & 0o777


def test_caches_and_libraries_are_made_private(built, tmp_path):
  places = [built, built.parent, built.parent.parent, tmp_path / 'cache']
  assert [mode(path) for path in places] == [0o700] * 4
  assert library.build() == built


@pytest.mark.parametrize('planted', ['folder', 'file'])
@pytest.mark.parametrize('added', [0o020, 0o002])
def test_a_library_that_others_can_write_to_is_refused(built, planted, added):
  path = built.parent if planted == 'folder' else built
  path.chmod(0o700 | added)
  with pytest.raises(library.Unavailable, match=f'{path} has mode 7.*chmod'):
    library.build()
  assert isinstance(library._load_or_reason.__wrapped__(), str)


def test_a_library_of_another_user_is_refused(built, monkeypatch):
  monkeypatch.setattr(os, 'geteuid', lambda: os.getuid() + 1)
  with pytest.raises(library.Unavailable, match=f'{built.parent} belongs to u'):
    library.build()


def test_a_library_without_our_functions_is_a_reason(monkeypatch):
  other = pathlib.Path(np.linalg._umath_linalg.__file__)
  monkeypatch.setattr(library, 'build', lambda: other)
  reason = library._load_or_reason.__wrapped__()
  assert reason.startswith('native kernels are not used: ')
  assert 'undefined symbol: spdf_' in reason
  assert f'delete {other.parent}, so that' in reason


def test_what_is_no_library_is_a_reason(built):
  reason = library._load_or_reason.__wrapped__()
  assert f'{built}: ' in reason and f'delete {built.parent}' in reason


def test_folders_of_killed_builds_are_removed_after_a_day(built):
  old, new = built.parent / 'tmpold', built.parent / 'tmpnew'
  for folder in (old, new):
    folder.mkdir()
    (folder / 'handlers.o').write_text('half')
  two_days_ago = time.time() - 2 * 24 * 60 * 60
  os.utime(old, (two_days_ago, two_days_ago))
  assert library.build() == built
  assert new.exists() and not old.exists()


def test_systems_without_modes_have_caches_too(tmp_path, monkeypatch):
  monkeypatch.delattr(os, 'geteuid')
  (tmp_path / 'cache').mkdir()
  (tmp_path / 'cache').chmod(0o777)
  create_private(tmp_path / 'cache')


@pytest.mark.parametrize('added', [0, 0o002])
def test_compiled_programs_are_cached_in_private_folders_only(
    tmp_path, caplog, added
):
  compilation_cache = pytest.importorskip(
      'experiments.launch.compilation_cache', reason='needs the checkout'
  )
  folder = tmp_path / 'cache' / compilation_cache._processor()
  folder.mkdir(parents=True)
  folder.chmod(0o700 | added)
  before = jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', None)
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  try:
    with flagsaver.flagsaver(compilation_cache=str(tmp_path / 'cache')):
      compilation_cache.prepare()
    found = jax.config.jax_compilation_cache_dir
  finally:
    jax.config.update('jax_compilation_cache_dir', before)
  if not added:
    assert found == str(folder)
    return
  assert found is None
  (record,) = caplog.records
  assert record.levelno == logging.WARNING
  assert f'compiled programs are not cached: {folder} has' in record.message

"""Caches of compiled programs are private, under any user and system."""

import logging
import os

from absl import flags
from absl.testing import flagsaver
import jax
import pytest

from spdf_jax.accelerator import processor
from spdf_jax.files import create_private


def test_caches_work_on_systems_without_file_modes(tmp_path, monkeypatch):
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
  folder = tmp_path / 'cache' / processor.identity()
  folder.mkdir(parents=True)
  folder.chmod(0o700 | added)
  before = jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', None)
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  try:
    with flagsaver.flagsaver(compilation_cache=str(tmp_path / 'cache')):
      compilation_cache.prepare()
    cache_dir = jax.config.jax_compilation_cache_dir
  finally:
    jax.config.update('jax_compilation_cache_dir', before)
  if not added:
    assert cache_dir == str(folder)
    return
  assert cache_dir is None
  (record,) = caplog.records
  assert record.levelno == logging.WARNING
  assert f'compiled programs are not cached: {folder} has' in record.message

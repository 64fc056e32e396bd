"""Tests of spdf_jax.data.stdlib."""

import pytest

from spdf_jax.data import stdlib


def test_tests_tables_and_packages_are_left_out(tmp_path):
  (tmp_path / 'pkg').mkdir()
  (tmp_path / 'pkg' / '__init__.py').write_text('package')
  for left_out in (
      'test/a.py', 'pkg/tests/a.py', 'encodings/a.py', 'idlelib/a.py',
      'pydoc_data/a.py', 'distutils/a.py', 'lib2to3/a.py',
      'site-packages/a.py', 'dist-packages/a.py', '__pycache__/a.py',
      'config-3.11-x86/a.py', '_sysconfigdata__linux.py', 'data.txt',
  ):
    path = tmp_path / left_out
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('left out')
  (tmp_path / 'pkg' / 'b.py').write_text('b')
  (tmp_path / 'a.py').write_text('a')
  found = stdlib.module_sources(tmp_path)
  assert found == [('a', 'a'), ('pkg', 'package'), ('pkg.b', 'b')]


def test_sources_are_decoded_as_they_declare(tmp_path):
  latin = '# -*- coding: latin-1 -*-\nname = "é"\n'
  (tmp_path / 'a.py').write_bytes(latin.encode('latin-1'))
  (tmp_path / 'b.py').write_bytes(b'\xef\xbb\xbfx = 1\r\n')
  assert stdlib.module_sources(tmp_path) == [('a', latin), ('b', 'x = 1\n')]


def test_a_file_that_cannot_be_decoded_is_left_out_and_said(tmp_path, caplog):
  (tmp_path / 'a.py').write_bytes(b'\xff\xfe')
  (tmp_path / 'b.py').write_text('b')
  assert stdlib.module_sources(tmp_path) == [('b', 'b')]
  assert 'a.py' in caplog.text


def test_a_python_without_sources_is_said(tmp_path):
  with pytest.raises(RuntimeError, match='holds no Python sources'):
    stdlib.module_sources(tmp_path)


def test_splits_of_modules_are_what_they_were():
  # Golden: a change here changes every corpus, and moves modules that were
  # trained on into the test split.
  assert {
      name: stdlib.module_split(name)
      for name in ('bisect', 'asyncio.sslproto', '__future__')
  } == {
      'bisect': 'train', 'asyncio.sslproto': 'validation', '__future__': 'test'
  }

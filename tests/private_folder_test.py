"""Private folders: created for their owner alone, or refused."""

import os

import pytest

from spdf_jax.private_folder import check_private
from spdf_jax.private_folder import create_private

pytestmark = pytest.mark.skipif(
    not hasattr(os, 'geteuid'), reason='the modes are those of POSIX'
)


def test_missing_parents_are_private_and_others_keep_their_mode(tmp_path):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a').chmod(0o755)
  for _ in range(2):
    create_private(tmp_path / 'a/b/c')
  modes = [os.stat(tmp_path / x).st_mode & 0o777 for x in ('a', 'a/b', 'a/b/c')]
  assert modes == [0o755, 0o700, 0o700]


@pytest.mark.parametrize('mode, private', [
    (0o700, True), (0o755, True), (0o500, True),
    (0o775, False), (0o720, False), (0o702, False), (0o777, False),
])
def test_a_path_that_others_can_write_to_is_not_private(
    tmp_path, mode, private
):
  (tmp_path / 'file').touch()
  (tmp_path / 'file').chmod(mode)
  if private:
    return check_private(tmp_path / 'file')
  with pytest.raises(ValueError, match=f'file has mode {mode:o}, so that'):
    check_private(tmp_path / 'file')


def test_a_file_in_the_way_is_an_error_of_the_system(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(FileExistsError):
    create_private(tmp_path / 'file')
  with pytest.raises(NotADirectoryError):
    create_private(tmp_path / 'file/a/b')

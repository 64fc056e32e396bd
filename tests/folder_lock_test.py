"""One process at a time holds the lock of a folder."""

import errno
import os
import re
import subprocess
import sys

import pytest
from tiny_run import make_recipe

from spdf_jax import folder_lock
from spdf_jax.data.preparation import prepare_files
from spdf_jax.folder_lock import lock_folder
from spdf_jax.training import open_session

HOLD = (
    'import sys; from spdf_jax.folder_lock import lock_folder; '
    'lock_folder(sys.argv[1], "workdir"); print("held", flush=True); '
    'sys.stdin.read()'
)


@pytest.fixture
def holder(tmp_path):
  """A process that holds the lock of `tmp_path`."""
  child = subprocess.Popen(
      [sys.executable, '-c', HOLD, str(tmp_path)], text=True,
      stdin=subprocess.PIPE, stdout=subprocess.PIPE,
      env=os.environ | {'PYTHONPATH': os.pathsep.join(filter(None, sys.path))},
  )
  assert child.stdout.readline() == 'held\n'
  yield child
  child.kill()
  child.communicate()


@pytest.mark.process
def test_a_second_process_is_refused_until_the_first_is_killed(
    holder, tmp_path
):
  message = f'workdir .* is in use by process {holder.pid} on .*; wait until'
  with pytest.raises(ValueError, match=message):
    lock_folder(tmp_path, 'workdir')
  holder.kill()
  holder.wait()
  lock_folder(tmp_path, 'workdir')()


@pytest.mark.process
def test_workdirs_and_corpora_of_another_process_are_refused(holder, tmp_path):
  before = sorted(tmp_path.iterdir())
  with pytest.raises(ValueError, match='workdir .* is in use by process'):
    open_session(make_recipe(), tmp_path)
  assert sorted(tmp_path.iterdir()) == before
  (tmp_path / 'text').mkdir()
  (tmp_path / 'text' / 'a.txt').write_text('some text\n' * 100)
  with pytest.raises(ValueError, match='output .* is in use by process'):
    prepare_files(
        tmp_path / 'text', tokenizer='bytes', output=tmp_path,
    )


def test_a_process_may_lock_a_folder_again_and_releases_it_once(tmp_path):
  release = lock_folder(tmp_path, 'workdir')
  lock_folder(tmp_path, 'workdir')()  # Does not release the first one.
  assert any(path.parent == tmp_path for path in folder_lock._held)
  release()
  assert not any(path.parent == tmp_path for path in folder_lock._held)
  lock_folder(tmp_path, 'workdir')()


def test_a_held_lock_is_refused_by_the_operating_system(tmp_path):
  release = lock_folder(tmp_path, 'workdir')
  descriptor = os.open(tmp_path / '.lock', os.O_RDWR)
  with pytest.raises(BlockingIOError):
    folder_lock.fcntl.flock(
        descriptor, folder_lock.fcntl.LOCK_EX | folder_lock.fcntl.LOCK_NB
    )
  os.close(descriptor)
  release()


def test_a_file_system_without_locks_is_warned_of(
    tmp_path, monkeypatch, caplog
):
  def refuse(descriptor, operation):
    raise OSError(errno.ENOLCK, 'No locks available')

  monkeypatch.setattr(folder_lock.fcntl, 'flock', refuse)
  lock_folder(tmp_path, 'workdir')()
  assert re.search('cannot be locked on this file system', caplog.text)

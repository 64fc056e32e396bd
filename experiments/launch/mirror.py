"""A copy of a workdir in a bucket, updated while its run trains."""

from collections.abc import Iterator
import contextlib
import json
import logging
import os
import pathlib
import shutil
import socket
import threading
import time
from typing import Any, IO
import uuid

import jax

from spdf_jax import extras
from spdf_jax import files
from spdf_jax.training.checkpoints import workdir as workdirs

logger = logging.getLogger('spdf_jax')

SECONDS = 30.0
"""Time between two updates of a mirror and of its lease."""

_MANIFEST = 'manifest.json'
_LEASE = 'lease.json'
_ID = '.mirror'  # File of the workdir with the id of its mirror.
_PULLED = '.pulled'  # Folder of checkpoints that are not copied completely.


@contextlib.contextmanager
def mirrored(workdir: str | os.PathLike[str], url: str) -> Iterator[None]:
  """Keeps a copy of a workdir in a bucket while a run trains in the context.

  On entry, a workdir without checkpoints is copied from the bucket, so that a
  run continues on another machine. Inside the context, a thread copies new and
  changed files to the bucket every `SECONDS` seconds; the exit copies the rest.
  An object in a bucket is replaced as a whole, and `manifest.json`, which is
  replaced after all others, lists the files of the copy: a kill leaves the
  copy before, and perhaps files that no manifest lists. Files whose name begins
  with a dot are not copied.

  One process writes a mirror. It replaces `lease.json` at every update, and a
  process that finds the lease of another waits to see whether that one still
  does. The store does not compare, so two processes that start within a second
  may both begin.

  Args:
    workdir: The working directory.
    url: The folder in the bucket, in any form that `etils.epath` takes, e.g.
      `'gs://bucket/runs/a'`.

  Yields:
    Nothing.

  Raises:
    ImportError: `etils` is not installed.
    ValueError: the bucket cannot be read or written, another process writes
      the mirror, it belongs to another workdir or has later checkpoints, or
      there are several processes.
  """
  if jax.process_count() > 1:
    raise ValueError(
        f'mirror is {url!r} and there are {jax.process_count()} processes, but '
        'one process copies its workdir; train without a mirror, in a workdir '
        'on a shared disk.'
    )
  mirror = _Mirror(pathlib.Path(workdir), url)
  fix = (
      'check its URL and your rights, and install the library of its scheme, '
      'such as gcsfs or s3fs.'
  )
  with extras.one_sentence(f'mirror {url!r} cannot be written', fix):
    other = mirror.other_writer()
    if other is None:
      mirror.renew_lease()
  if other is not None:
    raise ValueError(
        f'mirror {url!r} is in use by {other}; wait until it has ended, or '
        'give another mirror.'
    )
  try:
    with extras.one_sentence(f'mirror {url!r} cannot be read', fix):
      steps, found_id = mirror.read_manifest()
    mirror.check(steps, found_id)
    with extras.one_sentence(f'mirror {url!r} cannot be read', fix):
      if steps and not workdirs.saved_steps(workdir):
        mirror.pull()
    mirror.skip_checkpoints()
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
        mirror.push()
  finally:
    mirror.end_lease()


class _Mirror:
  """The files of a workdir and of its copy."""

  def __init__(self, workdir: pathlib.Path, url: str):
    self._workdir = workdir
    self._url = url
    self._bucket = extras.require('etils.epath', 'prepare').Path(url)
    self._pushed: dict[str, tuple[int, int]] = {}
    self._renewed = 0.0  # Time of the last renewal.
    writer = f'process {os.getpid()} on {socket.gethostname()}'
    self._lease = {'writer': writer, 'renewed': 0.0}
    self._id = uuid.uuid4().hex
    self._names: set[str] = set()  # Of files that the bucket may have.

  def other_writer(self) -> str | None:
    """Returns the process that keeps the lease; waits to see if it lives."""
    lease = self._read(_LEASE)
    if lease is None:
      return None
    logger.info(
        'mirror %r has the lease of %s; waiting %.0f seconds to see whether it '
        'still writes', self._url, lease['writer'], 3 * SECONDS,
    )
    time.sleep(3 * SECONDS)
    return None if self._read(_LEASE) == lease else lease['writer']

  def renew_lease(self) -> None:
    self._renewed = time.monotonic()
    self._lease |= {'renewed': self._renewed}
    self._bucket.mkdir(parents=True, exist_ok=True)
    (self._bucket / _LEASE).write_text(json.dumps(self._lease))

  def end_lease(self) -> None:
    """Removes the lease, so that the next process need not wait."""
    try:
      (self._bucket / _LEASE).unlink(missing_ok=True)
    except Exception as error:  # Clients of stores raise their own types.
      logger.warning(
          'the lease of mirror %r is not removed, so the next process waits: '
          '%s', self._url, error,
      )

  def read_manifest(self) -> tuple[list[int], str | None]:
    """Returns the steps and the id of the copy; `None` if there is none."""
    manifest = self._read(_MANIFEST)
    if manifest is None:
      return [], None
    self._names = {str(name) for name in manifest['files']}
    for name in self._names:
      if name.startswith('/') or '..' in name.split('/'):
        raise ValueError(f'{_MANIFEST} has the path {name!r}')
    parts = [name.split('/') for name in self._names]
    steps = {int(p[1]) for p in parts if p[0] == 'checkpoints'}
    return sorted(steps), str(manifest['id'])

  def check(self, steps: list[int], found_id: str | None) -> None:
    """Raises ValueError unless workdir and mirror are of one run."""
    path = self._workdir / _ID
    own_id = path.read_text() if path.exists() else None
    saved = workdirs.saved_steps(self._workdir)
    if found_id is not None and saved and own_id != found_id:
      raise ValueError(
          f'mirror {self._url!r} is the copy of another workdir than '
          f'{str(self._workdir)!r}; give another mirror, or a new workdir.'
      )
    if saved and steps and steps[-1] > saved[-1]:
      raise ValueError(
          f'mirror {self._url!r} has a checkpoint of step {steps[-1]} and '
          f'workdir {str(self._workdir)!r} ends at {saved[-1]}, since the run '
          'went on elsewhere; give a new workdir, to which it is copied.'
      )
    self._id = found_id or self._id

  def pull(self) -> None:
    """Copies the mirror to the workdir, its checkpoints last."""
    logger.info('copying %s to %s', self._url, self._workdir)
    self._workdir.mkdir(parents=True, exist_ok=True)
    release = files.lock_folder(self._workdir, 'workdir')
    try:
      self._pull()
    finally:
      release()

  def _pull(self) -> None:
    part = self._workdir / _PULLED
    shutil.rmtree(part, ignore_errors=True)
    for name in sorted(self._names):
      in_part = name.startswith('checkpoints/')
      path = (part if in_part else self._workdir) / name
      path.parent.mkdir(parents=True, exist_ok=True)
      with (self._bucket / name).open('rb') as remote, files.replacing(
          path
      ) as temporary, temporary.open('wb') as file:
        self._copy(remote, file)
    files.write_atomically(self._workdir / _ID, self._id)
    shutil.rmtree(self._workdir / 'checkpoints', ignore_errors=True)
    os.replace(part / 'checkpoints', self._workdir / 'checkpoints')
    part.rmdir()

  def skip_checkpoints(self) -> None:
    """Marks checkpoints that the mirror has as copied, since none changes."""
    self._pushed = {
        name: stamp for name, stamp in self._local_files().items()
        if name in self._names and name.startswith('checkpoints/')
    }

  def push(self) -> None:
    """Copies new and changed files to the bucket, and then the manifest."""
    stamps = self._local_files()
    if not stamps:  # The run was refused before it wrote anything.
      return
    changed = [
        name for name, stamp in stamps.items()
        if self._pushed.get(name) != stamp
    ]
    for name in changed:
      self._names.add(name)
      path = self._bucket / name
      path.parent.mkdir(parents=True, exist_ok=True)
      with (self._workdir / name).open('rb') as file, path.open('wb') as remote:
        self._copy(file, remote)
    old = self._names - stamps.keys()
    if changed or old:
      files.write_atomically(self._workdir / _ID, self._id)
      manifest = {'id': self._id, 'files': list(stamps)}
      (self._bucket / _MANIFEST).write_text(json.dumps(manifest))
    self._pushed = stamps
    for name in old:
      (self._bucket / name).unlink(missing_ok=True)
      self._names.remove(name)

  def update_until(self, stop: threading.Event) -> None:
    """Updates the mirror and renews the lease until `stop` is set."""
    while not stop.wait(SECONDS):
      try:
        self.renew_lease()
        self.push()
      except FileNotFoundError as error:  # The run deletes checkpoints.
        logger.debug('mirror %r is updated later: %s', self._url, error)
      except Exception as error:  # Libraries of buckets may raise any.
        logger.warning('mirror %r is not updated: %s', self._url, error)

  def _copy(self, source: IO[bytes], target: IO[bytes]) -> None:
    while chunk := source.read(1 << 24):
      target.write(chunk)
      if time.monotonic() - self._renewed > SECONDS:
        self.renew_lease()

  def _local_files(self) -> dict[str, tuple[int, int]]:
    """Returns size and time of every finished file by its path."""
    steps = {str(step) for step in workdirs.saved_steps(self._workdir)}
    stamps = {}
    for path in sorted(self._workdir.rglob('*')):
      name = path.relative_to(self._workdir)
      unfinished = name.parts[0] == 'checkpoints' and name.parts[1:2] and (
          name.parts[1] not in steps
      )
      # Dots in checkpoints are those of orbax, whose folders are complete.
      if not path.is_file() or unfinished or name.parts[0].startswith('.'):
        continue
      stat = path.stat()
      stamps[name.as_posix()] = stat.st_size, stat.st_mtime_ns
    return stamps

  def _read(self, name: str) -> Any:
    path = self._bucket / name
    return json.loads(path.read_text()) if path.exists() else None

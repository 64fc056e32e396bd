"""The processes of a run: how they start, keep memory and stop."""

from collections.abc import Mapping
import ctypes
import os
import platform
import signal
import types

import jax
from jax.experimental import multihost_utils

MODES = ('auto', 'on', 'off')
"""Whether a command is one of several processes; `auto`: if it was started as
one."""

_MOST_SILENCE = 100  # Seconds.

_OURS = {
    'coordinator': 'JAX_COORDINATOR_ADDRESS',
    'num_processes': 'JAX_NUM_PROCESSES',
    'process_id': 'JAX_PROCESS_ID',
}
# Where clusters say how many processes they have started: srun and Open MPI as
# a number, TPU hosts (GKE's too) as a list. JAX finds out the rest.
_NUMBERS = ('SLURM_STEP_NUM_TASKS', 'OMPI_COMM_WORLD_SIZE')
_LISTS = ('TPU_WORKER_HOSTNAMES', 'TPU_PROCESS_ADDRESSES')


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_KEPT = 2**31 - 1  # mallopt takes an int.
_NEVER_TRIM = -1
# One arena: the heaps of further ones hold at most 64 MiB.
_MALLOC_SETTINGS = {
    _M_ARENA_MAX: 1,
    _M_MMAP_THRESHOLD: _LARGEST_KEPT,
    _M_TRIM_THRESHOLD: _NEVER_TRIM,
}


def join_processes(
    mode: str = 'auto',
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: int = 300,
    environment: Mapping[str, str] = os.environ,
) -> bool:
  """Joins this process with the others of its job; call it before all else.

  What is not given is read from `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`
  and `JAX_PROCESS_ID`; without these, JAX asks the cluster: SLURM, Open MPI, or
  TPU hosts, also under GKE. When a process is lost, the others end too, after
  100 seconds at most.

  Args:
    mode: One of `MODES`.
    coordinator: `host:port` of process 0.
    num_processes: How many there are.
    process_id: Which one this is, from 0.
    timeout: Seconds that processes wait for one another, at start and end.
    environment: The environment variables.

  Returns:
    Whether there are several processes.

  Raises:
    ValueError: one of the three is given without the others, or is impossible;
      or `mode` is `'on'` where nothing says who the others are.

  Example:
    >>> join_processes('auto', environment={})
    False
  """
  if mode not in MODES:
    raise ValueError(f'distributed is {mode!r}; use one of {", ".join(MODES)}.')
  if mode == 'off':
    return False
  given = _given(
      dict(
          coordinator=coordinator,
          num_processes=num_processes,
          process_id=process_id,
      ),
      environment,
  )
  if not given and mode == 'auto' and not _in_cluster(environment):
    return False
  try:
    jax.distributed.initialize(
        **given,
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=min(timeout, _MOST_SILENCE),
        shutdown_timeout_seconds=timeout,
    )
  except ValueError as error:
    raise ValueError(
        f'distributed is {mode!r} and no cluster says who the other processes '
        f'are ({error}); give coordinator, num_processes and process_id.'
    ) from error
  return jax.process_count() > 1


def keep_freed_memory() -> bool:
  """Keeps freed buffers of up to 2 GiB for the next step, in the C library.

  XLA's CPU client allocates a step's temporary memory anew at every step.
  Above 32 MiB glibc returns such a buffer to the system when it is freed, and
  faulting its pages in again costs a quarter of a small model's step, and more
  of GPT-2 Small's, whose buffer takes 1 to 1.3 GiB. The process keeps the most
  memory that it ever held. Call it before jax starts threads. Results do not
  change.

  Returns:
    Whether it took effect: with glibc only.

  References:
    mallopt(3): M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD

  Example:
    >>> keep_freed_memory() in (True, False)
    True
  """
  if platform.libc_ver()[0] != 'glibc':
    return False
  mallopt = ctypes.CDLL(None).mallopt
  return all(mallopt(k, v) == 1 for k, v in _MALLOC_SETTINGS.items())


def is_main_process() -> bool:
  """Whether this process is the one that writes and tells.

  Example:
    >>> is_main_process()
    True
  """
  return jax.process_index() == 0


class Interrupts:
  """Notes the first SIGTERM or SIGINT; a second SIGINT stops at once.

  Use as a context manager. Of several processes all stop after the same step,
  whichever was asked: JAX's own service takes SIGTERM and lets them agree.

  Attributes:
    received: The signal's number or `None`.

  Example:
    >>> with Interrupts() as interrupts:
    ...   interrupts.stop_after(step=1)
    False
  """

  def __init__(self):
    self.received: int | None = None
    self._alone = jax.process_count() == 1
    self._previous: dict[int, object] = {}

  def __enter__(self) -> 'Interrupts':
    handlers = {signal.SIGINT: self._note}
    if self._alone:
      handlers[signal.SIGTERM] = self._note
    for number, handler in handlers.items():
      self._previous[number] = signal.signal(number, handler)
    return self

  def __exit__(self, *unused: object) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def stop_after(self, step: int) -> bool:
    """Whether to stop now; ask after every step, with its number."""
    if not self._alone and multihost_utils.reached_preemption_sync_point(step):
      self.received = self.received or signal.SIGTERM
      return True
    return self._alone and self.received is not None

  def _note(self, number: int, frame: types.FrameType | None) -> None:
    del frame
    if self.received is not None and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.received = number
    if not self._alone:
      os.kill(os.getpid(), signal.SIGTERM)


def _given(
    flags: Mapping[str, str | int | None], environment: Mapping[str, str]
) -> dict[str, str | int]:
  """Returns jax's arguments, from flags first; none, or all three."""
  found = {
      name: environment.get(_OURS[name]) if value is None else value
      for name, value in flags.items()
  }
  missing = [name for name, value in found.items() if value in (None, '')]
  if len(missing) == len(found):
    return {}
  if missing:
    raise ValueError(
        f'{", ".join(n for n in found if n not in missing)} of the processes '
        f'given, but not {", ".join(missing)}; give all three, or none, as '
        f'flags or as {", ".join(_OURS.values())}.'
    )
  try:
    number, this = int(found['num_processes']), int(found['process_id'])
  except ValueError as error:
    raise ValueError(
        f'num_processes is {found["num_processes"]!r} and process_id '
        f'{found["process_id"]!r}; give whole numbers.'
    ) from error
  if not 0 <= this < number:
    raise ValueError(
        f'process_id is {this} of {number} processes; it must be from 0 to '
        f'{number - 1}.'
    )
  if ':' not in str(found['coordinator']):
    raise ValueError(
        f'coordinator is {found["coordinator"]!r}; give host:port of process 0.'
    )
  return dict(
      coordinator_address=str(found['coordinator']),
      num_processes=number,
      process_id=this,
  )


def _in_cluster(environment: Mapping[str, str]) -> bool:
  """Whether a cluster has started several processes, this one among them."""
  numbers = [environment.get(name, '') for name in _NUMBERS]
  lists = [environment.get(name, '') for name in _LISTS]
  return any(n.isdigit() and int(n) > 1 for n in numbers) or any(
      ',' in hosts for hosts in lists
  )

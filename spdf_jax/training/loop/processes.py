# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: their start, memory and end."""

from collections.abc import Mapping
import ctypes
import logging
import os
import platform
import signal
import threading
import types
from typing import Any

import jax
from jax.experimental import multihost_utils

logger = logging.getLogger('spdf_jax')

MODES = ('auto', 'on', 'off')
"""Whether a command is one of several processes; `auto` detects it from the
environment."""

_HEARTBEAT_TIMEOUT = 100  # Seconds.

_VARIABLES = {
    'coordinator': 'JAX_COORDINATOR_ADDRESS',
    'num_processes': 'JAX_NUM_PROCESSES',
    'process_id': 'JAX_PROCESS_ID',
}
# Environment variables with the processes of a job: their number under srun and
# Open MPI, a list on TPU hosts (also under GKE). JAX detects the rest.
_NUMBERS = ('SLURM_STEP_NUM_TASKS', 'OMPI_COMM_WORLD_SIZE')
_LISTS = ('TPU_WORKER_HOSTNAMES', 'TPU_PROCESS_ADDRESSES')


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_LARGEST_KEPT = 2**31 - 1  # The largest value, since mallopt takes an int.
_NEVER_TRIM = -1


def join_processes(
    mode: str = 'auto',
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: int = 300,
    environment: Mapping[str, str] = os.environ,
) -> bool:
  """Joins this process with the others of its job.

  Call it before any other use of JAX. Missing arguments are read from
  `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`; without
  these, JAX detects the cluster: SLURM, Open MPI, or TPU hosts, also under GKE.
  When a process fails, the others end within 100 seconds.

  Args:
    mode: One of `MODES`.
    coordinator: `host:port` of process 0.
    num_processes: Number of processes.
    process_id: Index of this process, from 0.
    timeout: Seconds that processes wait for one another, at start and end.
    environment: The environment variables.

  Returns:
    Whether there are several processes.

  Raises:
    ValueError: coordinator, num_processes and process_id are given only in part
      or not valid; or none is given, `mode` is `'on'`, and JAX detects no
      cluster.

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
        heartbeat_timeout_seconds=min(timeout, _HEARTBEAT_TIMEOUT),
        shutdown_timeout_seconds=timeout,
    )
  except ValueError as error:
    raise ValueError(
        f'distributed is {mode!r} and the other processes cannot be detected '
        f'({error}); give coordinator, num_processes and process_id.'
    ) from error
  return jax.process_count() > 1


def keep_freed_memory(largest: int = _LARGEST_KEPT) -> bool:
  """Makes glibc keep freed buffers of up to 2 GiB for the next step.

  XLA's CPU client allocates temporary memory at every step. By default, glibc
  returns a freed buffer above 32 MiB to the system, and the page faults of the
  next step take a quarter of a small model's step, and more of GPT-2 Small's,
  whose buffer takes 1 to 1.3 GiB. With this setting the memory of the process
  never shrinks. Call it before JAX starts threads. Results do not change.

  Args:
    largest: Size of the largest buffers that are kept, in bytes. What needs
      little memory rather than many steps, such as pruning, sets it lower.

  Returns:
    Whether the setting took effect, which requires glibc.

  References:
    mallopt(3): M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD

  Example:
    >>> keep_freed_memory() in (True, False)
    True
  """
  if platform.libc_ver()[0] != 'glibc':
    return False
  mallopt = ctypes.CDLL(None).mallopt
  # One arena, since the heaps of further arenas hold at most 64 MiB.
  return all(mallopt(name, value) == 1 for name, value in (
      (_M_ARENA_MAX, 1),
      (_M_MMAP_THRESHOLD, largest),
      (_M_TRIM_THRESHOLD, _NEVER_TRIM),
  ))


def is_main_process() -> bool:
  """Returns whether this process is the one that writes files and logs.

  Example:
    >>> is_main_process()
    True
  """
  return jax.process_index() == 0


def is_lost_process(error: Exception) -> bool:
  """Returns whether an error says that another process of the run has ended.

  Gloo, which connects processes on CPUs, raises it in those that remain, and
  JAX's service in those that wait at a barrier, e.g. to save.

  Args:
    error: The error of a step.

  Example:
    >>> is_lost_process(ValueError('sparsity is 2'))
    False
  """
  return isinstance(error, jax.errors.JaxRuntimeError) and any(
      text in str(error) for text in ('Gloo', 'heartbeat timeout')
  )


class Interrupts:
  """A context manager that records the first SIGTERM or SIGINT.

  A second SIGINT raises KeyboardInterrupt at once. All processes of a run stop
  after the same step, whichever received the signal: JAX's preemption service
  handles SIGTERM and synchronizes them. In another thread than the main one,
  where Python sets no handlers, signals act as they would without it.

  Attributes:
    received: Number of the signal, or `None`.

  Example:
    >>> with Interrupts() as interrupts:
    ...   interrupts.stop_after(step=1)
    False
  """

  def __init__(self):
    self.received: int | None = None
    self._alone = jax.process_count() == 1
    self._previous: dict[int, Any] = {}

  def __enter__(self) -> 'Interrupts':
    if threading.current_thread() is not threading.main_thread():
      logger.info(
          'training runs in a thread, so that no handlers of signals are set; '
          'a signal ends the process without another checkpoint'
      )
      return self
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
    """Returns whether to stop after this step; must be called at every step."""
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
) -> dict[str, Any]:
  """Returns JAX's arguments from flags or environment: all three, or none."""
  args: dict[str, Any] = {
      name: environment.get(_VARIABLES[name]) if value is None else value
      for name, value in flags.items()
  }
  missing = [name for name, value in args.items() if value in (None, '')]
  if len(missing) == len(args):
    return {}
  if missing:
    raise ValueError(
        f'got {" and ".join(n for n in args if n not in missing)}, but not '
        f'{" and ".join(missing)}; give all three, or none, as flags or as '
        f'{", ".join(_VARIABLES.values())}.'
    )
  try:
    number, this = int(args['num_processes']), int(args['process_id'])
  except ValueError as error:
    raise ValueError(
        f'num_processes is {args["num_processes"]!r} and process_id '
        f'{args["process_id"]!r}; give whole numbers.'
    ) from error
  if not 0 <= this < number:
    raise ValueError(
        f'process_id is {this} of {number} processes; it must be from 0 to '
        f'{number - 1}.'
    )
  if ':' not in str(args['coordinator']):
    raise ValueError(
        f'coordinator is {args["coordinator"]!r}; give host:port of process 0.'
    )
  return dict(
      coordinator_address=str(args['coordinator']),
      num_processes=number,
      process_id=this,
  )


def _in_cluster(environment: Mapping[str, str]) -> bool:
  """Returns whether this is one of several processes started by a cluster."""
  numbers = [environment.get(name, '') for name in _NUMBERS]
  lists = [environment.get(name, '') for name in _LISTS]
  return any(n.isdigit() and int(n) > 1 for n in numbers) or any(
      ',' in hosts for hosts in lists
  )

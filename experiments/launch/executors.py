"""Executors of runs: this machine, or the nodes of a Ray cluster."""

from collections.abc import Callable, Iterator, Mapping
import concurrent.futures
import contextlib
import fcntl
import os
import pathlib
import socket
import sys
import tempfile
import time
from typing import Any, NamedTuple

from absl import flags

from experiments.launch import workers
from spdf_jax import extras
from spdf_jax.files import FolderInUse

EXECUTORS = ('local', 'ray')
"""Executors by name."""

_ROOT = pathlib.Path(__file__).parents[2]
_RETRIES = 20
"""Largest number of nodes that a run may lose before it fails."""
_PATIENCE = 300.0
"""Seconds that a run waits for a process of a lost node to end."""
_TIMEOUT = 20.0
"""Seconds within which the cluster's address must accept a connection."""
_PREFIXES = ('JAX_', 'XLA_', 'SPDF_')
"""Beginnings of the environment variables that tasks inherit."""


class Resources(NamedTuple):
  """Resources that Ray reserves for each run.

  Attributes:
    cpus: Number of cores, which the run is pinned to.
    gpus: Number of GPUs, the only ones that the run sees.
  """

  cpus: int
  gpus: int


def define(command_flags: flags.FlagValues) -> Callable[[], Resources | None]:
  """Defines the flags of a command that trains several runs.

  Args:
    command_flags: Flags of the command.

  Returns:
    A function that returns what the flags give: the resources that Ray reserves
    for each run, or `None` for this machine.
  """
  executor = flags.DEFINE_enum(
      'executor', 'local', EXECUTORS,
      'Where runs are trained: on this machine, or as tasks of the Ray cluster '
      'that RAY_ADDRESS names (extra cluster).',
      flag_values=command_flags,
  )
  cpus = flags.DEFINE_integer(
      'cpus_per_run', 1, 'With --executor=ray: cores of each run.',
      lower_bound=1, flag_values=command_flags,
  )
  gpus = flags.DEFINE_integer(
      'gpus_per_run', 0, 'With --executor=ray: GPUs of each run.',
      lower_bound=0, flag_values=command_flags,
  )

  def resources() -> Resources | None:
    if executor.value == 'local':
      return None
    return Resources(cpus.value, gpus.value)

  return resources


@contextlib.contextmanager
def opened(resources: Resources | None) -> Iterator['RayExecutor | None']:
  """Opens an executor of runs; `None` for this machine.

  Args:
    resources: Resources that Ray reserves for each run; `None`: the runs are
      processes of this machine.

  Raises:
    ImportError: Ray is not installed.
    OSError: there is no Ray cluster.
    ValueError: no node of the cluster has the resources of a run.
  """
  if resources is None:
    yield None
    return
  with RayExecutor(resources) as executor:
    yield executor


class RayExecutor(concurrent.futures.Executor):
  """An executor that runs each call in a new process of a Ray cluster.

  The processes run in this process' working directory, with its flags and its
  variables `JAX_*`, `XLA_*` and `SPDF_*`, so that clone, environment and data
  have the same paths on all nodes, and results are those of this machine. A
  call whose node or process ends is repeated on another node.

  Args:
    resources: Resources of each call.

  Raises:
    ImportError: Ray is not installed.
    OSError: no cluster is found.
    ValueError: no node of the cluster has the resources.
  """

  def __init__(self, resources: Resources):
    self._ray = extras.require('ray', 'cluster')
    address = os.environ.get('RAY_ADDRESS', 'auto')
    variables = {k: v for k, v in os.environ.items() if k.startswith(_PREFIXES)}
    variables['PYTHONPATH'] = os.pathsep.join(
        filter(None, (str(_ROOT), os.environ.get('PYTHONPATH')))
    )
    host, _, port = address.removeprefix('ray://').rpartition(':')
    try:
      if host:  # Ray itself retries for many minutes.
        socket.create_connection((host, int(port)), timeout=_TIMEOUT).close()
      self._ray.init(
          address=address, logging_level='warning',
          runtime_env={'env_vars': variables},
      )
    except (OSError, ValueError) as error:
      raise ConnectionError(
          f'no Ray cluster is found at {address!r}; start one with `ray start '
          '--head`, set RAY_ADDRESS, or give --executor=local.'
      ) from error
    try:
      self._check(resources)
    except ValueError:
      self.shutdown()
      raise
    self._task = self._ray.remote(
        num_cpus=resources.cpus, num_gpus=resources.gpus, max_calls=1,
        max_retries=_RETRIES, retry_exceptions=[InterruptedError],
    )(_run)
    self._where = (sys.argv, os.getcwd(), resources)

  def _check(self, resources: Resources) -> None:
    """Raises ValueError if a call fits no node."""
    # A lost node is listed without resources.
    nodes = [
        node['Resources'] for node in self._ray.nodes() if node['Resources']
    ]
    if not any(
        node.get('CPU', 0) >= resources.cpus
        and node.get('GPU', 0) >= resources.gpus for node in nodes
    ):
      raise ValueError(
          f'cpus_per_run={resources.cpus} with gpus_per_run={resources.gpus} '
          f'fits no node of the Ray cluster, which has {_format(nodes)}; '
          'reduce them, or add a node.'
      )

  def submit(
      self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
  ) -> concurrent.futures.Future:
    """Schedules a call; its future has the result or the call's exception."""
    result: concurrent.futures.Future = concurrent.futures.Future()
    result.set_running_or_notify_cancel()
    scheduled = self._task.remote(*self._where, fn, args, kwargs).future()
    scheduled.add_done_callback(lambda done: self._pass_on(done, result))
    return result

  def _pass_on(
      self,
      done: concurrent.futures.Future,
      result: concurrent.futures.Future,
  ) -> None:
    error = done.exception()
    exceptions = self._ray.exceptions
    if error is None:
      result.set_result(done.result())
    elif isinstance(error, exceptions.RayTaskError):
      result.set_exception(error.cause)
    elif isinstance(
        error, (exceptions.WorkerCrashedError, exceptions.NodeDiedError)
    ):
      result.set_exception(OSError(
          f'a run lost its node or process {_RETRIES + 1} times '
          f'({type(error).__name__}); finished runs are kept, so repeat the '
          'same command when the cluster is repaired.'
      ))
    else:
      line = str(error).strip().partition('\n')[0]
      result.set_exception(OSError(
          f'a run failed on the cluster ({type(error).__name__}: {line}); '
          'finished runs are kept, so repeat the same command when the cause '
          'is removed.'
      ))

  def shutdown(
      self, wait: bool = True, *, cancel_futures: bool = False
  ) -> None:
    """Disconnects from the cluster, which ends calls that still run."""
    del wait, cancel_futures
    self._ray.shutdown()


def _format(nodes: list[Mapping[str, float]]) -> str:
  return ' and '.join(
      f'{node.get("CPU", 0):g} CPUs and {node.get("GPU", 0):g} GPUs'
      for node in nodes
  )


def _run(
    argv: list[str],
    directory: str,
    resources: Resources,
    fn: Callable[..., Any],
    args: tuple,
    kwargs: Mapping[str, Any],
) -> Any:
  """Makes a call in a process of the cluster; see `RayExecutor`."""
  try:
    os.chdir(directory)
  except OSError as error:
    raise OSError(
        f'node {os.uname().nodename} has no folder {directory}; start the '
        'command in a folder that all nodes share.'
    ) from error
  held = _pin(resources.cpus)
  workers.start(argv)
  deadline = time.monotonic() + _PATIENCE
  try:
    while True:
      try:
        return fn(*args, **kwargs)
      except FolderInUse:
        # The process on a lost node may run on for a while.
        if time.monotonic() > deadline:
          raise
        time.sleep(1)
  finally:
    for descriptor in held:
      os.close(descriptor)


def _pin(count: int) -> list[int]:
  """Pins this process to a number of cores, if possible to unclaimed ones.

  The number of cores decides how XLA divides sums, and so the last digits of
  results. A core is claimed by locking a file, which is released when the
  process ends.

  Returns:
    File descriptors of the claims.
  """
  folder = pathlib.Path(
      tempfile.gettempdir(), f'spdf_jax_cores_{os.getuid()}'
  )
  folder.mkdir(mode=0o700, exist_ok=True)
  cores = sorted(os.sched_getaffinity(0))
  claimed: dict[int, int] = {}
  for core in cores:
    descriptor = os.open(folder / str(core), os.O_RDWR | os.O_CREAT, 0o600)
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
      os.close(descriptor)
    else:
      claimed[core] = descriptor
    if len(claimed) == count:
      break
  others = [core for core in cores if core not in claimed]
  os.sched_setaffinity(0, {*claimed, *others[:count - len(claimed)]})
  return list(claimed.values())

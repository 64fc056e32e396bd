"""Flags of where runs of a sweep or a pool are trained."""

from collections.abc import Iterator
import contextlib
import pathlib
import sys

from absl import flags

from experiments.launch import ray_executor
from experiments.launch import shared_executor
from experiments.launch import slurm_array

EXECUTORS = ('local', 'ray', 'slurm', 'shared')
"""Executors by name."""

Executor = ray_executor.RayExecutor | shared_executor.SharedExecutor

_EXECUTOR = flags.DEFINE_enum(
    'executor', 'local', EXECUTORS,
    'Where runs are trained: on this machine; as tasks of the Ray cluster that '
    'RAY_ADDRESS names (extra cluster); by an array of SLURM jobs; or shared '
    'with other machines that run the same command on the same disk.',
)
_JOBS = flags.DEFINE_integer(
    'jobs', 4, 'With --executor=slurm: number of jobs, which share the runs.',
    lower_bound=1,
)
_CPUS = flags.DEFINE_integer(
    'cpus_per_run', 1, 'With --executor=ray or slurm: cores of each run.',
    lower_bound=1,
)
_GPUS = flags.DEFINE_integer(
    'gpus_per_run', 0, 'With --executor=ray or slurm: GPUs of each run.',
    lower_bound=0,
)


def name() -> str:
  """Returns the name of the executor that the flag gives."""
  return _EXECUTOR.value


def is_shared() -> bool:
  """Returns whether other machines train runs of the same folder."""
  return _EXECUTOR.value in ('slurm', 'shared')


def submit(folder: pathlib.Path, module: str) -> str:
  """Submits this command as an array of SLURM jobs; returns sbatch's output.

  Args:
    folder: Folder of the runs.
    module: Module of the command.

  Raises:
    OSError: sbatch is not installed, or fails.
  """
  return slurm_array.submit(
      folder, module, sys.argv[1:], _JOBS.value, _resources()
  )


@contextlib.contextmanager
def opened() -> Iterator[Executor | None]:
  """Opens the executor that the flags give; `None` for this machine.

  Raises:
    ImportError: Ray is not installed.
    InterruptedError: an executor of shared runs received SIGTERM; everything is
      saved.
    OSError: there is no Ray cluster.
    ValueError: no node of the cluster has the resources of a run.
  """
  if _EXECUTOR.value == 'ray':
    with ray_executor.RayExecutor(_resources()) as of_ray:
      yield of_ray
  elif _EXECUTOR.value == 'shared':
    with shared_executor.open_shared(_JOBS.value) as shared:
      yield shared
  else:
    yield None


def _resources() -> ray_executor.Resources:
  return ray_executor.Resources(_CPUS.value, _GPUS.value)

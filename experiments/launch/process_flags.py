"""Flags of commands that can run in several processes."""

import logging as standard_logging

from absl import flags

from spdf_jax.training import processes

_DISTRIBUTED = flags.DEFINE_enum(
    'distributed', 'auto', processes.MODES,
    'Whether this is one of several processes: on, off, or auto, which detects '
    'a cluster (SLURM, Open MPI, TPU hosts), --coordinator, --num_processes '
    'and --process_id, or the variables JAX_COORDINATOR_ADDRESS, '
    'JAX_NUM_PROCESSES and JAX_PROCESS_ID.',
)
_COORDINATOR = flags.DEFINE_string(
    'coordinator', None, 'Address of process 0, host:port.'
)
_NUM_PROCESSES = flags.DEFINE_integer(
    'num_processes', None, 'Number of processes.', lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
    'process_id', None, 'Number of this process, from 0.', lower_bound=0
)
_TIMEOUT = flags.DEFINE_integer(
    'process_timeout', 300,
    'Seconds that processes wait for one another at start and end.',
    lower_bound=1,
)


def join() -> None:
  """Joins the processes that the flags give; only process 0 logs progress.

  Raises:
    ValueError: the flags or the environment are incomplete.
  """
  processes.join_processes(
      _DISTRIBUTED.value,
      coordinator=_COORDINATOR.value,
      num_processes=_NUM_PROCESSES.value,
      process_id=_PROCESS_ID.value,
      timeout=_TIMEOUT.value,
  )
  if not processes.is_main_process():
    standard_logging.getLogger('spdf_jax').setLevel(standard_logging.WARNING)

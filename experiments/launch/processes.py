"""Flags of commands that can run in several processes."""

import logging as standard_logging

from absl import flags

from spdf_jax.training.processes import is_main_process
from spdf_jax.training.processes import join_processes
from spdf_jax.training.processes import MODES

_DISTRIBUTED = flags.DEFINE_enum(
    'distributed', 'auto', MODES,
    'Whether this is one of several processes: on, off, or auto, if a cluster '
    '(SLURM, Open MPI, TPU hosts), the flags below or the variables '
    'JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say so.',
)
_COORDINATOR = flags.DEFINE_string(
    'coordinator', None, 'host:port of process 0.'
)
_NUM_PROCESSES = flags.DEFINE_integer(
    'num_processes', None, 'How many processes there are.', lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
    'process_id', None, 'Which one this is, from 0.', lower_bound=0
)
_TIMEOUT = flags.DEFINE_integer(
    'process_timeout', 300,
    'Seconds that processes wait for one another at start and end.',
    lower_bound=1,
)


def join() -> None:
  """Joins the processes that the flags name; all but the first are silent.

  Raises:
    ValueError: the flags, or the environment, name only half of what it takes.
  """
  join_processes(
      _DISTRIBUTED.value,
      coordinator=_COORDINATOR.value,
      num_processes=_NUM_PROCESSES.value,
      process_id=_PROCESS_ID.value,
      timeout=_TIMEOUT.value,
  )
  if not is_main_process():
    standard_logging.getLogger('spdf_jax').setLevel(standard_logging.WARNING)

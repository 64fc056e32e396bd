"""Joining processes: arguments for JAX, and incomplete environments."""

import platform

import jax
import pytest

from spdf_jax.training.loop import processes
from spdf_jax.training.loop.processes import join_processes
from tests.child import run_python
from tests.refusals import refuse

WHOLE = dict(
    JAX_COORDINATOR_ADDRESS='host:1234', JAX_NUM_PROCESSES='4',
    JAX_PROCESS_ID='3',
)


@pytest.fixture
def initialized(monkeypatch):
  """Replaces the initialization of JAX by a record of its arguments."""
  calls = []
  monkeypatch.setattr(
      jax.distributed, 'initialize', lambda **given: calls.append(given)
  )
  return calls


def test_a_single_process_does_not_initialize_distributed_jax(initialized):
  assert not join_processes('auto', environment={})
  assert not join_processes('off', environment=WHOLE)
  assert not initialized


@pytest.mark.parametrize('mode', ['auto', 'on'])
def test_other_processes_are_found_in_the_environment(initialized, mode):
  join_processes(mode, environment=WHOLE)
  assert initialized[0]['coordinator_address'] == 'host:1234'
  assert initialized[0]['num_processes'] == 4
  assert initialized[0]['process_id'] == 3


def test_flags_come_before_the_environment(initialized):
  join_processes(process_id=0, num_processes=2, environment=WHOLE, timeout=20)
  assert initialized[0] == dict(
      coordinator_address='host:1234', num_processes=2, process_id=0,
      initialization_timeout=20, heartbeat_timeout_seconds=20,
      shutdown_timeout_seconds=20,
  )


@pytest.mark.parametrize('environment', [
    dict(SLURM_STEP_NUM_TASKS='2'),
    dict(OMPI_COMM_WORLD_SIZE='16'),
    dict(TPU_WORKER_HOSTNAMES='t0,t1'),
])
def test_a_cluster_of_several_processes_is_joined(initialized, environment):
  join_processes('auto', environment=environment)
  assert initialized[0]['initialization_timeout'] == 300
  assert 'process_id' not in initialized[0]


@pytest.mark.parametrize('environment', [
    dict(SLURM_STEP_NUM_TASKS='1'),
    dict(SLURM_NTASKS='8'),  # A batch script before its srun.
    dict(TPU_WORKER_HOSTNAMES='localhost'),
])
def test_a_cluster_of_one_process_is_not(initialized, environment):
  assert not join_processes('auto', environment=environment)
  assert not initialized


@pytest.mark.parametrize('environment, message', [
    (dict(JAX_NUM_PROCESSES='2'),
     'got num_processes, but not coordinator and process_id'),
    (WHOLE | dict(JAX_PROCESS_ID=''), 'but not process_id; give all three'),
    (WHOLE | dict(JAX_PROCESS_ID='4'), 'process_id is 4 of 4 processes'),
    (WHOLE | dict(JAX_PROCESS_ID='-1'), 'from 0 to 3'),
    (WHOLE | dict(JAX_NUM_PROCESSES='two'), "num_processes is 'two'"),
    (WHOLE | dict(JAX_COORDINATOR_ADDRESS='host'), 'give host:port'),
])
def test_an_incomplete_environment_of_a_cluster_is_refused(
    initialized, environment, message
):
  for mode in ('auto', 'on'):
    refuse(message, join_processes, mode, environment=environment)
  assert not initialized


def test_distributed_on_without_other_processes_is_refused(monkeypatch):
  monkeypatch.delenv('JAX_COORDINATOR_ADDRESS', raising=False)
  def nobody(**_):
    raise ValueError('coordinator_address should be defined.')
  monkeypatch.setattr(jax.distributed, 'initialize', nobody)
  with pytest.raises(ValueError, match="distributed is 'on' and the other"):
    join_processes('on', environment={})


def test_an_unknown_mode_of_distributed_is_refused():
  refuse("'yes'; use one of auto, on, off", join_processes, 'yes')
  assert processes.is_main_process()


FREE_MEMORY = '''
import numpy as np
from spdf_jax.training.loop import processes

def resident():
  with open('/proc/self/statm') as file:
    return 4 * int(file.read().split()[1])  # KiB.

assert processes.keep_freed_memory({arguments})
held = [np.ones(2**20) for _ in range(16)]  # Of 8 MiB.
last = np.ones(2**10)
before = resident()
del held
print(before - resident())
'''


@pytest.mark.process
@pytest.mark.skipif(
    platform.libc_ver()[0] != 'glibc', reason='the allocator is not glibc'
)
def test_freed_memory_is_kept_up_to_a_size():
  returned = []
  for arguments in ('', 'largest=2**20'):
    code = FREE_MEMORY.format(arguments=arguments)
    returned.append(int(run_python(code)))
  assert returned[0] < 2**10 and returned[1] > 100 * 2**10

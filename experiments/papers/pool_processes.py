"""Processes of a pool: each runs one job at a time, pinned to one core."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import sys
import time

from experiments.papers import pool_runs
from experiments.papers import replica_groups
from experiments.papers.pool import Done
from experiments.papers.pool import Entry
from experiments.papers.pool import Job
from experiments.papers.pool import next_jobs
from experiments.papers.pool import Outcome
from experiments.papers.pool import run_all
from experiments.papers.pool_progress import PoolProgress


def run_pool(
    runner: pool_runs.Runner,
    entries: Sequence[Entry],
    done: Done,
    cores: Sequence[int],
    workers: int,
    select: Callable[[list[Job]], Iterable[Job]] = lambda jobs: jobs,
    executor: concurrent.futures.Executor | None = None,
) -> dict[str, Outcome]:
  """Runs unfinished runs; prints each finished run and the time left.

  Args:
    runner: Runner of the jobs.
    entries: Entries of the pool.
    done: Outcomes of finished runs.
    cores: Cores that workers are pinned to; empty: workers are not pinned.
    workers: Number of runs at a time.
    select: Filters and orders the runs that can start.
    executor: Executor of the runs, which queues all that can start; `None`:
      processes of this machine.

  Returns:
    All outcomes.

  Raises:
    OSError: a worker was killed.
  """
  progress = PoolProgress(entries, workers)
  print(f'{progress.counts(done)} runs are done', flush=True)
  run = functools.partial(
      run_all, lambda done: select(next_jobs(entries, done, runner.is_there)),
      runner, done, report=progress,
  )
  if executor is not None:
    return run(executor=executor, workers=sys.maxsize)
  context = multiprocessing.get_context('spawn')
  queue = context.Queue()
  for i in range(workers if cores else 0):
    queue.put(cores[i % len(cores)])
  with concurrent.futures.ProcessPoolExecutor(
      workers, context, pool_runs.start_worker, (queue, os.getpid())
  ) as processes:
    try:
      return run(executor=processes, workers=workers)
    except concurrent.futures.process.BrokenProcessPool as error:
      raise OSError(
          'a worker process was killed; finished runs are kept, so repeat the '
          'same command.'
      ) from error


def run_replicas(
    runner: pool_runs.Runner,
    entries: Sequence[Entry],
    done: Done,
    cores: Sequence[int],
    workers: int,
    limits: replica_groups.Limits,
) -> dict[str, Outcome]:
  """Trains unfinished runs in groups; prints each run and the time left.

  Initial weights and the n-gram losses of gate G1 are computed first, by
  processes on the CPU.

  Args:
    runner: Runner that creates the recipes.
    entries: Entries of the pool, checked by `replica_groups.check_arms`.
    done: Outcomes of finished runs.
    cores: Cores that processes are pinned to.
    workers: Number of processes.
    limits: Limits on time and on runs in one program.

  Returns:
    All outcomes.

  Raises:
    InterruptedError: a signal arrived or the time is over; everything is saved.
    OSError: a process was killed.
  """
  is_initial = lambda job: job.arm.method == 'init'
  waiting = lambda done: any(
      is_initial(job) for job in next_jobs(entries, done, runner.is_there)
  )
  in_time = lambda: time.monotonic() < limits.deadline
  if waiting(done):
    with _processes_on_cpu():
      done = run_pool(
          runner, entries, done, cores, workers,
          select=lambda jobs: filter(is_initial, jobs if in_time() else ()),
      )
    if waiting(done):
      raise InterruptedError('the time is over; repeat the same command.')
  progress = PoolProgress(entries, workers=1)
  print(f'{progress.counts(done)} runs are done', flush=True)
  return replica_groups.run_groups(runner, entries, done, limits, progress)


@contextlib.contextmanager
def _processes_on_cpu() -> Iterator[None]:
  """Sets JAX_PLATFORMS so that processes started meanwhile run on the CPU."""
  before = os.environ.get('JAX_PLATFORMS')
  os.environ['JAX_PLATFORMS'] = 'cpu'
  try:
    yield
  finally:
    if before is None:
      del os.environ['JAX_PLATFORMS']
    else:
      os.environ['JAX_PLATFORMS'] = before

"""Processes of a pool: each runs one job at a time, pinned to one core."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import concurrent.futures
import multiprocessing
import os

from experiments.papers import pool
from experiments.papers import pool_worker
from experiments.papers.pool import Done
from experiments.papers.pool import Entry
from experiments.papers.pool import Job
from experiments.papers.pool import Outcome
from experiments.papers.pool_progress import PoolProgress


def run_pool(
    runner: pool_worker.Runner,
    entries: Sequence[Entry],
    done: Done,
    cores: Sequence[int],
    workers: int,
    select: Callable[[list[Job]], Iterable[Job]] = lambda jobs: jobs,
) -> dict[str, Outcome]:
  """Runs unfinished runs; prints each finished run and the time left.

  Args:
    runner: Runner of the jobs.
    entries: Entries of the pool.
    done: Outcomes of finished runs.
    cores: Cores that workers are pinned to; empty: workers are not pinned.
    workers: Number of runs at a time.
    select: Filters and orders the runs that can start.

  Returns:
    All outcomes.

  Raises:
    OSError: a worker was killed.
  """
  progress = PoolProgress(entries, workers)
  print(f'{progress.counts(done)} runs are done', flush=True)
  context = multiprocessing.get_context('spawn')
  queue = context.Queue()
  for i in range(workers if cores else 0):
    queue.put(cores[i % len(cores)])
  with concurrent.futures.ProcessPoolExecutor(
      workers, context, pool_worker.start_worker, (queue, os.getpid())
  ) as processes:
    try:
      return pool.run_all(
          lambda done: select(pool.next_jobs(entries, done, runner.is_there)),
          runner, done, processes, workers, report=progress,
      )
    except concurrent.futures.process.BrokenProcessPool as error:
      raise OSError(
          'a worker process was killed; finished runs are kept, so repeat the '
          'same command.'
      ) from error

"""Processes of a pool: each runs one job at a time, pinned to one core."""

from collections.abc import Sequence
import concurrent.futures
import multiprocessing
import os
import signal
from typing import Any

from experiments.launch import grid
from experiments.papers import pool
from experiments.papers import pool_worker
from experiments.papers.pool import Done
from experiments.papers.pool import Entry
from experiments.papers.pool import Job
from experiments.papers.pool import Outcome
from spdf_jax.training import progress


class PoolProgress:
  """Prints each finished run, the number of remaining runs and the time left.

  Args:
    entries: Entries of the pool.
    workers: Number of runs at a time.
  """

  def __init__(self, entries: Sequence[Entry], workers: int):
    self._entries = entries
    self._workers = workers

  def _names(self, done: Done) -> dict[str, str]:
    """Returns the folder of each run that is known or expected, by name."""
    names = {
        job.name: job.arm.folder for job in pool.all_jobs(self._entries, done)
    }
    # Seeds whose learning rate is not chosen yet have no names so far.
    for entry in self._entries:
      if entry.arm.rate_of is None:
        count = sum(kind == entry.arm.folder for kind in names.values())
        for i in range(count, entry.seeds + len(grid.points(entry.grid))):
          names[f'{entry.arm.folder}/{i}'] = entry.arm.folder
    return names

  def counts(self, done: Done) -> str:
    """Returns the numbers of finished and of all runs, such as `'3 of 8'`."""
    names = self._names(done)
    return f'{len(names.keys() & done.keys())} of {len(names)}'

  def __call__(self, job: Job, done: Done) -> None:
    names = self._names(done)
    seconds: dict[str, list[float]] = {}
    for name, outcome in done.items():
      seconds.setdefault(name.partition('/')[0], []).append(outcome['seconds'])
    known = [x for values in seconds.values() for x in values]
    mean = sum(known) / len(known)
    left = [kind for name, kind in names.items() if name not in done]
    total = sum(
        sum(seconds[kind]) / len(seconds[kind]) if kind in seconds else mean
        for kind in left
    )
    outcome = done[job.name]
    loss = outcome.get(job.arm.metric)
    print(
        f'{self.counts(done)}: {job.name}: '
        + ('' if loss is None else f'{job.arm.metric} {loss:.4f}, ')
        + f'{outcome["seconds"]:.0f} s; {len(left)} left, about '
        f'{progress.format_seconds(total / self._workers)}',
        flush=True,
    )


def run_pool(
    runner: pool_worker.Runner,
    entries: Sequence[Entry],
    done: Done,
    cores: Sequence[int],
    workers: int,
) -> dict[str, Outcome]:
  """Runs unfinished runs; prints each finished run and the time left.

  A SIGTERM is passed on to the running runs, which save.

  Args:
    runner: Runner of the jobs.
    entries: Entries of the pool.
    done: Outcomes of finished runs.
    cores: Cores that workers are pinned to.
    workers: Number of runs at a time.

  Returns:
    All outcomes.

  Raises:
    InterruptedError: a signal arrived; everything is saved.
    OSError: a worker was killed.
  """
  report = PoolProgress(entries, workers)
  print(f'{report.counts(done)} runs are done', flush=True)
  context = multiprocessing.get_context('spawn')
  queue = context.Queue()
  for i in range(workers):
    queue.put(cores[i % len(cores)])

  def stop_runs(*_: Any) -> None:
    for child in multiprocessing.active_children():
      child.terminate()

  previous = signal.signal(signal.SIGTERM, stop_runs)
  with concurrent.futures.ProcessPoolExecutor(
      workers, context, pool_worker.start_worker, (queue, os.getpid())
  ) as processes:
    try:
      return pool.run_all(
          lambda done: pool.next_jobs(entries, done, runner.is_there),
          runner, done, processes, workers, report,
      )
    except concurrent.futures.process.BrokenProcessPool as error:
      raise OSError(
          'a worker process was killed; finished runs are kept, so repeat the '
          'same command.'
      ) from error
    finally:
      signal.signal(signal.SIGTERM, previous)

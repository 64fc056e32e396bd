"""Processes of a pool: each runs one job at a time, pinned to one core."""

import collections
from collections.abc import Callable, Sequence
import concurrent.futures
import functools
import multiprocessing
import os
import signal
import statistics
from typing import Any

from experiments.papers.arms import Arm
from experiments.pool import pool
from experiments.pool import worker as pool_worker
from experiments.pool.pool import Done
from experiments.pool.pool import Entry
from experiments.pool.pool import Job
from experiments.pool.pool import Outcome
from spdf_jax.training.loop import progress


class PoolProgress:
  """Prints each finished run, the number of remaining runs and the time left.

  A run of an arm without finished ones is expected to take as long for its work
  as the finished runs of others.

  Args:
    entries: Entries of the pool.
    workers: Number of runs at a time.
    work: Returns a number that grows with the time of a run of an arm, 0 for
      runs without training.
  """

  def __init__(
      self,
      entries: Sequence[Entry],
      workers: int,
      work: Callable[[Arm], float],
  ):
    self._entries = entries
    self._workers = workers
    self._work = functools.cache(work)

  def _arms(self, done: Done) -> dict[str, Arm]:
    """Returns the arm of each run that is known or expected, by name."""
    arms = {job.name: job.arm for job in pool.all_jobs(self._entries, done)}
    ended = pool.without_choice(self._entries, done)
    # Seeds whose learning rate is not chosen yet have no names so far.
    for entry in self._entries:
      arm = entry.arm
      if arm in ended:
        continue
      count = sum(other.folder == arm.folder for other in arms.values())
      for i in range(count, pool.number_of_runs(entry)):
        arms[f'{arm.folder}/{i}'] = arm
    return arms

  def counts(self, done: Done) -> str:
    """Returns the numbers of finished and of all runs, such as `'3 of 8'`."""
    arms = self._arms(done)
    return f'{len(arms.keys() & done.keys())} of {len(arms)}'

  def __call__(self, job: Job, done: Done) -> None:
    arms = self._arms(done)
    seconds = collections.defaultdict(list)
    spent = worked = 0.0
    for name in arms.keys() & done.keys():
      arm = arms[name]
      seconds[arm.folder].append(done[name]['seconds'])
      if self._work(arm):
        spent += done[name]['seconds']
        worked += self._work(arm)
    left = [arm for name, arm in arms.items() if name not in done]
    total = sum(
        statistics.fmean(seconds[arm.folder]) if arm.folder in seconds
        else self._work(arm) * spent / max(worked, 1.0)
        for arm in left
    )
    outcome = done[job.name]
    loss = outcome.get(job.arm.metric)
    print(
        f'{self.counts(done)}: {job.name}: '
        + ('' if loss is None else f'{job.arm.metric} {loss:.4f}, ')
        + f'{outcome["seconds"]:.0f} s; {len(left)} left, about '
        + progress.format_seconds(total / self._workers),
        flush=True,
    )


def run_pool(
    runner: pool_worker.Runner,
    entries: Sequence[Entry],
    done: Done,
    cores: Sequence[int],
    workers: int,
    work: Callable[[Arm], float] = lambda arm: 1.0,
) -> dict[str, Outcome]:
  """Runs unfinished runs; prints each finished run and the time left.

  A SIGTERM is passed on to the running runs, which save.

  Args:
    runner: Runner of the jobs.
    entries: Entries of the pool.
    done: Outcomes of finished runs.
    cores: Cores that workers are pinned to.
    workers: Number of runs at a time.
    work: Argument of `PoolProgress`.

  Returns:
    All outcomes.

  Raises:
    InterruptedError: a signal arrived; everything is saved.
    OSError: a worker was killed.
  """
  report = PoolProgress(entries, workers, work)
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

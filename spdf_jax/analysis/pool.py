"""A pool of runs: which come next, and all of them, several at a time."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import concurrent.futures
import math
from typing import Any
from typing import NamedTuple

from spdf_jax.analysis.sweeps import points
from spdf_jax.analysis.sweeps import rank
from spdf_jax.analysis.sweeps import Result
from spdf_jax.analysis.sweeps import run_name

Outcome = Mapping[str, Any]  # What a run has measured, by name.


class Arm(NamedTuple):
  """Runs that differ in nothing but their seed, and how they are chosen.

  Attributes:
    name: What it is called.
    grid: What is tried on the selection seed, values by name; none: one point.
    parent: The arm whose runs, seed by seed, it starts from; `''`: none.
    metric: What its point is chosen by.
  """

  name: str
  grid: Mapping[str, Sequence[Any]]
  parent: str
  metric: str


class Job(NamedTuple):
  """One run of a pool.

  Attributes:
    arm: The name of its arm.
    point: Its values of the arm's grid.
    seed: Its seed.
    parent: The name of the run that it starts from; `''`: none.
  """

  arm: str
  point: Mapping[str, Any]
  seed: int
  parent: str

  @property
  def name(self) -> str:
    """Its folder, below that of the pool."""
    return f'{self.arm}/{run_name(self.point, self.seed)}'


def choose(
    arm: Arm, selection_seed: int, done: Mapping[str, Outcome]
) -> Mapping[str, Any] | None:
  """Returns the best point of an arm's grid, `None` until all are run.

  Args:
    arm: The arm.
    selection_seed: The seed that its grid is run with.
    done: What finished runs have measured, by their names; what is not a
      number counts as infinite.

  Example:
    >>> arm = Arm('a', {'rate': (1, 2)}, '', 'validation/loss')
    >>> done = {'a/rate=1,seed=0': {'validation/loss': 3.0}}
    >>> choose(arm, 0, done) is None
    True
    >>> choose(arm, 0, done | {'a/rate=2,seed=0': {'validation/loss': 2.5}})
    {'rate': 2}
  """
  results = [
      Result(point, selection_seed, name, _finite(done[name]))
      for point in points(arm.grid)
      if (name := Job(arm.name, point, selection_seed, '').name) in done
  ]
  if len(results) < len(points(arm.grid)):
    return None
  if len(results) == 1:
    return results[0].fields
  return rank(results, arm.metric)[0].fields


def _finite(outcome: Outcome) -> Outcome:
  return {
      name: math.inf if isinstance(x, float) and math.isnan(x) else x
      for name, x in outcome.items()
  }


def next_jobs(
    arms: Sequence[Arm],
    seeds: Sequence[int],
    selection_seed: int,
    done: Mapping[str, Outcome],
) -> list[Job]:
  """Returns all runs that can start: a pure function of those that are done.

  An arm's grid is run on the selection seed, its best point on all others; a
  run that starts from another arm's starts when that one's, of the point chosen
  there and of the same seed, is done.

  Args:
    arms: Each after its parent.
    seeds: Those of the comparison.
    selection_seed: None of them.
    done: What finished runs have measured, by their names.

  Returns:
    Jobs, by arm and then by seed.

  Raises:
    ValueError: the selection seed is one of the seeds.

  Example:
    >>> arm = Arm('a', {'rate': (1, 2)}, '', 'validation/loss')
    >>> [job.name for job in next_jobs([arm], [1, 2], 0, {})]
    ['a/rate=1,seed=0', 'a/rate=2,seed=0']
  """
  if selection_seed in seeds:
    raise ValueError(
        f'seeds has the selection seed {selection_seed}; it would judge what '
        'was chosen on it, take it out.'
    )
  chosen = {arm.name: choose(arm, selection_seed, done) for arm in arms}
  jobs = []
  for arm in arms:
    best = chosen[arm.name]
    for seed in (selection_seed, *seeds):
      if arm.parent and chosen[arm.parent] is None:
        continue
      parent = ''
      if arm.parent:
        parent = Job(arm.parent, chosen[arm.parent], seed, '').name
        if parent not in done:
          continue
      if seed == selection_seed:
        tried = points(arm.grid)
      else:
        tried = [] if best is None else [best]
      jobs += [Job(arm.name, point, seed, parent) for point in tried]
  return [job for job in jobs if job.name not in done]


def count_jobs(arm: Arm, seeds: Sequence[int]) -> int:
  """Returns how many runs an arm takes.

  Example:
    >>> count_jobs(Arm('a', {'rate': (1, 2)}, '', ''), seeds=[1, 2, 3])
    5
  """
  return len(points(arm.grid)) + len(seeds)


def run_all(
    ready: Callable[[Mapping[str, Outcome]], Iterable[Job]],
    run: Callable[[Job], Outcome],
    done: Mapping[str, Outcome],
    executor: concurrent.futures.Executor,
    workers: int,
    report: Callable[[Job, Mapping[str, Outcome]], None],
) -> dict[str, Outcome]:
  """Runs a pool to its end, `workers` runs at a time.

  Args:
    ready: What can start, as `next_jobs` says.
    run: Runs one job and returns what it measured; called by the executor.
    done: What finished runs have measured, by their names: not run again.
    executor: Runs jobs.
    workers: How many at a time.
    report: Called with every finished job and all that are done.

  Returns:
    All that are done. What a run raises is raised here, once those that had
    started with it have ended.

  Example:
    >>> arm = Arm('a', {}, '', 'validation/loss')
    >>> with concurrent.futures.ThreadPoolExecutor() as executor:
    ...   found = run_all(lambda done: next_jobs([arm], [1], 0, done),
    ...                   lambda job: {'seed': job.seed}, {}, executor, 2,
    ...                   report=lambda job, done: None)
    >>> found
    {'a/seed=0': {'seed': 0}, 'a/seed=1': {'seed': 1}}
  """
  done = dict(done)
  running: dict[concurrent.futures.Future, Job] = {}
  while True:
    names = {job.name for job in running.values()}
    waiting = [job for job in ready(done) if job.name not in names]
    for job in waiting[: workers - len(running)]:
      running[executor.submit(run, job)] = job
    if not running:
      return done
    finished, _ = concurrent.futures.wait(
        running, return_when=concurrent.futures.FIRST_COMPLETED
    )
    for future in finished:
      job = running.pop(future)
      try:
        done[job.name] = future.result()
      except BaseException:
        concurrent.futures.wait(running)
        raise
      report(job, done)

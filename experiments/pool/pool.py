"""Pool of runs: their dependencies, the tuning of arms, and their execution."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import concurrent.futures
import math
import statistics
from typing import Any, NamedTuple

from experiments.launch.grid import points
from experiments.launch.grid import run_name
from experiments.papers.arms import Arm

Outcome = Mapping[str, Any]
"""Values measured by a run, by name."""

Done = Mapping[str, Outcome]
"""Outcomes of finished runs, by the names of their jobs."""

_DOUBLINGS = 3
"""Largest extension of a grid of rates beyond either end, in factors of 2."""


class Entry(NamedTuple):
  """An arm in a pool, with the grid it is tuned over and its seeds.

  Attributes:
    arm: The arm.
    grid: Values tried on the tuning seeds, by name; empty: nothing is tuned.
    seeds: Number of evaluation seeds, which are 1, 2, …; 0: the arm is measured
      on the tuning seeds.
    extend: Whether the grid's `'rate'` is extended by factors of 2 until the
      best rate is not at an end of it.
    tuning_seeds: Seeds whose mean loss a point of the grid is chosen by.
    repeat_every: Judging seeds that are multiples of it are run twice, the
      second time with other rounding errors; 0: none.
  """

  arm: Arm
  grid: Mapping[str, Sequence[Any]]
  seeds: int
  extend: bool = True
  tuning_seeds: tuple[int, ...] = (0,)
  repeat_every: int = 0

  @property
  def evaluation_seeds(self) -> tuple[int, ...]:
    """Seeds that the arm is measured on."""
    return tuple(range(1, self.seeds + 1)) or self.tuning_seeds


class Job(NamedTuple):
  """One run of a pool.

  Attributes:
    arm: Arm of the run.
    point: Values chosen from the arm's grid, by name.
    seed: Seed of the run.
    parent: Run that this one starts from; `None`: none.
    again: Whether the run repeats another with other rounding errors.
  """

  arm: Arm
  point: Mapping[str, Any]
  seed: int
  parent: 'Job | None' = None
  again: bool = False

  @property
  def name(self) -> str:
    """Name of the run: its folder relative to that of the pool."""
    name = f'{self.arm.folder}/{run_name(self.point, self.seed)}'
    return f'{name},again' if self.again else name

  @property
  def depth(self) -> int:
    """Number of runs before this one, each of which starts from the last."""
    return 0 if self.parent is None else 1 + self.parent.depth


def number_of_runs(entry: Entry) -> int:
  """Returns the number of runs of an entry, as far as its grid is known.

  Example:
    >>> number_of_runs(Entry(Arm('dense'), {'rate': (1, 2)}, 5, repeat_every=3,
    ...                      tuning_seeds=(1, 2, 3)))
    9
  """
  evaluated = set(range(1, entry.seeds + 1))
  repeated = entry.seeds // entry.repeat_every if entry.repeat_every else 0
  if entry.arm.method == 'init':
    repeated = 0  # See `all_jobs`.
  if entry.arm.rate_of is not None or not entry.grid:
    return len(evaluated) + repeated
  tuning = set(entry.tuning_seeds)
  return (
      len(points(entry.grid)) * len(tuning) + len(evaluated - tuning) + repeated
  )


def loss_of(
    entry: Entry, point: Mapping[str, Any], done: Done
) -> float | None:
  """Returns the mean loss of a point of a grid, `None` until its runs ended.

  It is infinite if a loss is NaN: then the point cannot be chosen.
  """
  losses = []
  for seed in entry.tuning_seeds:
    outcome = done.get(Job(entry.arm, point, seed).name)
    if outcome is None:
      return None
    losses.append(outcome.get(entry.arm.metric, 0.0))  # 'init' has no loss.
  mean = statistics.fmean(losses)
  return math.inf if math.isnan(mean) else mean


def tried(entry: Entry, done: Done) -> list[dict[str, Any]]:
  """Returns the points of an entry's grid, extended around the best rate.

  While the best rate is the lowest or the highest tried with the other values
  of its point, half or twice that rate is added, up to a factor of 8 beyond
  the initial grid. If no point may be chosen, the first one counts as the best.

  Args:
    entry: The entry.
    done: Outcomes of finished runs.

  Returns:
    Points in the order in which they were added, which does not depend on the
    order in which runs finish.

  Example:
    >>> entry = Entry(Arm('dense'), {'rate': (1.0, 2.0)}, 1)
    >>> done = {'dense/rate=1.0,seed=0': {'validation/loss': 3.0},
    ...         'dense/rate=2.0,seed=0': {'validation/loss': 2.5}}
    >>> tried(entry, done)
    [{'rate': 1.0}, {'rate': 2.0}, {'rate': 4.0}]
  """
  candidates = points(entry.grid)
  if not entry.extend or 'rate' not in entry.grid:
    return candidates
  factor = 2**_DOUBLINGS
  low, high = min(entry.grid['rate']) / factor, max(entry.grid['rate']) * factor
  while True:
    losses = [loss_of(entry, point, done) for point in candidates]
    if None in losses:
      return candidates
    best = candidates[losses.index(min(losses))]
    rates = [
        point['rate'] for point in candidates
        if point | {'rate': best['rate']} == best
    ]
    new = [
        best | {'rate': rate}
        for end, rate in (
            (min(rates), best['rate'] / 2), (max(rates), best['rate'] * 2)
        )
        if best['rate'] == end and low <= rate <= high
    ]
    if not new:
      return candidates
    candidates += new


def choose(entry: Entry, done: Done) -> dict[str, Any] | None:
  """Returns the best point of an entry's grid.

  Args:
    entry: The entry.
    done: Outcomes of finished runs.

  Returns:
    The point; `None` until all have run, or if none may be chosen.

  Example:
    >>> entry = Entry(Arm('dense'), {'rate': (1, 2)}, 1, extend=False)
    >>> done = {'dense/rate=1,seed=0': {'validation/loss': 3.0}}
    >>> choose(entry, done) is None
    True
    >>> choose(entry, done | {'dense/rate=2,seed=0': {'validation/loss': 2.5}})
    {'rate': 2}
  """
  candidates = tried(entry, done)
  if not entry.grid:
    return candidates[0]
  losses = [loss_of(entry, point, done) for point in candidates]
  if None in losses or math.isinf(min(losses)):
    return None
  return candidates[losses.index(min(losses))]


def without_choice(entries: Sequence[Entry], done: Done) -> set[Arm]:
  """Returns the arms of which every run of the grid diverged.

  Arms that take their rate or start from one of these are included.

  Example:
    >>> entry = Entry(Arm('dense'), {'rate': (1,)}, 1, extend=False)
    >>> done = {'dense/rate=1,seed=0': {'validation/loss': math.nan}}
    >>> [arm.name for arm in without_choice([entry], done)]
    ['dense']
  """
  arms: set[Arm] = set()
  for entry in entries:
    arm = entry.arm
    if arm.rate_of in arms or arm.parent in arms or (
        arm.rate_of is None and choose(entry, done) is None
        and all(loss_of(entry, p, done) == math.inf for p in tried(entry, done))
    ):
      arms.add(arm)
  return arms


def choose_all(
    entries: Sequence[Entry], done: Done
) -> dict[Arm, dict[str, Any] | None]:
  """Chooses hyperparameters for every arm; see `choose`.

  An arm with `rate_of` takes those of the arm that it names.
  """
  chosen = {
      entry.arm: choose(entry, done)
      for entry in entries if entry.arm.rate_of is None
  }
  return chosen | {
      entry.arm: chosen[entry.arm.rate_of]
      for entry in entries if entry.arm.rate_of is not None
  }


def all_jobs(entries: Sequence[Entry], done: Done) -> list[Job]:
  """Returns every run that is known to be needed, finished or not.

  Args:
    entries: Entries, each after its parent.
    done: Outcomes of finished runs.

  Returns:
    Jobs by entry and then by seed, without duplicates. A grid is run on the
    tuning seeds and its best point on the evaluation seeds; a run starts from
    the run of its parent's best point with the same seed, and a repetition from
    a repetition, except of initial weights.

  Example:
    >>> entry = Entry(Arm('init'), {}, seeds=1)
    >>> [job.name for job in all_jobs([entry], {})]
    ['init/seed=0', 'init/seed=1']
  """
  chosen = choose_all(entries, done)

  def job_of(
      arm: Arm, point: Mapping[str, Any], seed: int, again: bool = False
  ) -> Job:
    parent = arm.parent
    return Job(
        arm, point, seed,
        None if parent is None
        else job_of(parent, chosen[parent], seed, again),
        again and arm.method != 'init',
    )

  jobs: dict[str, Job] = {}
  for entry in entries:
    arm = entry.arm
    if arm.parent is not None and chosen[arm.parent] is None:
      continue
    wanted = []
    if arm.rate_of is None:
      wanted = [
          job_of(arm, point, seed)
          for point in tried(entry, done) for seed in entry.tuning_seeds
      ]
    if chosen[arm] is not None:
      for seed in range(1, entry.seeds + 1):
        wanted.append(job_of(arm, chosen[arm], seed))
        if entry.repeat_every and seed % entry.repeat_every == 0:
          wanted.append(job_of(arm, chosen[arm], seed, again=True))
    for job in wanted:
      jobs.setdefault(job.name, job)
  return list(jobs.values())


def next_jobs(
    entries: Sequence[Entry],
    done: Done,
    is_there: Callable[[Job], bool] = lambda job: True,
) -> list[Job]:
  """Returns all runs that can start, as a pure function of the finished ones.

  Args:
    entries: Entries, each after its parent.
    done: Outcomes of finished runs.
    is_there: Returns whether the weights of a finished run are on disk. If they
      are not, because its outcome was read from committed results, the run is
      repeated before the first run that starts from it.

  Returns:
    Jobs in the order of `all_jobs`, but runs without a parent first, so that
    the grids of the first blocks are complete on all seeds. Then runs with the
    longest chain of parents come first, so that few runs must be repeated if
    weights are lost with a machine.

  Example:
    >>> entry = Entry(Arm('dense'), {'rate': (1, 2)}, seeds=2)
    >>> init = Entry(Arm('init'), {}, seeds=2)
    >>> [job.name for job in next_jobs([init, entry], {'init/seed=0': {}})]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['init/seed=1', 'init/seed=2', 'dense/rate=1,seed=0',
     'dense/rate=2,seed=0']
  """
  ready: dict[str, Job] = {}

  def add(job: Job) -> None:
    parent = job.parent
    if parent is None or (parent.name in done and is_there(parent)):
      ready.setdefault(job.name, job)
    else:
      add(parent)

  for job in all_jobs(entries, done):
    if job.name not in done:
      add(job)
  return sorted(
      ready.values(), key=lambda job: (job.parent is not None, -job.depth)
  )


def run_all(
    ready: Callable[[Done], Iterable[Job]],
    run: Callable[[Job], Outcome],
    done: Done,
    executor: concurrent.futures.Executor,
    workers: int,
    report: Callable[[Job, Done], None],
) -> dict[str, Outcome]:
  """Runs a pool to its end, `workers` runs at a time.

  Args:
    ready: Returns the jobs that can start, as `next_jobs` does.
    run: Runs one job and returns its outcome; called by the executor.
    done: Outcomes of finished runs, which are not run again unless `ready`
      returns them; their outcomes stay.
    executor: Executor of the jobs, which is shut down if one fails.
    workers: Number of runs at a time.
    report: Called with every finished job and all outcomes so far.

  Returns:
    Outcomes of all runs. An exception of a run is raised after the other
    running jobs have ended; those that the executor has queued are cancelled.

  Example:
    >>> with concurrent.futures.ThreadPoolExecutor() as executor:
    ...   outcomes = run_all(
    ...       lambda done: next_jobs([Entry(Arm('init'), {}, 1)], done),
    ...       lambda job: {'seed': job.seed}, {}, executor, 2,
    ...       report=lambda job, done: None)
    >>> outcomes
    {'init/seed=0': {'seed': 0}, 'init/seed=1': {'seed': 1}}
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
        done.setdefault(job.name, future.result())
      except BaseException:
        executor.shutdown(cancel_futures=True)
        raise
      report(job, done)

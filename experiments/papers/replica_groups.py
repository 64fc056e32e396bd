"""Groups of runs of a pool that are trained together in one program."""

from collections.abc import Callable
from collections.abc import Sequence
import hashlib
import json
import math
import pathlib
import shutil
import sys
from typing import NamedTuple

import jax

from experiments.papers.json_files import write_json
from experiments.papers.pool import all_jobs
from experiments.papers.pool import Done
from experiments.papers.pool import Entry
from experiments.papers.pool import Job
from experiments.papers.pool import next_jobs
from experiments.papers.pool import Outcome
from experiments.papers.pool_runs import log_to
from experiments.papers.pool_runs import OUTCOME
from experiments.papers.pool_runs import Runner
from experiments.papers.replica_runs import train_group
from experiments.papers.scales import Scale
from spdf_jax.training.metrics import write_atomically

METHODS = ('init', 'dense', 'static')
"""Methods of the arms that groups train, and of their initial weights."""

_JOBS = 'jobs.json'
_REPLICAS_ON_CPU = 8


class Limits(NamedTuple):
  """Limits on a command that trains groups.

  Attributes:
    deadline: Time at which it saves and stops, by `time.monotonic`.
    replicas: Largest number of runs in one program; 0: no limit on an
      accelerator, 8 on a CPU.
  """

  deadline: float = math.inf
  replicas: int = 0


UNLIMITED = Limits()


def check_arms(entries: Sequence[Entry]) -> None:
  """Checks that all arms can be trained in groups.

  Raises:
    ValueError: an arm cannot.

  Example:
    >>> from experiments.papers.arms import Arm
    >>> check_arms([Entry(Arm('dense'), {'rate': (1e-3,)}, 1)])
  """
  for arm in (entry.arm for entry in entries):
    if arm.method not in METHODS or arm.task:
      raise ValueError(
          f'arm {arm.name} cannot be trained in one program with others; '
          'choose claims about the pre-training of dense and static models.'
      )


def split(ready: Sequence[Job], scale: Scale, replicas: int) -> list[Job]:
  """Chooses the runs of the next group.

  Args:
    ready: Runs that can start, in order; not empty.
    scale: Scale of the runs.
    replicas: Largest number of runs in a group.

  Returns:
    The first runs of the size and number of steps of `ready[0]`, as many as in
    each group if all such runs are divided into equal groups.

  Example:
    >>> from experiments.papers.arms import Arm
    >>> from experiments.papers.scales import SCALES
    >>> jobs = [Job(Arm('dense'), {}, seed) for seed in range(5)]
    >>> jobs += [Job(Arm('dense', size='large'), {}, 0)]
    >>> [job.seed for job in split(jobs, SCALES['small'], replicas=4)]
    [0, 1, 2]
  """
  kind = lambda job: (job.arm.size, scale.steps(job.arm))
  same = [job for job in ready if kind(job) == kind(ready[0])]
  groups = math.ceil(len(same) / replicas)
  return same[:math.ceil(len(same) / groups)]


def run_groups(
    runner: Runner,
    entries: Sequence[Entry],
    done: Done,
    limits: Limits,
    report: Callable[[Job, Done], None],
) -> dict[str, Outcome]:
  """Trains a pool to its end, group after group.

  An interrupted group is resumed first, even if it exceeds `limits.replicas`.

  Args:
    runner: Runner that creates the recipes; its folder already has the initial
      weights.
    entries: Entries of the pool, checked by `check_arms`.
    done: Outcomes of finished runs.
    limits: Limits on time and on runs in one program.
    report: Called with every finished job and all outcomes so far.

  Returns:
    All outcomes.

  Raises:
    InterruptedError: a signal arrived or the time is over; everything is saved.
    OSError: a group needs more memory than the device has.
  """
  done = dict(done)
  default = sys.maxsize if jax.default_backend() != 'cpu' else _REPLICAS_ON_CPU
  directory = pathlib.Path(runner.directory).parent / 'groups'
  while ready := [
      job for job in next_jobs(entries, done, runner.is_there)
      if job.arm.method != 'init'
  ]:
    jobs = _interrupted(directory, all_jobs(entries, done), ready) or split(
        ready, runner.scale, limits.replicas or default
    )
    names = json.dumps([job.name for job in jobs])
    folder = directory / hashlib.sha256(names.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / _JOBS, names + '\n')
    try:
      with log_to(folder / 'log.txt'):
        outcomes = train_group(jobs, runner, folder, limits.deadline)
    except jax.errors.JaxRuntimeError as error:
      if 'RESOURCE_EXHAUSTED' not in str(error):
        raise
      raise OSError(
          f'{len(jobs)} runs in one program need more memory than the device '
          f'has; give --replicas={max(len(jobs) // 2, 1)}.'
      ) from error
    for job, outcome in zip(jobs, outcomes):
      path = pathlib.Path(runner.directory, job.name, OUTCOME)
      path.parent.mkdir(parents=True, exist_ok=True)
      write_json(path, outcome, indent=2)
      done.setdefault(job.name, outcome)
      report(job, done)
    shutil.rmtree(folder / 'checkpoints', ignore_errors=True)
    jax.clear_caches()  # The next group compiles another program.
  return done


def _interrupted(
    directory: pathlib.Path, known: Sequence[Job], ready: Sequence[Job]
) -> list[Job]:
  """Returns the runs of an unfinished group with a checkpoint, if any."""
  jobs = {job.name: job for job in known}
  waiting = {job.name for job in ready}
  for path in sorted(directory.glob(f'*/{_JOBS}')):
    names = json.loads(path.read_text('utf-8'))
    saved = [p for p in path.parent.glob('checkpoints/*') if p.name.isdigit()]
    if saved and set(names) <= jobs.keys() and waiting & set(names):
      return [jobs[name] for name in names]
  return []

"""Groups of runs: the part of a pool that trains together in one program."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import math
import pathlib
import shutil
import sys
import time
from typing import Any
from typing import NamedTuple

import jax
import numpy as np

from experiments.papers.pool import all_jobs
from experiments.papers.pool import Done
from experiments.papers.pool import Entry
from experiments.papers.pool import Job
from experiments.papers.pool import next_jobs
from experiments.papers.pool import Outcome
from experiments.papers.pool_runs import OUTCOME
from experiments.papers.pool_runs import Runner
from experiments.papers.replicas import Replicas
from experiments.papers.scales import Scale
from spdf_jax import evaluation
from spdf_jax import training
from spdf_jax.analysis.plan import describe_plan
from spdf_jax.training.checkpoints import Checkpoints
from spdf_jax.training.identity import run_identity
from spdf_jax.training.interrupts import Interrupts
from spdf_jax.training.metrics import MetricWriter
from spdf_jax.training.metrics import read_rows
from spdf_jax.training.metrics import write_atomically
from spdf_jax.training.progress import Progress

METHODS = ('init', 'dense', 'static')
"""Methods of the arms that groups train, and that of their initial weights."""

_JOBS = 'jobs.json'
_SAVE_SECONDS = 180.0  # between checkpoints
_DISPATCH_SECONDS = 5.0  # of a chunk: how late a signal is noticed
_REPLICAS_ON_CPU = 8


class Limits(NamedTuple):
  """Limits on a command that trains groups.

  Attributes:
    deadline: When it saves and stops, by `time.monotonic`.
    replicas: The most runs in one program; 0: all on an accelerator, 8 on a
      CPU.
  """

  deadline: float = math.inf
  replicas: int = 0


UNLIMITED = Limits()

def check_arms(entries: Sequence[Entry]) -> None:
  """Raises ValueError where an arm cannot be trained in a group.

  Example:
    >>> from experiments.papers.arms import Arm
    >>> check_arms([Entry(Arm('dense'), {'rate': (1e-3,)}, 1)])
  """
  for arm in (entry.arm for entry in entries):
    if arm.method not in METHODS or arm.task:
      raise ValueError(
          f'arm {arm.name} does not train in one program with others; choose '
          'claims about the pre-training of dense and static models.'
      )


def split(ready: Sequence[Job], scale: Scale, replicas: int) -> list[Job]:
  """Chooses the runs of the next group.

  Args:
    ready: Runs that can start, in order; not empty.
    scale: Their scale.
    replicas: The most runs of a group.

  Returns:
    The first of the runs that have the first one's size and number of steps,
    all of which are divided into equal groups.

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

  A group that was interrupted goes on first, whatever `limits.replicas` is.

  Args:
    runner: Makes the recipes; its folder holds initial weights already.
    entries: What is run, checked by `check_arms`.
    done: Outcomes of finished runs.
    limits: When to stop, and the most runs in one program.
    report: Called with every finished job and all that are done.

  Returns:
    All outcomes.

  Raises:
    InterruptedError: a signal came or the time is over; everything is saved.
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
      write_atomically(path, json.dumps(outcome, indent=2) + '\n')
      done[job.name] = outcome
      report(job, done)
    shutil.rmtree(folder / 'checkpoints', ignore_errors=True)
    jax.clear_caches()  # The next group is another program.
  return done


def train_group(
    jobs: Sequence[Job],
    runner: Runner,
    folder: pathlib.Path,
    deadline: float = math.inf,
) -> list[Outcome]:
  """Trains a group to its end, or goes on with it, and measures it.

  Args:
    jobs: Its runs.
    runner: Makes their recipes.
    folder: Where its checkpoints and metrics are.
    deadline: When to save and stop, by `time.monotonic`.

  Returns:
    For each job what `pool_runs.train` returns; seconds are its share of those
    of the group.

  Raises:
    InterruptedError: a signal came or the time is over; everything is saved.
  """
  started = time.monotonic()
  replicas = Replicas([runner.create_recipe(job) for job in jobs])
  recipe = replicas.recipes[0]
  saved = Checkpoints(
      folder,
      phase_ends=recipe.plan.ends,
      keep=1,
      config={
          job.name: _identity(recipe)
          for job, recipe in zip(jobs, replicas.recipes)
      },
      fingerprints=recipe.fingerprints,
  )
  state = saved.restore_latest(replicas.shapes)
  if state is None:
    state = replicas.create_state()
  width = runner.scale.sizes[jobs[0].arm.size].width
  progress = Progress(
      _joint_plan(recipe.plan, len(jobs), width), int(state.step),
      out=sys.stdout,
  )
  before = time.monotonic()
  state = _train(replicas, state, saved, folder, jobs, progress, deadline)
  trained = time.monotonic() - before
  found = replicas.validation_losses(state.params)
  seconds = sum(
      row['time/seconds'] for row in read_rows(folder / 'metrics.jsonl')
  )
  others = time.monotonic() - started - trained
  flops = _flops(jobs, replicas.recipes)
  text = recipe.corpus.validation.description
  return [
      {
          'validation/loss': loss.loss,
          'validation/perplexity': loss.perplexity,
          'validation/bits_per_byte': evaluation.bits_per_byte(
              loss, text['tokens'] / text['bytes']
          ),
          'flops': flops[job.arm],
          'steps': replicas.steps,
          'training_seconds': round(seconds / len(jobs), 2),
          'kernels': False,
          'replicas': len(jobs),
          'seconds': round((seconds + others) / len(jobs), 1),
      }
      for job, loss in zip(jobs, found)
  ]


def _train(
    replicas: Replicas,
    state: training.TrainState,
    saved: Checkpoints,
    folder: pathlib.Path,
    jobs: Sequence[Job],
    progress: Progress,
    deadline: float,
) -> training.TrainState:
  """Takes all steps that are left; saves now and then, and on leaving."""
  step = int(state.step)
  writer = MetricWriter(folder / 'metrics.jsonl', step)
  now = saved_at = time.monotonic()
  state, _ = replicas.run(state, replicas.read(step, 0))
  jax.block_until_ready(state)
  progress.resume(step)  # Compiling is over.
  chunk, count = replicas.read(step, 1), 1
  with Interrupts() as interrupts:
    while chunk.count:
      state, losses = replicas.run(state, chunk)
      step += chunk.count
      following = replicas.read(step, count)  # While the device computes.
      losses = np.asarray(losses)[:chunk.count]
      then, now = now, time.monotonic()
      count = max(1, int(_DISPATCH_SECONDS / (now - then) * chunk.count))
      chunk = following
      writer.write_scalars(step, {
          **{
              f'train/loss/{job.name}': float(loss)
              for job, loss in zip(jobs, losses[-1])
          },
          'time/seconds': round(now - then, 4),
      })
      progress.update(step, float(np.nanmean(losses[-1])))
      stop = interrupts.stop_after(step) or now >= deadline
      if chunk.count and (stop or now - saved_at >= _SAVE_SECONDS):
        writer.flush()
        saved.save(state)
        saved_at = now
      if stop:
        break
  saved.close()
  writer.close()
  if chunk.count:
    raise InterruptedError(
        f'stopped after step {step} of {replicas.steps}; everything is saved, '
        'give the same command again.'
    )
  return state


def _interrupted(
    directory: pathlib.Path, known: Sequence[Job], ready: Sequence[Job]
) -> list[Job]:
  """Returns the runs of a group that has a checkpoint and is not finished."""
  jobs = {job.name: job for job in known}
  waiting = {job.name for job in ready}
  for path in sorted(directory.glob(f'*/{_JOBS}')):
    names = json.loads(path.read_text('utf-8'))
    saved = [p for p in path.parent.glob('checkpoints/*') if p.name.isdigit()]
    if saved and set(names) <= jobs.keys() and waiting & set(names):
      return [jobs[name] for name in names]
  return []


def _identity(recipe: training.Recipe) -> dict[str, Any]:
  """Returns what a replica is: its config without places, for its data too."""
  return {
      k: v for k, v in run_identity(recipe.config).items() if k != 'data.corpus'
  }


def _joint_plan(plan: training.Plan, runs: int, width: int) -> training.Plan:
  """Returns a plan whose steps have the tokens of all runs, for progress."""
  phase, = plan.phases
  return training.Plan((dataclasses.replace(
      phase, name=f'{runs} runs of width {width}',
      batch_size=runs * phase.batch_size,
  ),))


def _flops(
    jobs: Sequence[Job], recipes: Sequence[training.Recipe]
) -> Mapping[Any, float]:
  """Returns the FLOPs of a run of each arm."""
  found: dict[Any, float] = {}
  for job, recipe in zip(jobs, recipes):
    if job.arm not in found:
      phase, = describe_plan(recipe, job.name)['phases']
      found[job.arm] = float(phase['steps'] * phase['flops_per_step'])
  return found

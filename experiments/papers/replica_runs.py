"""Training of a group of runs: steps, checkpoints and outcomes."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import hashlib
import json
import math
import pathlib
import sys
import time

import jax
import numpy as np

from experiments.papers.arms import Arm
from experiments.papers.pool import Job
from experiments.papers.pool import Outcome
from experiments.papers.pool_runs import Runner
from experiments.papers.replicas import Replicas
from spdf_jax import evaluation
from spdf_jax import training
from spdf_jax.costs.plan_costs import describe_plan
from spdf_jax.training.checkpoints import Checkpoints
from spdf_jax.training.identity import run_identity
from spdf_jax.training.metrics import MetricWriter
from spdf_jax.training.metrics import read_rows
from spdf_jax.training.processes import Interrupts
from spdf_jax.training.progress import Progress

_SAVE_SECONDS = 180.0
"""Seconds between checkpoints."""
_DISPATCH_SECONDS = 5.0
"""Seconds of a chunk of steps, after which signals are checked."""


def train_group(
    jobs: Sequence[Job],
    runner: Runner,
    folder: pathlib.Path,
    deadline: float = math.inf,
) -> list[Outcome]:
  """Trains or resumes a group to its end, and returns the outcomes.

  Args:
    jobs: Runs of the group.
    runner: Runner that creates the recipes.
    folder: Folder for checkpoints and metrics of the group.
    deadline: Time at which it saves and stops, by `time.monotonic`.

  Returns:
    The outcome of each job, as `pool_runs.train` returns it; seconds are those
    of the group divided by the number of jobs.

  Raises:
    InterruptedError: a signal arrived or the time is over; everything is saved.
  """
  started = time.monotonic()
  replicas = Replicas([runner.create_recipe(job) for job in jobs])
  recipe = replicas.recipes[0]
  saved = Checkpoints(
      folder,
      phase_ends=recipe.plan.ends,
      keep=1,
      # The corpus may be in another folder when the group is resumed.
      config=dataclasses.replace(
          recipe.config,
          data=dataclasses.replace(recipe.config.data, corpus=''),
      ),
      fingerprints=recipe.fingerprints | {
          job.name: _digest(recipe)
          for job, recipe in zip(jobs, replicas.recipes)
      },
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
  """Takes all remaining steps; saves regularly and when interrupted."""
  step = int(state.step)
  writer = MetricWriter(folder / 'metrics.jsonl', step)
  now = saved_at = time.monotonic()
  state, _ = replicas.run(state, replicas.read(step, 0))
  jax.block_until_ready(state)
  progress.resume(step)  # Excludes compilation from the estimated time.
  chunk, count = replicas.read(step, 1), 1
  with Interrupts() as interrupts:
    while chunk.count:
      state, losses = replicas.run(state, chunk)
      step += chunk.count
      # Reads the next chunk while the device computes.
      following = replicas.read(step, count)
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
        'so repeat the same command.'
    )
  return state


def _digest(recipe: training.Recipe) -> str:
  """Returns a digest of a replica's config, without the path of its corpus."""
  identity = run_identity(recipe.config)
  del identity['data.corpus']
  text = json.dumps(identity, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _joint_plan(plan: training.Plan, runs: int, width: int) -> training.Plan:
  """Returns a plan whose steps have the tokens of all runs, for `Progress`."""
  phase, = plan.phases
  return training.Plan((dataclasses.replace(
      phase, name=f'{runs} runs of width {width}',
      batch_size=runs * phase.batch_size,
  ),))


def _flops(
    jobs: Sequence[Job], recipes: Sequence[training.Recipe]
) -> Mapping[Arm, float]:
  """Returns the FLOPs of a run of each arm."""
  found: dict[Arm, float] = {}
  for job, recipe in zip(jobs, recipes):
    if job.arm not in found:
      phase, = describe_plan(recipe, job.name)['phases']
      found[job.arm] = float(phase['steps'] * phase['flops_per_step'])
  return found

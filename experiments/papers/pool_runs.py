"""One run of experiments.reproduce, in a worker that keeps to one core."""

from collections.abc import Iterator
import contextlib
import json
import logging
import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any
from typing import NamedTuple

from absl import flags
import jax
import numpy as np

from experiments.launch import compilation_cache
from experiments.launch import console
from experiments.papers.arm_configs import create_config
from experiments.papers.arms import PRETRAINED
from experiments.papers.gates import BASELINES
from experiments.papers.pool import Job
from experiments.papers.pool import Outcome
from experiments.papers.scales import Scale
from experiments.papers.subspaces import cosine_distances
from experiments.papers.subspaces import module_means
from spdf_jax import evaluation
from spdf_jax import runs
from spdf_jax import training
from spdf_jax.runs import lifecycle
from spdf_jax.training.checkpoints import write_params
from spdf_jax.training.metrics import read_rows
from spdf_jax.training.metrics import write_atomically
from spdf_jax.training.phases import METRICS

OUTCOME = 'outcome.json'
"""Written when a run is finished, into its folder."""


class Runner(NamedTuple):
  """Runs the jobs of a scale: what a worker is sent.

  Attributes:
    scale: The scale.
    directory: Where the runs go.
    corpus: The corpus' folder, or its name.
    tasks: The folder of the tasks' folders.
    evaluations: Number of evaluations of a run; the last one is at its end.
  """

  scale: Scale
  directory: str
  corpus: str
  tasks: str
  evaluations: int = 1

  def __call__(self, job: Job) -> dict[str, Any]:
    """Runs a job, or goes on with it; returns what it measured.

    Raises:
      InterruptedError: a signal came; everything is saved.
    """
    workdir = pathlib.Path(self.directory, job.name)
    workdir.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    with log_to(workdir / 'log.txt'):
      recipe = self.create_recipe(job)
      if job.arm.method == 'init':
        outcome = write_initial(recipe, workdir)
      else:
        outcome = train(recipe, workdir)
    # No other run uses its programs, which would add up to gigabytes.
    jax.clear_caches()
    # Processor time: a run that was stopped for a while has not cost more.
    outcome['seconds'] = round(time.process_time() - started, 1)
    write_atomically(workdir / OUTCOME, json.dumps(outcome, indent=2) + '\n')
    return outcome

  def create_recipe(self, job: Job) -> training.Recipe:
    """Builds the recipe of a job."""
    config = create_config(job, self.scale, self.corpus, self.tasks)
    if job.parent is not None:
      config.init_from = str(pathlib.Path(self.directory, job.parent.name))
    if self.evaluations > 1:
      config.eval_every = max(
          self.scale.steps(job.arm) // self.evaluations, 1
      )
    return training.create_recipe(config)

  def is_there(self, job: Job) -> bool:
    """Returns whether the weights of a finished run are on disk."""
    return pathlib.Path(self.directory, job.name, OUTCOME).exists()


def write_initial(
    recipe: training.Recipe, workdir: pathlib.Path
) -> dict[str, Any]:
  """Writes the initial weights that all arms of a seed start from.

  Returns:
    The number of parameters, and the losses of n-grams that are counted on the
    tokens that a pre-training of this seed reads: gate G1.
  """
  if not (workdir / 'checkpoints' / '0').exists():
    write_params(
        workdir, recipe.init_params(), recipe.config.as_dict()
    )
  tokens = np.concatenate([
      recipe.batch_at(step).inputs.ravel()
      for step in range(recipe.plan.total_steps)
  ])
  batches = lifecycle.validation_batches(recipe)
  vocab_size = recipe.model.config.vocab_size
  score = {
      'bigram': evaluation.bigram_loss, 'trigram': evaluation.trigram_loss
  }
  return {'parameters': recipe.parameters} | {
      metric: score[name](tokens, batches, vocab_size).loss
      for name, metric in BASELINES.items()
  }


def train(recipe: training.Recipe, workdir: pathlib.Path) -> dict[str, Any]:
  """Trains a run to its end, and measures it.

  Returns:
    The losses of its last evaluation; the FLOPs and the seconds of its
    training; whether native kernels ran; the validation loss over the seconds,
    where there are several evaluations; and, of a fine-tuning, how far the
    hidden matrices turned, by module.
  """
  session = training.open_session(recipe, workdir)
  try:
    lifecycle.run(session, workdir.name, baseline=lambda recipe: None)
  except training.Interrupted as interrupted:
    raise InterruptedError(str(interrupted)) from None
  outcome: dict[str, Any] = {}
  curve, seconds = [], 0.0
  for row in read_rows(workdir / 'metrics.jsonl'):
    outcome |= {name: row[name] for name in METRICS if name in row}
    seconds += row.get('time/seconds', 0.0)
    if PRETRAINED in row:
      curve.append([row['step'], round(seconds, 2), row[PRETRAINED]])
  run = runs.read_run(workdir)
  outcome |= {
      'flops': runs.flops_at(run, run.last_step),
      'steps': run.last_step,
      'training_seconds': round(seconds, 2),
      'kernels': recipe.sparse_steps is not None,
  }
  if len(curve) > 1:
    outcome['curve'] = curve
  if recipe.task is not None:
    outcome |= distances(recipe, workdir)
  return outcome


def distances(
    recipe: training.Recipe, workdir: pathlib.Path
) -> dict[str, float]:
  """Measures how far a run turned the hidden matrices it started from."""
  shapes = recipe.abstract_state.params
  found = cosine_distances(*(
      training.read_params(training.find_checkpoint(source), shapes)
      for source in (recipe.config.init_from, str(workdir))
  ))
  means = module_means(found)
  means['all'] = sum(means.values()) / len(means)
  return {f'distance/{name}': value for name, value in means.items()}


def read_outcomes(directory: pathlib.Path) -> dict[str, Outcome]:
  """Reads what the finished runs of a pool have measured, by their names."""
  return {
      path.parent.relative_to(directory).as_posix(): json.loads(
          path.read_text('utf-8')
      )
      for path in sorted(directory.glob(f'*/*/{OUTCOME}'))
  }


@contextlib.contextmanager
def log_to(path: pathlib.Path) -> Iterator[None]:
  """Appends what is logged, and what goes to stderr, to a file."""
  with path.open('a', encoding='utf-8') as log, contextlib.redirect_stderr(log):
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [logging.StreamHandler(log)]
    try:
      yield
    finally:
      root.handlers = handlers


def start_worker(cores: Any, parent: int) -> None:
  """Readies a worker's process, before it compiles anything.

  Args:
    cores: A queue of the cores to keep to, one for each worker; empty: none.
    parent: The process that it works for, and ends with.
  """
  if not cores.empty():
    os.sched_setaffinity(0, {cores.get()})
  flags.FLAGS(sys.argv, known_only=True)
  console.prepare()
  compilation_cache.prepare()
  threading.Thread(target=_end_with, args=[parent], daemon=True).start()


def _end_with(parent: int) -> None:
  """Saves and ends this process once its parent is no more."""
  while os.getppid() == parent:
    time.sleep(1)
  os.kill(os.getpid(), signal.SIGTERM)
  time.sleep(60)
  os._exit(1)
